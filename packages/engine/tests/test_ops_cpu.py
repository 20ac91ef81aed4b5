"""The CPU's arithmetic against plain torch, for one row and for many."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from pagewood.engine.models.decoder import HeadSplit
from pagewood.engine.runner.kernels import warm_up
from pagewood.engine.runner.ops_cpu import CPUOps

ROWS = [1, 3, 127, 200]  # more than 127 are shared by threads
EPSILON = 1e-5


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    warm_up(16)


@pytest.fixture
def ops() -> CPUOps:
    return CPUOps(num_threads=3)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + EPSILON).rsqrt() * weight


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.one_of(st.integers(1, 30), st.integers(90, 210)),
    depth=st.integers(1, 90),
    size=st.one_of(st.integers(1, 100), st.sampled_from([32, 64, 1000])),
    has_bias=st.booleans(),
    num_threads=st.sampled_from([1, 2, 5]),
)
def test_linear(num_rows: int, depth: int, size: int, has_bias: bool, num_threads: int) -> None:
    x, weight, bias = randn(num_rows, depth), randn(size, depth, seed=1), randn(size, seed=2) if has_bias else None
    result = CPUOps(num_threads=num_threads).linear(weight, bias)(x)
    expected = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(result, expected.float(), atol=2e-5, rtol=2e-5)


def test_a_row_of_a_product_does_not_depend_on_the_others() -> None:
    x, weight = randn(150, 300), randn(999, 300, seed=1)
    alone = CPUOps(num_threads=1).linear(weight, None)
    shared = CPUOps(num_threads=4).linear(weight, None)
    together = shared(x)
    for first, last in [(0, 1), (1, 3), (3, 7), (7, 18), (18, 31), (31, 150)]:
        assert torch.equal(alone(x[first:last]), together[first:last])


@pytest.mark.parametrize("num_rows", ROWS)
def test_norms(ops: CPUOps, num_rows: int) -> None:
    x, residual, weight = randn(num_rows, 48), randn(num_rows, 48, seed=1), randn(48, seed=2)
    torch.testing.assert_close(ops.rms_norm(x, weight, EPSILON), norm(x, weight))
    total = x + residual
    torch.testing.assert_close(ops.add_rms_norm(x, residual, weight, EPSILON), norm(total, weight))
    assert torch.equal(residual, total)


@pytest.mark.parametrize("num_rows", ROWS)
def test_gate(ops: CPUOps, num_rows: int) -> None:
    gate_up = randn(num_rows, 70) * 30
    expected = functional.silu(gate_up[:, :35]) * gate_up[:, 35:]
    torch.testing.assert_close(ops.silu_mul(gate_up), expected, atol=1e-6, rtol=2e-6)


def test_gate_at_the_ends_of_float32(ops: CPUOps) -> None:
    gates = torch.tensor([-torch.inf, -1000.0, -90.0, -87.0, 0.0, 87.0, 1000.0, torch.nan])
    gate_up = torch.cat([gates, torch.ones(8)])[None]
    result = ops.silu_mul(gate_up)[0]
    assert result[-1].isnan()
    torch.testing.assert_close(result[1:-1], functional.silu(gates[1:-1]), atol=1e-35, rtol=1e-5)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("normed", [False, True])
def test_split_heads(ops: CPUOps, num_rows: int, normed: bool) -> None:
    num_heads, num_kv_heads, dim = 6, 2, 16
    qkv, angles = randn(num_rows, (num_heads + 2 * num_kv_heads) * dim), randn(num_rows, dim // 2, seed=1)
    q_norm, k_norm = (randn(dim, seed=2), randn(dim, seed=3)) if normed else (None, None)
    split = HeadSplit(q_size=num_heads * dim, kv_size=num_kv_heads * dim, q_norm=q_norm, k_norm=k_norm, epsilon=EPSILON)
    q, k, v = ops.split_heads(qkv, (angles.cos(), angles.sin()), split)

    def rotated(flat: Tensor, weight: Tensor | None) -> Tensor:
        heads = flat.view(num_rows, -1, dim)
        heads = heads if weight is None else norm(heads, weight)
        a, b = heads.chunk(2, -1)
        cosines, sines = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat([a * cosines - b * sines, b * cosines + a * sines], -1).view(num_rows, -1)

    parts = qkv.split([num_heads * dim, num_kv_heads * dim, num_kv_heads * dim], -1)
    torch.testing.assert_close(q, rotated(parts[0], q_norm))
    torch.testing.assert_close(k, rotated(parts[1], k_norm))
    assert torch.equal(v, parts[2])


def test_embeddings(ops: CPUOps) -> None:
    table = randn(70, 24)
    tokens = torch.tensor([69, 0, 31, 32, 32], dtype=torch.int32)
    tied, projection = ops.tied_embedding(table.clone())
    for embedding in (ops.embedding(table.clone()), tied):
        assert torch.equal(embedding(tokens), table[tokens])
        for wrong in (-1, 70):
            with pytest.raises(IndexError):
                embedding(torch.tensor([0, wrong], dtype=torch.int32))
    torch.testing.assert_close(projection(table[:2]), table[:2] @ table.T)


def test_a_kernel_refuses_other_types(ops: CPUOps) -> None:
    with pytest.raises(TypeError, match="No matching definition"):
        ops.rms_norm(randn(2, 8).double(), torch.from_numpy(np.ones(8, np.float32)), EPSILON)
