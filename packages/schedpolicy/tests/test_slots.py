from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewood.schedpolicy import SlotShares

NUM_KEYS = 5


@dataclass(frozen=True, slots=True)
class Queued:
    arrival: int
    key: int
    duration: int
    """Steps for which it runs."""


class Machine:
    """Requests that run for some steps each, as many as there are rows, and keys as there are slots."""

    def __init__(self, shares: SlotShares, *, num_rows: int) -> None:
        self.shares = shares
        self.num_rows = num_rows
        self.waiting: list[Queued] = []
        self.running: list[tuple[Queued, int]] = []
        self.step = 0
        self.since: dict[int, int] = {}
        """When each request arrived."""
        self.longest = 0
        """The most steps that a request has waited."""

    def add(self, request: Queued) -> None:
        self.waiting.append(request)
        self.since[request.arrival] = self.step

    def run(self) -> list[int]:
        """Run one step; return the arrivals of the requests that were admitted."""
        for request, end in list(self.running):
            if end <= self.step:
                self.running.remove((request, end))
                self.shares.stopped(request.key)
        self.shares.begin_step(self.waiting)
        admitted: list[int] = []
        for request in list(self.waiting):
            if len(self.running) == self.num_rows:
                break
            if self.shares.may_admit(request, request.key):
                self.shares.admitted(request, request.key)
                self.waiting.remove(request)
                self.running.append((request, self.step + request.duration))
                self.longest = max(self.longest, self.step - self.since[request.arrival])
                admitted.append(request.arrival)
        assert len({request.key for request, _ in self.running}) <= self.shares.num_slots
        self.step += 1
        return admitted


def flood(shares: SlotShares, num_steps: int) -> Machine:
    """Two keys always have requests that wait; one request of a third key waits behind the first of them."""
    machine = Machine(shares, num_rows=4)
    for number in range(num_steps):
        machine.add(Queued(2 * number, number % 2, 3))
        if number == 4:
            machine.add(Queued(9, 2, 1))
        machine.run()
    return machine


def test_keys_that_hold_all_slots_do_not_starve_another():
    machine = flood(SlotShares(2, max_passes=6), 100)
    assert 9 not in {request.arrival for request in machine.waiting}
    starved = flood(SlotShares(2, max_passes=10**9), 100)
    assert 9 in {request.arrival for request in starved.waiting}, "the traffic starves no request without the bound"


def test_a_draining_key_gets_no_more_requests_and_its_slot_goes_to_the_one_that_is_owed_it():
    shares = SlotShares(1, max_passes=1)
    machine = Machine(shares, num_rows=8)
    for request in (Queued(0, 0, 3), Queued(1, 1, 1), Queued(2, 0, 1), Queued(3, 0, 1)):
        machine.add(request)
    assert machine.run() == [0, 2]  # the third request with key 0 would pass the second of all again
    assert shares.num_draining == 1
    assert [machine.run() for _ in range(4)] == [[], [], [1], [3]]
    assert shares.num_draining == 0


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, NUM_KEYS - 1), st.integers(1, 6)), max_size=4), min_size=1, max_size=60
    ),
    st.integers(1, NUM_KEYS), st.integers(1, 6), st.integers(0, 8),
)  # fmt: skip
def test_every_request_runs_within_a_bound(
    steps: list[list[tuple[int, int]]], num_slots: int, num_rows: int, max_passes: int
):
    """While any waits, some request is admitted in as many steps as one runs at most."""
    machine, arrival = Machine(SlotShares(num_slots, max_passes=max_passes), num_rows=num_rows), 0
    for arriving in steps:
        for key, duration in arriving:
            machine.add(Queued(arrival, key, duration))
            arrival += 1
        machine.run()
    last_step = machine.step + 7 * (len(machine.waiting) + 1)
    while machine.waiting:
        machine.run()
        assert machine.step <= last_step, "requests wait for ever"


@given(st.lists(st.integers(1, NUM_KEYS - 1), min_size=30, max_size=80), st.integers(1, 3), st.integers(0, 8))
def test_a_flood_of_other_keys_delays_a_request_by_a_bound(keys: list[int], num_slots: int, max_passes: int):
    """Whatever others arrive, the request runs after `max_passes` admissions and the end of those that run then."""
    duration = 4
    machine, passes, ended = Machine(SlotShares(num_slots, max_passes=max_passes), num_rows=12), 0, None
    machine.add(Queued(0, 1, duration))
    machine.run()
    machine.add(Queued(1, 0, 1))
    for number, key in enumerate(keys, 2):
        machine.add(Queued(number, key, duration))
        admitted = machine.run()
        if 1 in admitted:
            return
        passes += len(admitted)
        if passes >= max_passes and ended is None:
            ended = machine.step + duration
        # Keys that became owed a slot earlier go first; there are at most as many of them as keys.
        assert ended is None or machine.step <= ended + NUM_KEYS * duration


def test_pinned_keys_always_run_and_leave_a_slot():
    shares = SlotShares(2, max_passes=4)
    shares.pin(["a"])
    assert shares.may_admit(Queued(0, 0, 1), "a")
    assert shares.may_admit(Queued(1, 0, 1), "b")
    shares.admitted(Queued(1, 0, 1), "b")
    shares.pin(["c"])  # beside "b"
    shares.pin([])
    assert shares.may_admit(Queued(2, 0, 1), "c")
    shares.admitted(Queued(2, 0, 1), "c")
    shares.pin(["a"])
    assert not shares.may_admit(Queued(3, 0, 1), "a"), "both slots are held"
    assert shares.num_draining == 1
    shares.stopped("c")
    assert shares.may_admit(Queued(3, 0, 1), "a")
    assert not shares.may_admit(Queued(2, 0, 1), "c")
    with pytest.raises(ValueError, match="keys must be fewer than the 2 slots, got 2"):
        shares.pin(["a", "b"])
    with pytest.raises(ValueError, match="num_slots must be >= 1, got 0"):
        SlotShares(0, max_passes=1)
