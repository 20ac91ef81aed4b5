"""Projections of a 110M model: the compiled one, torch's, and oneDNN's packed one, from one row to a prefill chunk.

Twelve weights take turns, so that they come from memory as in a decode step.
Run: pytest packages/engine/benchmarks/bench_linear.py --benchmark-enable
"""

# pyright: basic
# torch and pytest-benchmark are typed in part only.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.cpu.program.ops import CPUOps
from pagewood.engine.runner.cpu.program.tape import Buffer
from stand_ins.tapes import write_down

NUM_THREADS = 2
INPUTS, OUTPUTS, NUM_WEIGHTS = 768, 4096, 12


def compiled(weights: Sequence[Tensor], x: Tensor) -> Callable[[], object]:
    linears = [CPUOps().linear(weight, None) for weight in weights]

    def all_of(x: Buffer) -> Buffer:
        return [linear(x) for linear in linears][-1]

    return write_down(all_of, x.numpy(), kernel=warm_up(64), num_threads=NUM_THREADS)


def plain(weights: Sequence[Tensor], x: Tensor) -> Callable[[], object]:
    return lambda: [functional.linear(x, weight) for weight in weights]


def onednn(weights: Sequence[Tensor], x: Tensor) -> Callable[[], object]:
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, 1) for weight in weights]
    return lambda: [torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "") for weight in packed]


@pytest.mark.parametrize("make", [compiled, plain, onednn], ids=lambda make: make.__name__)
@pytest.mark.parametrize("num_rows", [1, 2, 4, 8, 16, 32, 64, 512])
def test_linear(
    benchmark: Any, make: Callable[[Sequence[Tensor], Tensor], Callable[[], object]], num_rows: int
) -> None:
    torch.set_num_threads(NUM_THREADS)
    run = make([torch.randn(OUTPUTS, INPUTS) for _ in range(NUM_WEIGHTS)], torch.randn(num_rows, INPUTS))
    with torch.inference_mode():
        benchmark(run)
    best_s = benchmark.stats.stats.min if benchmark.stats else float("inf")
    weights = NUM_WEIGHTS * INPUTS * OUTPUTS
    benchmark.extra_info["GB/s"] = round(weights * 4 / best_s / 1e9, 1)
    benchmark.extra_info["GFLOP/s"] = round(weights * 2 * num_rows / best_s / 1e9, 1)
