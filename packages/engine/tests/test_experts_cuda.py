"""Experts on tensors of a device, against the oracle, and its kernels in Triton's interpreter."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

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
from gpu_checks.experts import compare_choices, compare_experts

print(compare_experts(torch.device("cpu"), [(5, 48, 70, 3), (4, 40, 64, 1)], [1, 9, 70]))
print(compare_choices(torch.device("cpu"), [1, 5]))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton comes with torch for CUDA only")
def test_the_kernels_in_their_interpreter() -> None:
    tools = str(Path(__file__).parents[3] / "tools")
    # Triton reads this when it is imported, so in a process of its own.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": tools}
    subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, check=True)
