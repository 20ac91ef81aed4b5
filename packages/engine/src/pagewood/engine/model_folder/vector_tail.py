"""Reads what follows the pooling of states: the Dense modules of sentence-transformers, or the head of a reranker."""

# pyright: basic
# torch and safetensors are typed in part only.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from pagewood.engine.core.vector_tail import DenseLayer, VectorTail
from pagewood.engine.json_fields import Fields
from pagewood.engine.model_folder.sentence_modules import dense_modules
from pagewood.engine.models.stored.checkpoint_files import checkpoint_files


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """A layer of a head: the names of its tensors, and what has no tensor."""

    module: str
    activation: str = "none"
    norm: str | None = None


_HEADS: Mapping[str, tuple[_Stored, ...]] = MappingProxyType(
    {
        "BertForSequenceClassification": (
            _Stored(module="bert.pooler.dense", activation="tanh"), _Stored(module="classifier"),
        ),
        "DistilBertForSequenceClassification": (
            _Stored(module="pre_classifier", activation="relu"), _Stored(module="classifier"),
        ),
        "ModernBertForSequenceClassification": (
            _Stored(module="head.dense", activation="gelu", norm="head.norm"), _Stored(module="classifier"),
        ),
        "RobertaForSequenceClassification": (
            _Stored(module="classifier.dense", activation="tanh"), _Stored(module="classifier.out_proj"),
        ),
        "XLMRobertaForSequenceClassification": (
            _Stored(module="classifier.dense", activation="tanh"), _Stored(module="classifier.out_proj"),
        ),
    }
)  # fmt: skip
"""The layers of the heads that score pairs, by architecture."""


def read_vector_tail(folder: str | Path, hidden_size: int) -> VectorTail | None:
    """Return what follows the pooling of states `[hidden_size]`; None: nothing.

    Raises:
        ValueError: a tensor is missing, or has another shape than the layer before it and its own fields say.
        FileNotFoundError: a module has no safetensors.
    """
    folder = Path(folder)
    architectures = Fields.from_file(folder / "config.json").texts("architectures") or [""]
    stored = _HEADS.get(architectures[0])
    layers = _modules(folder, hidden_size) if stored is None else _head(folder, stored, hidden_size)
    return VectorTail(layers=layers) if layers else None


def _head(folder: Path, stored: tuple[_Stored, ...], size: int) -> list[DenseLayer]:
    fields = Fields.from_file(folder / "config.json")
    names = {f"{module}.{kind}" for one in stored for module in (one.module, one.norm) for kind in ("weight", "bias")}
    tensors: dict[str, np.ndarray] = {}
    for file in checkpoint_files(folder):
        tensors |= _tensors(file, names)
    layers: list[DenseLayer] = []
    for one in stored:
        layers.append(
            DenseLayer(
                weight=_weight(folder, tensors, one.module, size),
                bias=tensors.get(f"{one.module}.bias"),
                activation=one.activation,
                norm=None if one.norm is None else tensors[f"{one.norm}.weight"],
                epsilon=fields.number("norm_eps", 1e-5, low=1e-30, high=1),
            )
        )
        size = layers[-1].weight.shape[0]
    return layers


def _modules(folder: Path, size: int) -> list[DenseLayer]:
    layers: list[DenseLayer] = []
    for module in dense_modules(folder):
        file = folder / module.path / "model.safetensors"
        if not file.is_file():
            raise FileNotFoundError(f"{file} must exist; pickled weights are not read")
        tensors = _tensors(file, {"linear.weight", "linear.bias"})
        weight = _weight(file, tensors, "linear", size)
        if weight.shape != (module.out_features, module.in_features):
            raise ValueError(
                f"{file}: linear.weight must be {module.out_features} by {module.in_features}, as config.json says, "
                f"got {weight.shape}"
            )
        layers.append(DenseLayer(weight=weight, bias=tensors.get("linear.bias"), activation=module.activation))
        size = module.out_features
    return layers


def _tensors(file: Path, names: set[str]) -> dict[str, np.ndarray]:
    """Return the tensors of a file that have one of these names, as float32."""
    with safe_open(file, framework="pt") as opened:
        opened: Any
        return {name: opened.get_tensor(name).to(torch.float32).numpy() for name in names & set(opened.keys())}


def _weight(source: Path, tensors: Mapping[str, np.ndarray], module: str, size: int) -> np.ndarray:
    weight = tensors.get(f"{module}.weight")
    if weight is None or weight.ndim != 2 or weight.shape[1] != size:
        found = "none" if weight is None else weight.shape
        raise ValueError(f"{source} must have {module}.weight with {size} columns, got {found}")
    return np.ascontiguousarray(weight)
