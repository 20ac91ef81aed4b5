"""From the forms of weights to the layouts that the kernels read; see `compiled.products.weight_kind`.

Legend: N outputs, K inputs, D inputs filled up, P panels of 32 outputs, G groups of inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.runner.cpu.compiled.products.tile import WIDTH
from pagewood.engine.runner.cpu.compiled.products.weight_kind import HALF, STEP, WeightKind
from pagewood.engine.weights.matrix_forms import BFloat16, Float4, Float16, Float32, Int4, Int8, Int8Group, Weight
from pagewood.engine.weights.small_floats import nibbles

_ALIGNMENT = 64  # bytes of a cache line, and of the longest vector
_MAX_DEPTH = 1 << 16  # of codes: 255 * 127 * inputs fits into an int32

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedShape:
    """What packed weights look like. Invariant: `group` divides `depth`."""

    kind: WeightKind
    size: int
    """N."""
    inputs: int
    """K."""
    group: int
    """Inputs that share a scale; of INT8 all, and of 16-bit numbers `inputs`."""

    @property
    def depth(self) -> int:
        """D."""
        return -(-self.inputs // self.kind.unit) * self.kind.unit

    @property
    def num_panels(self) -> int:
        """P."""
        return -(-self.size // WIDTH)

    @property
    def panel_bytes(self) -> int:
        """Bytes of a panel."""
        if self.kind.has_groups:
            return 2 * (self.depth // self.group) * self.kind.block_bytes(self.group)
        return self.depth * WIDTH * (1 if self.kind.has_codes else 2)

    @property
    def nbytes(self) -> int:
        """Bytes of all panels and of the scales behind them."""
        return self.num_panels * (self.panel_bytes + (4 * WIDTH if self.kind.has_scales_apart else 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """A matrix of weights as the kernels read it. Invariant: `memory` has `shape.nbytes` bytes and is aligned to 64."""

    shape: PackedShape
    memory: Bytes

    @property
    def panels(self) -> Bytes:
        """All panels, one after the other."""
        return self.memory[: self.shape.num_panels * self.shape.panel_bytes]

    @property
    def scales(self) -> NDArray[np.float32] | None:
        """`[32 P]`, one for each output, of kinds that have them apart; None: they are in the panels, if any."""
        if not self.shape.kind.has_scales_apart:
            return None
        return self.memory[self.shape.num_panels * self.shape.panel_bytes :].view(np.float32)

    def write(self, first: int, weight: Weight) -> None:
        """Lay out outputs from `first` on, a multiple of 32, as many as `weight` `[n, K]` has.

        Only the last part may have a number of outputs that is not a multiple of 32.
        """
        shape = self.shape
        count = weight.shape[0]
        panels = slice(first // WIDTH, -(-(first + count) // WIDTH))
        rows = -count % WIDTH
        whole: Any = self.panels.reshape(shape.num_panels, shape.panel_bytes)[panels]
        if isinstance(weight, BFloat16):
            filled = _filled(weight.bits, rows, shape.depth - shape.inputs, 0)
            whole[:] = _in_panels(filled.view(np.uint8), 4)
        elif isinstance(weight, Float16):
            filled = _filled(weight.values, rows, 0, 0)
            whole[:] = _in_panels(filled.view(np.uint8), 2)
        elif isinstance(weight, Int8):
            whole[:] = _in_panels(_filled(weight.codes.view(np.uint8) ^ 128, rows, shape.depth - shape.inputs, 128), 4)
            self._write_scales(panels, weight.scales, rows)
        else:
            assert isinstance(weight, Int4 | Int8Group | Float4)
            self._write_groups(whole, weight, rows)
            if isinstance(weight, Float4) and weight.factors is not None:
                self._write_scales(panels, weight.factors, rows)

    def _write_scales(self, panels: slice, scales: NDArray[np.float32], rows: int) -> None:
        """Write the scales of the outputs of some panels, and fill up `rows`."""
        assert self.scales is not None
        self.scales[panels.start * WIDTH : panels.stop * WIDTH] = _filled(scales[:, None], rows, 0, 1)[:, 0]

    def _write_groups(self, whole: Any, weight: Int4 | Int8Group | Float4, rows: int) -> None:
        """Lay out weights with scales for groups in `whole` `[panels, panel_bytes]`, and fill up `rows` outputs."""
        shape, kind = self.shape, self.shape.kind
        num_groups = shape.depth // shape.group
        blocks = whole.reshape(2 * len(whole), num_groups, kind.block_bytes(shape.group))
        columns = shape.depth - weight.shape[1]

        def of_groups(values: Any, value: int) -> Any:
            filled = _filled(values, rows, columns // shape.group, value).reshape(-1, HALF, num_groups)
            return np.ascontiguousarray(filled.transpose(0, 2, 1)).view(np.uint8)

        scales = of_groups(weight.scales - np.uint8(1) if kind == WeightKind.MXFP4 else weight.scales, 0)
        blocks[:, :, : scales.shape[-1]] = scales
        if kind.has_zeros:
            assert isinstance(weight, Int4 | Int8Group)
            assert weight.zeros is not None
            zeros = weight.zeros if isinstance(weight, Int4) else weight.zeros.view(np.uint8) ^ 128
            blocks[:, :, 4 * HALF : 5 * HALF] = of_groups(zeros, kind.zero)
        if kind.has_offsets:
            assert isinstance(weight, Int4 | Int8Group)
            assert weight.offsets is not None
            blocks[:, :, 4 * HALF : 8 * HALF] = of_groups(weight.offsets, 0)
        codes = weight.codes.view(np.uint8) ^ 128 if isinstance(weight, Int8Group) else nibbles(weight.codes)
        zero = 0 if kind.is_float4 else kind.zero
        quads = _filled(codes, rows, columns, zero).reshape(len(blocks), HALF, num_groups, shape.group // 4, 4)
        quads = quads.transpose(0, 2, 3, 1, 4)
        if kind.bits == 4:
            quads = quads[:, :, ::2] | quads[:, :, 1::2] << 4
        blocks[:, :, kind.head_bytes :] = quads.reshape(*blocks.shape[:2], -1)


def shape_of(weight: Weight, *, pairs: bool = False) -> PackedShape | None:
    """Return how a form is packed; None: as float32, in the panels of `compiled.products.matmul`.

    Args:
        weight: the form.
        pairs: whether activations are rounded to bfloat16 for products with bfloat16.

    Raises:
        ValueError: codes have so many inputs that their sums could overflow.
    """
    size, inputs = weight.shape
    match weight:
        case Float32():
            return None
        case BFloat16():
            kind, group = WeightKind.BFLOAT16_PAIRS if pairs else WeightKind.BFLOAT16, inputs
        case Float16():
            kind, group = WeightKind.FLOAT16, inputs
        case Int8():
            kind, group = WeightKind.INT8, -(-inputs // STEP) * STEP
        case Float4():
            kind, group = WeightKind.MXFP4 if weight.factors is None else WeightKind.NVFP4, weight.group
        case Int4() | Int8Group():
            kind, group = _kind_of_groups(weight), weight.group
    if kind.has_codes and inputs > _MAX_DEPTH:
        raise ValueError(f"a projection of codes must have at most {_MAX_DEPTH} inputs, got {inputs}")
    return PackedShape(kind=kind, size=size, inputs=inputs, group=group)


def _kind_of_groups(weight: Int4 | Int8Group) -> WeightKind:
    has_zeros, has_offsets = weight.zeros is not None, weight.offsets is not None
    if isinstance(weight, Int4):
        plain, with_zeros, with_offsets = WeightKind.INT4, WeightKind.INT4_ZEROS, WeightKind.INT4_OFFSETS
    elif weight.group < STEP:
        return WeightKind.INT8_16_OFFSETS if has_offsets else WeightKind.INT8_16
    else:
        plain, with_zeros = WeightKind.INT8_GROUP, WeightKind.INT8_GROUP_ZEROS
        with_offsets = WeightKind.INT8_GROUP_OFFSETS
    return with_offsets if has_offsets else with_zeros if has_zeros else plain


def allocate(shape: PackedShape) -> PackedWeight:
    """Return packed weights in new memory, to be written."""
    memory = np.empty(shape.nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return PackedWeight(shape=shape, memory=memory[start : start + shape.nbytes])


def pack(weight: Weight) -> PackedWeight:
    """Lay out a form other than `Float32` in new memory."""
    shape = shape_of(weight)
    assert shape is not None
    packed = allocate(shape)
    packed.write(0, weight)
    return packed


def _filled(values: Any, rows: int, columns: int, value: int) -> Any:
    """Return a matrix with `rows` and `columns` of `value` added at its end."""
    if not rows and not columns:
        return np.ascontiguousarray(values)
    return np.pad(values, ((0, rows), (0, columns)), constant_values=value)


def _in_panels(values: Bytes, width: int) -> Bytes:
    """Return the bytes `[n, b]` of outputs as panels `[n / 32, b / width * 32 * width]`, in this order."""
    panels = values.reshape(-1, WIDTH, values.shape[1] // width, width).transpose(0, 2, 1, 3)
    return panels.reshape(len(panels), -1)
