"""Random traffic for engines with a real model, whose answers are compared with those of plain decoding, one by one."""

# pyright: basic
# It reads private parts of the engine, whose models are typed in part only.

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from node_threads import following
from pagewood.engine.api import (
    Abort,
    Delta,
    EngineConfig,
    FinishReason,
    Grammar,
    PoolingParams,
    SamplingParams,
    SetPriority,
    Submit,
    TokenLogprob,
)
from pagewood.engine.assembly.cpu import build as build_cpu
from pagewood.engine.build import build_engine
from pagewood.engine.core.loop import Engine, EngineInfo, Pending
from pagewood.engine.core.request import Request
from pagewood.engine.core.steps import speculation
from pagewood.engine.core.steps.speculation import Drafting, SpeculationCounts, StepsReport
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.runner.cpu.drafts.drafting import DraftCounts
from pagewood.engine.runner.cpu.populate import PopulatingRunner
from pagewood.engine.runner.cpu.runner import CPURunner
from pagewood.engine.runner.ranks.ranked_runner import RankedRunner
from pagewood.engine.testing.echo_grammar import EchoCompiler, text_inside
from pagewood.engine.testing.random_drafting import RandomDrafting
from scenarios.drawing import random_scenario
from scenarios.scenario import Arrival, Scenario
from tiny_models import cyclic_folders, head_folder, model_folder, num_right

