from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from naive_orders import NaiveDeferral
from pagewood.schedpolicy import InBatchDeferral
from pagewood.schedpolicy.testing import FakeRequest


def prompt(arrival: int, *runs: tuple[str, int], num_matched: int = 0) -> FakeRequest:
    text = b"".join(name.encode() * 4 * count for name, count in runs)
    return FakeRequest(arrival=arrival, text=text, num_tokens=len(text) // 4, num_matched=num_matched)


def led_by(*leaders: FakeRequest, **options: Any) -> InBatchDeferral[FakeRequest]:
    deferral = InBatchDeferral[FakeRequest](**options)
    for leader in leaders:
        leader.num_computed = leader.num_matched
        deferral.start(leader)
    return deferral


def arrivals(requests: Any) -> list[int]:
    return [request.arrival for request in requests]


def test_a_repeat_waits_until_the_leader_has_computed_what_they_share():
    leader, follower = prompt(0, ("a", 100), ("x", 100)), prompt(1, ("a", 100), ("y", 100))
    deferral = led_by(leader)
    assert deferral.defer(follower)
    assert follower in deferral
    assert leader not in deferral
    assert len(deferral) == 1
    assert deferral.ready() == []
    leader.num_computed = 68  # 32 of the shared tokens are left
    assert deferral.ready() == []
    leader.num_computed = 69
    assert deferral.ready() == [follower]
    assert follower not in deferral
    assert list(deferral) == []
    follower.num_matched = 69
    assert not deferral.defer(follower)


@pytest.mark.parametrize(("num_shared", "is_parked"), [(31, False), (32, True)])
def test_thirty_two_shared_tokens_are_worth_waiting_for(num_shared: int, is_parked: bool):
    deferral = led_by(prompt(0, ("a", num_shared), ("x", 40)))
    assert deferral.defer(prompt(1, ("a", num_shared), ("y", 40))) == is_parked


def test_only_what_is_beyond_the_match_counts():
    leader = prompt(0, ("a", 200), num_matched=100)
    deferral = led_by(leader)
    assert deferral.defer(prompt(1, ("a", 300), num_matched=168))
    assert not deferral.defer(prompt(2, ("a", 300), num_matched=169))
    assert not deferral.defer(prompt(3, ("b", 168), ("a", 100), num_matched=168))
    # A request whose match was lost can still gain only what the leader has yet to compute.
    leader.num_computed = 169
    assert not deferral.defer(prompt(4, ("a", 300)))


def test_the_last_token_of_a_request_is_always_computed():
    deferral = led_by(prompt(0, ("a", 100)))
    assert not deferral.defer(prompt(1, ("a", 32)))
    assert deferral.defer(prompt(2, ("a", 33)))


@pytest.mark.parametrize("page_size", [16, 64])
def test_whole_pages_are_shared_or_nothing(page_size: int):
    deferral = led_by(prompt(0, ("a", 60), ("x", 40)), page_size=page_size)
    assert deferral.defer(prompt(1, ("a", 60), ("y", 40))) == (page_size == 16)


def test_the_requests_of_a_leader_that_stops_are_ready():
    leader, follower, other = prompt(0, ("a", 64)), prompt(1, ("a", 65)), prompt(2, ("b", 64))
    deferral = led_by(leader)
    assert deferral.defer(follower)
    deferral.stop(other)
    assert deferral.ready() == []
    deferral.stop(leader)
    assert follower in deferral
    assert deferral.ready() == [follower]
    assert not deferral.defer(prompt(3, ("a", 65)))


def test_a_request_that_has_ended_is_not_returned():
    leader, first, second = prompt(0, ("a", 64)), prompt(1, ("a", 65)), prompt(2, ("a", 65))
    deferral = led_by(leader)
    assert deferral.defer(first)
    assert deferral.defer(second)
    deferral.discard(first)
    deferral.stop(leader)
    deferral.discard(second)
    deferral.discard(leader)
    assert deferral.ready() == []
    assert len(deferral) == 0


def test_a_computed_prompt_is_no_longer_a_leader():
    leader = prompt(0, ("a", 64))
    deferral = led_by(leader)
    leader.num_computed = 64
    assert deferral.ready() == []
    assert not deferral.defer(prompt(1, ("a", 65)))
    assert not led_by(prompt(2, ("a", 64), num_matched=63)).defer(prompt(3, ("a", 65)))


def test_misuse_is_refused():
    leader, follower = prompt(0, ("a", 64)), prompt(1, ("a", 65))
    deferral = led_by(leader)
    assert deferral.defer(follower)
    with pytest.raises(ValueError, match="arrival must be unique among parked requests, got 1 again"):
        deferral.defer(follower)
    with pytest.raises(ValueError, match="request must not be parked when it starts, got arrival 1"):
        deferral.start(follower)
    for name in ("min_shared", "page_size", "max_compared"):
        with pytest.raises(ValueError, match=f"{name} must be >= 1, got 0"):
            InBatchDeferral[Any](**{name: 0})


@dataclass(slots=True, eq=False)
class Counting:
    """A request that counts calls of its methods."""

    inner: FakeRequest
    num_compared: int = 0
    num_windows: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def window(self, start: int, end: int) -> bytes:
        self.num_windows += 1
        return self.inner.window(start, end)

    def num_shared(self, other: "Counting", /) -> int:
        self.num_compared += 1
        return self.inner.num_shared(other.inner)


def test_prefixes_are_compared_only_where_windows_agree_and_once_for_a_pair():
    leader = Counting(prompt(0, ("a", 1000)))
    deferral = InBatchDeferral[Any]()
    deferral.start(leader)
    other, stranger, repeat = (
        Counting(prompt(1, ("b", 500))),
        Counting(prompt(2, ("b", 100), ("a", 500), num_matched=100)),
        Counting(prompt(3, ("a", 500))),
    )
    for _ in range(10):
        deferral.ready()
        assert not deferral.defer(other)
        assert not deferral.defer(stranger)
        if repeat not in deferral:
            assert deferral.defer(repeat)
    assert [other.num_compared, stranger.num_compared, repeat.num_compared] == [0, 1, 1]
    assert leader.num_windows == 2 * 10  # one for each match that occurs in a pass
    leader.inner.num_computed = 1000
    assert deferral.ready() == [repeat]
    deferral.defer(other)
    assert leader.num_windows == 2 * 10, "a leader whose prompt is computed costs nothing"


def test_when_the_comparisons_of_a_pass_are_used_up_candidates_are_parked_and_compared_later():
    leader = prompt(0, ("a", 1000))
    deferral = led_by(leader, max_compared=1000)
    repeats = [prompt(arrival, ("a", 400), ("y", arrival)) for arrival in range(1, 9)]
    # They have the windows of the leader, but other prefixes.
    strangers = [prompt(arrival, ("b", 100), ("a", 400), num_matched=100) for arrival in range(9, 13)]
    assert all(deferral.defer(request) for request in (*repeats, *strangers))
    waited = [arrivals(deferral.ready()) for _ in range(5)]
    assert sorted(request for ready in waited for request in ready) == arrivals(strangers)
    assert all(len(ready) <= 3 for ready in waited)
    assert sorted(arrivals(deferral)) == arrivals(repeats)
    assert not any(deferral.defer(request) for request in strangers)
    leader.num_computed = 369
    assert deferral.ready() == repeats


def test_a_provisionally_parked_request_is_released_with_its_leader():
    leader = prompt(0, ("a", 1000))
    deferral = led_by(leader, max_compared=1)
    requests = [prompt(arrival, ("a", 500)) for arrival in range(1, 4)]
    assert all(map(deferral.defer, requests))
    deferral.discard(requests[1])
    deferral.stop(leader)
    assert deferral.ready() == [requests[0], requests[2]]


class DeferralMachine(RuleBasedStateMachine):
    """Calls in any order, compared with an oracle that compares every request with every leader."""

    max_compared = 1_000_000

    @initialize(min_shared=st.integers(1, 5), page_size=st.sampled_from([1, 2, 3]))
    def begin(self, min_shared: int, page_size: int) -> None:
        self.page_size = page_size
        self.deferral = InBatchDeferral[FakeRequest](
            min_shared=min_shared, page_size=page_size, max_compared=self.max_compared
        )
        self.naive = NaiveDeferral(min_shared=min_shared, page_size=page_size)
        self.waiting: list[FakeRequest] = []
        self.running: list[FakeRequest] = []
        self.num_arrivals = 0

    @rule(runs=st.lists(st.tuples(st.sampled_from("aab"), st.integers(1, 6)), min_size=1, max_size=4))
    def arrive(self, runs: list[tuple[str, int]]) -> None:
        self.waiting.append(prompt(self.num_arrivals, *runs))
        self.num_arrivals += 1

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def match(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        request.num_matched = data.draw(st.integers(0, request.num_tokens - 1)) // self.page_size * self.page_size

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def defer(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        is_parked = self.deferral.defer(request)
        self.check_deferred(request, is_parked)
        if is_parked:
            self.waiting.remove(request)

    def check_deferred(self, request: FakeRequest, is_parked: bool) -> None:
        assert is_parked == self.naive.defer(request)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(request)
        self.running.append(request)
        request.num_computed = request.num_matched
        self.deferral.start(request)
        self.naive.start(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.running))
        if request.num_computed < request.num_tokens:
            request.num_computed += data.draw(st.integers(1, request.num_tokens - request.num_computed))
        else:
            request.num_generated += 1
            request.num_tokens += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data(), is_preempted=st.booleans())
    def stop(self, data: st.DataObject, is_preempted: bool) -> None:
        request = data.draw(st.sampled_from(self.running))
        self.running.remove(request)
        self.deferral.stop(request)
        self.naive.stop(request)
        if is_preempted:
            request.num_matched = 0
            self.waiting.append(request)

    @precondition(lambda self: len(self.deferral) > 0)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(list(self.deferral)))
        self.deferral.discard(request)
        self.naive.discard(request)

    @rule()
    def ready(self) -> None:
        ready = self.deferral.ready()
        self.check_ready(ready)
        self.waiting += ready

    def check_ready(self, ready: list[FakeRequest]) -> None:
        assert ready == self.naive.ready()

    @invariant()
    def every_request_is_in_one_place(self) -> None:
        if self.num_arrivals:
            for request in (*self.waiting, *self.running):
                assert request not in self.deferral
            assert len(list(self.deferral)) == len(self.deferral)
            self.check_awaited()

    def check_awaited(self) -> None:
        for request in self.deferral:
            assert self.deferral.num_awaited(request) == self.naive.num_awaited(request)

    def teardown(self) -> None:
        if hasattr(self, "deferral"):
            for request in list(self.running):
                self.deferral.stop(request)
                self.naive.stop(request)
            self.ready()
            assert len(self.deferral) == 0


