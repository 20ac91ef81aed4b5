"""The modules of a model that adapters may change, and the names under which folders of adapters know them.

Legend: K inputs, N outputs of a module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.models.families.stored_layout import Place, StoredLayout

Float32 = NDArray[np.float32]
_DECODERS = ("model.language_model.", "language_model.model.")
"""Where a decoder lies in a model that reads images too."""
_PLAIN = StoredLayout()


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A module that an adapter may change."""

    inputs: int
    """K."""
    outputs: int
    """N."""
    has_bias: bool = False
    takes_tokens: bool = False
    """Whether it is an embedding, of K tokens."""
    table: str | None = None
    """The embedding whose table its matrix is; None: it has its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelModules:
    """The modules of a decoder by name, as in "model.layers.0.self_attn.q_proj"."""

    modules: Mapping[str, Module]
    stored: StoredLayout = _PLAIN
    """How the family of the model names and arranges its tensors."""
    num_heads: int
    numbers: Callable[[str], Float32]
    """Returns the weights `[N, K]` of a module, or the table `[K, N]` of an embedding, in new memory."""
    biases: Callable[[str], Float32]
    """Returns the bias `[N]` of a module that has one."""

    def places(self, module: str) -> dict[str, Place]:
        """Return where the modules lie in one that an adapter names; empty: there is no such module to change."""
        for decoder in _DECODERS:
            if module.startswith(decoder):
                module = "model." + module.removeprefix(decoder)
        found = self.stored.places(module)
        return found if all(name in self.modules for name in found) else {}

    def rows(self, array: Float32, place: Place) -> Float32:
        """Return the rows of a stored module's array that belong to one of the modules that it holds."""
        own = self.part(array, place)
        return own if own.ndim == array.ndim else own.reshape(-1, *array.shape[1:])

    def part(self, array: Float32, place: Place) -> Float32:
        """Return the same rows as a view: with an axis for heads before them if every head has some of them."""
        if place.num_parts == 1:
            return array
        if self.stored.fused_by_head:
            return array.reshape(self.num_heads, place.num_parts, -1, *array.shape[1:])[:, place.part]
        return np.split(array, place.num_parts)[place.part]
