"""Gives the weights of a checkpoint the form that an engine is configured for, and lays them out, a few rows at a time.

Legend: N outputs, K inputs.
"""

# pyright: basic
# torch's conversions from and to numpy have no types.

from __future__ import annotations

import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from pagewood.engine.models.stored.stacked_rows import StackedRows
from pagewood.engine.runner.cpu.compiled.products.dot import processor_has
from pagewood.engine.runner.cpu.compiled.products.pair_dot import PairLevel, pair_level
from pagewood.engine.runner.cpu.compiled.products.quantise_weights import (
    GROUP,
    quantise_int4_panels,
    quantise_int8_panels,
)
from pagewood.engine.runner.cpu.compiled.products.tile import WIDTH
from pagewood.engine.runner.cpu.compiled.products.weight_kind import STEP, WeightKind
from pagewood.engine.runner.cpu.weights.packing import PackedShape, PackedWeight, allocate, shape_of
from pagewood.engine.weights.matrix_forms import (
    F32,
    BFloat16,
    Float16,
    Weight,
    quantise_int4,
    quantise_int8,
    rows_of,
    to_bfloat16,
)

if TYPE_CHECKING:
    from pagewood.engine.api import ActivationFormat, WeightFormat

_HALVES = {
    WeightKind.BFLOAT16: torch.bfloat16,
    WeightKind.BFLOAT16_PAIRS: torch.bfloat16,
    WeightKind.FLOAT16: torch.float16,
}
Matrix: TypeAlias = Tensor | StackedRows | Weight
"""A matrix of weights `[N, K]`: numbers in memory, numbers in files, or a form that a checkpoint was quantised to."""

_SLICE_BYTES = 1 << 20  # of float32 values that are converted at a time
_SLICES = 2  # that a thread converts before the memory of a file that holds them is given back


