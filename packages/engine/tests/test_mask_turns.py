"""Requests with slow grammars take turns: what each step has of them, and that nothing else changes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewood.engine.api import Grammar
from pagewood.engine.core.queue.state import EngineState
from pagewood.engine.core.reasons import Reason
from pagewood.engine.core.request import Request
from pagewood.engine.core.steps.mask_turns import ALONE_MS, STEP_MS, MaskTurns
from pagewood.schedpolicy import deserving
from parts import make_queue, make_request, make_space
from scale import scaled
from scenarios.drawing import random_scenario, with_drafts, with_grammars, with_interruptions
from scenarios.running import run_scenario
from scenarios.scenario import Scenario
from seeded_faults import seed_fault


class Notes:
    """Keeps the notes."""

    def __init__(self) -> None:
        self.found: list[tuple[Reason, Request | None, tuple[int, ...]]] = []

    def note(self, reason: Reason, request: Request | None, other: Request | None = None, *numbers: int) -> None:
        self.found.append((reason, request, numbers))


def running(*slow_ms: int) -> EngineState:
    """Return a state in which requests run, each with the time that its grammar takes."""
    state = EngineState(waiting=make_queue(make_space(num_pages=64, page_size=4, num_rows=32)), rank=deserving)
    for number, mask_ms in enumerate(slow_ms, 1):
        request = make_request([number], max_new=8, arrival=number, priority=0)
        request.mask_ms = mask_ms
        state.run(request)
    state.num_constrained = sum(map(bool, slow_ms))
    return state


def turns_of(state: EngineState, num_steps: int, notes: Notes | None = None) -> list[list[int]]:
    """Return which of the running requests, by their places, have a slow grammar and get a token in each step."""
    turns, found = MaskTurns(notes), list[list[int]]()
    for _ in range(num_steps):
        out = turns.sitting_out(state)
        found.append([i for i, one in enumerate(state.running) if one.mask_ms and one not in out])
    return found


def test_fast_grammars_and_slow_ones_that_are_few_all_get_tokens() -> None:
    assert turns_of(running(0, 0, 0), 1) == [[]]
    assert MaskTurns().sitting_out(running(0, STEP_MS // 2, STEP_MS // 2)) == frozenset()


def test_beside_others_a_step_has_as_many_slow_grammars_as_fit_in_turn() -> None:
    assert turns_of(running(0, 8, 8, 8, 8), 4) == [[1, 2], [3, 4], [1, 2], [3, 4]]


def test_a_turn_that_takes_longer_than_a_step_may_is_paid_by_the_steps_after_it() -> None:
    turns = turns_of(running(0, STEP_MS + 1, 2, STEP_MS * 3), 8)
    assert turns == [[1], [2], [3], [], [], [1], [2], [3]]


def test_one_that_is_alone_has_its_turn_in_every_step() -> None:
    assert turns_of(running(ALONE_MS * 3), 3) == [[0]] * 3


def test_alone_they_get_more_of_a_step() -> None:
    num_fit = ALONE_MS // 10
    assert turns_of(running(*[10] * (num_fit + 1)), 1) == [list(range(num_fit))]
    state = running(*[10] * (num_fit + 1))
    state.waiting.add(make_request([9], max_new=8, arrival=99, priority=0))
    assert turns_of(state, 1) == [list(range(STEP_MS // 10))]


def test_those_that_sit_out_are_noted() -> None:
    notes = Notes()
    state = running(0, 15, 16)
    turns_of(state, 1, notes)
    assert notes.found == [(Reason.MASKS_OF_OTHERS, state.running[2], (16,))]


def slow_scenario(rng: random.Random, *, overlap: bool) -> Scenario:
    """Return a scenario in which most grammars are slow."""
    scenario = with_grammars(random_scenario(rng, overlap=overlap), rng)
    arrivals = tuple(
        one
        if one.sampling.grammar is None
        else replace(one, sampling=replace(one.sampling, grammar=slowed(one.sampling.grammar)))
        for one in scenario.arrivals
    )
    return replace(scenario, arrivals=arrivals)


def slowed(grammar: Grammar) -> Grammar:
    """Return a grammar like this one whose tokens take long, as all do of which the seed is a multiple of 3."""
    seed, _, rest = grammar.text.partition(" ")
    return replace(grammar, text=f"{int(seed) // 3 * 3} {rest}")


@settings(max_examples=scaled(15), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rng=st.randoms(use_true_random=False), overlap=st.booleans(), kind=st.sampled_from(["plain", "drafts", "breaks"])
)
def test_turns_change_no_output(rng: random.Random, overlap: bool, kind: str) -> None:
    scenario = slow_scenario(rng, overlap=overlap)
    if kind == "drafts":
        scenario = with_drafts(scenario, rng)
    elif kind == "breaks":
        scenario = with_interruptions(scenario, rng)
    run_scenario(scenario)


def test_requests_of_scenarios_sit_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seed_fault([(MaskTurns, "sitting_out", "found.add(request)", "raise ZeroDivisionError")], monkeypatch)

    def run_some() -> None:
        for seed in range(50):
            run_scenario(slow_scenario(random.Random(seed), overlap=seed % 2 == 0))

    with pytest.raises(ZeroDivisionError):
        run_some()


def test_a_slow_grammar_that_never_has_a_turn_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = (MaskTurns, "sitting_out", "request.mask_turn = self._num_turns", "pass")
    seed_fault([fault], monkeypatch)
    assert turns_of(running(0, 15, 16), 4) == [[1]] * 4