class ScarceComparisons(DeferralMachine):
    """The same with few comparisons in a pass: late decisions must be right, too."""

    max_compared = 8

    def check_deferred(self, request: FakeRequest, is_parked: bool) -> None:
        must_wait = any(self.naive.is_worth_waiting(request, leader) for leader in self.running)
        assert is_parked or not must_wait, "a repeat must not be admitted because comparisons are used up"
        if is_parked:
            windows = [
                leader
                for leader in self.running
                if leader.num_prompt - self.naive.whole_pages(leader.num_computed) >= self.naive.min_shared
                and self.window_of(leader, request.num_matched) == self.window_of(request, request.num_matched)
            ]
            assert windows, "a request is parked only on a leader with its window"

    def check_awaited(self) -> None:
        """A request that has not been compared may be thought to share all of its prompt."""
        for request in self.deferral:
            assert 0 <= self.deferral.num_awaited(request) < request.num_tokens

    def window_of(self, request: FakeRequest, offset: int) -> bytes:
        return request.window(offset, offset + self.naive.min_shared)

    def check_ready(self, ready: list[FakeRequest]) -> None:
        """Run passes until no request is parked provisionally, then check the leaders."""
        for _ in range(len(self.deferral) + 1):
            more = self.deferral.ready()
            ready += more
        for request in self.deferral:
            leaders = [r for r in self.running if self.naive.saved_by(request, r) >= self.naive.min_shared]
            assert leaders, "a request that is parked without a comparison waits for a leader that it does not repeat"


