"""Which request the engine admits next, by each order that needs more than a priority; and prompts that keep a pace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from echo_bench import echo_engine
from pagewood.engine.api import SamplingParams, Submit
from pagewood.engine.core.loop import Pending, StepHandle
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.result import StepResult
from pagewood.engine.testing import EchoRunner


def submit(name: str, *, num_tokens: int = 4, max_tokens: int = 2, **fields: Any) -> Submit:
    tokens = (np.arange(num_tokens, dtype="<i4") + len(name) + ord(name[0])) % 50
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return Submit(request_id=name, tokens=tokens.tobytes(), sampling=sampling, **fields)


def admitted(*submits: Submit, first: Submit | None = None, max_running: int = 1, **options: Any) -> list[str]:
    """Return in which order an engine starts requests that arrive a second apart while it runs another, `first`."""
    now_s = [0.0]
    engine, inbox, outbox = echo_engine(
        num_pages=1024, max_length=2048, max_running=max_running, parts={"clock": lambda: now_s[0]}, **options
    )
    pending: Pending | None = None
    names: list[str] = []
    for one in (first or submit("first", max_tokens=40), *submits):
        inbox.put(one)
        pending = engine.advance(pending)
        now_s[0] += 1.0
    for _ in range(60 + 4 * len(submits)):
        pending = engine.advance(pending)
        names += [delta.request_id for delta in outbox.take() if delta.first]
    return [name for name in names if name != "first"]


def test_the_earliest_deadline_is_first_and_those_without_one_are_last() -> None:
    found = admitted(
        submit("none"), submit("late", deadline_s=900.0), submit("soon", deadline_s=300.0), schedule_policy="edf"
    )
    assert found == ["soon", "late", "none"]


def test_classes_take_turns_by_their_weights() -> None:
    gold = [submit(f"g{number}", service_class="gold") for number in range(6)]
    plain = [submit(f"p{number}", service_class="plain") for number in range(3)]
    found = admitted(*plain, *gold, schedule_policy="wrr", schedule_weights=(("gold", 2.0),))
    for number in range(1, 4):  # two thirds of any beginning are gold, but for one
        assert abs(sum(name[0] == "g" for name in found[: 3 * number]) - 2 * number) <= 1
    assert sorted(found) == sorted(one.request_id for one in (*plain, *gold))


def test_requests_with_the_tag_of_those_that_run_are_next() -> None:
    first = submit("first", max_tokens=40, tag="x")
    others = (submit("a", max_tokens=4, tag="y"), submit("b", tag="z"), submit("c", tag="x"))
    assert admitted(*others, first=first, max_running=2, schedule_policy="tag") == ["a", "c", "b"]
    assert admitted(*others, first=first, max_running=2) == ["a", "b", "c"]


def test_namespaces_share_by_their_weights() -> None:
    mine = [submit(f"m{number}", namespace="mine") for number in range(6)]
    yours = [submit(f"y{number}", namespace="yours") for number in range(6)]
    found = admitted(*yours, *mine, schedule_policy="fair", schedule_weights=(("mine", 2.0),))
    assert sum(name[0] == "m" for name in found[:6]) == 4


def test_the_oldest_gets_every_fourth_place_whatever_the_order_says() -> None:
    short = [submit(f"s{number}", num_tokens=2 + number) for number in range(6)]
    plain = admitted(submit("long", num_tokens=40), *short, schedule_policy="shortest")
    aged = admitted(submit("long", num_tokens=40), *short, schedule_policy="shortest", schedule_ageing_s=1.0)
    assert plain.index("long") == 6
    assert aged.index("long") <= 3


class TimedRunner:
    """An echo runner whose steps take 5 ms, 0.1 ms for each prompt token and 0.2 ms for each decoded one."""

    def __init__(self) -> None:
        self.echo = EchoRunner(num_rows=16, max_length=2048, num_pages=1024, page_size=4, vocab_size=50)
        self.close = self.echo.close
        self.now_s = 0.0
        self.end_s = 0.0
        self.steps: list[tuple[int, float]] = []
        """Prompt tokens and seconds of each step."""

    def launch(self, batch: Batch) -> StepHandle:
        num_prefill = int(batch.counts[batch.counts > 1].sum())
        seconds = 0.005 + 1e-4 * num_prefill + 2e-4 * int((batch.counts == 1).sum())
        self.end_s = max(self.now_s, self.end_s) + seconds
        self.steps.append((num_prefill, seconds))
        return _TimedHandle(self, self.echo.launch(batch), self.end_s)


class _TimedHandle:
    def __init__(self, runner: TimedRunner, handle: StepHandle, end_s: float) -> None:
        self.runner, self.handle, self.end_s = runner, handle, end_s

    def wait(self) -> StepResult:
        self.runner.now_s = max(self.runner.now_s, self.end_s)
        return self.handle.wait()


def paced(overlap: bool, target_step_s: float | None) -> list[tuple[int, float]]:
    """Return the steps that compute long prompts one after the other beside eight requests that decode."""
    runner = TimedRunner()
    engine, inbox, _ = echo_engine(
        num_pages=2048, max_length=2048, max_running=16, make_runner=lambda kv: runner,
        parts={"clock": lambda: runner.now_s}, chunked_prefill_size=1024, overlap=overlap,
        target_step_s=target_step_s, prefix_cache=False,
    )  # fmt: skip
    pending: Pending | None = None
    for number in range(8):
        inbox.put(submit(chr(97 + number), num_tokens=8, max_tokens=400))
    for step in range(160):
        if step % 40 == 20:
            inbox.put(submit(f"long{step}", num_tokens=1600, max_tokens=1))
        pending = engine.advance(pending)
    return runner.steps


@pytest.mark.parametrize("overlap", [False, True])
def test_prompts_are_cut_so_that_steps_keep_their_target(overlap: bool) -> None:
    steps = paced(overlap, 0.02)[40:]  # by then the model of steps is fitted
    prompts = [num_tokens for num_tokens, _ in steps if num_tokens]
    assert max(seconds for _, seconds in steps) <= 0.0205
    assert 100 <= np.median(prompts) <= 134  # (20 - 5 - 8 * 0.2) / 0.1
    assert max(num_tokens for num_tokens, _ in paced(overlap, None)) == 1024
