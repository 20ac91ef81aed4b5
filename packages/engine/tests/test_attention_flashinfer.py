"""Planning for FlashInfer, with stand-ins of its wrappers, against naive attention over ragged mixes of grants."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagewood.engine.models.parts.attention import AttentionConfig
from pagewood.engine.runner.cuda.attention import FlashInferAttention, HostArrays, PageArrays, Places, offsets_of
from pagewood.engine.runner.cuda.attention_shape import AttentionShape
from pagewood.kvpool import MultiHeadLayout
from pagewood.kvpool.storage import KVStorage
from stand_ins import flashinfer_torch

DIM = 8


@pytest.fixture(scope="module", autouse=True)
def small_workspace() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pagewood.engine.runner.cuda.attention.WORKSPACE_BYTES", 1024)
        yield


def shape_of(
    num_heads: int, num_kv_heads: int, windows: list[int | None], *, soft_cap: float | None = None
) -> AttentionShape:
    return AttentionShape.of(
        [
            AttentionConfig(
                num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=DIM, rope=None, scale=DIM**-0.5, window=window,
                soft_cap=soft_cap,
            )
            for window in windows
        ]
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Grants over rows whose earlier positions are in KV memory already."""

    grants: list[tuple[int, int]]
    """(start, count) of row 0, 1, ..."""
    num_heads: int
    num_kv_heads: int
    page_size: int
    window: int | None
    soft_cap: float | None
    has_sinks: bool
    batch_invariant: bool
    seed: int


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    num_kv_heads = draw(st.sampled_from([1, 2]))
    counts = st.just(1) if draw(st.booleans()) else st.one_of(st.just(1), st.integers(1, 70))
    lengths = st.one_of(st.integers(0, 150), st.sampled_from([15, 16, 63, 64]))
    return Problem(
        grants=draw(st.lists(st.tuples(lengths, counts), min_size=1, max_size=5)),
        num_heads=num_kv_heads * draw(st.sampled_from([1, 3, 4])),
        num_kv_heads=num_kv_heads,
        page_size=draw(st.sampled_from([1, 16, 64])),
        window=draw(st.one_of(st.none(), st.integers(1, 100))),
        soft_cap=draw(st.sampled_from([None, None, 2.0])),
        has_sinks=draw(st.booleans()),
        batch_invariant=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


class Bench:
    """The inputs of a problem, and the results of both implementations."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        generator = torch.Generator().manual_seed(problem.seed)
        kv_size, q_size = problem.num_kv_heads * DIM, problem.num_heads * DIM
        self.starts = np.array([start for start, _ in problem.grants], np.int32)
        self.counts = np.array([count for _, count in problem.grants], np.int32)
        self.ends = self.starts + self.counts
        self.keys = [torch.randn(end, kv_size, generator=generator) * 2 for end in self.ends.tolist()]
        self.values = [torch.randn(end, kv_size, generator=generator) for end in self.ends.tolist()]
        self.queries = [torch.randn(count, q_size, generator=generator) for count in self.counts.tolist()]
        self.sinks = torch.randn(problem.num_heads, generator=generator) * 2 if problem.has_sinks else None

    def naive(self) -> Tensor:
        return torch.cat([self._naive(row, *grant) for row, grant in enumerate(self.problem.grants)])

    def _naive(self, row: int, start: int, count: int) -> Tensor:
        problem = self.problem
        group = problem.num_heads // problem.num_kv_heads
        q = self.queries[row].view(count, problem.num_heads, DIM).double()
        k = self.keys[row].view(-1, problem.num_kv_heads, DIM).double().repeat_interleave(group, 1)
        v = self.values[row].view(-1, problem.num_kv_heads, DIM).double().repeat_interleave(group, 1)
        distance = torch.arange(start, start + count)[:, None] - torch.arange(start + count)[None]
        seen = (distance >= 0) & (distance < (problem.window or 1 << 20))
        scores = torch.einsum("qhd,khd->hqk", q, k) / DIM**0.5
        if problem.soft_cap:
            scores = problem.soft_cap * torch.tanh(scores / problem.soft_cap)
        scores = scores.masked_fill(~seen, -torch.inf)
        if self.sinks is not None:
            scores = torch.cat([scores, self.sinks.double()[:, None, None].expand(-1, count, 1)], -1)
        weights = scores.softmax(-1)[..., : seen.shape[1]]
        return torch.einsum("hqk,khd->qhd", weights, v).reshape(count, -1).float()

    def planned(self) -> Tensor:
        problem, num_grants = self.problem, len(self.counts)
        arrays = PageArrays.of(self.ends, page_size=problem.page_size)
        num_pages = int(arrays.kv_indptr[-1])
        layout = MultiHeadLayout(
            num_layers=2, num_kv_heads=problem.num_kv_heads, head_dim=DIM, page_size=problem.page_size
        )
        storage = KVStorage(layout, num_pages + 1)
        pages = np.random.default_rng(problem.seed).permutation(num_pages + 1)[:num_pages].astype(np.int32)
        for layer in range(2):
            storage.layer(layer).fill_(1e3)  # unwritten positions must not count
        for row, start in enumerate(self.starts.tolist()):
            positions = np.arange(start)
            own = pages[arrays.kv_indptr[row] :]
            slots = own[positions // problem.page_size] * problem.page_size + positions % problem.page_size
            k, v = (x[row][:start].view(start, problem.num_kv_heads, DIM) for x in (self.keys, self.values))
            storage.write(1, k, v, torch.from_numpy(slots))
        shape = shape_of(
            problem.num_heads, problem.num_kv_heads, [None, problem.window], soft_cap=problem.soft_cap or None
        )
        attention = FlashInferAttention(flashinfer_torch, storage, shape, batch_invariant=problem.batch_invariant)
        positions = np.concatenate(
            [np.arange(a, b, dtype=np.int32) for a, b in zip(self.starts, self.ends, strict=True)]
        )
        kv_indptr, last = torch.from_numpy(arrays.kv_indptr), torch.from_numpy(arrays.last_page_len)
        planned = attention.plan(
            HostArrays(
                is_decode=bool((self.counts == 1).all()),
                qo_indptr=torch.from_numpy(offsets_of(self.counts)),
                kv_indptr=kv_indptr,
                last_page_len=last,
                kv_lens=torch.from_numpy(self.ends.astype(np.int32)),
            ),
            Places(
                grants=torch.from_numpy(np.repeat(np.arange(num_grants, dtype=np.int32), self.counts)),
                positions=torch.from_numpy(positions),
                kv_indptr=kv_indptr,
                kv_indices=torch.from_numpy(pages),
                last_page_len=last,
            ),
            {window: torch.empty(0) for window in shape.all_windows_left},
        )
        k, v = (torch.cat([x[row][start:] for row, start in enumerate(self.starts)]) for x in (self.keys, self.values))
        return planned.run(torch.cat(self.queries), k, v, 1, self.sinks)


@settings(max_examples=80, deadline=None)
@given(problems())
def test_planned_attention_equals_naive_attention(problem: Problem) -> None:
    bench = Bench(problem)
    torch.testing.assert_close(bench.planned(), bench.naive(), atol=2e-5, rtol=2e-5)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=9), st.sampled_from([1, 16, 64]))
def test_pages_hold_exactly_the_positions(ends: list[int], page_size: int) -> None:
    arrays = PageArrays.of(np.array(ends, np.int32), page_size=page_size)
    num_pages = np.diff(arrays.kv_indptr)
    assert arrays.kv_indptr.dtype == arrays.last_page_len.dtype == np.int32
    assert ((num_pages - 1) * page_size + arrays.last_page_len).tolist() == ends
    assert ((arrays.last_page_len >= 1) & (arrays.last_page_len <= page_size)).all()


def test_each_plan_uses_the_memory_that_it_is_given() -> None:
    storage = KVStorage(MultiHeadLayout(num_layers=1, num_kv_heads=1, head_dim=DIM, page_size=4), 2)
    attention = FlashInferAttention(flashinfer_torch, storage, shape_of(4, 1, [None]))
    one, zero = torch.tensor([0, 1], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    places = Places(grants=zero, positions=zero, kv_indptr=one, kv_indices=zero, last_page_len=zero + 1)
    kernels, _ = attention.of_graph(places)
    for staging in (torch.empty(1), torch.empty(2)):
        host = HostArrays(is_decode=True, qo_indptr=one, kv_indptr=one, last_page_len=zero + 1, kv_lens=zero + 1)
        kernels.plan(host, zero, {-1: staging})
        wrapper = kernels.by_window[-1]
        assert isinstance(wrapper, flashinfer_torch.BatchDecodeWithPagedKVCacheWrapper)
        assert wrapper._pin_memory_int_workspace_buffer is staging
        assert wrapper.use_tensor_cores


def test_storage_of_another_order_is_refused() -> None:
    storage = KVStorage(MultiHeadLayout(num_layers=1, num_kv_heads=1, head_dim=DIM, page_size=4, order="HND"), 2)
    with pytest.raises(ValueError, match="NHD"):
        FlashInferAttention(flashinfer_torch, storage, shape_of(1, 1, [None]))
