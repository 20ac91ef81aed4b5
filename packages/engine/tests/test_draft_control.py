"""An engine's policy of draft lengths: which requests get the drafts for which a step has room."""

from __future__ import annotations

import time

import numpy as np

from echo_bench import echo_engine
from pagewood.engine.api import EngineConfig, Submit
from pagewood.engine.assembly.steps.draft_control import draft_control
from pagewood.engine.assembly.steps.step_times import without_disturbances
from pagewood.engine.core.request import Request
from pagewood.schedpolicy import DraftCost, StepCost


def requests(*submits: Submit) -> list[Request]:
    """Return what an engine makes of the submits, when each has two tokens of output."""
    engine, inbox, _ = echo_engine(
        num_pages=400, page_size=1, max_length=200, vocab_size=100, max_running=4, overlap=False
    )
    for submit in submits:
        inbox.put(submit)
    for _ in range(2):
        engine.step()
    found = sorted(engine._state.running, key=lambda request: request.arrival)  # pyright: ignore[reportPrivateUsage]
    engine.close()
    assert [request.num_generated for request in found] == [2] * len(submits)
    return found


def test_a_request_behind_its_deadline_gets_what_a_step_has_room_for() -> None:
    policy = draft_control(EngineConfig(speculative="draft"))
    assert policy is not None
    cost = StepCost([1, 7, 8, 64], [0.01, 0.01, 0.03, 0.5])  # room for five drafts
    for _ in range(20):
        cost.observe(2, 0.01)
    policy.set_cost(cost, DraftCost(per_pass_s=1e-9))
    prompt, now_s = np.array([5, 6, 7], "<i4").tobytes(), time.monotonic()
    in_time, late = requests(
        Submit(request_id="a", tokens=prompt, deadline_s=now_s + 1e6),
        Submit(request_id="b", tokens=prompt, deadline_s=now_s + 60),
    )
    late.arrived_s -= 1000.0  # so slow until now that 60 s are too few
    lengths = policy.lengths([in_time, late], 0)
    assert lengths[1] > lengths[0]
    late.deadline_s = now_s - 1.0
    in_time.priority = 2
    lengths = policy.lengths([in_time, late], 0)
    assert lengths[0] > lengths[1]


def test_a_disturbed_measurement_does_not_make_small_steps_dearer_than_large_ones() -> None:
    assert without_disturbances([1.0, 5.0, 2.0, 3.0, 2.5]) == (1.0, 2.0, 2.0, 2.5, 2.5)
    assert without_disturbances([2.0]) == (2.0,)
