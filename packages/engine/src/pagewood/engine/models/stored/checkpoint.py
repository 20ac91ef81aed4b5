"""The weights of a model: each matrix in the form in which it was stored, or widened."""

# pyright: basic
# safetensors has no types.

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from pagewood.engine.api import Progress
from pagewood.engine.models.stored.expert_codes import EXPERTS, read_codes
from pagewood.engine.models.stored.head_order import RowOrder
from pagewood.engine.models.stored.mapped_memory import give_back
from pagewood.engine.models.stored.naming import Naming
from pagewood.engine.models.stored.row_orders import as_slice, orders_of_parts, rows_in
from pagewood.engine.models.stored.stacked_rows import StackedRows
from pagewood.engine.models.stored.tensor_files import TensorFiles, open_tensors
from pagewood.engine.models.stored.tied import check_copy, stored_name
from pagewood.engine.weights.checkpoint_formats import FLOATS, Array, Format, cut, part_names
from pagewood.engine.weights.matrix_forms import BFloat16, Float16, Float32, Weight, rows_of
from pagewood.engine.weights.matrix_parts import columns_of
from pagewood.engine.weights.nearest import joined

_log = logging.getLogger(__name__)

INTEGERS = ("I64", "I32")
_SIZES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}
"""Bytes of an element, by dtype; those of all others have one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A tensor, or the tensors of a quantised matrix, whose headers have been checked."""

    name: str
    rows: int
    order: RowOrder | None = None
    """Which of its rows are needed, see `models.ops.Weights`; the same for `inputs`."""
    inputs: range | None = None
    format: Format | None = None
    """None: plain numbers."""
    parts: Mapping[str, str] = field(default_factory=dict[str, str])
    """Names of the tensors of a quantised matrix, by suffix."""

    def ranges(self, columns: int) -> tuple[range | None, range]:
        """Return the rows and the columns that are needed of a matrix; None: the rows do not follow each other."""
        order = slice(0, self.rows) if self.order is None else as_slice(self.order)
        outputs = range(order.start, order.stop) if isinstance(order, slice) else None
        return outputs, range(columns) if self.inputs is None else self.inputs

    def shape(self, *columns: int) -> tuple[int, ...]:
        """Return the shape of what is needed of a tensor with these other dimensions."""
        own = columns if self.inputs is None else (len(self.inputs),)
        return (self.rows if self.order is None else len(self.order), *own)


