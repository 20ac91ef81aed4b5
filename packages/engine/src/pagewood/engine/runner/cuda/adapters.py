"""Adapters of projections on a device: the memory of their slots, and which rows of a step have which slot.

All slots of a projection have matrices of one size, that of the largest rank, so that graphs hold the kernels of any
adapter; what an adapter lacks is zero. The device finds the slot of each token from tables by row, as it finds tokens.

Legend: T rows of a step, K inputs, N outputs, C modules of a projection, S slots, R columns of A of a module (the
largest rank, rounded up).
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pagewood.engine.adapters.low_rank import AdapterWeights, Change
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.models.ops import Linear, Projection
from pagewood.engine.models.stored.expert_codes import EXPERTS
from pagewood.engine.runner.cuda.device import Device

_RANKS = 16
"""R is a multiple of it, so that tensor cores fit."""
_NOTHING = Change()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotRows:
    """Rows by slot."""

    slots: Tensor
    """`[T] int32`, the slot of each row; S: the model alone computes it."""
    order: Tensor
    """`[T] int32`, the rows by slot."""
    starts: Tensor
    """`[S + 1] int32`, the first place of each slot, and the end."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Site:
    """What the slots have for one projection."""

    a: Tensor
    """`[S, C R, K]`; of an embedding `[S, K, C R]`."""
    b: Tensor
    """`[S, N, R]`, scaled."""
    factors: Tensor
    """`[S, N] float32`, of what the model computes."""
    bias: Tensor
    """`[S, N] float32`"""
    sizes: Sequence[int]
    """Outputs of each module."""
    takes_tokens: bool


class LowRankKernels(Protocol):
    """Compute what adapters add. Invariant: a row's bits depend neither on other rows nor on its place."""

    def arrange(self, slots: Tensor, num_slots: int) -> SlotRows:
        """Return rows `[T]` by slot."""
        ...

    def shrink(self, x: Tensor, site: Site, rows: SlotRows) -> Tensor:
        """Return `[T, C R] float32`, the rows of `x` `[T, K]` times A of their slots, in `rows.order`."""
        ...

    def expand(self, shrunk: Tensor, out: Tensor, site: Site, rows: SlotRows) -> None:
        """Change the rows of `out` `[T, N]` that have a slot; `shrunk` is the result of `shrink`."""
        ...


@dataclass(slots=True, kw_only=True, weakref_slot=True)
class PackedAdapter:
    """An adapter in pinned memory."""

    changes: Sequence[Sequence[Sequence[Tensor | None]]]
    """By projection, of each module; see `Change.arrays`. Of an embedding, A is transposed."""
    nbytes: int


