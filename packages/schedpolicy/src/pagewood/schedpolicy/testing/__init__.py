"""What an order of your own must do, as checks that a test can call; needs no test framework.

A test gives a maker of empty orders and a generator of random numbers; every seed makes another traffic:

    @pytest.mark.parametrize("seed", range(100))
    def test_my_order(seed):
        check_order(MyOrder, Random(seed))

With hypothesis, `@given(st.randoms(use_true_random=False))` gives generators whose failures shrink.
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
from pagewood.schedpolicy.testing.traffic import Traffic, check_order, check_same_order, longest_wait

__all__ = [
    "FakeRequest",
    "Naive",
    "NaiveDeferral",
    "NaiveShares",
    "NaiveTags",
    "Traffic",
    "by",
    "check_order",
    "check_same_order",
    "depth_first",
    "longest_wait",
    "random_request",
    "response_ratio",
]
