"""The modules of a sentence-transformers folder, and its Dense modules. Imports neither torch nor transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import cast

from pagewood.engine.json_fields import Fields

_LARGEST = (1 << 31) - 1
_ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {
        "Identity": "none", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu", "Sigmoid": "sigmoid",
    }
)  # fmt: skip
"""Our names of activations, by the last part of the class that a file names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseModule:
    """A Dense module: `linear` in the safetensors of its folder, then an activation."""

    path: str
    in_features: int
    out_features: int
    activation: str


def sentence_modules(folder: Path) -> list[tuple[str, str]]:
    """Return the type and the folder of each module in `modules.json`, in their order; empty without such a file.

    Raises:
        ValueError: the file is damaged, or a module lies outside of the folder.
    """
    file = folder / "modules.json"
    if not file.is_file():
        return []
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} must hold JSON: {error}") from error
    if not isinstance(entries, list):
        raise ValueError(f"{file} must hold a list of modules, got {entries!r:.80}")
    modules: list[tuple[str, str]] = []
    for entry in cast("list[object]", entries):
        if not isinstance(entry, dict):
            raise ValueError(f"{file} must hold a list of modules, got {entry!r:.80}")
        fields = Fields(str(file), cast("dict[str, object]", entry))
        path = fields.text("path", "")
        if ".." in Path(path).parts or Path(path).is_absolute():
            raise ValueError(f"{file}: path must stay in the model's folder, got {path!r:.80}")
        modules.append((fields.text("type").rpartition(".")[2], path))
    return modules


def dense_modules(folder: Path) -> list[DenseModule]:
    """Return the Dense modules of a folder, in their order.

    Raises:
        ValueError: a file is damaged, or names another activation.
    """
    found: list[DenseModule] = []
    for kind, path in sentence_modules(folder):
        if kind != "Dense":
            continue
        fields = Fields.from_file(folder / path / "config.json")
        found.append(
            DenseModule(
                path=path,
                in_features=fields.integer("in_features", low=1, high=_LARGEST),
                out_features=fields.integer("out_features", low=1, high=_LARGEST),
                activation=activation_named(fields, "activation_function", "Tanh"),
            )
        )
    return found


def activation_named(fields: Fields, name: str, default: str) -> str:
    """Return our name of the activation whose class a field names.

    Raises:
        ValueError: it is another one.
    """
    given = fields.text(name, default)
    own = _ACTIVATIONS.get(given.rpartition(".")[2])
    if own is None:
        raise ValueError(f"{fields.source}: {name} must be one of {', '.join(_ACTIVATIONS)}, got {given!r:.80}")
    return own
