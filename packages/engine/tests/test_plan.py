"""Which requests a step computes: prompts beside decodes, or before them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from echo_bench import echo_engine, submit
from pagewood.engine.api import EngineConfig
from pagewood.engine.core.loop import StepHandle
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.result import StepResult
from pagewood.engine.core.queue.state import EngineState
from pagewood.engine.core.steps.plan import Planner
from pagewood.engine.testing import EchoRunner
from pagewood.schedpolicy import NewTokenRatio, SkipAhead, choose_victim, deserving, prefill_first
from parts import make_queue, make_request, make_space


class Recording:
    """An echo runner that keeps the number of positions of each grant, by step."""

    def __init__(self) -> None:
        self.echo = EchoRunner(num_rows=4, max_length=64, num_pages=64, page_size=4, vocab_size=50)
        self.close = self.echo.close
        self.counts: list[list[int]] = []

    def launch(self, batch: Batch) -> StepHandle:
        self.counts.append(batch.counts.tolist())
        return self.echo.launch(batch)


def steps(**options: Any) -> list[list[int]]:
    """Return the positions of each grant by step: one request decodes, then two long prompts arrive."""
    runner = Recording()
    engine, inbox, _ = echo_engine(num_pages=64, max_running=4, make_runner=lambda kv: runner, overlap=False, **options)
    for name, prompt, at_step in (("a", [1], 0), ("b", [2] * 20, 2), ("c", [3] * 20, 2)):
        while len(runner.counts) < at_step:
            engine.step()
        inbox.put(submit(name, prompt, max_tokens=6))
    while engine.counters().num_running or engine.counters().num_waiting or len(runner.counts) < 3:
        engine.step()
    return runner.counts


def test_a_decode_gets_a_grant_in_every_step_beside_prompts() -> None:
    counts = steps(chunked_prefill_size=16)
    assert counts[:6] == [[1], [1], [1, 16], [1, 4, 12], [1, 1, 8], [1, 1, 1]]


def test_decode_first_is_the_default_and_stall_free_counts_decodes_too() -> None:
    default = steps(chunked_prefill_size=16)
    assert steps(chunked_prefill_size=16, schedule_preset="decode-first") == default
    counts = steps(chunked_prefill_size=16, schedule_preset="stall-free")
    assert counts[:6] == [[1], [1], [1, 15], [1, 5, 10], [1, 1, 10], [1, 1, 1]]
    assert max(map(sum, counts)) == 16
    assert max(map(sum, default)) == 17


def steps_of_long_and_short(max_prefills: int) -> list[list[int]]:
    runner = Recording()
    engine, inbox, _ = echo_engine(
        num_pages=64, max_running=4, make_runner=lambda kv: runner, overlap=False, chunked_prefill_size=16,
        max_prefills=max_prefills,
    )  # fmt: skip
    for name, prompt in (("long", [1] * 62), ("short", [2] * 2)):
        inbox.put(submit(name, prompt, max_tokens=2))
        engine.step()
    for _ in range(3):
        engine.step()
    return runner.counts


def test_a_long_prompt_leaves_room_for_a_waiting_one_only_while_one_waits() -> None:
    assert steps_of_long_and_short(max_prefills=8) == [[16], [14, 2], [1, 16], [16], [1]]


def test_a_prompt_leaves_no_room_if_a_step_computes_only_one() -> None:
    assert steps_of_long_and_short(max_prefills=1) == [[16], [16], [16], [14], [1, 2]]


def prompts_of_steps(
    prompts: list[int], *, joint: int | None, long_step_tokens: int = 0, align: int = 1
) -> list[list[int]]:
    """Return the tokens of each grant in each step; all requests want one token and arrive together."""
    runner = Recording()
    engine, inbox, _ = echo_engine(
        num_pages=64, max_running=8, info={"long_step_tokens": long_step_tokens},
        make_runner=lambda kv: runner, chunked_prefill_size=16,
        joint_prefill_tokens=joint, chunk_align=align,
    )  # fmt: skip
    for name, length in enumerate(prompts):
        inbox.put(submit(str(name), [name + 1] * length, max_tokens=1))
    pending = engine.advance(None)
    while pending is not None:
        pending = engine.advance(pending)
    return runner.counts


def test_prompts_share_a_step_until_those_that_end_in_it_are_enough() -> None:
    assert prompts_of_steps([6, 6, 6], joint=None) == [[6, 6, 4], [2]]
    assert prompts_of_steps([6, 6, 6], joint=6) == [[6], [6], [6]]
    assert prompts_of_steps([6, 6, 6], joint=7) == [[6, 6], [6]]
    assert prompts_of_steps([2, 2, 2, 8], joint=6) == [[2, 2, 2], [8]]


def test_a_prompt_that_goes_on_leaves_room_for_others_whatever_is_enough() -> None:
    assert prompts_of_steps([40, 2], joint=1) == [[16], [14, 2], [10]]


class Arriving(Recording):
    """Something arrives while the host waits for the first step."""

    def __init__(self, arrive: Callable[[], None]) -> None:
        super().__init__()
        self._arrive = arrive

    def launch(self, batch: Batch) -> StepHandle:
        handle = super().launch(batch)
        return Arrival(handle, self._arrive) if len(self.counts) == 1 else handle


class Arrival:
    def __init__(self, handle: StepHandle, arrive: Callable[[], None]) -> None:
        self._handle = handle
        self._arrive = arrive

    def wait(self) -> StepResult:
        self._arrive()
        return self._handle.wait()


@pytest.mark.parametrize(
    ("long_step_tokens", "expected"), [(0, [[6], [1], [1, 5]]), (7, [[6], [1], [1, 5]]), (6, [[6], [1, 5], [1, 1]])]
)
def test_what_arrives_during_a_long_step_is_in_the_next_one(long_step_tokens: int, expected: list[list[int]]) -> None:
    """A step that was launched before it arrived does not have it."""
    runner = Arriving(lambda: inbox.put(submit("second", [5] * 5, max_tokens=8)))
    engine, inbox, _ = echo_engine(
        num_pages=64, max_running=4, info={"long_step_tokens": long_step_tokens}, make_runner=lambda kv: runner,
        chunked_prefill_size=16,
    )  # fmt: skip
    inbox.put(submit("first", [6] * 6, max_tokens=8))
    pending = engine.advance(None)
    while pending is not None:
        pending = engine.advance(pending)
    assert runner.counts[:3] == expected


def test_a_request_that_loses_its_pages_to_a_prompt_gets_no_page_in_a_step_without_prompts() -> None:
    """The prompt needs more than the decoding request has, and the other prompt is still being read."""
    kv = make_space(num_pages=8, page_size=4)
    state = EngineState(waiting=make_queue(kv), rank=deserving)
    prompt, other = (make_request([n] * 28, arrival=n, priority=-n) for n in range(2))
    decoding = make_request([2] * 4, arrival=2, priority=-2)
    for request, num_tokens in ((prompt, 4), (other, 20), (decoding, 4)):
        request.num_launched = num_tokens
        assert kv.admit(request, max_tokens=num_tokens, num_reserved=-99)
        state.run(request)
    decoding.num_known = 5
    other.num_in_flight = 1
    planner = Planner(
        kv=kv,
        budget=prefill_first(max_running=4),
        reserve=NewTokenRatio(scale=0.5),
        victim=choose_victim,
        skip_ahead=SkipAhead(max_skipped=8, max_passes=32),
    )
    assert planner.plan(state, 0.0).grants == ()
    assert decoding in state.waiting
    assert kv.violation([prompt, other]) is None


def test_with_prefill_first_no_step_has_both_and_prompts_come_before_decodes() -> None:
    counts = steps(chunked_prefill_size=16, prefill_first=True)
    assert counts == steps(chunked_prefill_size=16, schedule_preset="prefill-first")
    assert counts[:7] == [[1], [1], [16], [4, 12], [8], [1, 1, 1], [1, 1, 1]]


def test_prompts_are_cut_at_multiples_of_the_alignment_only() -> None:
    assert prompts_of_steps([6, 6, 6], joint=None, align=4) == [[6, 6, 4], [2]]
    assert prompts_of_steps([5, 14, 6], joint=None, align=1) == [[5, 11], [3, 6]]
    assert prompts_of_steps([5, 14, 6], joint=None, align=8) == [[5, 8], [6, 6]]
    assert prompts_of_steps([12, 20], joint=None, align=8) == [[12], [16], [4]]
    assert prompts_of_steps([40, 2], joint=None, align=14) == [[14, 2], [14], [12]]


@pytest.mark.parametrize("align", [1, 3, 8, 14])
def test_every_prompt_ends_whatever_the_alignment(align: int) -> None:
    rng = np.random.default_rng(align)
    for _ in range(20):
        prompts = rng.integers(1, 60, 4).tolist()
        assert sum(map(sum, prompts_of_steps(prompts, joint=None, align=align))) == sum(prompts)


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"chunk_align": 0}, "chunk_align must be >= 1"),
        ({"chunk_align": 15}, "chunk_align must be <= 14"),
        ({"chunk_align": 3, "schedule_preset": "stall-free"}, "chunk_align must be <= 2"),
        ({"chunk_align": 4, "target_step_s": 0.1}, "chunk_align must be 1 with target_step_s"),
    ],
)
def test_alignments_without_room_are_refused(fields: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        EngineConfig(chunked_prefill_size=16, **fields)
