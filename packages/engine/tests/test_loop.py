"""Single behaviours of the loops; random traffic is in test_scenarios.py."""

from typing import Any, Literal

import numpy as np
import pytest

from echo_bench import echo_engine, expected, submit
from pagewood.engine.api import (
    Abort,
    Command,
    Delta,
    FinishReason,
    PassOn,
    Pause,
    Refusal,
    Refuse,
    SamplingParams,
    SetPriority,
    Submit,
)
from pagewood.engine.core.loop import Pending, Runner, StepHandle
from pagewood.engine.core.memory.kv import KVSpace
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.result import StepResult
from pagewood.engine.testing import EchoRunner


class Bench:
    """An engine with an echo runner, and all its answers."""

    def __init__(self, *, max_running: int = 4, runner: Runner | None = None, **options: Any) -> None:
        self.engine, self.inbox, self.outbox = echo_engine(
            max_running=max_running, make_runner=None if runner is None else lambda _: runner, **options
        )
        self.pending: Pending | None = None
        self.deltas: list[Delta] = []

    def step(self, *commands: Command) -> list[Delta]:
        for command in commands:
            self.inbox.put(command)
        self.pending = self.engine.advance(self.pending)
        deltas = list(self.outbox.take())
        self.deltas += deltas
        return deltas

    def until_idle(self) -> None:
        for _ in range(500):
            self.step()
            if self.pending is None and not self.engine.counters().num_running + self.engine.counters().num_waiting:
                return
        raise AssertionError("the engine does not become idle")


@pytest.mark.parametrize("overlap", [False, True])
def test_an_abort_frees_everything_one_step_later(overlap: bool) -> None:
    bench = Bench(overlap=overlap, prefix_cache=False)
    bench.step(submit("a", [1, 2, 3, 4, 5], max_tokens=50))
    for _ in range(5):
        bench.step()
    assert bench.engine.counters().num_free_pages < 32
    assert [delta.finish for delta in bench.step(Abort(request_id="a"))][-1] is FinishReason.ABORT
    bench.step()
    assert bench.engine.counters().num_free_pages == 32
    assert bench.step(Abort(request_id="a")) == []


@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_passed_on_comes_behind_the_answers_to_earlier_commands(overlap: bool) -> None:
    bench = Bench(overlap=overlap)
    bench.step(submit("a", [1, 2, 3], max_tokens=50))
    bench.step(Pause(request_id="pause"))
    refuse = Refuse(request_id="b", refusal=Refusal(message="no template"))
    found = bench.step(Abort(request_id="a"), refuse, PassOn(request_id="c", carry=b"it"), Abort(request_id="d"))
    assert [(one.request_id, one.finish) for one in found] == [
        ("a", FinishReason.ABORT), ("b", FinishReason.REFUSED), ("c", FinishReason.STOP)
    ]  # fmt: skip
    assert (found[-1].first, found[-1].carry, found[-1].refusal, found[-1].tokens) == (True, b"it", None, ())


def test_a_waiting_request_can_be_aborted() -> None:
    bench = Bench(max_running=1)
    bench.step(submit("a", [1], max_tokens=30), submit("b", [2], max_tokens=30))
    deltas = bench.step(Abort(request_id="b"))
    assert [(d.request_id, d.finish, d.carry) for d in deltas if d.finish] == [("b", FinishReason.ABORT, b"b")]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            submit("a", [1] * 60, max_tokens=5),
            "maximum context length is 64 tokens, but the prompt has 60 tokens and max",
        ),
        (submit("a", [1] * 64, max_tokens=None), "maximum context length is 64 tokens, but the prompt has 64 tokens"),
        (submit("a", [1, 50], max_tokens=5), r"prompt must have token ids in \[0, 50\), got 50"),
        (submit("a", [1, -1], max_tokens=5), r"prompt must have token ids in \[0, 50\), got -1"),
        (submit("a", [], max_tokens=5), "prompt must be one or more int32 token ids, got 0 bytes"),
        (Submit(request_id="a", tokens=b"12345"), "prompt must be one or more int32 token ids, got 5 bytes"),
        (Refuse(request_id="a", refusal=Refusal(message="no template")), "no template"),
    ],
)
def test_a_request_that_can_never_run_is_refused_at_once(command: Command, message: str) -> None:
    bench = Bench()
    (delta,) = bench.step(command)
    assert (delta.finish, delta.first) == (FinishReason.REFUSED, True)
    assert delta.refusal is not None
    with pytest.raises(ValueError, match=message):
        raise ValueError(delta.refusal.message)


def test_an_id_in_use_is_refused_and_the_first_request_continues() -> None:
    bench = Bench()
    bench.step(submit("a", [1, 2], max_tokens=3))
    assert [d.finish for d in bench.step(submit("a", [3], max_tokens=3)) if d.refusal] == [FinishReason.REFUSED]
    bench.until_idle()
    assert sum(len(delta.tokens) for delta in bench.deltas) == 3


