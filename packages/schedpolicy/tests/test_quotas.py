from random import Random

import pytest

from pagewood.schedpolicy import Outcome, Quota, Quotas
from pagewood.schedpolicy.testing import FakeRequest, random_request


def request(arrival: int, tenant: str = "a") -> FakeRequest:
    return FakeRequest(arrival=arrival, tenant=tenant, num_tokens=100, max_new_tokens=20)


@pytest.mark.parametrize(
    ("quota", "reason"),
    [
        (Quota(max_running=1), "max_running: 1 wanted, 0 left"),
        (Quota(max_tokens_in_flight=239), "max_tokens_in_flight: 120 wanted, 119 left"),
        (Quota(max_kv_tokens=199), "max_kv_tokens: 100 wanted, 99 left"),
    ],
)
def test_a_tenant_at_its_limit_waits_and_others_do_not(quota: Quota, reason: str):
    quotas = Quotas({"a": quota})
    first, second = request(0), request(1)
    assert quotas.check(first).fits
    quotas.admit(first)
    verdict = quotas.check(second)
    assert (verdict.outcome, verdict.reason) == (Outcome.OTHER, reason)
    assert quotas.check(request(2, "b")).fits
    quotas.stop(first)
    assert quotas.check(second).fits


@pytest.mark.parametrize("quota", [Quota(max_running=2), Quota(max_tokens_in_flight=240), Quota(max_kv_tokens=200)])
def test_a_limit_may_be_reached(quota: Quota):
    quotas = Quotas({}, default=quota)
    quotas.admit(request(0))
    assert quotas.check(request(1)).fits


def test_usage_grows_with_running_requests():
    quotas = Quotas({"a": Quota(max_kv_tokens=205)})
    first = request(0)
    quotas.admit(first)
    assert quotas.check(request(1)).fits
    first.num_tokens, first.num_generated = 110, 10
    assert not quotas.check(request(1)).fits
    usage = quotas.usage("a")
    assert (usage.num_running, usage.num_tokens_in_flight, usage.num_kv_tokens) == (1, 120, 110)
    assert quotas.usage("unknown").num_running == 0


def test_a_request_that_can_never_run_is_found_at_once():
    quotas = Quotas({"a": Quota(max_tokens_in_flight=119), "b": Quota(max_kv_tokens=99)})
    quotas.admit(request(0, "c"))
    assert quotas.can_ever_run(request(1)).reason == "max_tokens_in_flight: 120 wanted, 119 left"
    assert quotas.can_ever_run(request(1, "b")).reason == "max_kv_tokens: 100 wanted, 99 left"
    assert quotas.can_ever_run(request(1, "c")).fits
    assert Quotas({"a": Quota(max_tokens_in_flight=120, max_kv_tokens=100)}).can_ever_run(request(1)).fits


def test_a_request_at_its_limit_needs_no_more_than_it_has():
    done = FakeRequest(arrival=0, tenant="a", num_tokens=120, num_generated=20, max_new_tokens=20)
    quotas = Quotas({"a": Quota(max_tokens_in_flight=120)})
    assert quotas.check(done).fits
    quotas.admit(done)
    assert quotas.usage("a").num_tokens_in_flight == 120


def test_a_preempted_request_that_has_outgrown_its_quota_runs_alone():
    quotas = Quotas({"a": Quota(max_kv_tokens=105)})
    grown, other = request(0), request(1)
    grown.num_tokens, grown.num_generated = 110, 10
    assert quotas.check(grown).fits
    quotas.admit(other)
    assert quotas.check(grown).reason == "max_kv_tokens: 110 wanted, 5 left"
    quotas.stop(other)
    assert quotas.check(grown).fits
    quotas.admit(grown)
    assert quotas.check(other).reason == "max_kv_tokens: 100 wanted, 0 left"
    quotas.stop(grown)
    assert not quotas.check(FakeRequest(arrival=2, tenant="a", num_tokens=110, max_new_tokens=1)).fits


def test_no_tenant_has_more_than_its_quota():
    for seed in range(50):
        rng = Random(seed)
        quota = Quota(max_running=3, max_tokens_in_flight=300)
        quotas = Quotas({}, default=quota)
        running: list[FakeRequest] = []
        for arrival in range(100):
            fresh = random_request(rng, arrival, 0.0)
            if quotas.check(fresh).fits:
                quotas.admit(fresh)
                running.append(fresh)
            elif running:
                quotas.stop(running.pop(rng.randrange(len(running))))
            for tenant in ("a", "b", "c"):
                usage = quotas.usage(tenant)
                assert usage.num_running == sum(request.tenant == tenant for request in running) <= 3
                assert usage.num_tokens_in_flight <= 300


def test_limits_are_checked():
    for name in ("max_running", "max_tokens_in_flight", "max_kv_tokens"):
        with pytest.raises(ValueError, match=f"{name} must be >= 1, got 0"):
            Quota(**{name: 0})
