"""The modules of a model that adapters may change, and the names under which folders of adapters know them.

Legend: K inputs, N outputs of a module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.models.families.stored_layout import Place, StoredLayout

Float32 = NDArray[np.float32]
_DECODERS = ("model.language_model.", "language_model.model.")
"""Where a decoder lies in a model that reads images too."""
_PLAIN = StoredLayout()
GATE_UP, DOWN = "gate_up_proj", "down_proj"
"""Parameters of all experts of a layer in `transformers`."""


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
class ExpertStack:
    """Modules of experts of one layer, whose matrices `transformers` keeps as two parameters, with those of all."""

    name: str
    """As in "model.layers.0.mlp.experts"."""
    count: int
    """Experts."""
    parts: tuple[str, str, str]
    """Last names of an expert's modules: gate, up, down."""

    def modules(self, expert: int, parameter: str) -> list[str]:
        """Return the modules whose matrices an expert has in `gate_up_proj` or `down_proj`."""
        own = self.parts[2:] if parameter == DOWN else self.parts[:2]
        return [f"{self.name}.{expert}.{part}" for part in own]


def expert_stacks(modules: Iterable[str]) -> dict[str, ExpertStack]:
    """Return the experts among modules, by all names that their module may have in an adapter.

    Checkpoints of some families name a part of a layer in another way than `transformers` does in memory.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for module in modules:
        stack, _, rest = module.rpartition(".experts.")
        expert, _, part = rest.partition(".")
        if stack and expert.isdecimal():
            found.setdefault(f"{stack}.experts", {}).setdefault(expert, []).append(part)
    stacks: dict[str, ExpertStack] = {}
    for name, experts in found.items():
        if len(experts["0"]) != 3:  # without gates; an adapter may name them one by one
            continue
        gate, up, down = experts["0"]
        own = ExpertStack(name=name, count=len(experts), parts=(gate, up, down))
        layer, _, part = name.removesuffix(".experts").rpartition(".")
        stacks |= {name: own} if part.isdecimal() else {name: own, f"{layer}.mlp.experts": own}
    return stacks


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelModules:
    """The modules of a decoder by name, as in "model.layers.0.self_attn.q_proj"."""

    modules: Mapping[str, Module]
    stacks: Mapping[str, ExpertStack] = field(default_factory=dict[str, ExpertStack])
    """See `expert_stacks`."""
    stored: StoredLayout = _PLAIN
    """How the family of the model names and arranges its tensors."""
    num_heads: int
    numbers: Callable[[str], Float32]
    """Returns the weights `[N, K]` of a module, or the table `[K, N]` of an embedding, in new memory."""
    biases: Callable[[str], Float32]
    """Returns the bias `[N]` of a module that has one."""

    def places(self, module: str) -> dict[str, Place]:
        """Return where the modules lie in one that an adapter names; empty: there is no such module to change."""
        found = self.stored.places(_plain_name(module))
        return found if all(name in self.modules for name in found) else {}

    def stack(self, module: str) -> ExpertStack | None:
        """Return the experts of a module that an adapter names; None: it is another one."""
        return self.stacks.get(_plain_name(module))

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


def _plain_name(module: str) -> str:
    """Return the name of a module in a decoder that stands alone."""
    for decoder in _DECODERS:
        if module.startswith(decoder):
            return "model." + module.removeprefix(decoder)
    return module
