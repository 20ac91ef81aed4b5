"""Attention of one layer: the compiled kernels over pages, and gathering pages for scaled_dot_product_attention.

Run: pytest packages/engine/benchmarks/bench_attention.py --benchmark-enable
"""

# pyright: basic
# torch and pytest-benchmark are typed in part only.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pagewood.engine.models.parts.attention import AttentionConfig
from pagewood.engine.models.parts.rope import RopeConfig
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.cpu.program.attention import CPUAttention
from pagewood.kvpool import MultiHeadLayout
from pagewood.kvpool.storage import KVStorage
from stand_ins.tapes import GrantedAttention, write_down

NUM_THREADS = 2
HEADS, KV_HEADS, DIM, PAGE_SIZE = 12, 4, 64, 16
CASES = {
    "1 token after 1024": [(1024, 1)],
    "32 tokens after 1024": [(1024, 1)] * 32,
    "512 tokens after 0": [(0, 512)],
    "512 tokens after 1024": [(1024, 512)],
    "31 tokens after 512, 256 after 0": [(512, 1)] * 31 + [(0, 256)],
}
Run = Callable[[], Tensor]


class Setting:
    """Rows of pages in random order, with memory behind them."""

    def __init__(self, grants: list[tuple[int, int]]) -> None:
        self.rows = np.arange(len(grants), dtype=np.int32)
        self.starts = np.array([start for start, _ in grants], np.int32)
        self.counts = np.array([count for _, count in grants], np.int32)
        pages_per_row = -(-int((self.starts + self.counts).max()) // PAGE_SIZE)
        layout = MultiHeadLayout(num_layers=1, num_kv_heads=KV_HEADS, head_dim=DIM, page_size=PAGE_SIZE, order="HND")
        num_pages = pages_per_row * len(grants)
        self.storage = KVStorage(layout, num_pages)
        self.storage.layer(0).normal_()
        order = np.random.default_rng(0).permutation(num_pages).astype(np.int32)
        self.page_table = order.reshape(len(grants), pages_per_row)

    def compiled(self, q: Tensor, k: Tensor, v: Tensor) -> Run:
        config = AttentionConfig(
            num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, rope=RopeConfig(head_dim=DIM, theta=10000.0),
            scale=DIM**-0.5,
        )  # fmt: skip
        attention = CPUAttention(self.storage, [config])
        run = write_down(
            lambda q, k, v: attention.run(q, k, v, 0),
            *(x.numpy() for x in (q, k, v)),
            kernel=warm_up(DIM),
            num_threads=NUM_THREADS,
            attention=GrantedAttention(
                attention=attention,
                page_table=self.page_table,
                rows=self.rows,
                starts=self.starts,
                counts=self.counts,
            ),
        )
        return lambda: torch.from_numpy(run())

    def gathered(self, q: Tensor, k: Tensor, v: Tensor) -> Run:
        """Copy the pages of each grant together, then compute attention with torch."""
        offsets = np.concatenate(([0], np.cumsum(self.counts)))

        def run() -> Tensor:
            parts: list[Tensor] = []
            for row, start, count in zip(self.rows, self.starts, self.counts, strict=True):
                end, own = int(start + count), slice(offsets[row], offsets[row + 1])
                positions = np.arange(start, end)
                slots = self.page_table[row, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
                shape = (count, KV_HEADS, DIM)
                self.storage.write(0, k[own].view(shape), v[own].view(shape), torch.from_numpy(slots))
                pages = self.storage.layer(0)[torch.from_numpy(self.page_table[row])]
                keys, values = pages.permute(1, 2, 0, 3, 4).reshape(2, KV_HEADS, -1, DIM)[:, :, :end]
                mask = torch.ones(count, end, dtype=torch.bool).tril(int(start))
                queries = q[own].view(count, HEADS, DIM).transpose(0, 1)
                out = functional.scaled_dot_product_attention(
                    queries[None], keys[None], values[None], attn_mask=mask, enable_gqa=True
                )
                parts.append(out[0].transpose(0, 1).reshape(count, -1))
            return torch.cat(parts)

        return run


@pytest.mark.parametrize("way", ["compiled", "gathered"])
@pytest.mark.parametrize("grants", CASES.values(), ids=CASES)
def test_attention(benchmark: Any, grants: list[tuple[int, int]], way: str) -> None:
    torch.set_num_threads(NUM_THREADS)
    setting = Setting(grants)
    num_tokens = int(setting.counts.sum())
    q, k, v = (torch.randn(num_tokens, heads * DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    run: Run = getattr(setting, way)(q, k, v)
    with torch.inference_mode():
        result = benchmark(run)
        torch.testing.assert_close(result, setting.gathered(q, k, v)(), atol=1e-4, rtol=1e-4)
    best_s = benchmark.stats.stats.min if benchmark.stats else float("inf")
    pairs = sum(count * start + count * (count + 1) // 2 for start, count in grants)
    benchmark.extra_info["GFLOP/s"] = round(4 * HEADS * DIM * pairs / best_s / 1e9, 1)
    keys = int((setting.starts + setting.counts).sum())
    benchmark.extra_info["GB/s"] = round(keys * KV_HEADS * DIM * 8 / best_s / 1e9, 1)
