"""How checkpoints of a family name and arrange their tensors, where that differs from Llama's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Place:
    """Where the tensors of a module are stored."""

    module: str
    """The stored module."""
    part: int = 0
    """Which of its equal parts, if it has several side by side."""
    num_parts: int = 1
    is_in_layer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLayout:
    """The names of stored modules, and what lies in their tensors."""

    prefix: str = ""
    """Before all stored names, unless the checkpoint has the decoder alone."""
    outer: str = ""
    """Before the prefix, and before all names of other modules, in some checkpoints."""
    layers: str = "model.layers"
    outside: Mapping[str, str] = field(default_factory=dict[str, str])
    """Llama's names of stored modules outside of layers, by stored name."""
    in_layer: Mapping[str, str] = field(default_factory=dict[str, str])
    """The same inside of a layer."""
    in_parts: Mapping[str, str] = field(default_factory=dict[str, str])
    """Beginnings of the names of other modules inside of a layer, by stored beginning, both with the dot at the end."""
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Modules of a layer that hold several of Llama's, of the same size, by stored name."""
    fused_by_head: bool = False
    """Whether these lie side by side in every head, not in the whole module."""
    has_inputs_first: bool = False
    """Whether matrices of layers are `[in, out]`."""
    unneeded: tuple[str, ...] = ()
    """Ends of the names of tensors that no computation needs, such as masks, with the dot before them."""
    unneeded_parts: tuple[str, ...] = ()
    """Beginnings of the names, behind the prefix, of tensors of heads for other tasks."""

    def places(self, stored: str) -> dict[str, Place]:
        """Return the place of each of Llama's modules that a stored module holds, by name."""
        own = stored.removeprefix(self.outer).removeprefix(self.prefix)
        found = re.fullmatch(rf"{re.escape(self.layers)}\.(\d{{1,6}})\.(.+)", own, re.ASCII)
        if found is None:
            return {self.outside.get(own, own): Place(stored)}
        layer, inside = f"model.layers.{int(found[1])}", found[2]
        parts = self.fused.get(inside)
        if parts is None:
            begin, dot, rest = inside.partition(".")
            named = self.in_parts.get(begin + dot, begin + dot) + rest
            return {f"{layer}.{self.in_layer.get(inside, named)}": Place(stored, is_in_layer=True)}
        return {f"{layer}.{name}": Place(stored, part, len(parts), is_in_layer=True) for part, name in enumerate(parts)}
