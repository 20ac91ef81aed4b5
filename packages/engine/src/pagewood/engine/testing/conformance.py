"""Conformance of runners: the engine's core drives a runner through all situations of an engine, case by case.

The oracle is the runner itself: a request must get the same result among others as alone, on a new runner, with its
prompt computed in one step, and without a prefix cache, overlap and drafts. So no model has to be written twice.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pagewood.engine.api import (
    Abort,
    Delta,
    EngineConfig,
    FinishReason,
    Grammar,
    PoolingParams,
    SamplingParams,
    Submit,
    TokenLogprob,
)
from pagewood.engine.assemble import assemble
from pagewood.engine.core.loop import Engine, EngineInfo, Pending, Runner
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.testing.echo_grammar import EchoCompiler
from pagewood.engine.testing.random_drafting import RandomDrafting
from pagewood.engine.testing.watched_runner import WatchedRunner

_LONGEST = 64
_TOLERANCE = 1e-3
"""Allowed difference of log probabilities and vectors: they may depend on the order of additions."""
_MOST_STEPS = 3000
_GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSize:
    """The sizes for which a runner is made."""

    num_rows: int
    """Requests that hold a row at the same time."""
    max_length: int
    """Longest prompt plus output."""
    num_pages: int
    page_size: int
    """Positions per page."""
    max_drafts: int = 0
    """The most drafts of a grant; 0: no grant promises more than one token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Abilities:
    vocab_size: int
    vector_size: int
    max_drafts: int
    has_logprobs: bool
    has_grammars: bool


@dataclass(frozen=True, slots=True)
class _Ask:
    """A request."""

    prompt: tuple[int, ...]
    sampling: SamplingParams = _GREEDY
    pooling: PoolingParams | None = None


@dataclass(slots=True)
class _Answer:
    """The result of a request."""

    tokens: list[int] = field(default_factory=list[int])  # contents written by: conformance
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])  # contents written by: conformance
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    # contents written by: conformance
    end: Delta | None = None  # written by: conformance


