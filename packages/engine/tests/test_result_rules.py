"""What a runner returns is checked once a step: a wrong result ends the requests of its step, and no other."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from echo_bench import echo_engine
from pagewood.engine.api import Delta, FinishReason, Grammar, PoolingParams, SamplingParams, Submit
from pagewood.engine.assemble import assemble
from pagewood.engine.core.loop import Pending, Runner
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.result import StepResult
from pagewood.engine.core.messages.result_rules import check_drafts
from pagewood.engine.core.messages.sampling_table import SamplingArrays
from pagewood.engine.decision_log.replay import replay
from pagewood.engine.testing import EchoRunner, oracle_tokens
from pagewood.engine.testing.echo import STATE_SIZE, EchoStep
from pagewood.engine.testing.echo_grammar import EchoCompiler
from pagewood.engine.testing.random_drafting import RandomDrafting
from wrong_results import WRONG, WrongRunner

VOCAB, LONGEST = 50, 64


def echo_runner() -> EchoRunner:
    return EchoRunner(num_rows=3, max_length=LONGEST, num_pages=64, page_size=4, vocab_size=VOCAB, guess_quality=0.9)


class Bench:
    """An engine around a runner, and all its answers."""

    def __init__(self, runner: Runner, *, overlap: bool, drafts: bool = False, decision_log: str | None = None) -> None:
        self.pending: Pending | None = None
        self.deltas: list[Delta] = []
        parts = {
            "drafting": RandomDrafting(max_tokens=4, seed=1) if drafts else None, "drafts_constrained": True,
            "compiler": EchoCompiler(random.Random(0), VOCAB),
        }  # fmt: skip
        self.engine, self.inbox, self.outbox = echo_engine(
            num_pages=64, max_running=3, make_runner=lambda kv: runner, info={"vector_size": STATE_SIZE}, parts=parts,
            overlap=overlap, decision_log=decision_log,
        )  # fmt: skip

    def step(self) -> None:
        self.pending = self.engine.advance(self.pending)
        self.deltas += self.outbox.take()
        assert self.engine.violation() is None

    def until_idle(self) -> None:
        for _ in range(300):
            self.step()
            if self.pending is None and self.engine._state.is_idle:  # pyright: ignore[reportPrivateUsage]
                return
        raise AssertionError("the engine does not become idle")

    def ends(self) -> dict[str, Delta]:
        return {delta.request_id: delta for delta in self.deltas if delta.finish is not None}

    def tokens(self, name: str) -> list[int]:
        return [token for delta in self.deltas if delta.request_id == name for token in delta.tokens]


def submit(name: str, prompt: Sequence[int], pooling: PoolingParams | None = None, **sampling: object) -> Submit:
    params = SamplingParams(temperature=0.0, max_tokens=12, **sampling)  # pyright: ignore[reportArgumentType]
    return Submit(request_id=name, tokens=np.array(prompt, "<i4").tobytes(), sampling=params, pooling=pooling)


def expected(prompt: Sequence[int]) -> list[int]:
    sampling = SamplingParams(temperature=0.0, max_tokens=12)
    return oracle_tokens(prompt, sampling, vocab_size=VOCAB, stop_ids=frozenset(), max_length=LONGEST)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_result_ends_the_requests_of_its_step_and_no_other(kind: str, overlap: bool) -> None:
    wrong, in_step = WRONG[kind], set[str]()

    def note(batch: Batch) -> None:
        holders = bench.engine._state.holders  # pyright: ignore[reportPrivateUsage]
        rows: list[int] = batch.rows.tolist()
        in_step.update(one.request_id for one in holders if one.row in rows and one.finish is None)

    is_early = "prompt" in kind or "vector" in kind
    runner = WrongRunner(echo_runner(), wrong, first=0 if is_early else 2, on_wrong=note)
    bench = Bench(runner, overlap=overlap, drafts="draft" in kind)
    reports = 2 if "report" in kind or "alternative" in kind or "rank" in kind else None
    prompts = {name: list(range(1, 3 + index)) for index, name in enumerate("abcdefgh")}
    for name, prompt in prompts.items():  # three run, the others wait
        wants_prompt = 0 if name == "a" and kind in ("no reports of the prompt", "a prompt token too few") else None
        bench.inbox.put(submit(name, prompt, logprobs=reports, prompt_logprobs=wants_prompt))
        if "vector" in kind and name == "a":
            bench.inbox.put(submit("v", [1, 2, 3], pooling=PoolingParams(kind="mean")))
    bench.until_idle()
    ends = bench.ends()
    failed = {name for name, delta in ends.items() if delta.finish is FinishReason.ERROR}
    assert runner.was_wrong
    assert 1 <= len(failed) <= 3
    assert failed == in_step
    for name in failed:
        refusal = ends[name].refusal
        assert refusal is not None
        assert refusal.code == "step_failed"
        assert re.search(wrong.message, refusal.message), refusal.message
    assert ends.keys() >= prompts.keys()
    for name, prompt in prompts.items():
        found = bench.tokens(name)
        assert found == expected(prompt)[: len(found)]
        assert name in failed or found == expected(prompt)
    assert bench.engine.counters().num_violations == 0


class WrongDrafts:
    """An echo runner whose first step with masks has wrong drafts, or no drafts at all."""

    def __init__(self, drafts: object) -> None:
        self.echo, self.drafts = echo_runner(), drafts
        self.close = self.echo.close

    def launch(self, batch: Batch) -> WrongDraftsStep | EchoStep:
        step = self.echo.launch(batch)
        if not len(batch.constrained) or self.drafts is None:
            return step
        drafts, self.drafts = self.drafts, None
        return WrongDraftsStep(step, drafts)


class WrongDraftsStep:
    def __init__(self, step: EchoStep, drafts: object) -> None:
        self._step, self._drafts = step, drafts

    def drafts(self) -> object:
        if isinstance(self._drafts, Exception):
            raise self._drafts
        return self._drafts

    def constrain(self, masks: Int32) -> None:
        self._step.constrain(masks)

    def wait(self) -> StepResult:
        return self._step.wait()


WRONG_DRAFTS: dict[str, tuple[object, str]] = {
    "an error": (RuntimeError("the device is lost"), "the device is lost"),
    "too few": ([], "drafts must return one sequence for each of 1 constrained grants, got 0"),
    "too many": ([(), ()], "drafts must return one sequence for each of 1 constrained grants, got 2"),
    "too long": ([(1,)], "drafts must return at most 0 tokens for a grant that may have 0, got 1"),
}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", WRONG_DRAFTS)
def test_wrong_drafts_end_the_requests_of_their_step_and_not_the_engine(kind: str, overlap: bool) -> None:
    drafts, message = WRONG_DRAFTS[kind]
    bench = Bench(WrongDrafts(drafts), overlap=overlap)  # pyright: ignore[reportArgumentType]
    bench.inbox.put(submit("a", [1, 2, 3], grammar=Grammar(kind="regex", text="1 40 999 0")))
    bench.step()
    bench.until_idle()
    end = bench.ends()["a"]
    assert end.finish is FinishReason.ERROR
    assert end.refusal is not None
    assert message in end.refusal.message
    bench.inbox.put(submit("b", [1, 2, 3]))
    bench.step()
    bench.until_idle()
    assert bench.tokens("b") == expected([1, 2, 3])


@pytest.mark.parametrize(
    ("drafts", "message"),
    [
        ([(1, 50)], r"drafts must return token ids in \[0, 50\), got \[1, 50\]"),
        ([(1, 2, 3, 4)], "drafts must return at most 3 tokens for a grant that may have 3, got 4"),
    ],
)
def test_drafts_of_a_grant_that_speculates_are_checked(drafts: list[object], message: str) -> None:
    one = np.zeros(1, np.int32)
    empty = np.empty(0, np.int32)
    batch = Batch(
        page_rows=empty, page_columns=empty, page_ids=empty, token_rows=empty, token_positions=empty, token_ids=empty,
        rows=one, starts=one, counts=one + 4, sampled=one, num_promised=one + 4, constrained=one,
        sampling=SamplingArrays.of([SamplingParams()], [0]),
    )  # fmt: skip
    check_drafts([(1, 2, 3)], batch, vocab_size=50)
    with pytest.raises(ValueError, match=message):
        check_drafts(drafts, batch, vocab_size=50)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", ["a list of tokens", "too few counts", "more drafts than granted", "no reports"])
def test_a_wrong_result_is_in_the_decision_log_as_a_failed_step(kind: str, overlap: bool, tmp_path: Path) -> None:
    path = tmp_path / "decisions.log"
    runner = WrongRunner(echo_runner(), WRONG[kind])
    bench = Bench(runner, overlap=overlap, drafts=True, decision_log=str(path))
    for name in "abcde":
        bench.inbox.put(submit(name, [1, 2, 3], logprobs=2, prompt_logprobs=1))
    bench.until_idle()
    bench.engine.close()
    assert runner.was_wrong
    found = replay(path, assemble=assemble)
    assert found.difference is None
    assert found.num_plans > 5
