"""The compiled attention against a naive one, over ragged mixes of grants."""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.models.parts.attention import AttentionConfig
from pagewood.engine.models.parts.rope import RopeConfig
from pagewood.engine.runner.cpu.compiled.step import StepKernel
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.cpu.program.attention import CPUAttention
from pagewood.kvpool import MultiHeadLayout
from pagewood.kvpool.codes import dequantise, quantise
from pagewood.kvpool.storage import KVStorage
from stand_ins.tapes import GrantedAttention, write_down

DIM = 16
MAX_LENGTH = 320


def attention_of(
    num_heads: int,
    num_kv_heads: int,
    window: int | None,
    *,
    is_chunked: bool = False,
    soft_cap: float | None = None,
) -> AttentionConfig:
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=DIM,
        rope=RopeConfig(head_dim=DIM, theta=10000.0),
        scale=DIM**-0.5,
        window=window,
        is_chunked=is_chunked and window is not None,
        soft_cap=soft_cap,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Some grants over rows whose earlier positions are in memory already."""

    grants: list[tuple[int, int]]
    """(start, count) of row 0, 1, ..."""
    num_heads: int
    num_kv_heads: int
    page_size: int
    window: int | None
    num_threads: int
    seed: int
    int8: bool = False
    is_chunked: bool = False
    soft_cap: float | None = None
    has_sinks: bool = False
    begins: tuple[int, ...] | None = None
    """First position that each grant attends to."""


@cache
def kernel(*, int8: bool) -> StepKernel:
    return warm_up(DIM, int8=int8)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    kernel(int8=False)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    num_kv_heads = draw(st.sampled_from([1, 2, 3]))
    lengths = st.one_of(st.integers(0, 20), st.integers(0, 150), st.just(63), st.just(64))
    counts = st.one_of(st.just(1), st.integers(1, 9), st.integers(1, 150))
    return Problem(
        grants=draw(st.lists(st.tuples(lengths, counts), min_size=1, max_size=6)),
        num_heads=num_kv_heads * draw(st.sampled_from([1, 2, 3, 8])),
        num_kv_heads=num_kv_heads,
        page_size=draw(st.sampled_from([1, 4, 16, 128])),
        window=draw(st.one_of(st.none(), st.integers(1, 200))),
        num_threads=draw(st.sampled_from([1, 2, 5])),
        seed=draw(st.integers(0, 1000)),
        int8=draw(st.booleans()),
        is_chunked=draw(st.booleans()),
        soft_cap=draw(st.sampled_from([None, 0.7, 30.0])),
        has_sinks=draw(st.booleans()),
    )


class Bench:
    """The inputs of a problem, and its results by both implementations."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        generator = torch.Generator().manual_seed(problem.seed)
        kv_size, q_size = problem.num_kv_heads * DIM, problem.num_heads * DIM
        ends = [start + count for start, count in problem.grants]
        self.keys = [torch.randn(end, kv_size, generator=generator) * 2 for end in ends]
        self.values = [torch.randn(end, kv_size, generator=generator) for end in ends]
        self.queries = [torch.randn(count, q_size, generator=generator) for _, count in problem.grants]
        self.sinks = torch.randn(problem.num_heads, generator=generator) * 3 if problem.has_sinks else None

    def naive(self) -> Tensor:
        return torch.cat([self._naive(row) for row in range(len(self.problem.grants))])

    def _naive(self, row: int) -> Tensor:
        problem, (start, count) = self.problem, self.problem.grants[row]
        group = problem.num_heads // problem.num_kv_heads
        q = self.queries[row].view(count, problem.num_heads, DIM).double()
        k, v = (
            self._kept(x[row].view(-1, problem.num_kv_heads, DIM)).double().repeat_interleave(group, 1)
            for x in (self.keys, self.values)
        )
        own, other, window = torch.arange(start, start + count)[:, None], torch.arange(start + count), problem.window
        seen = other <= own
        if window is not None:
            seen &= own // window == other // window if problem.is_chunked else own - other < window
        if problem.begins is not None:
            seen &= torch.arange(start + count)[None] >= problem.begins[row]
        scores = torch.einsum("qhd,khd->hqk", q, k) / DIM**0.5
        if problem.soft_cap is not None:
            scores = problem.soft_cap * torch.tanh(scores / problem.soft_cap)
        scores = scores.masked_fill(~seen, -torch.inf)
        if self.sinks is not None:
            scores = torch.cat([scores, self.sinks.double()[:, None, None].expand(-1, count, 1)], -1)
        weights = scores.softmax(-1)[..., : start + count]
        return torch.einsum("hqk,khd->qhd", weights, v).reshape(count, -1).float()

    def _kept(self, x: Tensor) -> Tensor:
        """Return the numbers that the memory holds for `x`."""
        return dequantise(*quantise(x)) if self.problem.int8 else x

    def compiled(self, *, in_steps_of: int | None = None) -> Tensor:
        """Compute all grants in one step, or each in steps of `in_steps_of` tokens."""
        problem = self.problem
        pages_per_row = -(-MAX_LENGTH // problem.page_size)
        layout = MultiHeadLayout(
            num_layers=2,
            num_kv_heads=problem.num_kv_heads,
            head_dim=DIM,
            page_size=problem.page_size,
            dtype="int8" if problem.int8 else "float32",
            order="HND",
        )
        num_pages = pages_per_row * len(problem.grants)
        storage = KVStorage(layout, num_pages)
        for layer in range(2):  # unwritten memory must not be read
            (storage.scales(layer) if problem.int8 else storage.layer(layer)).fill_(torch.nan)
        order = np.random.default_rng(problem.seed).permutation(num_pages).astype(np.int32)
        page_table = order.reshape(len(problem.grants), pages_per_row)
        for row, (start, _) in enumerate(problem.grants):
            positions = np.arange(start)
            slots = page_table[row, positions // problem.page_size] * problem.page_size + positions % problem.page_size
            k, v = (x[row][:start].view(start, problem.num_kv_heads, DIM) for x in (self.keys, self.values))
            storage.write(1, k, v, torch.from_numpy(slots))
        own = attention_of(
            problem.num_heads,
            problem.num_kv_heads,
            problem.window,
            is_chunked=problem.is_chunked,
            soft_cap=problem.soft_cap,
        )
        attention = CPUAttention(storage, [replace(own, window=None, is_chunked=False), own])
        if in_steps_of is None:
            return self._step(attention, page_table, [(row, *grant) for row, grant in enumerate(problem.grants)])
        parts = [
            self._step(attention, page_table, [(row, first, min(in_steps_of, start + count - first))])
            for row, (start, count) in enumerate(problem.grants)
            for first in range(start, start + count, in_steps_of)
        ]
        return torch.cat(parts)

    def _step(self, attention: CPUAttention, page_table: Int32, grants: list[tuple[int, int, int]]) -> Tensor:
        def column(i: int) -> Int32:
            return np.array([grant[i] for grant in grants], np.int32)

        granted = GrantedAttention(
            attention=attention,
            page_table=page_table,
            rows=column(0),
            starts=column(1),
            counts=column(2),
            begins=None if self.problem.begins is None else np.array(self.problem.begins, np.int32)[column(0)],
        )
        q = torch.cat(
            [self.queries[row][start - self.problem.grants[row][0] :][:count] for row, start, count in grants]
        )
        k = torch.cat([self.keys[row][start:][:count] for row, start, count in grants])
        v = torch.cat([self.values[row][start:][:count] for row, start, count in grants])
        run = write_down(
            lambda q, k, v: attention.run(q, k, v, 1, self.sinks),
            *(x.numpy() for x in (q, k, v)),
            kernel=kernel(int8=self.problem.int8),
            num_threads=self.problem.num_threads,
            attention=granted,
        )
        return torch.from_numpy(run().copy())


@settings(max_examples=30, deadline=None)
@given(problems())
def test_attention_is_the_naive_one(problem: Problem) -> None:
    check_naive(problem)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(problems())
def test_attention_is_the_naive_one_in_more_problems(problem: Problem) -> None:
    check_naive(problem)


def check_naive(problem: Problem) -> None:
    bench = Bench(problem)
    torch.testing.assert_close(bench.compiled(), bench.naive(), atol=2e-6, rtol=2e-5)


@settings(max_examples=15, deadline=None)
@given(problems(), st.data())
def test_a_grant_may_attend_to_later_positions_only(problem: Problem, data: st.DataObject) -> None:
    """The keys before are unwritten, as after a gap that a drafter leaves."""
    begins = tuple(data.draw(st.integers(0, start)) for start, _ in problem.grants)
    problem = replace(problem, begins=begins)
    bench = Bench(problem)
    expected = bench.naive()
    for row, begin in enumerate(begins):
        bench.keys[row][:begin] = bench.values[row][:begin] = torch.nan
    torch.testing.assert_close(bench.compiled(), expected, atol=2e-6, rtol=2e-5)
    assert torch.equal(bench.compiled(in_steps_of=7), bench.compiled())


@settings(max_examples=15, deadline=None)
@given(problems(), st.sampled_from([1, 7, 64]))
def test_attention_is_the_same_bits_in_any_chunks(problem: Problem, size: int) -> None:
    bench = Bench(problem)
    assert torch.equal(bench.compiled(in_steps_of=size), bench.compiled())


def _in_short(group: int, window: int | None, int8: bool) -> bool:
    """Whether a case is one of six in which each two of the three properties meet in all their values."""
    return (group % 2 == 0) ^ (window is None) ^ int8


@pytest.mark.parametrize(
    ("group", "window", "int8"),
    [
        pytest.param(*case, marks=[] if _in_short(*case) else [pytest.mark.slow])
        for case in itertools.product((1, 3, 8), (None, 40), (False, True))
    ],
)
def test_attention_is_the_same_bits_with_any_page_size(group: int, window: int | None, int8: bool) -> None:
    options = {"num_heads": 2 * group, "num_kv_heads": 2, "window": window, "num_threads": 2, "seed": 1, "int8": int8}
    grants = [(0, 90), (63, 66), (5, 3)]
    benches = [Bench(Problem(grants=grants, page_size=page_size, **options)) for page_size in (16, 1, 7, 128)]
    results = [*(bench.compiled() for bench in benches), *(bench.compiled(in_steps_of=1) for bench in benches[::2])]
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize(
    ("value", "in_steps_of"),
    [*itertools.product((torch.nan, torch.inf, -torch.inf), (None, 10)), (torch.nan, 1), (-torch.inf, 1)],
)
@pytest.mark.parametrize("int8", [False, True])
def test_a_value_that_is_not_finite_does_not_reach_earlier_positions(
    value: float, int8: bool, in_steps_of: int | None
) -> None:
    options = {"num_heads": 3, "num_kv_heads": 1, "page_size": 4, "window": None, "num_threads": 1, "seed": 1}
    bench = Bench(Problem(grants=[(0, 100), (0, 100)], int8=int8, **options))
    expected = bench.compiled()
    bench.values[0][70, 3] = value
    result = bench.compiled(in_steps_of=in_steps_of)
    assert torch.equal(result[:70], expected[:70])
    assert torch.equal(result[100:], expected[100:])
    assert not result[70:100, 3].isfinite().any()


def test_a_single_token_gets_the_same_bits_in_any_batch() -> None:
    grants = [(start, 1) for start in (0, 5, 63, 64, 130, 200)]
    options = {"num_heads": 6, "num_kv_heads": 2, "page_size": 4, "window": None, "num_threads": 2, "seed": 1}
    bench = Bench(Problem(grants=grants, **options))
    assert torch.equal(bench.compiled(), bench.compiled(in_steps_of=1))


def test_large_scores_do_not_overflow() -> None:
    problem = Problem(
        grants=[(70, 40), (90, 1)], num_heads=2, num_kv_heads=1, page_size=16, window=None, num_threads=1, seed=0
    )
    bench = Bench(problem)
    bench.queries = [q * 1000 for q in bench.queries]
    result = bench.compiled()
    assert result.isfinite().all()
    torch.testing.assert_close(result, bench.naive(), atol=1e-2, rtol=1e-2)


def test_storage_of_another_order_is_refused() -> None:
    layout = MultiHeadLayout(num_layers=1, num_kv_heads=1, head_dim=DIM, page_size=4, order="NHD")
    with pytest.raises(ValueError, match="HND"):
        CPUAttention(KVStorage(layout, 2), [attention_of(1, 1, None)])
