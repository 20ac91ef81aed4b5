"""Bounds of histograms: all those of vLLM and of SGLang, so that the series under their names are exact."""

from __future__ import annotations

from collections.abc import Sequence

VLLM_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
VLLM_TOKEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
VLLM_REQUEST = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
VLLM_NUM_ANSWERS = (1, 2, 5, 10, 20)
SGLANG_FIRST_TOKEN = (
    0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 80.0, 100.0, 200.0, 400.0,
)  # fmt: skip
SGLANG_TOKEN = (
    0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0,
    2.0, 4.0, 6.0, 8.0,
)  # fmt: skip
SGLANG_REQUEST = (*SGLANG_FIRST_TOKEN, 600.0, 1200.0, 1800.0, 2400.0)
SGLANG_QUEUE = (
    0.0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    70.0, 80.0, 90.0, 100.0, 200.0, 300.0, 400.0, 500.0, 600.0, 700.0, 800.0, 900.0, 1000.0, 1200.0, 1400.0, 1600.0,
    1800.0, 2000.0, 2500.0, 3000.0,
)  # fmt: skip
SGLANG_TOKENS = (
    100, 300, 500, 700, 1000, 1500, 2000, 3000, 4000, 5000, 6000, 7000, 8000, 9000, 10000, 12500, 15000, 17500, 20000,
    22500, 25000, 27500, 30000, 35000, 40000, 60000, 80000, 100000, 200000, 300000, 400000, 600000, 800000, 1000000,
    1100000,
)  # fmt: skip


def one_two_five(largest: int) -> tuple[int, ...]:
    """Return 1, 2, 5, 10, 20 and so on up to `largest`, the bounds of vLLM's histograms of tokens."""
    found = [digit * 10**power for power in range(len(str(largest))) for digit in (1, 2, 5)]
    return tuple(bound for bound in found if bound <= largest)


def _all(*bounds: Sequence[float]) -> tuple[float, ...]:
    return tuple(sorted({bound for some in bounds for bound in some}))


FIRST_TOKEN = _all(VLLM_FIRST_TOKEN, SGLANG_FIRST_TOKEN)
TOKEN = _all((0.001,), VLLM_TOKEN, SGLANG_TOKEN)
REQUEST = _all((0.01, 0.05, 0.1, 0.2), VLLM_REQUEST, SGLANG_REQUEST)
QUEUE = _all(VLLM_REQUEST, SGLANG_QUEUE)
TOKENS = _all(one_two_five(10_000_000), SGLANG_TOKENS)