class Checkpoint:
    """The named tensors of a folder. Invariant: `finish` succeeds only if every tensor has been read or checked."""

    __slots__ = (
        "_device",
        "_dtype",
        "_files",
        "_keeps_float8",
        "_kept",
        "_maps_plain",
        "_names",
        "_naming",
        "_num_read",
        "_num_tensors",
        "_passed",
        "_progress",
        "_quantised",
        "_unread",
        "folder",
        "num_elements",
    )

    def __init__(
        self,
        folder: str | Path,
        *,
        dtype: torch.dtype | None,
        device: torch.device | None = None,
        maps_plain: bool = False,
        keeps_float8: bool = False,
        progress: Progress | None = None,
        files: TensorFiles | None = None,
    ) -> None:
        """Open the files of `folder`; `stack` converts tensors to `dtype` on `device` (None: the CPU).

        `files` are read in their place.

        With `maps_plain`, `stack` returns plain matrices as `StackedRows`, which read only the rows that are used.
        Without `dtype` it does so too. Vectors are then float32 on the CPU, and a quantised matrix is a `Weight` in its
        stored form. The operations that take over the matrices must accept both.

        With `keeps_float8`, `stack` returns experts as `ScaledCodes` where `expert_codes.read_codes` can read them.

        Raises:
            FileNotFoundError: there are no weights in it, or a file of its index is missing.
            ValueError: a file is damaged, or its quantisation is not supported.
        """
        self.folder = Path(folder)
        self._dtype = dtype
        self._device = device
        self._maps_plain = maps_plain or dtype is None
        self._keeps_float8 = keeps_float8
        self._progress = progress
        self._files: TensorFiles = open_tensors(self.folder) if files is None else files
        self._names = frozenset(self._files.names())
        self._unread = set(self._names)  # written by: check, finish
        self._naming = Naming.of(self._names)
        self._num_tensors = len(self._names)
        self._num_read = 0  # written by: stack, forms, integers
        self._passed: list[Tensor] = []
        """Tensors of the last call; the next call gives back their memory."""  # written by: _mapped, _forget
        self._quantised: set[str] = set()  # modules; written by: check
        self._kept: Counter[tuple[str, str, str]] = Counter()  # written by: forms, stack
        """Number of matrices by (format, form in which they are kept, reason)."""
        self.num_elements = 0  # written by: check
        """Total number of elements that have been read or checked: of ranks, those of their parts."""

    def check(
        self,
        parts: Sequence[tuple[str, int]],
        *columns: int,
        dtypes: Sequence[str] = FLOATS,
        order: RowOrder | None = None,
        inputs: range | None = None,
    ) -> list[Found]:
        """Take tensors off the list of unread ones and return the places of those that are needed.

        Only the headers are read. Tensors of which `order` names no row are not needed.

        Args:
            parts: name and number of rows of each.
            columns: the other dimensions.
            dtypes: the dtypes that are allowed, as headers of safetensors name them.
            order: of the rows of all; see `models.ops.Weights`.
            inputs: the columns that are needed; None: all.

        Raises:
            ValueError: a tensor is missing, or has another shape or dtype.
        """
        found: list[Found] = []
        orders = orders_of_parts(order, [rows for _, rows in parts])
        for (name, rows), own in zip(parts, orders, strict=True):
            name = stored_name(self.folder, self._naming.stored(name), self._files.names())
            form = self._files.format_of(name) if len(columns) == 1 else None
            if form is not None and not self._is_plain(name):
                one = self._check_quantised(name, form, rows, columns[0])
            else:
                scalar = [()] if rows == 1 and not columns else []
                self._check_one(name, [(rows, *columns), *scalar], dtypes)
                one = Found(name=name, rows=rows)
            if own is not None and not len(own):
                self._report(max(1, len(one.parts)))
                continue
            found.append(replace(one, order=own, inputs=inputs))
            self.num_elements += math.prod(found[-1].shape(*columns))
        return found

    def stack(
        self,
        parts: Sequence[tuple[str, int]],
        *columns: int,
        order: RowOrder | None = None,
        inputs: range | None = None,
    ) -> Tensor:
        """Return the named tensors, each `[rows, *columns]`, one below the other in one new tensor.

        Quantised matrices are widened. `__init__` describes when matrices are returned in another form. For `order` and
        `inputs` see `models.ops.Weights`.

        Raises:
            ValueError: see `check`; nothing is allocated then. Or a quantised matrix holds a forbidden value, or its
                groups cannot be divided as `inputs` asks for.
        """
        found = self.check(parts, *columns, order=order, inputs=inputs)
        self._forget()
        has_codes = any(one.format is not None for one in found)
        if columns and self._maps_plain and not has_codes:
            return cast("Tensor", self._mapped_rows(found))
        if columns and self._keeps_float8 and all(EXPERTS in one.name for one in found):
            codes = read_codes(found, columns[0], self._mapped, device=self._device)
            if codes is not None:
                for one in found:
                    self._kept[getattr(one.format, "name", ""), f"float8 in groups of {codes.group}", ""] += 1
                    self._report(len(one.parts))
                return cast("Tensor", codes)
        if columns and self._dtype is None:
            return cast("Tensor", joined(self.read(found, columns[0])))
        return self._widened(found, *columns)

    def numbers(self, name: str, rows: int, columns: int, *, order: RowOrder | None = None) -> Tensor:
        """Return the matrix `name` `[rows, columns]` as `dtype`, or float32 without one, in new memory.

        Raises:
            ValueError: see `stack`, also for `order`.
        """
        found = self.check([(name, rows)], columns, order=order)
        self._forget()
        return self._widened(found, columns)

    def _widened(self, found: Sequence[Found], *columns: int) -> Tensor:
        """Return tensors that `check` found one below the other, as numbers in new memory."""
        shapes = [one.shape(*columns) for one in found]
        total = (sum(rows for rows, *_ in shapes), *shapes[0][1:])
        stacked = torch.empty(total, dtype=self._dtype or torch.float32, device=self._device)
        start = 0
        for one in found:
            if one.format is None:
                rows = self._rows(one)
                self._report(1)
            else:
                rows = [torch.from_numpy(self._read(one, one.format, columns[0]).dequantised())]
            for part in rows:
                stacked[start : start + len(part)] = part
                start += len(part)
        return stacked

    def exact(self, name: str, rows: int, *columns: int, order: RowOrder | None = None) -> Tensor:
        """Return the tensor `name` `[rows, *columns]` as float32 in memory of its own, whatever `stack` returns.

        `order` names the rows of the result; None: all in their order.

        Raises:
            ValueError: see `stack`.
        """
        [found] = self.check([(name, rows)], *columns)
        self._forget()
        if found.format is not None:
            tensor = torch.from_numpy(self._read(found, found.format, columns[0]).dequantised())
        else:
            tensor = self._mapped(found.name).to(torch.float32, copy=True)
            self._report(1)
        tensor = tensor if order is None else tensor[torch.from_numpy(order)]
        return tensor.to(self._device)

    def _mapped_rows(self, found: Sequence[Found]) -> StackedRows:
        tensors = [part for one in found for part in rows_in(self._mapped(one.name), one.order)]
        self._report(len(found))
        return StackedRows(tensors, columns=found[0].inputs)

    def forms(self, parts: Sequence[tuple[str, int]], columns: int) -> list[Weight]:
        """Return the named matrices, each `[rows, columns]`, in their stored forms, not widened.

        Raises:
            ValueError: see `stack`.
        """
        return self.read(self.check(parts, columns), columns)

    def read(self, found: Sequence[Found], columns: int) -> list[Weight]:
        """Return matrices that `check` found, each of `columns` inputs, in their stored forms.

        Raises:
            ValueError: a quantised matrix holds a value that it must not.
        """
        self._forget()
        return [self._plain(one) if one.format is None else self._read(one, one.format, columns) for one in found]

    @property
    def kept(self) -> Mapping[tuple[str, str, str], int]:
        """Number of quantised matrices that were read, by (format, form, reason)."""
        return self._kept

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        """Return the shape and the dtype of a tensor, as headers of safetensors or types of GGUF name it."""
        return self._files.header(name)

    def num_bytes(self, found: Found, columns: int) -> int:
        """Return the bytes that are stored of a matrix; a type without a size of its own counts one an element."""
        if found.format is None:
            return math.prod(found.shape(columns)) * _SIZES.get(self.header(found.name)[1], 1)
        headers = map(self.header, found.parts.values())
        return sum(math.prod(shape) * _SIZES.get(dtype, 1) for shape, dtype in headers)

    def check_copy(self, copy: str, original: str, *, why: str) -> None:
        """Compare two tensors that should be the same; see `tied.check_copy`.

        Raises:
            ValueError: they differ.
        """
        check_copy(self.folder, self._files, self._naming.stored(copy), self._naming.stored(original), why=why)

    def integers(self, name: str, rows: int) -> Tensor:
        """Return the tensor `name` `[rows]` as int64 on the CPU.

        Raises:
            ValueError: it is missing, or has another shape or no whole numbers.
        """
        [found] = self.check([(name, rows)], dtypes=INTEGERS)
        self._report(1)
        return self._files.read(found.name).to(torch.int64)

    def finish(self, *, ignored: Callable[[str], bool]) -> None:
        """Close the files, and log in which forms quantised matrices were read.

        Raises:
            ValueError: they hold tensors that have neither been read nor checked and are not `ignored`.
        """
        left = sorted(
            name
            for name in self._unread
            if not ignored(name) and not self._files.is_unneeded(name) and not self._is_empty_bias(name)
        )
        if left:
            raise ValueError(f"{self.folder} holds {len(left)} unexpected tensors, the first is {left[0]}")
        self._unread.clear()
        self._forget()
        self._files.close()
        for (stored, form, why), count in self._kept.items():
            _log.info("%d matrices of %s as %s%s", count, stored, form, f" ({why})" if why else "")

    def _rows(self, found: Found) -> list[Tensor]:
        """Return tensors that are, one below the other, what is needed of plain numbers."""
        tensor, inputs = self._mapped(found.name), found.inputs
        own = tensor if inputs is None else tensor[:, inputs.start : inputs.stop]
        return rows_in(own.view(1) if own.ndim == 0 else own, found.order)

    def _mapped(self, name: str) -> Tensor:
        tensor = self._files.read(name)
        self._passed.append(tensor)
        return tensor

    def _forget(self) -> None:
        """Give back the memory of tensors that earlier calls have read from files; they can still be read."""
        for tensor in self._passed:
            give_back(tensor)
        self._passed.clear()

    def _is_plain(self, name: str) -> bool:
        """Whether a matrix is stored as plain numbers, which configurations do not always say."""
        return name in self._names and self._files.header(name)[1] in FLOATS

    def _check_one(self, name: str, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str]) -> None:
        shape = shapes[0]
        if name not in self._names:
            raise ValueError(f"{self.folder} lacks the tensor {name} of shape {shape}")
        own, dtype = self._files.header(name)
        if own not in shapes:
            raise ValueError(f"{self.folder}: {name} must have shape {' or '.join(map(str, shapes))}, got {own}")
        if dtype not in dtypes:
            kind = "floating point " if dtypes is FLOATS else "whole " if dtypes is INTEGERS else ""
            raise ValueError(f"{self.folder}: {name} must hold {kind}numbers ({', '.join(dtypes)}), got {dtype}")
        self._unread.discard(name)

    def _check_quantised(self, name: str, form: Format, rows: int, columns: int) -> Found:
        module = name.removesuffix(".weight")
        try:
            parts = form.parts(rows, columns)
        except ValueError as error:
            raise ValueError(f"{self.folder}: {name}: {error}") from error
        names: dict[str, str] = {}
        for part in parts:
            own = module + part.suffix
            if own not in self._names and not part.is_optional:
                raise ValueError(
                    f"{self.folder} lacks the tensor {own} of shape {part.shapes[0]}; {form.name} makes {name} of "
                    f"{part_names(parts)}"
                )
            if own in self._names:
                self._check_one(own, part.shapes, part.dtypes)
                names[part.suffix] = own
        self._quantised.add(module)
        return Found(name=name, rows=rows, format=form, parts=names)

    def _read(self, found: Found, form: Format, columns: int) -> Weight:
        arrays = {suffix: _array(self._mapped(name)) for suffix, name in found.parts.items()}
        whole, (outputs, inputs) = (found.rows, columns), found.ranges(columns)
        parts = None if outputs is None else cut(form.parts(*whole), arrays, whole, outputs, inputs)
        try:
            if outputs is not None and parts is not None:
                kept = form.read(parts, len(outputs), len(inputs))
            else:
                kept = form.read(arrays, *whole)
        except ValueError as error:
            raise ValueError(f"{self.folder}: {found.name}: {error}") from error
        group = getattr(kept.weight, "group", None)
        shown = type(kept.weight).__name__.lower() + (f" in groups of {group}" if group else "")
        self._kept[form.name, shown, kept.why] += 1
        self._report(len(arrays))
        return kept.weight if parts is not None else self._cut(kept.weight, found)

    def _cut(self, weight: Weight, found: Found) -> Weight:
        """Return what is needed of a matrix.

        Raises:
            ValueError: its groups cannot be divided so.
        """
        if found.order is not None:
            weight = rows_of(weight, as_slice(found.order))
        try:
            return weight if found.inputs is None else columns_of(weight, found.inputs)
        except ValueError as error:
            raise ValueError(f"{self.folder}: {found.name}: {error}") from error

    def _plain(self, found: Found) -> Weight:
        """Return a matrix of plain numbers, mapped."""
        rows = self._rows(found)
        tensor = rows[0].contiguous() if len(rows) == 1 else torch.cat(rows)
        self._report(1)
        match tensor.dtype:
            case torch.bfloat16:
                return BFloat16(tensor.view(torch.uint16).numpy())
            case torch.float16:
                return Float16(tensor.numpy())
            case _:
                return Float32(tensor.to(torch.float32).numpy())

    def _is_empty_bias(self, name: str) -> bool:
        """Whether a tensor is a bias of zeros, which some tools store for every quantised matrix."""
        module = name.removesuffix(".bias")
        return module != name and module in self._quantised and not self._files.read(name).any()

    def _report(self, count: int) -> None:
        for _ in range(count):
            self._num_read = min(self._num_read + 1, self._num_tensors)  # a tied table may be read twice
            if self._progress:
                self._progress("reading weights", self._num_read, self._num_tensors)


def _array(tensor: Tensor) -> Array:
    """Return the numbers of a tensor: floating point numbers as float32, those of 8 bits as bytes."""
    if tensor.dtype.is_floating_point:
        return (tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor.to(torch.float32)).numpy()
    return np.asarray(tensor.numpy())
