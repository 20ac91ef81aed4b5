"""Paged attention on a CPU: planned once a step, run once a layer.

Legend: T tokens of a step, G grants, N items, Q and K elements of all query and key heads of a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagewood.engine.arrays import Int32
from pagewood.engine.runner.compiled.attention import AttentionKernels, cut
from pagewood.kvpool.storage import KVStorage

_UNLIMITED = 1 << 40  # a window that no sequence fills
_TILE_ROWS = 192  # query rows of an item: enough to pay for copying a block of keys
_PARALLEL_COST = 1 << 22  # multiply-adds below which waking the other threads costs more than they save


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """The items of a step for one window, and which thread does which."""

    items: Int32
    """[N, 4], see `compiled.attention.cut`."""
    bounds: NDArray[np.int64]
    """[parts + 1], the first item of each thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """A step, as the kernels want it."""

    rows: Int32
    """[G] row of each grant in the page table."""
    starts: Int32
    """[G] first position of each grant."""
    offsets: Int32
    """[G + 1] first token of each grant in the step."""
    cuts: Mapping[int, _Cut]
    """By window."""


class CPUAttention:
    """Causal grouped-head attention over the pages of a `KVStorage`.

    Invariant: `run` computes what the last `plan` said. Both are called on one thread.
    """

    __slots__ = ("_kernels", "_memories", "_num_threads", "_page_table", "_plan", "_storage", "_tile", "_windows")

    def __init__(
        self,
        storage: KVStorage,
        page_table: Int32,
        kernels: AttentionKernels,
        *,
        num_heads: int,
        windows: Sequence[int | None],
        num_threads: int,
    ) -> None:
        """Attend over `storage`, whose layout must have the order HND and float32.

        Args:
            storage: the KV memory.
            page_table: `[rows, pages of a row]`, page ids; read in every `run`.
            kernels: for the layout's head_dim.
            num_heads: query heads.
            windows: per layer, see `ModelConfig.windows`.
            num_threads: that share the work of a step.

        Raises:
            ValueError: the layout is another.
        """
        layout = storage.layout
        if (layout.order, layout.dtype) != ("HND", "float32"):
            raise ValueError(f"storage must have the layout HND in float32, got {layout.order} in {layout.dtype}")
        self._storage = storage
        self._memories = [storage.layer(i).view(-1).numpy() for i in range(layout.num_layers)]
        self._page_table = page_table
        self._kernels = kernels
        self._windows = [_UNLIMITED if window is None else window for window in windows]
        self._num_threads = num_threads
        self._tile = max(1, _TILE_ROWS * layout.num_kv_heads // num_heads)
        self._plan: _Plan | None = None  # written by: plan

    def plan(self, rows: Int32, starts: Int32, counts: Int32) -> None:
        """Prepare for a step whose grant g computes positions [starts[g], starts[g] + counts[g]) of row rows[g]."""
        offsets = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=offsets[1:])
        cuts = {window: self._cut(starts, counts, window) for window in set(self._windows)}
        self._plan = _Plan(rows=rows, starts=starts, offsets=offsets, cuts=cuts)

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """Write `k` and `v` `[T, K]` to their pages in `layer` and return `[T, Q]`, what `q` `[T, Q]` attends to."""
        assert self._plan is not None
        plan, layout, window = self._plan, self._storage.layout, self._windows[layer]
        work = plan.cuts[window]
        out = torch.empty_like(q)
        attend = self._kernels.attend if len(work.bounds) == 2 else self._kernels.attend_parallel
        attend(
            self._memories[layer], q.numpy(), k.numpy(), v.numpy(), out.numpy(),
            self._page_table, plan.rows, plan.starts, plan.offsets, work.items, work.bounds,
            layout.num_kv_heads, layout.page_size, window, layout.head_dim**-0.5,
        )  # fmt: skip
        return out

    def _cut(self, starts: Int32, counts: Int32, window: int) -> _Cut:
        layout = self._storage.layout
        most = layout.num_kv_heads * int(((counts + self._tile - 1) // self._tile).sum())
        items, costs = np.empty((most, 4), np.int32), np.empty(most, np.float64)
        cut(starts, counts, layout.num_kv_heads, self._tile, window, items, costs)
        ends = np.cumsum(costs)
        parts = self._num_threads if ends[-1] * layout.head_dim >= _PARALLEL_COST else 1
        bounds = np.zeros(parts + 1, np.int64)
        bounds[1:-1] = np.searchsorted(ends, ends[-1] / parts * np.arange(1, parts))
        bounds[-1] = most
        return _Cut(items=items, bounds=bounds)
