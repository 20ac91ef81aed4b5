"""Adapters of projections on a device: the memory of their slots, and which rows of a step have which slot.

All slots of a projection have matrices of one size, that of the largest rank, so that graphs hold the kernels of any
adapter; what an adapter lacks is zero. The device finds the slot of each token from tables by row, as it finds tokens.
Experts of a layer have one place for all of them in a slot: a row is then a token with one of its experts.

Legend: T rows of a step, P pairs of a token and one of its experts, K inputs, N outputs, C modules of a projection, S
slots, E experts of a layer, R columns of A of a module (the largest rank, rounded up).
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from pagewood.engine.adapters.low_rank import AdapterWeights, Change
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.models.ops import ExpertMatrices, Linear, Projection
from pagewood.engine.models.stored.expert_codes import EXPERTS
from pagewood.engine.runner.cuda.device import Device
from pagewood.engine.runner.cuda.division import DividedRows
from pagewood.engine.runner.cuda.low_rank import GroupedRows, LowRankKernels, Site, adapt

_RANKS = 16
"""R is a multiple of it, so that tensor cores fit."""
_NOTHING = Change()
_Arrays = Sequence[Tensor | None]
"""The arrays of a module in the order of `Change.arrays`, each `[E, ...]`."""


@dataclass(slots=True, kw_only=True, weakref_slot=True)
class PackedAdapter:
    """An adapter in pinned memory."""

    changes: Sequence[Sequence[_Arrays]]
    """By site, of each module. Of an embedding, A is transposed."""
    changes_experts: bool
    nbytes: int


class CUDAAdapters:
    """The adapters of a runner. Invariant: a slot is written on the compute stream, between two steps.

    Args:
        num_slots: S.
        max_rank: of an adapter in a module.
        max_expert_rank: of an adapter in a module of an expert; 0: slots have no room for experts.
        num_rows: rows of the runner.
        device: of the slots.
        dtype: of A and B.
        kernels: compute what is added.
    """

    __slots__ = (
        "_arranged", "_base", "_device", "_division", "_dtype", "_every", "_kernels", "_known", "_max_expert_rank",
        "_max_rank", "_num_slots", "_of_experts", "_own", "_resident", "_row_slots", "_row_starts", "_slots_of_rows",
        "_wanted", "expert_slots", "is_used", "sites",
    )  # fmt: skip

    def __init__(
        self,
        *,
        num_slots: int,
        max_rank: int,
        max_expert_rank: int = 0,
        num_rows: int,
        device: Device,
        dtype: torch.dtype,
        kernels: LowRankKernels,
    ) -> None:
        self._num_slots = num_slots
        self._max_rank = max_rank
        self._max_expert_rank = max_expert_rank
        self._device = device
        self._dtype = dtype
        self._kernels = kernels
        self.sites: list[tuple[Sequence[Projection], Site]] = []
        """With the projections of each, one for each expert."""  # contents written by: add, add_experts, admit
        options = {"dtype": torch.int32, "device": device.torch_device}
        self._row_slots = torch.full((num_rows + 1,), num_slots, **options)
        """[rows + 1], the last one of rows that pad a graph."""  # contents written by: note_rows
        self._row_starts = torch.zeros(num_rows + 1, **options)  # contents written by: note_rows
        self.expert_slots = torch.full((num_slots + 1,), num_slots, **options)
        """[S + 1], each slot itself; S: its adapter changes no expert."""  # contents written by: admit
        self._slots_of_rows: Int32 = np.full(num_rows, -1, np.int32)
        """The slot of each row, as the host knows it."""  # contents written by: admit, in_use
        self._known: WeakValueDictionary[int, PackedAdapter] = WeakValueDictionary()
        """By number; each lives as long as the engine refers to it."""  # contents written by: keep
        self._resident: list[PackedAdapter | None] = [None] * num_slots  # contents written by: admit
        self._division: DividedRows | None = None
        """How the tokens of the pass are divided among ranks; None: this one has all."""  # written by: begin
        self._wanted: Tensor | None = None
        """The tokens that the rows of the pass are; None: all."""  # written by: begin, narrow
        self._base = self._own = self._row_slots  # written by: begin; _own: _go_on
        """The slots of this rank's tokens, and of its rows of the pass."""
        self._every: Tensor | None = None
        """Those of the rows of all ranks; None: they are not known yet."""  # written by: _go_on, _of_all
        self._arranged: dict[int, GroupedRows] = {}
        """The slots of the pass, by number of rows."""  # written by: _go_on; contents written by: rows
        self._of_experts: dict[int, Tensor] = {}
        """The same ones that change experts."""  # written by: _go_on; contents written by: pairs
        self.is_used = True
        """Whether a row of the pass may have an adapter; in graphs any may."""  # written by: adapters, runner

    @property
    def max_rank(self) -> int:
        """The largest rank of an adapter in a module."""
        return self._max_rank

    @property
    def nbytes(self) -> int:
        """Device memory of all slots."""
        return sum(site.nbytes for _, site in self.sites)

    def add(self, linear: Linear[Tensor], projection: Projection) -> Linear[Tensor]:
        """Return a projection to which adapters add; it takes memory for all slots."""
        return _AdaptedLinear(linear, self, self._added([projection], self._max_rank), self._kernels)

    def add_experts(self, matrices: ExpertMatrices) -> AdaptedExperts | None:
        """Return what adds to the products of experts, with memory for all slots; None: slots have no room for them."""
        if not self._max_expert_rank or not matrices.down_parts:
            return None
        parts = matrices.gate_up_parts, matrices.down_parts
        gate_up, down = (self._added(own, self._max_expert_rank) for own in parts)
        return AdaptedExperts(self, gate_up, down, self._kernels, is_part=matrices.is_part)

    def left_out(self, linear: Linear[Tensor]) -> Linear[Tensor]:
        """Return a projection as the model alone computes it, for passes over other rows than those of the step."""
        return _WithoutAdapters(linear, self)

    def _added(self, projections: Sequence[Projection], max_rank: int) -> Site:
        """Add projections that are alike."""
        first, where, rank = projections[0], self._device.torch_device, -(-max_rank // _RANKS) * _RANKS
        sizes, num_groups = first.sizes_here(), self._num_slots * len(projections)
        inputs = first.inputs if first.part is None else len(first.part)
        columns, outputs = rank * len(sizes), sum(sizes)
        shape = (inputs, columns) if first.takes_tokens else (columns, inputs)
        site = Site(
            a=torch.zeros(num_groups, *shape, dtype=self._dtype, device=where),
            b=torch.zeros(num_groups, outputs, rank, dtype=self._dtype, device=where),
            factors=torch.ones(num_groups, outputs, device=where),
            bias=torch.zeros(num_groups, outputs, device=where),
            sizes=sizes,
            num_experts=len(projections),
            takes_tokens=first.takes_tokens,
        )
        self.sites.append((projections, site))
        return site

    def pack(self, weights: AdapterWeights) -> PackedAdapter:
        """Lay an adapter out; on any thread.

        Raises:
            ValueError: it changes experts in a way for which slots have no room.
        """
        for name, change in weights.changes.items():
            rank = 0 if change.a is None else len(change.a)
            if EXPERTS in name and max(1, rank) > self._max_expert_rank:
                raise ValueError(
                    f"max_adapter_expert_rank must be at least {max(1, rank)} on CUDA for an adapter that changes "
                    f"{name}, got {self._max_expert_rank}; one that is merged (--merge-adapter) needs no such room"
                )
        changes = [[*self._packed(weights, projections)] for projections, _ in self.sites]
        arrays = [one for of_site in changes for each in of_site for one in each if one is not None]
        return PackedAdapter(
            changes=changes,
            changes_experts=any(EXPERTS in name for name in weights.changes),
            nbytes=sum(one.nbytes for one in arrays),
        )

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

    @contextmanager
    def in_use(self) -> Generator[None]:
        """Compute as if all rows had adapters, to learn how much memory that takes."""
        self._slots_of_rows.fill(0)
        yield
        self._slots_of_rows.fill(-1)

    def note_rows(self, rows: Tensor, slots: Tensor, starts: Tensor) -> None:
        """Queue the slots of admitted rows `[A]`, and the first positions that their adapters compute."""
        self._row_slots.index_copy_(0, rows, torch.where(slots < 0, self._num_slots, slots))
        self._row_starts.index_copy_(0, rows, starts)

    def begin(self, sources: Tensor, tokens_per_row: int, division: DividedRows | None = None) -> None:
        """Begin a pass over tokens, given their places in the token table, of all ranks if they are divided."""
        if self.is_used:
            rows = torch.div(sources, tokens_per_row, rounding_mode="floor")
            is_active = sources - rows * tokens_per_row >= self._row_starts.index_select(0, rows)
            every = torch.where(is_active, self._row_slots.index_select(0, rows), self._num_slots)
            self._division, self._wanted = division, None
            self._base = every if division is None else division.own(every)
            self._go_on(self._base, every)

    def narrow(self, wanted: Tensor) -> None:
        """Note that from now on, the rows of the pass are the tokens `wanted` `[W]`, of this rank."""
        if self.is_used and wanted is not self._wanted:
            self._wanted = wanted
            keeps_all = self._division is not None and self._division.kept is self._division
            self._go_on(self._base.index_select(0, wanted), self._every if keeps_all else None)

    def pick(self, gathered: Tensor) -> None:
        """Note that from now on, the rows of the pass are those `gathered` `[N]` of the wanted ones of all ranks."""
        if self.is_used:
            self._go_on(self._of_all().index_select(0, gathered), None)

    def _go_on(self, own: Tensor, every: Tensor | None) -> None:
        self._own, self._every, self._arranged, self._of_experts = own, every, {}, {}

    def _slots(self, count: int) -> Tensor:
        """Return the slots of the first rows of this rank, or where these are fewer, of the rows of all ranks."""
        return self._own[:count] if count <= len(self._own) else self._of_all()

    def _of_all(self) -> Tensor:
        """Return the slots of the rows of all ranks, which exchange them if they do not know them yet."""
        if self._every is None:
            assert self._division is not None
            none = self._num_slots  # what pads rows becomes 0
            self._every = self._division.kept.gather_numbers(self._own - none) + none
        return self._every

    def rows(self, count: int) -> GroupedRows:
        """Return the first rows of the pass by slot."""
        if count not in self._arranged:
            self._arranged[count] = self._kernels.arrange(self._slots(count), self._num_slots)
        return self._arranged[count]

    def pairs(self, chosen: Tensor, num_experts: int, *, is_part: bool) -> GroupedRows:
        """Return the first rows of the pass with their experts `chosen` `[T, n]`, by slot and expert.

        With `is_part`, `num_experts` stands for one that is not here.
        """
        count, num_groups = len(chosen), self._num_slots * num_experts
        if count not in self._of_experts:
            self._of_experts[count] = self.expert_slots.index_select(0, self._slots(count))[:, None]
        slots = self._of_experts[count]
        slots = slots.masked_fill(chosen == num_experts, self._num_slots) if is_part else slots
        groups = torch.add(chosen, slots, alpha=num_experts).clamp_(max=num_groups)
        return self._kernels.arrange(groups.flatten(), num_groups)

    def _packed(self, weights: AdapterWeights, projections: Sequence[Projection]) -> list[_Arrays]:
        """Return the arrays of each module of a site."""
        first = projections[0]
        found: list[_Arrays] = []
        for number, rows in enumerate(first.rows_here()):
            changes = [weights.changes.get(one.parts[number][0], _NOTHING) for one in projections]
            kinds = zip(*(_own(change, first, rows).arrays for change in changes), strict=True)
            dtypes = self._dtype, self._dtype, torch.float32, torch.float32
            fills = 0.0, 0.0, 1.0, 0.0
            found.append([self._stacked(*one) for one in zip(kinds, dtypes, fills, strict=True)])
        return found

    def _stacked(self, arrays: Sequence[np.ndarray | None], dtype: torch.dtype, fill: float) -> Tensor | None:
        """Return the arrays of all experts in pinned memory, padded to the largest rank, or None if all are None."""
        shapes = [one.shape for one in arrays if one is not None]
        if not shapes:
            return None
        shape = (len(arrays), *(max(sizes) for sizes in zip(*shapes, strict=True)))
        memory = self._device.pinned(int(np.prod(shape)), dtype).view(shape).fill_(fill)
        for own, array in zip(memory, arrays, strict=True):
            if array is not None:
                numbers = torch.from_numpy(np.ascontiguousarray(array, np.float32))
                own[tuple(slice(size) for size in array.shape)] = numbers
        return memory

    def _fill(self, slot: int, packed: PackedAdapter) -> None:
        self.expert_slots[slot] = slot if packed.changes_experts else self._num_slots
        for (_, site), changes in zip(self.sites, packed.changes, strict=True):
            if site.num_experts > 1 and not packed.changes_experts:
                continue
            groups = slice(slot * site.num_experts, (slot + 1) * site.num_experts)
            a, b, factors, bias = (one[groups] for one in (site.a, site.b, site.factors, site.bias))
            a.zero_()  # what is left in B is multiplied by it
            factors.fill_(1.0)
            bias.zero_()
            first, rank = 0, b.shape[2]
            for number, (size, change) in enumerate(zip(site.sizes, changes, strict=True)):
                outputs, column = slice(first, first + size), number * rank
                first += size
                own_a, own_b, *vectors = change
                if own_a is not None and own_b is not None:
                    columns = slice(column, column + own_b.shape[2])
                    self._device.upload(own_a, a[..., columns] if site.takes_tokens else a[:, columns])
                    self._device.upload(own_b, b[:, outputs, : own_b.shape[2]])
                for own, memory in zip(vectors, (factors, bias), strict=True):
                    if own is not None:
                        self._device.upload(own, memory[:, outputs])


def _own(change: Change, projection: Projection, rows: np.ndarray | None) -> Change:
    """Return the part of a change for the inputs and the outputs `rows` that are here."""

    def own(array: np.ndarray | None) -> np.ndarray | None:
        return array if array is None or rows is None else array[rows]

    a, part = change.a, projection.part
    if a is not None:
        a = a if part is None else a[:, part.start : part.stop]
        a = a.T if projection.takes_tokens else a
    bias = own(change.bias) if projection.adds_bias else None
    return replace(change, a=a, b=own(change.b), factors=own(change.factors), bias=bias)


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
        if self._adapters.is_used and len(x):
            adapt(self._kernels, x, out, self._site, self._adapters.rows(len(x)))
        return out


class _WithoutAdapters:
    """A projection, or what is made of one, to which adapters do not add."""

    __slots__ = ("_adapters", "_linear")

    def __init__(self, linear: Linear[Tensor], adapters: CUDAAdapters) -> None:
        self._linear = linear
        self._adapters = adapters

    def __call__(self, x: Tensor) -> Tensor:
        """Return what the projection alone makes of `x`."""
        self._adapters.is_used, is_used = False, self._adapters.is_used
        out = self._linear(x)
        self._adapters.is_used = is_used
        return out


class AdaptedExperts:
    """What adapters add to the products of experts. Invariant: the same as that of `_AdaptedLinear`."""

    __slots__ = ("_adapters", "_down", "_gate_up", "_is_part", "_kernels")

    def __init__(
        self, adapters: CUDAAdapters, gate_up: Site, down: Site, kernels: LowRankKernels, *, is_part: bool
    ) -> None:
        self._adapters = adapters
        self._gate_up = gate_up
        self._down = down
        self._kernels = kernels
        self._is_part = is_part

    def pairs(self, chosen: Tensor) -> GroupedRows | None:
        """Return the tokens with their experts `chosen` `[T, n]` by slot; None: the model alone computes them."""
        if not self._adapters.is_used or not len(chosen):
            return None
        return self._adapters.pairs(chosen, self._down.num_experts, is_part=self._is_part)

    def to_first(self, x: Tensor, out: Tensor, pairs: GroupedRows) -> None:
        """Add to the first product `out` `[P, N]`, or as many outputs of the gates, of tokens or pairs `x`."""
        adapt(self._kernels, x, out, self._gate_up, pairs)

    def to_second(self, x: Tensor, out: Tensor, pairs: GroupedRows) -> None:
        """Add to the second product `out` `[P, N]` of `x` `[P, K]`."""
        adapt(self._kernels, x, out, self._down, pairs)
