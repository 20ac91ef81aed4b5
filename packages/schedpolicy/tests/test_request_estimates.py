from pagewood.schedpolicy.drafting.acceptance import Acceptance
from pagewood.schedpolicy.drafting.request_estimates import RequestEstimates
from pagewood.schedpolicy.testing import FakeRequest


def batch(*arrivals: int) -> list[FakeRequest]:
    return [FakeRequest(arrival=arrival) for arrival in arrivals]


def estimates() -> RequestEstimates:
    return RequestEstimates(Acceptance(3))


def test_a_request_is_known_from_its_first_decision_until_it_is_forgotten():
    known = estimates()
    known.current(batch(1, 2))
    assert known.has_new
    known.current(batch(2))
    assert not known.has_new
    assert len(known) == 2
    known.forget(batch(1)[0])
    known.forget(batch(1)[0])
    assert len(known) == 1
    known.current(batch(1))
    assert known.has_new


def test_an_observation_changes_the_estimates_of_its_requests():
    known = estimates()
    before = [list(one.survival) for one in known.current(batch(0, 1, 2))]
    for _ in range(5):
        known.observe(batch(0, 1, 9), [3, 0, 3], [3, 0, 3], [0, 0, 3])
    lower, other, _ = [one.survival for one in known.current(batch(0, 1, 2))]
    assert lower[0] < before[0][0]
    assert other[0] > lower[0]
    assert len(known) == 3  # what came of a request that is not known counts for all together only


def test_large_batches_take_turns():
    known, large = estimates(), batch(*range(20))
    for _ in range(8):
        known.current(large)
        known.observe(large, [1] * 20, [1] * 20, [1] * 20)
    stale = [one.is_stale for one in known.current(large)]
    assert stale.count(False) == 5
    assert not any(one.is_stale for one in known.current(large[:16]))


def test_a_request_without_a_decision_gets_the_usual_length():
    known = estimates()
    first, second = known.current(batch(0, 1))
    first.length = 2
    assert second.length < 0
    assert known.latest_lengths(batch(1, 0, 7), 3) == [3, 2, 3]
