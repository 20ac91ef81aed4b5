"""The tensors of a checkpoint with a layout of its own, under the names and in the arrangement of Llama's."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from torch import Tensor

from pagewood.engine.models.families.stored_layout import Place, StoredLayout
from pagewood.engine.weights.checkpoint_formats import Format

if TYPE_CHECKING:
    from pagewood.engine.models.stored.tensor_files import TensorFiles


class StoredTensors:
    """`TensorFiles` over others. Invariant: names, shapes and the order of rows are those of Llama's decoders."""

    __slots__ = ("_files", "_layout", "_names", "_num_heads", "_places")

    def __init__(self, files: TensorFiles, layout: StoredLayout, *, num_heads: int) -> None:
        """Read the names of `files`; `num_heads` is the number of query heads, of which there are as many for keys."""
        self._files = files
        self._layout = layout
        self._num_heads = num_heads
        self._places: dict[str, Place] = {}
        self._names: dict[str, str] = {}
        """The stored name of each tensor."""
        for stored in files.names():
            module, _, kind = stored.rpartition(".")
            for own, place in layout.places(module).items():
                self._places[own] = place
                self._names[f"{own}.{kind}"] = stored

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        return self._names

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        """Return the shape and the dtype of a tensor."""
        shape, dtype = self._files.header(self._names[name])
        place = self._place(name)
        if self._is_transposed(place, len(shape)):
            shape = shape[::-1]
        if place.num_parts == 1:
            return shape, dtype
        if not shape or shape[0] % place.num_parts:
            raise ValueError(f"{self._names[name]} must hold {place.num_parts} matrices of one size, got shape {shape}")
        return (shape[0] // place.num_parts, *shape[1:]), dtype

    def read(self, name: str) -> Tensor:
        """Return a tensor, mapped where its rows lie as they are needed."""
        tensor, place = self._files.read(self._names[name]), self._place(name)
        if self._is_transposed(place, tensor.ndim):
            tensor = tensor.T
        if place.num_parts == 1:
            return tensor
        if self._layout.fused_by_head:
            return tensor.unflatten(0, (self._num_heads, place.num_parts, -1))[:, place.part].flatten(0, 1)
        return tensor.chunk(place.num_parts)[place.part]

    def format_of(self, name: str) -> Format | None:
        """Return the format of a matrix.

        Raises:
            ValueError: it is quantised, and is not stored as it is computed.
        """
        place = self._place(name)
        form = self._files.format_of(f"{place.module}.weight")
        if form is not None and (place.num_parts > 1 or self._is_transposed(place, 2)):
            raise ValueError(f"{place.module} must have plain numbers, because it is rearranged, got {form.name}")
        return form

    def is_unneeded(self, name: str) -> bool:
        """Whether no decoder needs a tensor."""
        if name.endswith(self._layout.unneeded) or name.startswith(self._layout.unneeded_parts):
            return True
        return self._files.is_unneeded(self._names.get(name, name))

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def _place(self, name: str) -> Place:
        module = name.rpartition(".")[0]
        return self._places.get(module, Place(module))

    def _is_transposed(self, place: Place, num_axes: int) -> bool:
        return self._layout.has_inputs_first and place.is_in_layer and num_axes == 2