def test_max_tokens_none_means_as_many_as_fit() -> None:
    bench = Bench()
    bench.step(submit("a", [1, 2, 3], max_tokens=None))
    bench.until_idle()
    assert bench.deltas[-1].num_output_tokens == 61
    assert bench.deltas[-1].finish is FinishReason.LENGTH


def test_requests_without_a_seed_get_different_ones() -> None:
    bench = Bench()
    tokens = np.array([1, 2, 3], "<i4").tobytes()
    sampling = SamplingParams(max_tokens=10, temperature=1.0)
    bench.step(*(Submit(request_id=name, tokens=tokens, sampling=sampling) for name in "ab"))
    bench.until_idle()
    a, b = ([t for delta in bench.deltas if delta.request_id == name for t in delta.tokens] for name in "ab")
    assert len(a) == len(b) == 10
    assert a != b


def echo_runner() -> EchoRunner:
    return EchoRunner(num_rows=4, max_length=64, num_pages=32, page_size=4, vocab_size=50)


class Faulty:
    """An echo runner whose third step has a fault."""

    def __init__(self, fault: Literal["launch", "interrupted launch", "wait", "interrupt", "row"]) -> None:
        self.echo = echo_runner()
        self.fault = fault
        self.num_launched = 0

    def launch(self, batch: Batch) -> StepHandle:
        self.num_launched += 1
        if self.num_launched != 3:
            return self.echo.launch(batch)
        if self.fault == "launch":
            raise RuntimeError("out of device memory")
        if self.fault == "interrupted launch":
            raise KeyboardInterrupt
        return FaultyStep(self.echo.launch(batch), self.fault)

    def close(self) -> None: ...


class FaultyStep:
    """A step that fails, that is interrupted once in `wait`, or that has no token for its first row."""

    def __init__(self, step: StepHandle, fault: str) -> None:
        self._step = step
        self._fault = fault

    def wait(self) -> StepResult:
        if self._fault == "interrupt":
            self._fault = ""
            raise KeyboardInterrupt
        result = self._step.wait()
        if self._fault == "wait":
            raise RuntimeError("out of device memory")
        tokens = result.tokens.copy()
        if self._fault == "row":
            tokens[0] = -1
        return StepResult.of_one_each(tokens)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fault", ["launch", "wait"])
def test_a_failed_step_ends_its_requests_and_not_the_engine(fault: Literal["launch", "wait"], overlap: bool) -> None:
    bench = Bench(overlap=overlap, runner=Faulty(fault))
    bench.step(submit("a", [1, 2, 3], max_tokens=20))
    bench.until_idle()
    assert bench.deltas[-1].finish is FinishReason.ERROR
    assert bench.deltas[-1].refusal is not None
    assert "out of device memory" in bench.deltas[-1].refusal.message
    assert bench.engine.violation() is None
    bench.deltas.clear()
    bench.step(submit("b", [1, 2, 3], max_tokens=5))
    bench.until_idle()
    assert [token for delta in bench.deltas for token in delta.tokens] == expected([1, 2, 3], 5)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_interrupted_wait_loses_no_token(overlap: bool) -> None:
    bench = Bench(overlap=overlap, runner=Faulty("interrupt"))
    bench.inbox.put(submit("a", [1, 2, 3], max_tokens=20))
    num_interrupts = 0
    for _ in range(100):
        try:
            bench.step()
        except KeyboardInterrupt:
            num_interrupts += 1
            bench.pending = None
    bench.deltas += bench.outbox.take()
    assert num_interrupts == 1
    assert [token for delta in bench.deltas for token in delta.tokens] == expected([1, 2, 3], 20)
    assert bench.engine.violation() is None
    assert bench.engine.counters().num_running == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_an_interrupted_launch_ends_its_requests_after_the_step_in_flight(overlap: bool) -> None:
    bench = Bench(overlap=overlap, runner=Faulty("interrupted launch"))
    bench.step(submit("a", [1, 2, 3], max_tokens=20))
    bench.step()
    with pytest.raises(KeyboardInterrupt):
        bench.step()
    bench.pending = None
    assert (bench.engine.counters().num_running, bench.engine.counters().num_draining) == (0, 0)
    assert bench.engine.violation() is None
    bench.step(submit("b", [1, 2, 3], max_tokens=5))
    bench.until_idle()
    ends = {delta.request_id: delta for delta in bench.deltas if delta.finish}
    assert (ends["a"].finish, ends["b"].finish) == (FinishReason.ERROR, FinishReason.LENGTH)
    tokens = [token for delta in bench.deltas if delta.request_id == "b" for token in delta.tokens]
    assert tokens == expected([1, 2, 3], 5)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_row_whose_logits_are_not_numbers_ends_its_request_only(overlap: bool) -> None:
    bench = Bench(overlap=overlap, runner=Faulty("row"))
    prompts = {"a": [1, 2, 3], "b": [4, 5], "c": [6]}
    bench.step(*(submit(name, prompt, max_tokens=20) for name, prompt in prompts.items()))
    bench.until_idle()
    ends = {delta.request_id: delta for delta in bench.deltas if delta.finish}
    assert [ends[name].finish for name in "abc"] == [FinishReason.ERROR, FinishReason.LENGTH, FinishReason.LENGTH]
    assert ends["a"].refusal is not None
    assert ends["a"].refusal.code == "logits_not_numbers"
    for name in "bc":
        tokens = [token for delta in bench.deltas if delta.request_id == name for token in delta.tokens]
        assert tokens == expected(prompts[name], 20)
    assert bench.engine.violation() is None