TestDeferral = DeferralMachine.TestCase
TestScarceComparisons = ScarceComparisons.TestCase
TestDeferral.settings = TestScarceComparisons.settings = settings(max_examples=100, stateful_step_count=40)


@given(st.lists(st.integers(0, 60), min_size=2, max_size=12), st.integers(1, 30))
def test_a_burst_computes_its_common_prefix_once(tails: list[int], chunk: int):
    """A minimal engine: followers run after the leader, and find the whole prefix cached."""
    deferral = InBatchDeferral[FakeRequest](min_shared=8)
    waiting = [prompt(arrival, ("a", 64), ("x", tail), ("y", 1)) for arrival, tail in enumerate(tails)]
    running: list[FakeRequest] = []
    cached = num_computed = 0
    while waiting or running or len(deferral):
        waiting = sorted(waiting + deferral.ready(), key=lambda request: request.arrival)
        for request in list(waiting):
            request.num_matched = min(cached, request.num_tokens - 1)
            waiting.remove(request)
            if not deferral.defer(request):
                request.num_computed = request.num_matched
                deferral.start(request)
                running.append(request)
        for request in list(running):
            num_new = min(chunk, request.num_tokens - request.num_computed)
            request.num_computed += num_new
            num_computed += num_new
            cached = max(cached, min(64, request.num_computed))
            if request.num_computed == request.num_tokens:
                running.remove(request)
                deferral.stop(request)
    assert num_computed <= 64 + sum(tails) + len(tails) * (1 + 7)
