"""The compiled attention over latents against a naive one over heads, and its products against plain torch's."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.models.ops import LatentShape, Norm
from pagewood.engine.models.parts.latent_attention import LatentAttentionConfig
from pagewood.engine.models.parts.norm import NormConfig
from pagewood.engine.models.parts.rope import RopeConfig
from pagewood.engine.models.torch_ops import TorchLatentHeads
from pagewood.engine.runner.cpu.compiled.attention import latents
from pagewood.engine.runner.cpu.compiled.step import StepKernel
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.cpu.program.attention import attention_over
from pagewood.engine.runner.cpu.program.latent_attention import CPULatentAttention, CPULatentHeads
from pagewood.engine.runner.cpu.weights.packer import Packer
from pagewood.kvpool import LatentLayout, MultiHeadLayout
from pagewood.kvpool.codes import dequantise, quantise
from pagewood.kvpool.latent_storage import LatentStorage
from pagewood.kvpool.storage import KVStorage
from stand_ins.tapes import GrantedAttention, write_down

RANK, ROPE = 16, 4
SIZE = RANK + ROPE
MAX_LENGTH = 900


def config_of(num_heads: int) -> LatentAttentionConfig:
    shape = LatentShape(num_heads=num_heads, plain_dim=8, rope_dim=ROPE, value_dim=8, rank=RANK)
    rope = RopeConfig(head_dim=ROPE, theta=10000.0)
    return LatentAttentionConfig(shape=shape, rope=rope, scale=0.3, norm=NormConfig(epsilon=1e-6))


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Some grants over rows whose earlier positions are in memory already."""

    grants: list[tuple[int, int]]
    """(start, count) of row 0, 1, ..."""
    num_heads: int
    page_size: int = 16
    num_threads: int = 2
    seed: int = 1
    dtype: str = "float32"


@cache
def kernel(dtype: str = "float32") -> StepKernel:
    return warm_up(LatentLayout(num_layers=1, latent_dim=RANK, rope_dim=ROPE, page_size=1, dtype=dtype))


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    kernel()
    kernel("int8")


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    segment = latents.SEGMENT
    starts = st.one_of(st.integers(0, 20), st.integers(0, 700), st.sampled_from([segment - 1, segment, 2 * segment]))
    counts = st.one_of(st.just(1), st.integers(1, 9), st.integers(1, 90))
    return Problem(
        grants=draw(st.lists(st.tuples(starts, counts), min_size=1, max_size=5)),
        num_heads=draw(st.sampled_from([1, 2, 3, 4, 16, 130])),
        page_size=draw(st.sampled_from([1, 4, 16, 128])),
        num_threads=draw(st.sampled_from([1, 2, 5])),
        seed=draw(st.integers(0, 1000)),
        dtype=draw(st.sampled_from(["float32", "int8"])),
    )


