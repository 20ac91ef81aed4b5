"""Conformance checks and oracles for your own orders and routers, and requests for tests; they need no test framework.

A test passes a function that makes empty orders, and a random generator; every seed gives different traffic:

    @pytest.mark.parametrize("seed", range(100))
    def test_my_order(seed):
        check_order(MyOrder, Random(seed))

With hypothesis, `@given(st.randoms(use_true_random=False))` gives generators whose failures can be shrunk.
"""

from pagewood.schedpolicy.testing.one_step import OneStep
from pagewood.schedpolicy.testing.oracles import Naive, by
from pagewood.schedpolicy.testing.requests import FakeRequest, random_request
from pagewood.schedpolicy.testing.routing import FakeRouted, NaiveRouter, RouterTraffic, check_router
from pagewood.schedpolicy.testing.traffic import Traffic, check_order, check_same_order

__all__ = [
    "FakeRequest",
    "FakeRouted",
    "Naive",
    "NaiveRouter",
    "OneStep",
    "RouterTraffic",
    "Traffic",
    "by",
    "check_order",
    "check_router",
    "check_same_order",
    "random_request",
]