class CUDAAdapters:
    """The adapters of a runner. Invariant: a slot is written on the compute stream, between two steps.

    Args:
        num_slots: S.
        max_rank: of an adapter in a module.
        num_rows: rows of the runner.
        device: of the slots.
        dtype: of A and B.
        kernels: compute what is added.
    """

    __slots__ = (
        "_arranged", "_base", "_device", "_dtype", "_kernels", "_known", "_max_rank", "_narrowed", "_num_slots",
        "_projections", "_rank", "_resident", "_row_slots", "_row_starts", "_sites", "_slots_of_rows", "is_used",
    )  # fmt: skip

    def __init__(
        self,
        *,
        num_slots: int,
        max_rank: int,
        num_rows: int,
        device: Device,
        dtype: torch.dtype,
        kernels: LowRankKernels,
    ) -> None:
        self._num_slots = num_slots
        self._max_rank = max_rank
        self._rank = -(-max_rank // _RANKS) * _RANKS
        self._device = device
        self._dtype = dtype
        self._kernels = kernels
        self._projections: list[Projection] = []  # written by: add
        self._sites: list[Site] = []  # contents written by: add, admit
        options = {"dtype": torch.int32, "device": device.torch_device}
        self._row_slots = torch.full((num_rows + 1,), num_slots, **options)
        """[rows + 1], the last one of rows that pad a graph."""  # contents written by: note_rows
        self._row_starts = torch.zeros(num_rows + 1, **options)  # contents written by: note_rows
        self._slots_of_rows: Int32 = np.full(num_rows, -1, np.int32)
        """The slot of each row, as the host knows it."""  # contents written by: admit
        self._known: WeakValueDictionary[int, PackedAdapter] = WeakValueDictionary()
        """By number; each lives as long as the engine refers to it."""  # contents written by: keep
        self._resident: list[PackedAdapter | None] = [None] * num_slots  # contents written by: admit
        self._base = self._row_slots  # written by: begin
        self._narrowed = self._row_slots  # written by: begin, narrow
        self._arranged: dict[int, SlotRows] = {}
        """The slots of the pass, by number of rows."""  # written by: begin, narrow; contents written by: rows
        self.is_used = True
        """Whether a row of the pass may have an adapter; in graphs any may."""  # written by: admit, runner

    @property
    def projections(self) -> Sequence[Projection]:
        """The projections of the model that adapters may change."""
        return self._projections

    @property
    def max_rank(self) -> int:
        """The largest rank of an adapter in a module."""
        return self._max_rank

    def add(self, linear: Linear[Tensor], projection: Projection) -> Linear[Tensor]:
        """Return a projection to which adapters add; it takes memory for all slots."""
        sizes, where = projection.sizes_here(), self._device.torch_device
        inputs = projection.inputs if projection.part is None else len(projection.part)
        columns, outputs = self._rank * len(sizes), sum(sizes)
        shape = (inputs, columns) if projection.takes_tokens else (columns, inputs)
        site = Site(
            a=torch.zeros(self._num_slots, *shape, dtype=self._dtype, device=where),
            b=torch.zeros(self._num_slots, outputs, self._rank, dtype=self._dtype, device=where),
            factors=torch.ones(self._num_slots, outputs, device=where),
            bias=torch.zeros(self._num_slots, outputs, device=where),
            sizes=sizes,
            takes_tokens=projection.takes_tokens,
        )
        self._projections.append(projection)
        self._sites.append(site)
        return _AdaptedLinear(linear, self, site, self._kernels)

    def pack(self, weights: AdapterWeights) -> PackedAdapter:
        """Lay an adapter out; on any thread.

        Raises:
            ValueError: it changes experts.
        """
        if changed := next((name for name in weights.changes if EXPERTS in name), None):
            raise ValueError(
                f"experts must not be changed on CUDA, where slots for all would take much memory, got {changed}; an "
                "adapter that is merged (--merge-adapter) may change them"
            )
        changes = [
            [
                self._packed(weights.changes.get(name, _NOTHING), projection, rows)
                for (name, _), rows in zip(projection.parts, projection.rows_here(), strict=True)
            ]
            for projection in self._projections
        ]
        arrays = [one for of_projection in changes for each in of_projection for one in each if one is not None]
        return PackedAdapter(changes=changes, nbytes=sum(one.nbytes for one in arrays))

    def keep(self, number: int, packed: PackedAdapter) -> None:
        """Make an adapter known by its number, as long as it is referred to."""
        self._known[number] = packed

    def admit(self, batch: Batch) -> None:
        """Queue the contents of slots that get another adapter, and note whether a row of the batch has one."""
        if len(batch.adapters):
            self._slots_of_rows[batch.admitted_rows()] = batch.adapters[:, 0]
            for slot, number, _ in batch.adapters.tolist():
                if slot >= 0 and self._resident[slot] is not self._known[number]:
                    self._resident[slot] = self._known[number]
                    self._fill(slot, self._known[number])
        self.is_used = bool((self._slots_of_rows[batch.rows] >= 0).any())

    def note_rows(self, rows: Tensor, slots: Tensor, starts: Tensor) -> None:
        """Queue the slots of admitted rows `[A]`, and the first positions that their adapters compute."""
        self._row_slots.index_copy_(0, rows, torch.where(slots < 0, self._num_slots, slots))
        self._row_starts.index_copy_(0, rows, starts)

    def begin(self, rows: Tensor, positions: Tensor) -> None:
        """Begin a pass over tokens of some rows `[T]` at `positions` `[T]`."""
        if self.is_used:
            is_active = positions >= self._row_starts.index_select(0, rows)
            self._base = torch.where(is_active, self._row_slots.index_select(0, rows), self._num_slots)
            self._narrowed, self._arranged = self._base, {}

    def narrow(self, wanted: Tensor) -> None:
        """Note that from now on, the rows of the pass are the tokens `wanted` `[W]`."""
        if self.is_used:
            self._narrowed, self._arranged = self._base.index_select(0, wanted), {}

    def rows(self, count: int) -> SlotRows:
        """Return the first rows of the pass by slot."""
        if count not in self._arranged:
            self._arranged[count] = self._kernels.arrange(self._narrowed[:count], self._num_slots)
        return self._arranged[count]

    def _packed(self, change: Change, projection: Projection, rows: np.ndarray | None) -> list[Tensor | None]:
        part = projection.part

        def pinned(array: np.ndarray | None, dtype: torch.dtype) -> Tensor | None:
            if array is None:
                return None
            numbers = torch.from_numpy(np.ascontiguousarray(array, np.float32))
            memory = self._device.pinned(numbers.numel(), dtype).view(numbers.shape)
            return memory.copy_(numbers)

        def own(array: np.ndarray | None) -> np.ndarray | None:
            return array if array is None or rows is None else array[rows]

        a = change.a if change.a is None or part is None else change.a[:, part.start : part.stop]
        return [
            pinned(a if a is None or not projection.takes_tokens else a.T, self._dtype),
            pinned(own(change.b), self._dtype),
            pinned(own(change.factors), torch.float32),
            pinned(own(change.bias) if projection.adds_bias else None, torch.float32),
        ]

    def _fill(self, slot: int, packed: PackedAdapter) -> None:
        for site, changes in zip(self._sites, packed.changes, strict=True):
            a, b, factors, bias = (one[slot] for one in (site.a, site.b, site.factors, site.bias))
            a.zero_()  # what is left in B is multiplied by it
            factors.fill_(1.0)
            bias.zero_()
            first = 0
            for number, (size, change) in enumerate(zip(site.sizes, changes, strict=True)):
                outputs, column = slice(first, first + size), number * self._rank
                first += size
                own_a, own_b, *vectors = change
                if own_a is not None and own_b is not None:
                    columns = slice(column, column + own_b.shape[1])
                    self._device.upload(own_a, a[:, columns] if site.takes_tokens else a[columns])
                    self._device.upload(own_b, b[outputs, : own_b.shape[1]])
                for own, memory in zip(vectors, (factors, bias), strict=True):
                    if own is not None:
                        self._device.upload(own, memory[outputs])


class _AdaptedLinear:
    """A projection to which adapters add. Invariant: rows without an adapter have the bits of the projection itself."""

    __slots__ = ("_adapters", "_kernels", "_linear", "_site")

    def __init__(self, linear: Linear[Tensor], adapters: CUDAAdapters, site: Site, kernels: LowRankKernels) -> None:
        self._linear = linear
        self._adapters = adapters
        self._site = site
        self._kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        """Return `[T, N]` of `[T, K]`, or of tokens `[T]`."""
        out = self._linear(x)
        if not self._adapters.is_used or not len(x):
            return out
        rows = self._adapters.rows(len(x))
        shrunk = _picked(x, self._site, rows) if self._site.takes_tokens else self._kernels.shrink(x, self._site, rows)
        self._kernels.expand(shrunk, out, self._site, rows)
        return out


def _picked(tokens: Tensor, site: Site, rows: SlotRows) -> Tensor:
    """Return what `shrink` does for an embedding: the rows of A of the tokens' slots, in `rows.order`."""
    num_slots, num_tokens, columns = site.a.shape
    slots = rows.slots.clamp(max=num_slots - 1).long()
    places = (slots * num_tokens + tokens).index_select(0, rows.order)
    return site.a.view(-1, columns).index_select(0, places).float()


class TorchLowRank:
    """`LowRankKernels` in plain torch, slot by slot: for devices without Triton, and as the reference.

    Args:
        multiply: computes products in float32, see `ops.Multiply`; rows have the bits that they have there.
    """

    __slots__ = ("_multiply",)

    def __init__(self, multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor] = functional.linear) -> None:
        self._multiply = multiply

    def arrange(self, slots: Tensor, num_slots: int) -> SlotRows:
        """Sort rows."""
        ascending, order = slots.sort(stable=True)
        every = torch.arange(num_slots + 1, device=slots.device, dtype=torch.int32)
        return SlotRows(slots=slots, order=order.int(), starts=torch.searchsorted(ascending, every, out_int32=True))

    def shrink(self, x: Tensor, site: Site, rows: SlotRows) -> Tensor:
        """Multiply all rows by A of every slot."""
        own, slots = x.index_select(0, rows.order).float(), rows.slots.index_select(0, rows.order)
        shrunk = own.new_zeros(len(own), site.a.shape[1])
        for slot, a in enumerate(site.a.float()):
            shrunk = torch.where((slots == slot)[:, None], self._multiply(own, a, None), shrunk)
        return shrunk

    def expand(self, shrunk: Tensor, out: Tensor, site: Site, rows: SlotRows) -> None:
        """Multiply all rows by B of every slot."""
        order, by_row = rows.order.long(), torch.empty_like(shrunk)
        by_row.index_copy_(0, order, shrunk)
        before, changed = out.float(), out.float()
        parts = by_row.split(site.b.shape[2], dim=1)
        for slot, b in enumerate(site.b.float()):
            matrices = b.split(list(site.sizes))
            products = [self._multiply(own, matrix, None) for own, matrix in zip(parts, matrices, strict=True)]
            own = before * site.factors[slot] + torch.cat(products, 1) + site.bias[slot]
            changed = torch.where((rows.slots == slot)[:, None], own, changed)
        out.copy_(changed)
