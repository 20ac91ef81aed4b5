"""Writes a model folder into whose weights an adapter is merged, for servers whose requests all use it."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagewood.engine.adapters.low_rank import Change
from pagewood.engine.adapters.modules import ModelModules
from pagewood.engine.adapters.peft_folder import read_adapter
from pagewood.engine.api import Progress
from pagewood.engine.model_folder.adapter_modules import model_modules
from pagewood.engine.model_folder.load import check_weights
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.families.stored_layout import Place
from pagewood.engine.models.stored.checkpoint_files import holds_gguf
from pagewood.engine.models.stored.fused_experts import expert_parts
from pagewood.engine.models.stored.naming import Naming
from pagewood.engine.models.stored.tensor_files import SafetensorsFiles
from pagewood.engine.models.stored.tied import OUTPUT, is_tied
from pagewood.engine.quantise.compressed_folder import CompressedFolder

Float32 = NDArray[np.float32]


def merge_adapter(folder: Path, adapter: Path, out: Path, *, progress: Progress | None = None) -> int:
    """Write the model in `folder` to `out`, with an adapter in its weights, and return how many modules it changes.

    Sums are computed in float32 and rounded to the dtype of each tensor. One tensor is in memory at a time, beside the
    adapter and what a file of the result holds.

    Args:
        folder: holds config.json and plain weights.
        adapter: folder of PEFT.
        out: a new or empty folder.
        progress: called for every tensor.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the model or the adapter is not supported, the weights are quantised, or `out` is not empty.
    """
    if holds_gguf(folder):
        raise ValueError(f"{folder}: weights must be safetensors for an adapter to be merged, got a GGUF file")
    files = SafetensorsFiles.of_folder(folder)
    names = sorted(files.names())
    for name in names:
        form = files.format_of(name)
        if form is not None:
            raise ValueError(f"{folder}: weights must be plain numbers for an adapter to be merged, got {form.name}")
    check_weights(folder, ModelConfig.from_folder(folder))
    model = model_modules(folder)
    weights = read_adapter(adapter, model, max_rank=sys.maxsize)  # modules that are replaced may have any
    if weights.invocation:
        raise ValueError(
            f"{adapter}: alora_invocation_tokens must be null for an adapter to be merged, got "
            f"{list(weights.invocation)}"
        )
    changes, naming = dict(weights.changes), Naming.of(names)
    merger = _Merger(model, naming)
    ends = _separated(folder, model, changes)
    if ends is not None and any(one.endswith("lm_head.weight") for one in names):
        raise ValueError(
            f"{adapter}: {OUTPUT.removesuffix('.weight')} and its embedding must be changed alike to be merged into "
            f"{folder}, which stores the table that both have under both names"
        )
    inside = expert_parts(files)
    written, missing = CompressedFolder(out), {name for name, one in changes.items() if one.bias is not None}
    for number, name in enumerate(names):
        module, _, kind = name.rpartition(".")
        places = merger.places(module)
        own = {place: _table_rows(model, one, changes[one]) for one, place in places.items() if one in changes}
        tensor = files.read(name)
        if own and kind in ("weight", "bias"):
            tensor = merger.changed(tensor, own, is_bias=kind == "bias")
            missing -= places.keys() if kind == "bias" else set[str]()
        if name in inside:
            tensor, biases = merger.with_experts(tensor, inside[name], changes)
            missing -= biases
        written.add({name: tensor})
        if ends is not None and ends.embedding in places:
            written.add({naming.stored(OUTPUT): merger.changed(files.read(name), {Place(OUTPUT): ends.output})})
        if progress:
            progress("merging an adapter", number + 1, len(names))
    if missing:
        raise ValueError(f"{adapter}: lora_bias must be false for {sorted(missing)[0]}, which has no bias in the model")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if ends is not None:
        for section in (config, *(one for one in config.values() if isinstance(one, dict))):
            if section is config or "tie_word_embeddings" in section:
                section["tie_word_embeddings"] = False
    written.finish(folder, config)
    return len(changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Separated:
    """An output projection that gets a matrix of its own, because it no longer equals the embedding."""

    embedding: str
    output: Change


def _separated(folder: Path, model: ModelModules, changes: dict[str, Change]) -> _Separated | None:
    """Take the change of an output projection out of `changes` if it has the table of an embedding.

    Returns:
        What it becomes; None: it has a matrix of its own, or both are changed alike.
    """
    for name, module in model.modules.items():
        embedding = module.table
        if embedding is None or not changes.keys() & {name, embedding}:
            continue
        output, own = changes.pop(name, Change()), changes.get(embedding, Change())
        if output.bias is not None:
            changes[name] = Change(bias=output.bias)
        table, matrix = _added(own), _added(output)
        if table is not None and matrix is not None and np.array_equal(table.T, matrix):
            return None
        if model.stored.outside or not is_tied(folder):
            raise ValueError(
                f"{folder}: {name} and {embedding} must be changed alike to be merged, because checkpoints of this "
                "family have one table for both"
            )
        return _Separated(embedding=embedding, output=output)
    return None


def _table_rows(model: ModelModules, name: str, change: Change) -> Change:
    """Return the change of a matrix as it is stored: that of an embedding is a table."""
    if not model.modules[name].takes_tokens or change.a is None or change.b is None:
        return change
    return Change(a=change.b.T, b=change.a.T, bias=change.bias)


def _added(change: Change) -> Float32 | None:
    return None if change.b is None or change.a is None or change.factors is not None else change.b @ change.a


class _Merger:
    """Knows where the modules of a model lie in its files."""

    __slots__ = ("_model", "_naming")

    def __init__(self, model: ModelModules, naming: Naming) -> None:
        self._model = model
        self._naming = naming

    def places(self, stored: str) -> dict[str, Place]:
        """Return the modules of a stored one that an adapter may change; empty: there are none."""
        decoder = self._naming.decoder
        if stored.startswith(decoder) and not stored.startswith("model."):
            stored = "model." + stored.removeprefix(decoder)
        return self._model.places(stored) or self._model.places(stored.removeprefix("model."))

    def changed(self, tensor: Tensor, changes: dict[Place, Change], *, is_bias: bool = False) -> Tensor:
        """Return a tensor with the changes of the modules that lie in it."""
        is_in_layer = all(place.is_in_layer for place in changes)
        is_transposed = self._model.stored.has_inputs_first and is_in_layer and tensor.ndim == 2
        numbers: Float32 = tensor.to(torch.float32, copy=True).numpy()
        numbers = numbers.T if is_transposed else numbers
        for place, change in changes.items():
            _apply(change, self._model.part(numbers, place), is_bias=is_bias)
        numbers = np.ascontiguousarray(numbers.T if is_transposed else numbers)
        return torch.from_numpy(numbers).to(tensor.dtype)

    def with_experts(
        self, tensor: Tensor, parts: Mapping[str, Callable[[Tensor], Tensor]], changes: Mapping[str, Change]
    ) -> tuple[Tensor, set[str]]:
        """Return a tensor of all experts with the changes of the modules in it, and the modules whose biases it has."""
        found = [(name, one) for name in parts for one in self.places(name.rpartition(".")[0]).keys() & changes.keys()]
        if not found:
            return tensor, set()
        numbers, biases = tensor.to(torch.float32, copy=True), {one for name, one in found if name.endswith(".bias")}
        for name, module in found:
            _apply(changes[module], parts[name](numbers).numpy(), is_bias=name.endswith(".bias"))
        return numbers.to(tensor.dtype), biases


def _apply(change: Change, rows: Float32, *, is_bias: bool) -> None:
    """Change the rows of a module, which may have an axis for heads before them, or its bias."""
    num_columns = 0 if is_bias else 1
    if change.factors is not None:
        rows *= change.factors.reshape(*rows.shape[: rows.ndim - num_columns], *(1,) * num_columns)
    added = change.bias if is_bias else None if change.b is None or change.a is None else change.b @ change.a
    if added is not None:
        rows += added.reshape(rows.shape)
