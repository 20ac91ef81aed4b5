"""Projections of a 110M model: the compiled one, torch's, and oneDNN's packed one, from one row to a prefill chunk.

Twelve weights take turns, so that they come from memory as in a decode step.
Run: pytest packages/engine/benchmarks/bench_linear.py --benchmark-enable
"""

# pyright: basic
# torch and pytest-benchmark are typed in part only.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pagewood.engine.runner.compiled import matmul
from pagewood.engine.runner.ops_cpu import CPUOps

NUM_THREADS = 2
INPUTS, OUTPUTS, NUM_WEIGHTS = 768, 4096, 12


def compiled(weight: Tensor) -> Callable[[Tensor], Tensor]:
    matmul.multiply.compile()
    matmul.multiply_parallel.compile()
    return CPUOps(num_threads=NUM_THREADS).linear(weight, None)


def plain(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: functional.linear(x, weight)


def onednn(weight: Tensor) -> Callable[[Tensor], Tensor]:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


@pytest.mark.parametrize("make", [compiled, plain, onednn], ids=lambda make: make.__name__)
@pytest.mark.parametrize("num_rows", [1, 2, 4, 8, 16, 32, 64, 512])
def test_linear(benchmark: Any, make: Callable[[Tensor], Callable[[Tensor], Tensor]], num_rows: int) -> None:
    torch.set_num_threads(NUM_THREADS)
    linears = [make(torch.randn(OUTPUTS, INPUTS)) for _ in range(NUM_WEIGHTS)]
    x = torch.randn(num_rows, INPUTS)

    def run() -> None:
        for linear in linears:
            linear(x)

    with torch.inference_mode():
        benchmark(run)
    best_s = benchmark.stats.stats.min if benchmark.stats else float("inf")
    weights = NUM_WEIGHTS * INPUTS * OUTPUTS
    benchmark.extra_info["GB/s"] = round(weights * 4 / best_s / 1e9, 1)
    benchmark.extra_info["GFLOP/s"] = round(weights * 2 * num_rows / best_s / 1e9, 1)
