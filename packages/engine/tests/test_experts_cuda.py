"""Experts on tensors of a device, against the oracle, and its kernels in Triton's interpreter."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagewood.engine.api import EngineConfig
from pagewood.engine.models.ops import ExpertMatrices
from pagewood.engine.models.parts.experts import RouterConfig
from pagewood.engine.models.parts.feed_forward import Activation
from pagewood.engine.models.scaled_codes import ScaledCodes
from pagewood.engine.models.torch_experts import TorchExperts
from pagewood.engine.models.torch_ops import TorchOps
from pagewood.engine.runner.cuda.experts import CUDAExperts
from pagewood.engine.runner.cuda.kernels.experts_flashinfer import FusedExperts, FusedKernels
from pagewood.engine.runner.cuda.kernels.flashinfer_compile import compile_experts
from pagewood.engine.runner.cuda.ops import CUDAOps
from stand_ins import flashinfer_torch
from stand_ins.recording_device import RecordingDevice

OPS = CUDAOps(flashinfer_torch)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


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


def widened(own: ExpertMatrices) -> ExpertMatrices:
    names = ("gate_up", "down", "gate_up_bias", "down_bias")
    tensors = {name: tensor.float() for name in names if (tensor := getattr(own, name)) is not None}
    return replace(own, **tensors)


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
    oracle = TorchExperts(widened(own), "silu", TorchOps(), weighs_inputs=has_bias)(x.float(), chosen, shares)
    atol = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(found.float(), oracle, atol=atol, rtol=atol)
    torch.testing.assert_close(total.float(), oracle + torch.sigmoid(gate) * shared.float(), atol=atol, rtol=atol)


def test_a_tokens_result_does_not_depend_on_the_others() -> None:
    x, chosen = torch.randn(20, WIDTH), torch.randint(N, (20, 2), dtype=torch.int32)
    shares, experts = torch.rand(20, 2), OPS.experts(matrices(), "silu")
    alone = [experts(x[i : i + 1], chosen[i : i + 1], shares[i : i + 1]) for i in range(20)]
    assert torch.equal(torch.cat(alone), experts(x, chosen, shares))


def compiled() -> None:
    compile_experts(torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("activation", "has_bias"), [("silu", False), ("silu", True), ("clamped", True)])
def test_flashinfers_mixture_is_that_of_the_oracle_and_never_waits(
    dtype: torch.dtype, activation: Activation, has_bias: bool
) -> None:
    own, device = matrices(dtype, has_bias=has_bias), RecordingDevice()
    ops = CUDAOps(flashinfer_torch, fused_experts=FusedKernels(flashinfer_torch, compiled))
    x, chosen = 4 * torch.randn(30, WIDTH).to(dtype), torch.rand(30, N).topk(3).indices.int()
    shares, before = torch.rand(30, 3), own.gate_up.clone()
    experts = ops.experts(own, activation)
    assert isinstance(experts, FusedExperts)
    with device.watching():
        found = experts(x, chosen, shares)
        none = experts(x[:0], chosen[:0], shares[:0])
    assert not device.waits
    assert none.shape == (0, WIDTH)
    assert torch.equal(own.gate_up, before)  # it may be memory of a file
    oracle = TorchExperts(widened(own), activation, TorchOps())(x.float(), chosen, shares)
    limit = (1e-6 if dtype == torch.float32 else 1e-2) * float(oracle.abs().max())
    torch.testing.assert_close(found.float(), oracle, atol=limit, rtol=0)


def test_a_rank_without_the_second_bias_adds_zeros() -> None:
    own = replace(matrices(has_bias=True), down_bias=None)
    x, chosen, shares = torch.randn(9, WIDTH), torch.rand(9, N).topk(2).indices.int(), torch.rand(9, 2)
    found = FusedExperts(own, "silu", flashinfer_torch.cutlass_fused_moe)(x, chosen, shares)
    torch.testing.assert_close(found, TorchExperts(own, "silu", TorchOps())(x, chosen, shares))


def refused(caplog: pytest.LogCaptureFixture, kernels: FusedKernels, own: ExpertMatrices, **options: Any) -> str:
    """Ask for the experts of two layers; return the only line in the log."""
    ops = CUDAOps(flashinfer_torch, fused_experts=kernels)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert isinstance(ops.experts(own, **{"activation": "silu", **options}), CUDAExperts)
    [line] = [record.getMessage() for record in caplog.records]
    return line.partition("fused ones: ")[2]


def test_what_flashinfer_does_not_take_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    own, kernels = matrices(), FusedKernels(flashinfer_torch, compiled)
    codes: Any = ScaledCodes(codes=own.gate_up.to(torch.float8_e4m3fn), scales=own.gate_up[:, :1], group=WIDTH)
    for changed, options, reason in (
        (own, {"activation": "gelu_tanh"}, "the activation of experts must be silu or clamped, got gelu_tanh"),
        (own, {"weighs_inputs": True}, "the shares of experts must multiply results, but those of this model multiply"),
        (replace(own, gate_up=codes), {}, "experts must be of 16 bits, because its kernels for FP8 round activations"),
        (replace(own, num_placed=2 * N), {}, "all experts must be on this rank, but ranks have experts of their own"),
        (replace(own, gate_up=own.gate_up[:, :20]), {}, "sizes of experts must be multiples of 8, got 20 and 40"),
    ):
        caplog.clear()
        assert refused(caplog, kernels, changed, **options).startswith(reason)
    assert isinstance(kernels.experts(own, "silu", weighs_inputs=False), FusedExperts)


def test_a_flashinfer_that_lacks_the_kernels_leaves_experts_to_others(caplog: pytest.LogCaptureFixture) -> None:
    tried: list[int] = []

    def broken() -> None:
        tried.append(1)
        raise RuntimeError("no nvcc")

    def older(input: torch.Tensor, token_selected_experts: torch.Tensor) -> None: ...

    for flashinfer, compile_fused, reason in (
        (flashinfer_torch, broken, "they cannot be compiled here: no nvcc"),
        (SimpleNamespace(), compiled, "FlashInfer has no cutlass_fused_moe"),
        (
            SimpleNamespace(cutlass_fused_moe=older),
            compiled,
            "FlashInfer's cutlass_fused_moe has no fc1_expert_biases,",
        ),
    ):
        caplog.clear()
        kernels: Any = FusedKernels(flashinfer, compile_fused)  # pyright: ignore[reportArgumentType]
        assert refused(caplog, kernels, matrices()).startswith(reason)
    assert tried == [1]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"device": "cpu"}, "on a CPU"),
        ({"batch_invariant": True}, "with batch_invariant"),
    ],
)
def test_other_kernels_of_experts_exclude_some_options(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=f"expert_kernels must be triton {reason}.*, got flashinfer"):
        EngineConfig(**{"device": "cuda", "expert_kernels": "flashinfer", **options})
    with pytest.raises(ValueError, match="expert_kernels must be one of triton, flashinfer, got 'cutlass'"):
        EngineConfig(device="cuda", expert_kernels="cutlass")  # pyright: ignore[reportArgumentType]


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