@dataclass(frozen=True, slots=True, kw_only=True)
class _Guest:
    """A request of a case."""

    ask: _Ask
    at_step: int = 0
    after: int | None = None
    """The guest whose end it waits for; None: it comes at `at_step`."""
    abort_after: int | None = None
    """Tokens after which it is aborted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    name: str
    guests: Sequence[_Guest]
    config: EngineConfig
    num_pages: int = 96
    is_drafting: bool = False
    needs: str = ""
    """Event that the case needs to be meaningful: `cached`, `preempted` or `drafted`."""


def check_runner(
    make_runner: Callable[[RunnerSize], Runner],
    *,
    vocab_size: int,
    page_sizes: Sequence[int] = (4,),
    max_drafts: int = 0,
    vector_size: int = 0,
    has_logprobs: bool = False,
    has_grammars: bool = False,
    seed: int = 0,
) -> None:
    """Check that a runner computes correct results for the engine.

    Its logits must not depend on other requests of a step by more than a rounding error, and must depend on every token
    of a text and on its place.

    Args:
        make_runner: makes a new runner; all that it makes must have the same weights.
        vocab_size: token ids are below it.
        page_sizes: those to be checked.
        max_drafts: the most drafts of a grant; 0: the runner drafts nothing.
        vector_size: elements of a hidden state; 0: the runner makes no vectors.
        has_logprobs: whether it reports log probabilities.
        has_grammars: whether its handles are `ConstrainedHandle`s.
        seed: makes the prompts.

    Raises:
        AssertionError: it does not; the message names the case and the expected result.
    """
    able = _Abilities(
        vocab_size=vocab_size,
        vector_size=vector_size,
        max_drafts=max_drafts,
        has_logprobs=has_logprobs,
        has_grammars=has_grammars,
    )
    for page_size in page_sizes:
        alone = _Alone(make_runner, able, page_size)
        _check_power(alone, random.Random(seed), vocab_size)
        for case in _cases(alone, able, random.Random(seed), page_size):
            loops = (False, True) if case.config.num_continuous_decode_steps == 1 else (False,)
            for overlap in loops:
                where = f"{case.name}, page_size={page_size}, overlap={overlap}"
                config = replace(case.config, overlap=overlap)
                _Run(make_runner, able, replace(case, config=config), where).check(alone)


class _Alone:
    """Results of requests alone; each is computed once."""

    def __init__(self, make_runner: Callable[[RunnerSize], Runner], able: _Abilities, page_size: int) -> None:
        self._make_runner = make_runner
        self._able = able
        self._page_size = page_size
        self._answers: dict[_Ask, _Answer] = {}

    def answer(self, ask: _Ask) -> _Answer:
        """Return the result of a request alone."""
        if ask not in self._answers:
            self._answers[ask] = self.computed(ask)
        return self._answers[ask]

    def computed(self, ask: _Ask) -> _Answer:
        """Compute it on a new runner."""
        config = EngineConfig(
            page_size=self._page_size,
            max_running=1,
            chunked_prefill_size=_LONGEST,
            prefix_cache=False,
            overlap=False,
        )
        case = _Case(name="alone", guests=(_Guest(ask=ask),), config=config)
        return _Run(self._make_runner, self._able, case, f"a request alone, page_size={self._page_size}").answers()[0]


def _check_power(alone: _Alone, rng: random.Random, vocab_size: int) -> None:
    """Check that wrong KV would show: outputs are repeatable, and depend on the text, on its order and on seeds."""
    texts = [_text(rng, vocab_size, 11) for _ in range(3)]
    changes: dict[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = {
        "the first token of the prompt": lambda text: ((text[0] + 1) % vocab_size, *text[1:]),
        "the order of the first two tokens of the prompt": lambda text: (text[1], text[0], *text[2:]),
    }
    for text in texts:
        ask = _Ask(text)
        once, twice = alone.answer(ask).tokens, alone.computed(ask).tokens
        assert once == twice, f"the output must be the same on every new runner, got {once} and {twice} for {text}"
    for what, change in changes.items():
        num = sum(alone.answer(_Ask(text)).tokens != alone.answer(_Ask(change(text))).tokens for text in texts)
        assert num >= 2, (
            f"the output must depend on {what}, got other tokens for {num} of 3 prompts: nothing could be checked with "
            "this runner, or it does not compute with these weights"
        )
    outputs = {tuple(alone.answer(_Ask(texts[0], _seeded(number))).tokens) for number in range(4)}
    assert len(outputs) > 1, f"the output must depend on the seed at temperature 1, got {outputs} for 4 seeds"


def _cases(alone: _Alone, able: _Abilities, rng: random.Random, page_size: int) -> Iterator[_Case]:
    vocab = able.vocab_size
    config = EngineConfig(page_size=page_size, max_running=5, chunked_prefill_size=_LONGEST)
    uncached = replace(config, prefix_cache=False)
    one, two, *others = [_text(rng, vocab, length) for length in (9, 23, 1, 14, 30, 5, 17, 26)]
    mixed = [
        _Ask(one),
        _Ask(two, _seeded(1)),
        *(_Ask(text, _seeded(i) if i % 2 else _GREEDY) for i, text in enumerate(others)),
    ]

    def company(asks: Sequence[_Ask], *, every: int = 2) -> list[_Guest]:
        return [_Guest(ask=ask, at_step=index * every) for index, ask in enumerate(asks)]

    yield _Case(name="one request", guests=company(mixed[:1]), config=uncached)
    yield _Case(name="a batch", guests=company(mixed), config=uncached)
    yield _Case(
        name="prompts in chunks", guests=company(mixed, every=1), config=replace(uncached, chunked_prefill_size=5)
    )
    few = replace(uncached, max_running=2)
    yield _Case(name="rows and pages used again", guests=company(mixed, every=0), config=few, num_pages=2 * _LONGEST)
    ends = [replace(ask, sampling=_stopped(alone.answer(ask).tokens, ask.sampling, i)) for i, ask in enumerate(mixed)]
    yield _Case(name="ends while a step is in flight", guests=company(ends, every=0), config=few)
    aborts = [_Guest(ask=ask, at_step=i, abort_after=i + 1 if i % 2 else None) for i, ask in enumerate(mixed)]
    yield _Case(name="aborts in flight", guests=aborts, config=replace(config, max_running=3, chunked_prefill_size=8))
    told = (*two, *alone.answer(mixed[1]).tokens)
    follows = [_Ask((*two, *one), _seeded(3)), mixed[1], _Ask((*two[:-3], *one)), _Ask((*told, *one[:3]))]
    hits = [_Guest(ask=mixed[1]), *(_Guest(ask=ask, after=0) for ask in follows), _Guest(ask=follows[3], after=3)]
    yield _Case(name="prefixes from the cache", guests=hits, config=config, needs="cached")
    short = replace(config, schedule_conservativeness=0.05)
    long = [replace(ask, sampling=replace(ask.sampling, max_tokens=30)) for ask in mixed]
    num_pages = -(-_LONGEST // page_size) + 2
    yield _Case(name="preemption", guests=company(long, every=1), config=short, num_pages=num_pages, needs="preempted")
    several = replace(config, num_continuous_decode_steps=4)
    yield _Case(name="several steps at once", guests=company(mixed, every=1), config=several)
    if able.max_drafts:
        for cut in (_LONGEST, 6):
            drafted = replace(config, chunked_prefill_size=cut)
            name = f"drafts, chunked_prefill_size={cut}"
            guests = [*company(long), _Guest(ask=follows[0], after=1), _Guest(ask=mixed[1], after=1)]
            yield _Case(name=name, guests=guests, config=drafted, is_drafting=True, needs="drafted")
        guests = company(long, every=1)
        yield _Case(name="drafts and preemption", guests=guests, config=short, num_pages=num_pages, is_drafting=True)
    if able.has_logprobs:
        wishes = ((2, None), (None, 1), (0, 0), (None, None))
        asks = [_reported(ask, *wishes[index % 4]) for index, ask in enumerate(mixed)]
        cut = replace(config, chunked_prefill_size=6)
        yield _Case(name="log probabilities", guests=company(asks), config=cut)
        if able.max_drafts:
            yield _Case(name="log probabilities with drafts", guests=company(asks), config=cut, is_drafting=True)
    if able.vector_size:
        kinds = (
            PoolingParams(kind="last"),
            None,
            PoolingParams(kind="mean"),
            PoolingParams(kind="cls", normalize=False),
        )
        asks = [replace(ask, pooling=kinds[i % 4]) for i, ask in enumerate(mixed)]
        yield _Case(name="vectors", guests=company(asks), config=replace(config, chunked_prefill_size=6))
    if able.has_grammars:
        grammars = [Grammar(kind="regex", text=f"{i} 12 999 0") if i % 3 else None for i in range(len(mixed))]
        asks = [replace(ask, sampling=replace(ask.sampling, grammar=grammars[i])) for i, ask in enumerate(mixed)]
        yield _Case(name="grammars", guests=company(asks), config=config)
        if able.max_drafts:
            yield _Case(name="grammars with drafts", guests=company(asks), config=config, is_drafting=True)


class _Run:
    """One run of a case on a new runner."""

    def __init__(self, make_runner: Callable[[RunnerSize], Runner], able: _Abilities, case: _Case, where: str) -> None:
        self._case = case
        self._where = where
        self._inbox, self._outbox = MemoryInbox(), MemoryOutbox()
        self._answers = [_Answer() for _ in case.guests]
        self._sent: set[int] = set()  # contents written by: conformance
        size = RunnerSize(
            num_rows=case.config.num_rows,
            max_length=_LONGEST,
            num_pages=case.num_pages,
            page_size=case.config.page_size,
            max_drafts=able.max_drafts if case.is_drafting else 0,
        )
        self._runner = WatchedRunner(make_runner(size))
        self._engine: Engine = assemble(
            case.config,
            info=EngineInfo(
                model_name="conformance",
                max_length=_LONGEST,
                vocab_size=able.vocab_size,
                eos_token_ids=(),
                num_pages=case.num_pages,
                page_size=case.config.page_size,
                vector_size=able.vector_size,
            ),
            make_runner=lambda kv: self._runner,
            drafting=RandomDrafting(max_tokens=able.max_drafts, seed=1) if case.is_drafting else None,
            drafts_constrained=able.has_grammars,
            compiler=EchoCompiler(random.Random(0), able.vocab_size) if able.has_grammars else None,
            inbox=self._inbox,
            outbox=self._outbox,
        )

    def answers(self) -> Sequence[_Answer]:
        """Run the case; return the results of its guests."""
        pending: Pending | None = None
        try:
            for step in range(_MOST_STEPS):
                self._arrive(step)
                pending = self._engine.advance(pending)
                self._collect()
                if pending is None and len(self._sent) == len(self._answers) and all(one.end for one in self._answers):
                    break
            else:
                raise AssertionError(f"all requests must end in {_MOST_STEPS} steps, got {self._engine.counters()}")
        except AssertionError as error:
            raise AssertionError(f"{self._where}: {error}") from error
        except Exception as error:
            raise AssertionError(f"{self._where}: the engine must go on, got {error!r}") from error
        finally:
            self._engine.close()
        self._runner.check()
        return self._answers

    def check(self, alone: _Alone) -> None:
        """Run the case, and compare the results of its guests with their results alone."""
        answers = self.answers()
        for index, (guest, found) in enumerate(zip(self._case.guests, answers, strict=True)):
            _check_answer(f"{self._where}, request {index}", guest, found, alone.answer(guest.ask))
        counters, ends = self._engine.counters(), [answer.end for answer in answers if answer.end is not None]
        happened = {
            "cached": sum(end.num_cached_tokens for end in ends),
            "preempted": counters.num_preempted,
            "drafted": 0 if counters.speculation is None else counters.speculation.num_drafted,
        }
        needs = self._case.needs
        assert not needs or happened[needs], f"{self._where}: num_{needs} must be above 0: the case has shown nothing"

    def _arrive(self, step: int) -> None:
        for index, (guest, answer) in enumerate(zip(self._case.guests, self._answers, strict=True)):
            if index not in self._sent:
                is_due = step >= guest.at_step if guest.after is None else self._answers[guest.after].end is not None
                if is_due:
                    self._sent.add(index)
                    ask, tokens = guest.ask, np.array(guest.ask.prompt, "<i4").tobytes()
                    self._inbox.put(
                        Submit(request_id=str(index), tokens=tokens, sampling=ask.sampling, pooling=ask.pooling)
                    )
            elif guest.abort_after is not None and answer.end is None and len(answer.tokens) >= guest.abort_after:
                self._inbox.put(Abort(request_id=str(index)))

    def _collect(self) -> None:
        for delta in self._outbox.take():
            answer = self._answers[int(delta.request_id)]
            answer.tokens += delta.tokens
            answer.logprobs += delta.logprobs
            answer.prompt_logprobs += delta.prompt_logprobs
            if delta.finish is not None:
                answer.end = delta
            if delta.refusal is not None:
                message = delta.refusal.message
                raise AssertionError(f"request {delta.request_id} must get tokens, got an error: {message}")


def _check_answer(where: str, guest: _Guest, found: _Answer, expected: _Answer) -> None:
    """Compare the result of a request with its result alone."""
    assert found.end is not None
    assert expected.end is not None
    num = len(found.tokens) if found.end.finish is FinishReason.ABORT else len(expected.tokens)
    if found.tokens != expected.tokens[:num]:
        pairs = enumerate(zip(found.tokens, expected.tokens, strict=False))
        at = next((i for i, (one, other) in pairs if one != other), min(len(found.tokens), num))
        raise AssertionError(
            f"{where} must get the tokens that it gets alone, {expected.tokens[:num]}, got {found.tokens}: they differ "
            f"from output token {at} on, at position {len(guest.ask.prompt) + at}"
        )
    if found.end.finish is FinishReason.ABORT:
        return
    assert found.end.finish is expected.end.finish, f"{where} must end by {expected.end.finish}, got {found.end.finish}"
    for name in ("logprobs", "prompt_logprobs"):
        own, other = _numbers(getattr(found, name)), _numbers(getattr(expected, name))
        assert own.shape == other.shape, f"{where} must have {len(other)} numbers as {name}, got {len(own)}"
        is_near = np.allclose(own, other, rtol=0, atol=_TOLERANCE)
        assert is_near, f"{where} must have the {name} that it has alone, {other.tolist()}, got {own.tolist()}"
    own, other = (np.frombuffer(end.vector, "<f4") for end in (found.end, expected.end))
    is_near = np.allclose(own, other, rtol=_TOLERANCE, atol=_TOLERANCE)
    assert is_near, f"{where} must have the vector that it has alone, {other.tolist()}, got {own.tolist()}"


def _numbers(entries: Sequence[TokenLogprob]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return tokens and log probabilities of reports in one row; of alternatives, which may tie, the latter only."""
    return np.array(
        [number for one in entries for number in (one.token, one.logprob, *(value for _, value in one.top))]
    )


def _text(rng: random.Random, vocab_size: int, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(vocab_size) for _ in range(length))


def _seeded(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=12)


def _reported(ask: _Ask, num_top: int | None, num_prompt_top: int | None) -> _Ask:
    return replace(ask, sampling=replace(ask.sampling, logprobs=num_top, prompt_logprobs=num_prompt_top))


def _stopped(tokens: Sequence[int], sampling: SamplingParams, index: int) -> SamplingParams:
    """Return the parameters of a request that ends at one of the tokens that it would get."""
    return replace(sampling, stop_token_ids=(tokens[index % len(tokens)],), max_tokens=1 + 3 * (index % 4))
