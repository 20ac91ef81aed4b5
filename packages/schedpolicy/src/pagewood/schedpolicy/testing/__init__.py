"""Conformance checks and oracles for your own orders and draft lengths; they need no test framework.

A test passes a function that makes empty orders, and a random generator; every seed gives different traffic:

    @pytest.mark.parametrize("seed", range(100))
    def test_my_order(seed):
        check_order(MyOrder, Random(seed))

With hypothesis, `@given(st.randoms(use_true_random=False))` gives generators whose failures can be shrunk.
"""

from pagewood.schedpolicy.testing.oracles import (
    Naive,
    NaiveDeferral,
    NaiveShares,
    NaiveTags,
    by,
    depth_first,
    response_ratio,
)
from pagewood.schedpolicy.testing.requests import FakeRequest, random_request
from pagewood.schedpolicy.testing.speculation import (
    Drafting,
    OneStep,
    SpeculativeMachine,
    SpeculativeRun,
    check_drafting,
)
from pagewood.schedpolicy.testing.traffic import Traffic, check_order, check_same_order, longest_wait

__all__ = [
    "Drafting",
    "FakeRequest",
    "Naive",
    "NaiveDeferral",
    "NaiveShares",
    "NaiveTags",
    "OneStep",
    "SpeculativeMachine",
    "SpeculativeRun",
    "Traffic",
    "by",
    "check_drafting",
    "check_order",
    "check_same_order",
    "depth_first",
    "longest_wait",
    "random_request",
    "response_ratio",
]
