"""The operations of a decoder on tensors, with FlashInfer's in plain torch, against the CPU's compiled ones."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewood.engine.models.ops import XIELU, HeadSplit, Norm, PlainActivation
from pagewood.engine.models.parts.rope import RopeConfig
from pagewood.engine.models.rope import Rope
from pagewood.engine.models.torch_ops import TorchOps
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.cpu.program.ops import CPUOps
from pagewood.engine.runner.cuda.ops import CUDAOps
from stand_ins import flashinfer_torch
from stand_ins.tapes import write_down

OPS = CUDAOps(flashinfer_torch)
DIM = 16


def compiled(operation, *arrays: torch.Tensor) -> torch.Tensor:
    run = write_down(operation, *(x.numpy() for x in arrays), kernel=warm_up(DIM), num_threads=1)
    return torch.from_numpy(run().copy())


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.integers(1, 4), st.booleans(), st.booleans(), st.booleans(), st.integers(0, 100))
def test_heads_are_split_normed_and_rotated_as_on_the_cpu(
    tokens: int, kv_heads: int, norms: bool, is_rotated: bool, follow: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    q_size, kv_size = 2 * kv_heads * DIM, kv_heads * DIM
    qkv = torch.randn(tokens, q_size + 2 * kv_size)
    own = [Norm(weight=torch.randn(DIM), epsilon=1e-5) if norms else None for _ in range(2)]
    split = HeadSplit(head_dim=DIM, q_size=q_size, kv_size=kv_size, q_norm=own[0], k_norm=own[1], norms_follow=follow)
    positions = torch.randint(0, 100, (tokens,), dtype=torch.int32)
    rope = Rope(RopeConfig(head_dim=DIM, theta=100.0), device=torch.device("cpu"))
    cosines, sines = rope(positions)
    expected = [
        compiled(
            lambda x, c, s, i=i: CPUOps().split_heads(x, (c, s) if is_rotated else None, split)[i], qkv, cosines, sines
        )
        for i in range(3)
    ]
    table = torch.cat(rope(torch.arange(100)), -1)
    results = OPS.split_heads(qkv.clone(), (positions, table) if is_rotated else None, split)
    for result, other in zip(results, expected, strict=True):
        torch.testing.assert_close(result, other, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("is_rotated", [False, True])
def test_heads_without_values_or_keys_of_their_own(is_rotated: bool) -> None:
    """Against plain torch, whose results are those of the CPU."""
    torch.manual_seed(0)
    norms = [Norm(weight=torch.randn(DIM), epsilon=1e-5) for _ in range(2)]
    shared = HeadSplit(head_dim=DIM, q_size=64, kv_size=32, q_norm=norms[0], k_norm=norms[1], values_are_keys=True)
    queries = HeadSplit(head_dim=DIM, q_size=64, kv_size=0, q_norm=norms[0], k_norm=None)
    positions = torch.tensor([3, 99, 0, 1], dtype=torch.int32)
    rope = Rope(RopeConfig(head_dim=DIM, theta=100.0), device=torch.device("cpu"))
    table = torch.cat(rope(torch.arange(100)), -1)
    for split in (shared, queries):
        qkv = torch.randn(4, sum(split.sizes))
        expected = TorchOps().split_heads(qkv, rope(positions) if is_rotated else None, split)
        found = OPS.split_heads(qkv.clone(), (positions, table) if is_rotated else None, split)
        for result, other in zip(found, expected, strict=True):
            assert (result is None) == (other is None)
            if result is not None:
                torch.testing.assert_close(result, other, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_are_normed_and_columns_and_shares_multiplied(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, y, own = torch.randn(5, 24).to(dtype), torch.randn(5, 60).to(dtype), torch.randn(8).to(dtype)
    for weight in (own, None):
        norm = Norm(weight=weight, epsilon=1e-5)
        found, expected = OPS.norm_heads(x.clone(), norm, 8), TorchOps().norm_heads(x, norm, 8)
        torch.testing.assert_close(found, expected, atol=2e-2 if dtype == torch.bfloat16 else 2e-6, rtol=2e-2)
    assert torch.equal(OPS.multiply_columns(x.clone(), y, 31), x * y[:, 31:55])
    shares, chosen = torch.rand(5, 2), torch.randint(0, 8, (5, 2), dtype=torch.int32)
    assert torch.equal(OPS.scale_chosen(shares, chosen, own.float()), shares * own.float()[chosen.long()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_times_the_factors_of_their_positions(dtype: torch.dtype) -> None:
    x, positions = torch.randn(6, 8, dtype=dtype), torch.tensor([0, 5, 1, 2, 2, 4], dtype=torch.int32)
    table = torch.randn(9, 2)
    expected = x * table[[0, 5, 1, 2, 2, 4], :1].to(dtype)
    assert torch.equal(OPS.scale_rows(x.clone(), (positions, table)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_activations_and_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(5, 24), torch.randn(5, 24), torch.randn(24)
    atol, rtol = (2e-6, 2e-5) if dtype == torch.float32 else (3e-2, 2e-2)
    exact, norm = (Norm(weight=one, epsilon=1e-5) for one in (weight, weight.to(dtype)))
    normed = OPS.norm(x.to(dtype), norm)
    torch.testing.assert_close(normed.float(), compiled(lambda x: CPUOps().norm(x, exact), x), atol=atol, rtol=rtol)

    total = residual.to(dtype).clone()
    sum_norm = OPS.add_norm(x.to(dtype).clone(), total, norm)
    expected = compiled(lambda x, r: CPUOps().add_norm(x, r, exact), x, residual)
    torch.testing.assert_close(sum_norm.float(), expected, atol=atol, rtol=rtol)
    torch.testing.assert_close(total.float(), x + residual, atol=atol, rtol=rtol)

    less_one = Norm(weight=norm.weight, epsilon=1e-5, offset=1.0)
    wide = Norm(weight=weight.to(dtype).float(), epsilon=1e-5, offset=1.0)
    shifted = compiled(lambda x: CPUOps().norm(x, wide), x)
    torch.testing.assert_close(OPS.norm(x.to(dtype), less_one).float(), shifted, atol=atol, rtol=rtol)
    for own, exact_own in ((norm, exact), (less_one, wide)):
        total, expected = residual.to(dtype).clone(), residual.clone()
        OPS.norm_add(x.to(dtype).clone(), total, own)
        TorchOps().norm_add(x, expected, exact_own)
        torch.testing.assert_close(total.float(), expected, atol=2 * atol, rtol=rtol)
    total = residual.to(dtype).clone()
    sum_norm = OPS.add_norm(x.to(dtype).clone(), total, less_one)
    expected = TorchOps().add_norm(x, residual.clone(), wide)
    torch.testing.assert_close(sum_norm.float(), expected, atol=2 * atol, rtol=2 * rtol)
    scaled = OPS.scale(x.to(dtype).clone(), 7.3)
    assert torch.equal(scaled, x.to(dtype) * torch.tensor(7.3, dtype=dtype))
    torch.testing.assert_close(OPS.gelu_mul(x.to(dtype)).float(), TorchOps().gelu_mul(x), atol=atol, rtol=rtol)

    for has_parameters in (False, True):
        exact = Norm(
            weight=weight if has_parameters else None, bias=-weight if has_parameters else None, epsilon=1e-5,
            is_centred=True,
        )  # fmt: skip
        own = replace(exact, weight=weight.to(dtype), bias=-weight.to(dtype)) if has_parameters else exact
        normed = compiled(lambda x, exact=exact: CPUOps().norm(x, exact), x)
        torch.testing.assert_close(OPS.norm(x.to(dtype), own).float(), normed, atol=2 * atol, rtol=2 * rtol)
        total, expected = residual.to(dtype).clone(), residual.clone()
        summed = OPS.add_norm(x.to(dtype), total, own)
        exact_sum = TorchOps().add_norm(x, expected, exact)
        torch.testing.assert_close(summed.float(), exact_sum, atol=4 * atol, rtol=2 * rtol)
        torch.testing.assert_close(total.float(), expected, atol=atol, rtol=rtol)
    no_weight = Norm(weight=None, epsilon=1e-5)
    normed = compiled(lambda x: CPUOps().norm(x, no_weight), x)
    torch.testing.assert_close(OPS.norm(x.to(dtype), no_weight).float(), normed, atol=2 * atol, rtol=2 * rtol)
    total = residual.to(dtype).clone()
    OPS.add(x.to(dtype), total)
    torch.testing.assert_close(total.float(), x + residual, atol=atol, rtol=rtol)
    plain: tuple[PlainActivation, ...] = ("gelu", "gelu_tanh", "gelu_quick", "relu_squared")
    for activation in plain:
        active = compiled(partial(CPUOps().activate, activation=activation), x.clone())
        torch.testing.assert_close(OPS.activate(x.to(dtype), activation).float(), active, atol=atol, rtol=2 * rtol)
    numbers = {name: torch.tensor([0.3]) for name in ("positive", "negative", "beta")} | {"epsilon": -torch.ones(1)}
    active = compiled(lambda x: CPUOps().activate(x, XIELU(**numbers)), x.clone())
    narrow = XIELU(**{name: number.to(dtype) for name, number in numbers.items()})
    torch.testing.assert_close(OPS.activate(x.to(dtype), narrow).float(), active, atol=atol, rtol=4 * rtol)
    capped = compiled(lambda x: CPUOps().soft_cap(x, 3.0), x.clone())
    result = OPS.soft_cap(x.to(dtype).clone(), 3.0)
    assert result.dtype == dtype
    torch.testing.assert_close(result.float(), capped, atol=atol, rtol=2 * rtol)

    product = compiled(lambda x: CPUOps().silu_mul(x), x)
    torch.testing.assert_close(OPS.silu_mul(x.to(dtype)).float(), product, atol=atol, rtol=rtol)
    assert torch.equal(OPS.take(x, torch.tensor([3, 0], dtype=torch.int32)), x[[3, 0]])


def test_one_table_serves_embedding_and_projection() -> None:
    table = torch.randn(7, 4)
    embed, project = OPS.tied_embedding(table)
    tokens = torch.tensor([6, 0, 6], dtype=torch.int32)
    assert torch.equal(embed(tokens), table[[6, 0, 6]])
    torch.testing.assert_close(project(table), table @ table.T)
    bias = torch.randn(7)
    torch.testing.assert_close(OPS.linear(table, bias)(table), table @ table.T + bias)
    assert torch.equal(OPS.embedding(table)(tokens), table[[6, 0, 6]])