class Packer:
    """Packs matrices one after the other. Invariant: what it returns does not refer to what it was given."""

    __slots__ = ("_has_pairs", "_memory", "_num_threads", "activations", "form", "made", "mapped")

    def __init__(
        self,
        form: WeightFormat,
        *,
        activations: ActivationFormat = "auto",
        memory: Callable[[PackedShape], tuple[PackedWeight, bool]] | None = None,
        num_threads: int = 1,
    ) -> None:
        """Choose a form for weights in floating point; those that have codes already keep them.

        Args:
            form: auto: as precise as the checkpoint, so bfloat16 and float16 stay as they are.
            activations: auto: rounded to eight bits for products with codes, and to bfloat16 for products with bfloat16
                weights if the processor has an instruction for that; bfloat16: the same, on any processor; float32: not
                rounded.
            memory: returns memory for a matrix, and whether the matrix is there already; None: new memory.
            num_threads: that convert slices of a matrix.
        """
        self.form: WeightFormat = form
        self.activations: ActivationFormat = activations
        self._has_pairs = activations == "bfloat16" or (activations == "auto" and pair_level() == PairLevel.AVX512_BF16)
        self._memory = memory or (lambda shape: (allocate(shape), False))
        self._num_threads = num_threads
        self.made: list[NDArray[Any]] = []
        """The memory of all matrices that lie in new memory."""  # written by: pack, panels, table
        self.mapped: list[NDArray[Any]] = self.made if memory is None else []
        """The memory of those that lie where `memory` says."""  # written by: pack

    def pack(self, weight: Matrix) -> PackedWeight | None:
        """Return `weight` `[N, K]` packed; None: its form is float32, see `panels` and `table`.

        Rows on the device `meta` stand for those whose packed form is in memory already.
        """
        if isinstance(weight, Weight):
            return self._pack_form(weight)
        size, inputs = weight.shape
        kind = self.kind(weight.dtype, inputs)
        if kind is None:
            return None
        depth = -(-inputs // STEP) * STEP
        group = {WeightKind.INT8: depth, WeightKind.INT4: GROUP}.get(kind, inputs)
        packed, is_written = self._memory(PackedShape(kind=kind, size=size, inputs=inputs, group=group))
        self.mapped.append(packed.memory)
        if is_written:
            return packed
        if kind.has_codes:
            for quantise in (quantise_int4_panels, quantise_int8_panels):
                quantise.compile()
        source = _stacked(weight)

        def write(first: int, rows: Tensor) -> None:
            if kind == WeightKind.INT8:  # a part of a matrix has the codes of the whole
                _quantise(rows, packed, first, source.largest(first, first + len(rows)))
            elif kind.has_codes:
                _quantise(rows, packed, first)
            else:
                packed.write(first, _form(rows, kind))

        self._write_rows(source, weight.dtype if weight.dtype == _HALVES.get(kind) else torch.float32, write)
        return packed

    def panels(self, weight: Matrix) -> F32:
        """Return `weight` `[N, K]` as the panels `[P, K, 32]` of `compiled.products.matmul`, in new memory."""
        size, inputs = weight.shape
        panels = torch.zeros(-(-size // WIDTH), inputs, WIDTH)

        def write(first: int, rows: Tensor) -> None:
            whole = functional.pad(rows, (0, 0, 0, -len(rows) % WIDTH)) if len(rows) % WIDTH else rows
            start = first // WIDTH
            panels[start : start + len(whole) // WIDTH] = whole.view(-1, WIDTH, inputs).transpose(1, 2)

        self._write_floats(weight, write)
        self.made.append(panels.numpy())
        return self.made[-1]

    def table(self, weight: Matrix) -> F32:
        """Return a copy of `weight` `[N, K]`."""
        table = torch.empty(weight.shape)

        def write(first: int, rows: Tensor) -> None:
            table[first : first + len(rows)] = rows

        self._write_floats(weight, write)
        self.made.append(table.numpy())
        return self.made[-1]

    def _write_floats(self, weight: Matrix, write: Callable[[int, Tensor], None]) -> None:
        """Call `write` for the first output of each slice and its numbers `[n, K]` as float32."""
        if isinstance(weight, Weight):

            def widen(first: int, last: int) -> None:
                write(first, torch.from_numpy(rows_of(weight, slice(first, last)).dequantised()))

            self._write(*weight.shape, widen, None)
        else:
            self._write_rows(_stacked(weight), torch.float32, write)

    def _write_rows(self, source: StackedRows, dtype: torch.dtype, write: Callable[[int, Tensor], None]) -> None:
        """Call `write` as `_write_floats` does, with numbers as `dtype`, in memory that is reused."""
        size, inputs = source.shape
        buffers: SimpleQueue[Tensor] = SimpleQueue()
        for _ in range(self._num_threads):
            buffers.put(_passing(_slice_rows(inputs) * inputs, dtype))

        def write_one(first: int, last: int) -> None:
            buffer = buffers.get()
            try:
                rows = buffer[: (last - first) * inputs].view(-1, inputs)
                source.write_to(rows, first)
                write(first, rows)
            finally:  # otherwise the slices behind one that fails would wait for ever
                buffers.put(buffer)

        self._write(size, inputs, write_one, source.forget)

    def _write(
        self, size: int, inputs: int, write: Callable[[int, int], None], forget: Callable[[int, int], None] | None
    ) -> None:
        """Call `write` for outputs [first, last) in slices, on all threads, and `forget` for runs of slices."""
        rows = _slice_rows(inputs)
        run = rows * _SLICES * self._num_threads
        with ThreadPoolExecutor(self._num_threads) as threads:
            for start in range(0, size, run):
                end = min(start + run, size)
                firsts = range(start, end, rows)
                list(threads.map(write, firsts, (min(first + rows, end) for first in firsts)))
                if forget is not None:
                    forget(start, end)

    def kind(self, dtype: torch.dtype, inputs: int) -> WeightKind | None:
        """Return the layout of a tensor; None: float32."""
        match self.form:
            case "int8":
                return WeightKind.INT8
            case "int4":
                return WeightKind.INT4
            case "float32":
                return None
            case "bfloat16":
                kind = WeightKind.BFLOAT16
            case "auto":
                kinds = {torch.bfloat16: WeightKind.BFLOAT16, torch.float16: WeightKind.FLOAT16}
                kind = kinds.get(dtype)
        if kind == WeightKind.BFLOAT16 and self._has_pairs:
            return WeightKind.BFLOAT16_PAIRS
        if inputs % 2 or (kind == WeightKind.FLOAT16 and not processor_has("f16c")):
            return None  # the loops take two inputs at a time, and widen float16 in registers
        return kind

    def _pack_form(self, weight: Weight) -> PackedWeight | None:
        shape = shape_of(weight, pairs=self._has_pairs)
        is_half = shape is not None and shape.kind in (WeightKind.BFLOAT16, WeightKind.FLOAT16)
        if is_half and (weight.shape[1] % 2 or (isinstance(weight, Float16) and not processor_has("f16c"))):
            shape = None
        if shape is None:
            return None
        packed, is_written = self._memory(shape)
        self.mapped.append(packed.memory)
        if not is_written:
            size, inputs = weight.shape
            self._write(
                size, inputs, lambda first, last: packed.write(first, rows_of(weight, slice(first, last))), None
            )
        return packed


def packed_bytes(weight: Matrix, form: WeightFormat) -> int:
    """Return the bytes that `weight` `[N, K]`, which may be on the device `meta`, takes when it is packed as `form`."""
    sizes: list[int] = []

    def note(shape: PackedShape) -> tuple[PackedWeight, bool]:
        sizes.append(shape.nbytes)
        return PackedWeight(shape=shape, memory=np.empty(0, np.uint8)), True

    if form != "float32":
        Packer(form, memory=note).pack(weight)
    return sizes[0] if sizes else 4 * (-(-weight.shape[0] // WIDTH) * WIDTH) * weight.shape[1]


def _stacked(weight: Tensor | StackedRows) -> StackedRows:
    return StackedRows([weight]) if isinstance(weight, Tensor) else weight


def _slice_rows(inputs: int) -> int:
    """Return the outputs of a slice, whole panels."""
    return max(1, _SLICE_BYTES // (4 * inputs * WIDTH)) * WIDTH


def _passing(size: int, dtype: torch.dtype) -> Tensor:
    """Return `[size]` for a short time, in memory that goes back to the system at once; malloc would keep it."""
    return torch.frombuffer(mmap.mmap(-1, size * dtype.itemsize), dtype=dtype)


def rounded(rows: Tensor, kind: WeightKind | None) -> F32:
    """Return what the numbers `[n, K]` of a matrix become in the layout that `Packer.kind` has chosen."""
    if kind is None:
        return rows.float().numpy()
    if not kind.has_codes:
        return _form(rows, kind).dequantised()
    values = rows.float().numpy()
    if kind == WeightKind.INT8:
        return quantise_int8(values).dequantised()
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % GROUP)))
    return quantise_int4(padded, group=GROUP).dequantised()[:, : values.shape[1]]


def _form(rows: Tensor, kind: WeightKind) -> Weight:
    """Return some rows of a matrix as the form of `kind`, a layout of 16 bits."""
    if kind == WeightKind.FLOAT16:
        return Float16(rows.numpy())
    if rows.dtype == torch.bfloat16:
        return BFloat16(rows.view(torch.int16).numpy().view(np.uint16))
    return to_bfloat16(rows.float().numpy())


def _quantise(rows: Tensor, packed: PackedWeight, first: int, largest: Tensor | None = None) -> None:
    """Write some rows `[n, K] float32` of a matrix, the first of which is a multiple of 32, as codes.

    For `largest` `[n] float32` see `quantise_int8_panels`.
    """
    values = rows.numpy()
    at = packed.panels.ctypes.data + first // WIDTH * packed.shape.panel_bytes
    if packed.scales is None:
        quantise_int4_panels(values.ctypes.data, *values.shape, at)
    else:
        scales_at, largest_at = packed.scales[first:].ctypes.data, 0 if largest is None else largest.data_ptr()
        quantise_int8_panels(values.ctypes.data, *values.shape, at, scales_at, largest_at)