class Bench:
    """The inputs of a problem, and its results by both implementations."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        generator = torch.Generator().manual_seed(problem.seed)
        ends = [start + count for start, count in problem.grants]
        self.latents = [torch.randn(end, SIZE, generator=generator) * 2 for end in ends]
        size = problem.num_heads * SIZE
        self.queries = [torch.randn(count, size, generator=generator) for _, count in problem.grants]

    def naive(self) -> Tensor:
        return torch.cat([self._naive(row) for row in range(len(self.problem.grants))])

    def _naive(self, row: int) -> Tensor:
        start, count = self.problem.grants[row]
        latents = self.latents[row]
        if self.problem.dtype == "int8":
            latents = torch.cat([dequantise(*quantise(part)) for part in latents.split([RANK, ROPE], -1)], -1)
        q, k = self.queries[row].view(count, -1, SIZE).double(), latents.double()
        seen = torch.arange(start, start + count)[:, None] >= torch.arange(start + count)
        scores = torch.einsum("qhd,kd->hqk", q, k) * config_of(self.problem.num_heads).scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hqk,kd->qhd", weights, k[:, :RANK]).reshape(count, -1).float()

    def compiled(self, *, in_steps_of: int | None = None) -> Tensor:
        """Compute all grants in one step, or each in steps of `in_steps_of` tokens."""
        problem = self.problem
        pages_per_row = -(-MAX_LENGTH // problem.page_size)
        num_pages = pages_per_row * len(problem.grants)
        layout = LatentLayout(
            num_layers=2, latent_dim=RANK, rope_dim=ROPE, page_size=problem.page_size, dtype=problem.dtype
        )
        storage = LatentStorage(layout, num_pages)
        for layer in range(2):  # unwritten memory must not be read
            (storage.scales(layer) if problem.dtype == "int8" else storage.layer(layer)).fill_(torch.nan)
        order = np.random.default_rng(problem.seed).permutation(num_pages).astype(np.int32)
        page_table = order.reshape(len(problem.grants), pages_per_row)
        for row, (start, _) in enumerate(problem.grants):
            positions = np.arange(start)
            slots = page_table[row, positions // problem.page_size] * problem.page_size + positions % problem.page_size
            storage.write(1, self.latents[row][:start], torch.from_numpy(slots))
        attention = CPULatentAttention(storage, dict.fromkeys(range(2), config_of(problem.num_heads)))
        if in_steps_of is None:
            return self._step(attention, page_table, [(row, *grant) for row, grant in enumerate(problem.grants)])
        parts = [
            self._step(attention, page_table, [(row, first, min(in_steps_of, start + count - first))])
            for row, (start, count) in enumerate(problem.grants)
            for first in range(start, start + count, in_steps_of)
        ]
        return torch.cat(parts)

    def _step(self, attention: CPULatentAttention, page_table: Int32, grants: list[tuple[int, int, int]]) -> Tensor:
        def column(i: int) -> Int32:
            return np.array([grant[i] for grant in grants], np.int32)

        granted = GrantedAttention(
            attention=attention, page_table=page_table, rows=column(0), starts=column(1), counts=column(2)
        )
        q = torch.cat(
            [self.queries[row][start - self.problem.grants[row][0] :][:count] for row, start, count in grants]
        )
        k = torch.cat([self.latents[row][start:][:count] for row, start, count in grants])
        run = write_down(
            lambda q, k: attention.run(q, k, None, 1),
            q.numpy(),
            k.numpy(),
            kernel=kernel(self.problem.dtype),
            num_threads=self.problem.num_threads,
            attention=granted,
        )
        return torch.from_numpy(run().copy())


@settings(max_examples=25, deadline=None)
@given(problems())
def test_attention_is_the_naive_one(problem: Problem) -> None:
    bench = Bench(problem)
    torch.testing.assert_close(bench.compiled(), bench.naive(), atol=4e-6, rtol=4e-5)


@settings(max_examples=10, deadline=None)
@given(problems(), st.sampled_from([1, 7, 64]))
def test_attention_is_the_same_bits_in_any_chunks(problem: Problem, size: int) -> None:
    """Single tokens have their segments apart, and long steps go through them one by one."""
    bench = Bench(problem)
    assert torch.equal(bench.compiled(in_steps_of=size), bench.compiled())


def test_a_token_is_the_same_bits_with_any_page_size_and_in_any_batch() -> None:
    problem = Problem(grants=[(0, 90), (latents.SEGMENT * 2 - 1, 3), (700, 1), (5, 3)], num_heads=5)
    expected = Bench(problem).compiled()
    for page_size in (1, 7, 128):
        assert torch.equal(Bench(replace(problem, page_size=page_size)).compiled(), expected)
    single = Bench(replace(problem, grants=[(700, 1)]))
    whole = Bench(problem)
    single.latents, single.queries = whole.latents[2:3], whole.queries[2:3]
    assert torch.equal(single.compiled(), expected[93:94])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("in_steps_of", [None, 1, 10])
def test_a_latent_that_is_not_finite_does_not_reach_earlier_positions(value: float, in_steps_of: int | None) -> None:
    bench = Bench(Problem(grants=[(250, 100), (0, 100)], num_heads=3))
    expected = bench.compiled()
    bench.latents[0][320, 3] = value
    result = bench.compiled(in_steps_of=in_steps_of)
    assert torch.equal(result[:70], expected[:70])
    assert torch.equal(result[100:], expected[100:])
    assert not result[70:100].isfinite().all(dim=-1).any()


def test_large_scores_do_not_overflow() -> None:
    bench = Bench(Problem(grants=[(270, 40), (390, 1)], num_heads=2))
    bench.queries = [q * 1000 for q in bench.queries]
    result = bench.compiled()
    assert result.isfinite().all()
    torch.testing.assert_close(result, bench.naive(), atol=1e-2, rtol=1e-2)


def test_a_latent_page_read_as_heads_is_noticed() -> None:
    """Memory of heads has other pages; of latents, it is refused. So is memory of latents for heads."""
    layout = LatentLayout(num_layers=1, latent_dim=RANK, rope_dim=ROPE, page_size=4)
    heads = MultiHeadLayout(num_layers=1, num_kv_heads=1, head_dim=SIZE, page_size=4, order="HND")
    with pytest.raises(ValueError, match="memory must be a LatentStorage for layers of latents"):
        attention_over(KVStorage(heads, 2), [config_of(2)])
    with pytest.raises(ValueError, match="memory must have"):
        LatentStorage(layout, 2, memory=KVStorage(heads, 2).memory)
    with pytest.raises(ValueError, match="latents must be float32 or int8 on a CPU, got bfloat16"):
        CPULatentAttention(LatentStorage(replace(layout, dtype="bfloat16"), 2), {0: config_of(2)})


SHAPES = (
    LatentShape(num_heads=3, plain_dim=12, rope_dim=ROPE, value_dim=40, rank=RANK, has_pairs=True),
    LatentShape(num_heads=1, plain_dim=7, rope_dim=8, value_dim=5, rank=64),
    LatentShape(num_heads=16, plain_dim=32, rope_dim=8, value_dim=32, rank=36, has_pairs=True),
)


@pytest.mark.parametrize("shape", SHAPES)
def test_absorbed_products_are_those_of_plain_torch(shape: LatentShape) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape.head_rows, shape.rank, generator=generator)
    norm = Norm(weight=torch.randn(shape.rank, generator=generator), epsilon=1e-3)
    own, oracle = CPULatentHeads(weight, shape, Packer("float32")), TorchLatentHeads(weight, shape)
    cosines, sines = torch.randn(2, 80, shape.rope_dim // 2, generator=generator)

    def compare(operation: Callable[[CPULatentHeads | TorchLatentHeads, Any], Any], *arrays: Tensor) -> None:
        def run(rows: slice) -> Tensor:
            parts = [one[rows].contiguous().numpy() for one in arrays]
            written = write_down(lambda *x: operation(own, x), *parts, kernel=kernel(), num_threads=2)
            return torch.from_numpy(written().copy())

        whole = run(slice(None))
        torch.testing.assert_close(whole, operation(oracle, arrays), atol=2e-5, rtol=1e-4)
        parts = [run(slice(first, last)) for first, last in ((0, 1), (1, 10), (10, 33), (33, 80))]
        assert torch.equal(torch.cat(parts), whole)

    q = torch.randn(80, shape.query_size, generator=generator)
    x = torch.randn(80, shape.latent_size, generator=generator)
    for i in range(2):
        compare(lambda heads, x, i=i: heads.absorb(x[0], x[1], (x[2], x[3]), norm)[i], q, x, cosines, sines)
    compare(lambda heads, x: heads.values(x[0]), torch.randn(80, shape.num_heads * shape.rank, generator=generator))
