"""The CPU's arithmetic against plain torch, for one row and for many."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from pagewood.engine.models.ops import XIELU, HeadSplit, Norm, PlainActivation
from pagewood.engine.models.torch_ops import TorchOps
from pagewood.engine.runner.cpu.compiled.step import StepKernel
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.cpu.program.ops import CPUOps
from pagewood.engine.runner.cpu.program.tape import Buffer
from stand_ins.tapes import write_down

ROWS = [1, 3, 127, 200]
EPSILON = 1e-5
OPS = CPUOps()


@cache
def step_kernel() -> StepKernel:
    return warm_up(16)


def compute(operation: Callable[..., Buffer], *inputs: Tensor, num_threads: int = 3) -> Tensor:
    arrays = [x.numpy() for x in inputs]
    return torch.from_numpy(write_down(operation, *arrays, kernel=step_kernel(), num_threads=num_threads)().copy())


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
    result = compute(OPS.linear(weight, bias), x, num_threads=num_threads)
    expected = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(result, expected.float(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("size", [999, 2080])  # from 2048 outputs on, tiles of many rows are packed
def test_a_row_of_a_product_does_not_depend_on_the_others(size: int) -> None:
    x, weight = randn(150, 300), randn(size, 300, seed=1)
    linear = OPS.linear(weight, None)
    together = compute(linear, x, num_threads=4)
    for first, last in [(0, 1), (1, 3), (3, 7), (7, 18), (18, 31), (31, 150), (0, 8), (0, 9), (0, 17)]:
        assert torch.equal(compute(linear, x[first:last], num_threads=1), together[first:last])


@pytest.mark.parametrize("num_rows", ROWS)
def test_norms(num_rows: int) -> None:
    x, residual, weight = randn(num_rows, 48), randn(num_rows, 48, seed=1), randn(48, seed=2)
    torch.testing.assert_close(compute(lambda x: OPS.norm(x, Norm(weight=weight, epsilon=EPSILON)), x), norm(x, weight))
    own = Norm(weight=weight, epsilon=EPSILON)
    normed = compute(lambda x, residual: OPS.add_norm(x, residual, own), x, residual)
    torch.testing.assert_close(normed, norm(x + residual, weight))
    added = compute(lambda x, residual: (OPS.add_norm(x, residual, own), residual)[1], x, residual)
    assert torch.equal(added, x + residual)


@pytest.mark.parametrize("num_rows", ROWS)
def test_gate(num_rows: int) -> None:
    gate_up = randn(num_rows, 70) * 30
    expected = functional.silu(gate_up[:, :35]) * gate_up[:, 35:]
    torch.testing.assert_close(compute(OPS.silu_mul, gate_up), expected, atol=1e-6, rtol=2e-6)


XIELU_NUMBERS = XIELU(
    positive=torch.tensor([0.7]), negative=torch.tensor([1.3]), beta=torch.tensor([0.5]), epsilon=torch.tensor([-1e-6])
)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "gelu_quick", "relu_squared", XIELU_NUMBERS])
def test_activations_without_a_gate(num_rows: int, activation: PlainActivation) -> None:
    x = randn(num_rows, 70) * 5
    expected = TorchOps().activate(x.double(), activation).float()
    torch.testing.assert_close(compute(lambda x: OPS.activate(x, activation), x), expected, atol=2e-6, rtol=3e-6)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("has_parameters", [False, True])
def test_norms_around_the_mean(num_rows: int, has_parameters: bool) -> None:
    x, residual = randn(num_rows, 48) * 3 + 20, randn(num_rows, 48, seed=1)
    weight, bias = (randn(48, seed=2), randn(48, seed=3)) if has_parameters else (None, None)
    own = Norm(weight=weight, bias=bias, epsilon=EPSILON, is_centred=True)

    def expected(x: Tensor) -> Tensor:
        return TorchOps().norm(x.double(), replace(own, weight=None, bias=None)) * (1 if weight is None else weight) + (
            0 if bias is None else bias
        )

    torch.testing.assert_close(compute(lambda x: OPS.norm(x, own), x), expected(x).float(), atol=2e-5, rtol=2e-5)
    total = compute(lambda x, residual: (OPS.add_norm(x, residual, own), residual)[1], x, residual.clone())
    assert torch.equal(total, x + residual)
    result = compute(lambda x, residual: OPS.add_norm(x, residual, own), x, residual.clone())
    torch.testing.assert_close(result, expected(total).float(), atol=2e-5, rtol=2e-5)
    added = compute(lambda x, residual: (OPS.norm_add(x, residual, own), residual)[1], x, residual.clone())
    torch.testing.assert_close(added, (residual + expected(x)).float(), atol=2e-5, rtol=2e-5)
    assert torch.equal(
        compute(lambda x, residual: (OPS.add(x, residual), residual)[1], x, residual.clone()), x + residual
    )


@pytest.mark.parametrize("num_rows", ROWS)
def test_soft_cap(num_rows: int) -> None:
    x = randn(num_rows, 70) * 40
    expected = TorchOps().soft_cap(x.double(), 30.0).float()
    torch.testing.assert_close(compute(lambda x: OPS.soft_cap(x, 30.0), x), expected, atol=1e-5, rtol=1e-6)
    ends = torch.tensor([[-torch.inf, -1e30, 1e30, torch.inf]])
    assert compute(lambda x: OPS.soft_cap(x, 30.0), ends).tolist() == [[-30.0, -30.0, 30.0, 30.0]]


def part_of(qkv: Buffer, rotation: Sequence[Buffer], split: HeadSplit, index: int) -> Buffer:
    """Return queries, keys or values of a projection, rotated unless `rotation` is empty."""
    part = OPS.split_heads(qkv, (rotation[0], rotation[1]) if rotation else None, split)[index]
    assert part is not None
    return part


@pytest.mark.parametrize("num_rows", ROWS)
def test_operations_of_few_families(num_rows: int) -> None:
    """Against plain torch: norms of what is added and of some columns, gelu, a multiplier."""
    torch_ops = TorchOps()
    x, residual, own = randn(num_rows, 64), randn(num_rows, 64, seed=1), Norm(weight=randn(64, seed=2), epsilon=EPSILON)
    added = compute(lambda x, residual: (OPS.norm_add(x, residual, own), residual)[1], x, residual)
    expected = residual.clone()
    torch_ops.norm_add(x, expected, own)
    torch.testing.assert_close(added, expected)
    torch.testing.assert_close(compute(OPS.gelu_mul, x * 30), torch_ops.gelu_mul(x * 30), atol=1e-5, rtol=2e-6)
    assert torch.equal(compute(lambda x: OPS.scale(x, 64**0.3), x), torch_ops.scale(x, 64**0.3))

    angles = randn(num_rows, 8, seed=3)
    norms = [Norm(weight=randn(size, seed=4), epsilon=EPSILON) for size in (32, 16)]
    split = HeadSplit(head_dim=16, q_size=32, kv_size=16, q_norm=norms[0], k_norm=norms[1], norms_are_whole=True)
    for index, wanted in enumerate(torch_ops.split_heads(x, (angles.cos(), angles.sin()), split)):
        found = compute(lambda x, c, s, index=index: part_of(x, (c, s), split, index), x, angles.cos(), angles.sin())
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(("is_rotated", "has_norms"), [(False, False), (False, True), (True, True)])
def test_heads_that_are_not_rotated_or_normed_later(num_rows: int, is_rotated: bool, has_norms: bool) -> None:
    """Against plain torch: heads without a rotation, and norms behind it."""
    x, angles = randn(num_rows, 64), randn(num_rows, 8, seed=1)
    norms = [Norm(weight=randn(16, seed=seed), epsilon=EPSILON) if has_norms else None for seed in (2, 3)]
    split = HeadSplit(head_dim=16, q_size=32, kv_size=16, q_norm=norms[0], k_norm=norms[1], norms_follow=True)
    rotation = (angles.cos(), angles.sin()) if is_rotated else None
    for index, wanted in enumerate(TorchOps().split_heads(x, rotation, split)):
        found = compute(
            lambda x, *own, index=index: part_of(x, own, split, index),
            x,
            *(rotation or ()),
        )
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("is_rotated", [False, True])
def test_heads_without_values_or_keys_of_their_own(num_rows: int, is_rotated: bool) -> None:
    """Against plain torch: values that are keys before their norm and rotation, and queries alone."""
    angles = randn(num_rows, 8, seed=1)
    rotation = (angles.cos(), angles.sin()) if is_rotated else ()
    norms = [Norm(weight=randn(16, seed=seed), epsilon=EPSILON) for seed in (2, 3)]
    shared = HeadSplit(head_dim=16, q_size=32, kv_size=16, q_norm=norms[0], k_norm=norms[1], values_are_keys=True)
    queries = HeadSplit(head_dim=16, q_size=32, kv_size=0, q_norm=norms[0], k_norm=None)
    for split, num_results in ((shared, 3), (queries, 1)):
        x = randn(num_rows, sum(split.sizes))
        expected = TorchOps().split_heads(x, rotation or None, split)
        assert [one is None for one in expected] == [i >= num_results for i in range(3)]
        for index in range(num_results):

            def part(x: Buffer, *own: Buffer, split: HeadSplit = split, index: int = index) -> Buffer:
                return part_of(x, own, split, index)

            wanted = expected[index]
            assert wanted is not None
            torch.testing.assert_close(compute(part, x, *rotation), wanted)


@pytest.mark.parametrize("num_rows", ROWS)
def test_heads_are_normed_and_columns_multiplied(num_rows: int) -> None:
    x, y, norm = randn(num_rows, 24), randn(num_rows, 60, seed=1), Norm(weight=randn(8, seed=2), epsilon=EPSILON)
    for own in (norm, Norm(weight=None, epsilon=EPSILON)):
        found = compute(lambda x, own=own: OPS.norm_heads(x, own, 8), x.clone())
        torch.testing.assert_close(found, TorchOps().norm_heads(x, own, 8))
    found = compute(lambda x, y: OPS.multiply_columns(x, y, 31), x.clone(), y)
    assert torch.equal(found, x * y[:, 31:55])


def test_rows_times_factors() -> None:
    x, factors = randn(70, 9), randn(70, 1, seed=1)
    assert torch.equal(compute(lambda x, f: OPS.scale_rows(x, (f, f)), x, factors), x * factors)


def test_gate_at_the_ends_of_float32() -> None:
    gates = torch.tensor([-torch.inf, -1000.0, -90.0, -87.0, 0.0, 87.0, 1000.0, torch.nan])
    gate_up = torch.cat([gates, torch.ones(8)])[None]
    result = compute(OPS.silu_mul, gate_up)[0]
    assert result[-1].isnan()
    torch.testing.assert_close(result[1:-1], functional.silu(gates[1:-1]), atol=1e-35, rtol=1e-5)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("normed", [False, True])
def test_split_heads(num_rows: int, normed: bool) -> None:
    num_heads, num_kv_heads, dim = 6, 2, 16
    qkv, angles = randn(num_rows, (num_heads + 2 * num_kv_heads) * dim), randn(num_rows, dim // 2, seed=1)
    q_norm, k_norm = (randn(dim, seed=2), randn(dim, seed=3)) if normed else (None, None)
    norms = [None if weight is None else Norm(weight=weight, epsilon=EPSILON) for weight in (q_norm, k_norm)]
    split = HeadSplit(
        head_dim=dim, q_size=num_heads * dim, kv_size=num_kv_heads * dim, q_norm=norms[0], k_norm=norms[1]
    )

    def part(index: int) -> Tensor:
        def split_off(qkv: Buffer, cosines: Buffer, sines: Buffer) -> Buffer:
            return part_of(qkv, (cosines, sines), split, index)

        return compute(split_off, qkv, angles.cos(), angles.sin())

    q, k, v = (part(index) for index in range(3))

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


def test_embeddings() -> None:
    table = randn(70, 24)
    tokens = torch.tensor([69, 0, 31, 32, 32], dtype=torch.int32)
    tied, projection = OPS.tied_embedding(table.clone())
    for embedding in (OPS.embedding(table.clone()), tied):
        assert torch.equal(compute(embedding, tokens[:, None]), table[tokens])
    torch.testing.assert_close(compute(projection, table[:2]), table[:2] @ table.T)


def test_take() -> None:
    x, wanted = randn(40, 19), torch.randint(40, (40,), dtype=torch.int32)
    assert torch.equal(compute(OPS.take, x, wanted[:, None]), x[wanted])


def test_parameters_of_another_type_are_converted() -> None:
    x, weight = randn(2, 8), randn(8, seed=1)
    narrow = weight.to(torch.float64)
    assert torch.equal(
        compute(lambda x: OPS.norm(x, Norm(weight=narrow, epsilon=EPSILON)), x),
        compute(lambda x: OPS.norm(x, Norm(weight=weight, epsilon=EPSILON)), x),
    )


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12), num_rows=st.integers(1, 9), data=st.data())
def test_matrices_in_use_at_the_same_time_do_not_share_memory(
    sizes: list[int], num_rows: int, data: st.DataObject
) -> None:
    """A random graph of gathers and norms, whose result is computed by torch too."""
    start = randn(num_rows, 8)
    places = torch.randint(num_rows, (num_rows,), dtype=torch.int32)
    weights = [randn(8, seed=seed) for seed in range(len(sizes))]
    sources = [data.draw(st.integers(0, index)) for index in range(len(sizes))]

    def graph(x: Buffer, wanted: Buffer) -> Buffer:
        made = [x]
        for source, weight in zip(sources, weights, strict=True):
            made.append(OPS.norm(OPS.take(made[source], wanted), Norm(weight=weight, epsilon=EPSILON)))
        last = OPS.norm(made[-1], Norm(weight=weights[0], epsilon=EPSILON))
        OPS.add_norm(made[data.draw(st.integers(0, len(made) - 1))], last, Norm(weight=weights[0], epsilon=EPSILON))
        return made[-1]

    expected = [start]
    for source, weight in zip(sources, weights, strict=True):
        expected.append(norm(expected[source][places], weight))
    torch.testing.assert_close(compute(graph, start, places[:, None]), expected[-1])


@pytest.mark.parametrize("num_rows", ROWS)
def test_concat(num_rows: int) -> None:
    a, b = randn(num_rows, 37), randn(num_rows, 8, seed=1)
    assert compute(lambda a, b: OPS.concat([a, b, a]), a, b).equal(torch.cat([a, b, a], -1))
    assert compute(lambda a, b: OPS.concat([b]), a, b).equal(b)


@pytest.mark.parametrize("num_rows", ROWS)
def test_clear_first(num_rows: int) -> None:
    x, positions = randn(num_rows, 37), torch.arange(num_rows) % 50
    sines = torch.sin(positions[:, None] * torch.logspace(0, -4, 8) / 4096)
    result = compute(lambda x, sines: OPS.clear_first(x, (sines, sines)), x, sines)
    assert result.equal(x * (positions > 0)[:, None])