ORACLE_LENGTH = 160
PROCESSORS = tuple([(name, f"logits_functions:{name}") for name in ("add_biases", "follow_text", "fail_at")])
"""Of all engines here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafter:
    """What drafts, and what is known of its drafts."""

    kind: str
    folder: Path | None = None
    num_right: Callable[[int, int], int] | None = None
    """Returns how many of a row's drafts are right: of its last known token, and the number of drafts; None: unknown.
    Exactly these must be accepted."""
    is_ready: bool = False
    """Whether every row must get as many drafts as it is granted."""


@dataclass(slots=True)
class Answer:
    """What a request was answered."""

    tokens: tuple[int, ...] = ()  # written by: add
    logprobs: tuple[TokenLogprob, ...] = ()  # written by: add
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # written by: add
    last: Delta | None = None  # written by: add

    def add(self, delta: Delta) -> None:
        """Append what a step has answered."""
        assert self.last is None, f"request {delta.request_id} was answered after its end"
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        if delta.finish is not None:
            self.last = delta

    @property
    def finish(self) -> FinishReason | None:
        """Why it ended; None: it has not."""
        return None if self.last is None else self.last.finish


@dataclass(slots=True)
class Watched:
    """A policy of draft lengths whose calls are checked; satisfies `core.steps.speculation.Drafting`."""

    policy: Drafting
    drafter: Drafter
    num_drafted: int = 0  # written by: speculating
    num_accepted: int = 0  # written by: speculating

    @property
    def max_tokens(self) -> int:
        """The most draft tokens of one request in one step."""
        return self.policy.max_tokens

    @property
    def reason(self) -> str:
        """Why the latest numbers are what they are."""
        return self.policy.reason

    @property
    def is_far(self) -> bool:
        """Whether drafters need not follow."""
        return self.policy.is_far

    def set_cost(self, *costs: Any) -> None:
        """Pass on the cost of steps."""
        self.policy.set_cost(*costs)  # type: ignore[attr-defined]

    def rests(self, num_requests: int) -> bool:
        """Return what the policy says."""
        return self.policy.rests(num_requests)

    def lengths(self, requests: Sequence[Request], num_other_tokens: int) -> Sequence[int]:
        """Return the policy's lengths."""
        return self.policy.lengths(requests, num_other_tokens)

    def observe(self, report: StepsReport) -> None:
        """Check the numbers of steps."""
        for some in zip(report.accepted, report.drafted, report.granted, strict=True):
            assert list(some) == sorted(some), f"(accepted, drafted, granted) are {some}"
        if self.drafter.num_right is not None:
            for request, count, num_accepted in zip(report.requests, report.drafted, report.accepted, strict=True):
                if request.finish is None:  # otherwise its last tokens were dropped
                    right = self.drafter.num_right(int(request.tokens[request.num_known - 1]), count)
                    assert num_accepted == right, f"{num_accepted} of {count} drafts accepted, {right} are right"
        is_whole = list(report.drafted) == list(report.granted)
        assert is_whole or not self.drafter.is_ready, f"{report.drafted} of {report.granted} drafted"
        self.num_drafted += sum(report.drafted)
        self.num_accepted += sum(report.accepted)
        self.policy.observe(report)

    def forget(self, request: Request) -> None:
        """Pass on the end of a request."""
        assert request.finish is not None
        self.policy.forget(request)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What came of a run."""

    counts: SpeculationCounts
    num_preempted: int
    num_cached_tokens: int
    num_aborted: int
    drafter: DraftCounts
    """Counts of a draft model or a head; all are 0 if there are other ranks."""
    cached: dict[str, int]
    """Tokens of each request that came from the cache."""


def make(kind: str, architecture: str) -> tuple[Path, Drafter]:
    """Return a target and what drafts for it."""
    model = model_folder(architecture)
    match kind:
        case "self":
            return model, Drafter(kind="draft", folder=model, num_right=lambda _, count: count, is_ready=True)
        case "perturbed":
            return model, Drafter(kind="draft", folder=model_folder(architecture, noise=0.02))
        case "unrelated":
            return model, Drafter(kind="draft", folder=model_folder("qwen3", seed=5))
        case "eagle":
            return model, Drafter(kind="eagle", folder=head_folder(architecture))
        case "mtp":
            return model_folder(architecture, has_mtp=True), Drafter(kind="eagle")
        case "cyclic":
            target, head = cyclic_folders()
            return target, Drafter(kind="eagle", folder=head, num_right=num_right)
        case _:
            return model, Drafter(kind=kind)


def random_traffic(rng: random.Random, *, overlap: bool) -> Scenario:
    """Draw traffic as for the echo model, with all sampling parameters."""
    scenario = random_scenario(rng, overlap=overlap)
    arrivals = tuple(replace(one, sampling=_random_sampling(rng, one.sampling)) for one in scenario.arrivals)
    return replace(scenario, arrivals=arrivals)


def _random_sampling(rng: random.Random, sampling: SamplingParams) -> SamplingParams:
    return replace(
        sampling,
        max_tokens=sampling.max_tokens and min(sampling.max_tokens, 30),
        temperature=rng.choice((0.0, 0.0, 0.3, 0.8, 1.5)),
        top_k=rng.choice((0, 0, 2, 10)),
        top_p=rng.choice((1.0, 1.0, 0.9, 0.5)),
        min_p=rng.choice((0.0, 0.0, 0.1)),
        typical_p=rng.choice((1.0, 1.0, 0.7)),
    )


def random_drafting(rng: random.Random) -> Callable[[EngineConfig], Drafting] | None:
    """Return a policy of random lengths, or None for that of the configuration."""
    if rng.random() < 0.4:
        return None
    seed = rng.randrange(1000)
    return lambda config: RandomDrafting(max_tokens=config.speculative_num_tokens, seed=seed)


def run(
    scenario: Scenario,
    *,
    model: Path,
    drafter: Drafter | None,
    num_tokens: int = 4,
    control: str = "fixed",
    make_drafting: Callable[[EngineConfig], Drafting] | None = None,
    num_threads: int = 2,
    **options: Any,
) -> Report:
    """Serve traffic with an engine that speculates; every answer must be that of plain decoding.

    Args:
        scenario: the traffic, and the size of the KV memory.
        model: folder of the target.
        drafter: what drafts; None: the engine does not speculate.
        num_tokens: most drafts of a request in a step.
        control: `speculative_control`, if `make_drafting` is None.
        make_drafting: makes another policy of draft lengths.
        num_threads: of the runner, on each host; other hosts are threads of this process.
        options: other fields of the configuration.

    Raises:
        AssertionError: a wrong token or end, broken accounting, counts that cannot be, no progress, or, of a drafter
            whose right drafts are known, another number of accepted ones.
    """
    config = replace(
        scenario.config,
        model=str(model),
        max_total_tokens=scenario.num_pages * scenario.config.page_size,
        max_length=scenario.max_length,
        num_threads=num_threads,
        speculative="off" if drafter is None else drafter.kind,
        speculative_model=None if drafter is None or drafter.folder is None else str(drafter.folder),
        speculative_num_tokens=num_tokens,
        speculative_control=control if make_drafting is None else "fixed",
        logits_processors=PROCESSORS,
        **options,
    )
    watched: list[Watched] = []

    def draft_control(config: EngineConfig, **others: Any) -> Watched | None:
        if drafter is None:
            return None
        policy = original(config, **others) if make_drafting is None else make_drafting(config)
        assert policy is not None
        watched.append(Watched(policy, drafter))
        return watched[0]

    original = build_cpu.draft_control
    inbox, outbox = MemoryInbox(), MemoryOutbox()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_cpu, "draft_control", draft_control)
        patch.setattr(build_cpu, "grammar_compiler", echo_compiler)
        if drafter is not None and drafter.num_right is not None:
            patch.setattr(speculation, "_REPORTED_S", 0.0)  # so that each step is checked before the next
        with following(config) if config.nnodes > 1 else nullcontext() as errors:
            engine = build_engine(config, inbox=inbox, outbox=outbox)
            try:
                answers = _serve(engine, scenario, inbox, outbox)
            finally:
                engine.close()
        assert not errors
    if engine._speculation is not None:
        engine._speculation.report()
    _check_ends(scenario, answers, model=model, int8=config.kv_cache_dtype == "int8")
    ends = {name: answer.last for name, answer in answers.items() if answer.last is not None}
    counters = engine.counters()
    assert counters.num_violations == 0
    assert counters.num_free_pages + counters.num_cached_pages == scenario.num_pages
    assert (counters.speculation is None) == (drafter is None)
    counts = counters.speculation or SpeculationCounts()
    if watched:
        _check_counts(counts, watched[0])
    return Report(
        counts=counts,
        num_preempted=counters.num_preempted,
        num_cached_tokens=sum(delta.num_cached_tokens for delta in ends.values()),
        num_aborted=sum(delta.finish is FinishReason.ABORT for delta in ends.values()),
        drafter=getattr(getattr(runner_of(engine), "_drafter", None), "counts", DraftCounts()),
        cached={name: delta.num_cached_tokens for name, delta in ends.items()},
    )


def echo_compiler(config: EngineConfig, folder: Path, info: EngineInfo) -> EchoCompiler:
    """Return a compiler of the grammars of `echo_grammar`."""
    return EchoCompiler(random.Random(config.seed), info.vocab_size)


def runner_of(engine: Engine) -> CPURunner:
    """Return the runner of a CPU engine, that of rank 0 if there are several."""
    runner: Any = engine._runner
    while isinstance(runner, PopulatingRunner | RankedRunner):
        runner = runner.inner if isinstance(runner, PopulatingRunner) else runner._runner
    return runner


def _serve(engine: Engine, scenario: Scenario, inbox: MemoryInbox, outbox: MemoryOutbox) -> dict[str, Answer]:
    """Serve the arrivals; return the answer to each."""
    answers = {str(index): Answer() for index in range(len(scenario.arrivals))}
    last_event = max(max(one.at_step, one.abort_at_step or 0) for one in scenario.arrivals)
    num_positions = sum(len(one.prompt) + (one.sampling.max_tokens or 0) for one in scenario.arrivals)
    deadline = last_event + 20 * (num_positions + scenario.max_length) + 2000
    pending: Pending | None = None
    step = 0
    while step <= last_event or any(one.finish is None for one in answers.values()) or pending is not None:
        assert step < deadline, f"no progress: {engine.counters()}"
        _arrive(scenario, step, inbox)
        pending = engine.advance(pending)
        for delta in outbox.take():
            answers[delta.request_id].add(delta)
        violation = engine.violation()
        assert violation is None, violation
        step += 1
    engine.step()  # idle, so the engine checks its invariant
    return answers


def _arrive(scenario: Scenario, step: int, inbox: MemoryInbox) -> None:
    for index, one in enumerate(scenario.arrivals):
        if one.at_step == step:
            tokens = np.array(one.prompt, "<i4").tobytes()
            inbox.put(
                Submit(
                    request_id=str(index), tokens=tokens, sampling=one.sampling, priority=one.priority,
                    namespace=one.namespace, pooling=one.pooling,
                )
            )  # fmt: skip
        priority, at_step = one.priority_from_step or (0, None)
        if at_step == step:
            inbox.put(SetPriority(request_id=str(index), priority=priority))
        if one.abort_at_step == step:
            inbox.put(Abort(request_id=str(index)))


def _check_ends(scenario: Scenario, answers: dict[str, Answer], *, model: Path, int8: bool) -> None:
    for index, one in enumerate(scenario.arrivals):
        name = str(index)
        answer = answers[name]
        output, last = answer.tokens, answer.last
        assert last is not None
        room = scenario.max_length - len(one.prompt)
        grammar = one.sampling.grammar
        if (one.sampling.max_tokens or 1) > room or (grammar is not None and grammar.text.endswith("1")):
            assert last.finish in (FinishReason.REFUSED, FinishReason.ABORT), f"request {name} was accepted"
            continue
        sampling = replace(one.sampling, max_tokens=one.sampling.max_tokens or room)
        plain = plain_answer(model, int8, one.prompt, sampling, one.pooling)
        expected = plain.tokens
        if one.pooling is not None:
            assert plain.last is not None
            assert last.finish in (FinishReason.STOP, FinishReason.ABORT)
            if last.finish is FinishReason.STOP:
                _check_vectors(last.vector, plain.last.vector, kind=one.pooling.kind)
            continue
        assert answer.logprobs[: len(expected)] == plain.logprobs[: len(answer.logprobs)], (
            f"request {name}: other log probabilities"
        )
        assert len(answer.logprobs) == (0 if sampling.logprobs is None else len(output))
        if output:
            assert answer.prompt_logprobs == plain.prompt_logprobs, f"request {name}: other log probabilities"
        if last.finish is FinishReason.ABORT:
            assert one.abort_at_step is not None
            assert output == expected[: len(output)], f"request {name}: {output} is no prefix of {expected}"
        elif FinishReason.ERROR in (plain.finish, last.finish):  # its matcher fails, if it is asked in time
            num_both = min(len(output), len(expected))
            assert grammar is not None
            assert int(grammar.text.split()[2]) < 999
            assert output[:num_both] == expected[:num_both]
            if last.finish is FinishReason.ERROR:
                inside = text_inside(grammar, output)
                assert inside is not None, f"request {name} failed before its grammar began"
                assert len(inside) >= int(grammar.text.split()[2]), f"request {name} failed behind {output}"
        else:
            assert output == expected, f"request {name}: {output} is not {expected}"
            assert last.finish is plain.finish
            assert plain.last is not None
            assert last.num_output_tokens == plain.last.num_output_tokens
        assert 0 <= last.num_accepted_tokens <= last.num_drafted_tokens


def _check_vectors(found: bytes, expected: bytes, *, kind: str) -> None:
    """States have the same bits in every step; a mean is rounded once for each chunk."""
    ours, theirs = (np.frombuffer(one, "<f4") for one in (found, expected))
    assert ours.size == theirs.size > 0
    if kind == "mean":
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    else:
        np.testing.assert_array_equal(ours, theirs)


def _check_counts(counts: SpeculationCounts, watched: Watched) -> None:
    assert counts.num_drafted == watched.num_drafted == sum(counts.drafted_by_position)
    assert counts.num_accepted == watched.num_accepted == sum(counts.accepted_by_position)
    assert list(counts.drafted_by_position) == sorted(counts.drafted_by_position, reverse=True)
    assert list(counts.accepted_by_position) == sorted(counts.accepted_by_position, reverse=True)
    pairs = zip(counts.accepted_by_position, counts.drafted_by_position, strict=True)
    assert all(accepted <= drafted for accepted, drafted in pairs)
    assert counts.draft_s >= 0.0
    assert counts.verify_s >= 0.0


class PlainEngine:
    """An engine that does not speculate, shares no prefixes and serves one request at a time."""

    def __init__(self, model: Path, *, int8: bool) -> None:
        self._inbox, self._outbox = MemoryInbox(), MemoryOutbox()
        longest = min(ORACLE_LENGTH, ModelConfig.from_folder(model).max_position)
        config = EngineConfig(
            model=str(model), max_running=1, max_total_tokens=ORACLE_LENGTH, max_length=longest, num_threads=1,
            prefix_cache=False, overlap=False, kv_cache_dtype="int8" if int8 else "auto", logits_processors=PROCESSORS,
        )  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build_cpu, "grammar_compiler", echo_compiler)
            self._engine = build_engine(config, inbox=self._inbox, outbox=self._outbox)

    def answer(self, prompt: tuple[int, ...], sampling: SamplingParams, pooling: PoolingParams | None) -> Answer:
        """Return the answer to one request."""
        tokens = np.array(prompt, "<i4").tobytes()
        self._inbox.put(Submit(request_id="x", tokens=tokens, sampling=sampling, pooling=pooling))
        answer = Answer()
        while answer.last is None:
            self._engine.step()
            for delta in self._outbox.take():
                answer.add(delta)
        return answer

    def close(self) -> None:
        """End its threads."""
        self._engine.close()


_plain_engines: dict[tuple[Path, bool], PlainEngine] = {}


@cache
def plain_answer(
    model: Path, int8: bool, prompt: tuple[int, ...], sampling: SamplingParams, pooling: PoolingParams | None = None
) -> Answer:
    """Return the answer of a plain engine, which `plain_engines` closes later."""
    key = (model, int8)
    if key not in _plain_engines:
        _plain_engines[key] = PlainEngine(model, int8=int8)
    return _plain_engines[key].answer(prompt, sampling, pooling)


@contextmanager
def plain_engines() -> Generator[None]:
    """Close all plain engines at the end."""
    try:
        yield
    finally:
        for engine in _plain_engines.values():
            engine.close()
        _plain_engines.clear()
        plain_answer.cache_clear()


def arrival(prompt: Sequence[int], *, at_step: int = 0, **sampling: Any) -> Arrival:
    """Return a request that is not aborted."""
    return Arrival(
        at_step=at_step, abort_at_step=None, prompt=tuple(prompt), priority=0, namespace=None,
        sampling=SamplingParams(**{"seed": 5, "ignore_eos": True, **sampling}),
    )  # fmt: skip


def traffic(
    arrivals: Sequence[Arrival], *, num_pages: int, page_size: int, max_length: int = 120, **config: Any
) -> Scenario:
    """Return the traffic of given requests."""
    return Scenario(
        config=EngineConfig(page_size=page_size, **config), num_pages=num_pages, max_length=max_length,
        arrivals=tuple(arrivals), eager_steps=frozenset(),
    )  # fmt: skip


def mixed_load(seed: int, *, temperature: float = 0.8, **config: Any) -> Scenario:
    """Return requests for more tokens than a tiny memory holds."""
    rng = random.Random(seed)
    stem = [rng.randrange(3, 40) for _ in range(20)]
    arrivals: list[Arrival] = []
    for number in range(14):
        prompt = stem[: rng.choice((0, 9, 20))] + [rng.randrange(3, 40) for _ in range(rng.randint(1, 10))]
        prompt += stem[:2] if number % 3 == 2 else []  # so that drafts from the text are found
        grammar = Grammar(kind="regex", text=f"{number} 12 999 0") if number % 4 == 1 else None
        one = arrival(
            prompt, at_step=rng.choice((0, 0, 2, 9)), max_tokens=rng.randint(10, 18), seed=number, grammar=grammar,
            temperature=temperature * (number % 2), logprobs=2 if number % 3 == 0 else None,
            prompt_logprobs=1 if number % 6 == 0 else None, repetition_penalty=1.3 if number % 5 == 2 else 1.0,
        )  # fmt: skip
        if number % 7 == 4:
            one = replace(one, pooling=PoolingParams(kind=rng.choice(("last", "mean", "cls")), normalize=False))
        if number % 7 == 6:
            one = replace(one, abort_at_step=one.at_step + 12)
        arrivals.append(one)
    return traffic(
        arrivals, num_pages=14, page_size=4, max_length=48, max_running=5, chunked_prefill_size=7,
        schedule_conservativeness=0.02, **config,
    )  # fmt: skip
