"""Experts on tensors of a device, against the oracle, and the grouped product in Triton's interpreter."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from pagewood.engine.models.ops import ExpertMatrices
from pagewood.engine.models.parts.experts import RouterConfig
from pagewood.engine.models.torch_experts import TorchExperts
from pagewood.engine.models.torch_ops import TorchOps
from pagewood.engine.runner.cuda.ops import CUDAOps
from stand_ins import flashinfer_torch
from stand_ins.recording_device import RecordingDevice

OPS = CUDAOps(flashinfer_torch)
N, SIZE, WIDTH = 6, 40, 24


def matrices(dtype: torch.dtype = torch.float32, *, has_bias: bool = False) -> ExpertMatrices:
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.3).to(dtype)

    return ExpertMatrices(
        count=N,
        gate_up=randn(N * 2 * SIZE, WIDTH),
        down=randn(N * WIDTH, SIZE),
        gate_up_bias=randn(N * 2 * SIZE) if has_bias else None,
        down_bias=randn(N * WIDTH) if has_bias else None,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_mixture_is_that_of_the_oracle_and_never_waits(dtype: torch.dtype, has_bias: bool) -> None:
    own, device = matrices(dtype, has_bias=has_bias), RecordingDevice()
    router = RouterConfig(num_experts=N, num_chosen=3, num_groups=2, num_chosen_groups=1, renormalises=True)
    x, weight, bias = torch.randn(30, WIDTH).to(dtype), torch.randn(N, WIDTH), torch.randn(N)
    gate, shared = torch.randn(30, 1), torch.randn(30, WIDTH).to(dtype)
    with device.watching():
        chosen, shares = OPS.choose(OPS.exact_linear(weight, None)(x), router, bias)
        found = OPS.experts(own, "silu", weighs_inputs=has_bias)(x, chosen, shares)
        total = OPS.add_gated(found.clone(), shared, gate)
    assert not device.waits
    wide = ExpertMatrices(
        count=N,
        gate_up=own.gate_up.float(),
        down=own.down.float(),
        gate_up_bias=None if own.gate_up_bias is None else own.gate_up_bias.float(),
        down_bias=None if own.down_bias is None else own.down_bias.float(),
    )
    oracle = TorchExperts(wide, "silu", TorchOps(), weighs_inputs=has_bias)(x.float(), chosen, shares)
    atol = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(found.float(), oracle, atol=atol, rtol=atol)
    torch.testing.assert_close(total.float(), oracle + torch.sigmoid(gate) * shared.float(), atol=atol, rtol=atol)


def test_a_tokens_result_does_not_depend_on_the_others() -> None:
    x, chosen = torch.randn(20, WIDTH), torch.randint(N, (20, 2), dtype=torch.int32)
    shares, experts = torch.rand(20, 2), OPS.experts(matrices(), "silu")
    alone = [experts(x[i : i + 1], chosen[i : i + 1], shares[i : i + 1]) for i in range(20)]
    assert torch.equal(torch.cat(alone), experts(x, chosen, shares))


INTERPRETED = """
import torch
from pagewood.engine.runner.cuda.experts import grouped_by_row
from pagewood.engine.runner.cuda.kernels.grouped_triton import grouped

torch.manual_seed(0)
for counts, depth, num_columns, has_bias in (
    ([1, 0, 0, 3], 48, 96, True), ([0, 40, 17, 16, 1], 100, 70, False), ([0, 0, 2], 64, 64, True)
):
    experts = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).int()
    x, weight = torch.randn(len(experts), depth).half(), torch.randn(len(counts), num_columns, depth).half()
    bias = torch.randn(len(counts), num_columns).half() if has_bias else None
    result = grouped(x, weight, bias, experts)
    expected = grouped_by_row(x.float(), weight.float(), None if bias is None else bias.float(), experts)
    torch.testing.assert_close(result.float(), expected, atol=2e-2, rtol=2e-3)
    assert torch.equal(grouped(x[-1:], weight, bias, experts[-1:]), result[-1:])
assert grouped(x[:0], weight, bias, experts[:0]).shape == (0, num_columns)
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton comes with torch for CUDA only")
def test_the_grouped_product_in_its_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}  # read when Triton is imported, so in a process of its own
    subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, check=True)