def test_broken_accounting_is_healed_while_idle(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.step(submit("a", [1] * 10, max_tokens=5))
    bench.until_idle()
    kv = bench.engine._kv  # pyright: ignore[reportPrivateUsage]
    assert isinstance(kv, KVSpace)
    kv._allocator.alloc(3)  # pyright: ignore[reportPrivateUsage]  # a leak
    for _ in range(2):  # the second pass without a command looks
        bench.step()
    counters = bench.engine.counters()
    assert (counters.num_violations, counters.num_free_pages, counters.num_cached_pages) == (1, 32, 0)
    assert "KV accounting is wrong" in caplog.text
    bench.step(submit("b", [1] * 10, max_tokens=5))
    bench.until_idle()
    assert bench.engine.counters().num_violations == 1


def test_run_aborts_the_remaining_requests_when_it_is_stopped() -> None:
    bench = Bench()
    bench.inbox.put(submit("a", [1, 2, 3], max_tokens=60))
    turns = iter([False] * 10 + [True])
    bench.engine.run(lambda: next(turns))
    deltas = bench.outbox.take()
    assert deltas[-1].finish is FinishReason.ABORT
    assert bench.engine.violation() is None
    assert bench.engine.counters().num_running == 0


def test_a_step_computes_no_more_prompt_tokens_than_configured() -> None:
    batches: list[Batch] = []

    class Recording:
        def __init__(self) -> None:
            self.echo = echo_runner()
            self.close = self.echo.close

        def launch(self, batch: Batch) -> StepHandle:
            batches.append(batch)
            return self.echo.launch(batch)

    bench = Bench(chunked_prefill_size=16, runner=Recording())
    bench.step(*(submit(str(i), [i + 1] * 12, max_tokens=2) for i in range(4)))
    bench.until_idle()
    assert max(int(batch.counts[batch.counts > 1].sum()) for batch in batches) == 16


def test_requests_that_share_a_long_prefix_compute_it_once() -> None:
    bench = Bench(chunked_prefill_size=64)
    prefix = list(range(1, 41))
    bench.step(*(submit(str(i), [*prefix, 41 + i], max_tokens=4) for i in range(4)))
    bench.until_idle()
    assert bench.engine.counters().num_tokens == 41 + 3 * 1 + 4 * 3
    cached = {delta.request_id: delta.num_cached_tokens for delta in bench.deltas}
    assert cached == {"0": 0, "1": 40, "2": 40, "3": 40}


def test_a_higher_priority_is_admitted_first() -> None:
    bench = Bench(max_running=1)
    bench.step(submit("running", [9], max_tokens=3))
    low, high = submit("low", [1], max_tokens=2), submit("high", [2], max_tokens=2)
    bench.step(low, Submit(request_id="high", tokens=high.tokens, sampling=high.sampling, priority=5))
    bench.until_idle()
    assert [delta.request_id for delta in bench.deltas if delta.finish] == ["running", "high", "low"]


def test_a_new_priority_of_a_waiting_request_decides_when_it_is_admitted() -> None:
    bench = Bench(max_running=1)
    bench.step(*(submit(name, [index], max_tokens=3) for index, name in enumerate("abc")))
    bench.step(SetPriority(request_id="c", priority=1))
    bench.until_idle()
    assert [delta.request_id for delta in bench.deltas if delta.finish] == ["a", "c", "b"]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_new_priority_of_a_running_request_decides_which_is_preempted(overlap: bool) -> None:
    def ends(*commands: Command) -> list[str]:
        bench = Bench(max_running=3, schedule_conservativeness=0.01, overlap=overlap)
        bench.step(*(submit(name, [index] * 30, max_tokens=34) for index, name in enumerate("abc")))
        for _ in range(5):
            bench.step()
        assert {delta.request_id for delta in bench.deltas if delta.tokens} == {"a", "b", "c"}  # all of them stream
        bench.step(*commands)
        bench.until_idle()
        assert bench.engine.counters().num_preempted == 1
        return [delta.request_id for delta in bench.deltas if delta.finish]

    assert ends() == ["a", "b", "c"]
    assert ends(SetPriority(request_id="c", priority=1)) == ["c", "a", "b"]
    assert ends(SetPriority(request_id="a", priority=-1)) == ["b", "c", "a"]


def test_a_priority_for_an_unknown_request_is_not_an_error() -> None:
    bench = Bench()
    assert bench.step(SetPriority(request_id="a", priority=1)) == []
    bench.step(submit("a", [1], max_tokens=2))
    bench.until_idle()
    assert bench.step(SetPriority(request_id="a", priority=1)) == []
