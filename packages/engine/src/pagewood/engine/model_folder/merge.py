"""Writes a model folder into whose weights an adapter is merged, for servers whose requests all use it."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagewood.engine.adapters.low_rank import Change
from pagewood.engine.adapters.modules import ModelModules
from pagewood.engine.adapters.peft_folder import read_adapter
from pagewood.engine.api import MAX_ADAPTER_RANK, Progress
from pagewood.engine.model_folder.adapter_modules import model_modules
from pagewood.engine.model_folder.load import check_weights
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.families.stored_layout import Place
from pagewood.engine.models.stored.checkpoint_files import holds_gguf
from pagewood.engine.models.stored.naming import Naming
from pagewood.engine.models.stored.tensor_files import SafetensorsFiles
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
    files = SafetensorsFiles(folder)
    names = sorted(files.names())
    for name in names:
        form = files.format_of(name)
        if form is not None:
            raise ValueError(f"{folder}: weights must be plain numbers for an adapter to be merged, got {form.name}")
    check_weights(folder, ModelConfig.from_folder(folder))
    model = model_modules(folder)
    weights = read_adapter(adapter, model, max_rank=MAX_ADAPTER_RANK)
    if weights.invocation:
        raise ValueError(
            f"{adapter}: alora_invocation_tokens must be null for an adapter to be merged, got "
            f"{list(weights.invocation)}"
        )
    changes = dict(weights.changes)
    for name in changes:
        module = model.modules[name]
        if module.takes_tokens or module.table is not None:
            raise ValueError(f"{adapter}: {name} must not be changed by an adapter to be merged, as it is an embedding")
    merger = _Merger(model, Naming.of(names))
    written, missing = CompressedFolder(out), {name for name, one in changes.items() if one.bias is not None}
    for number, name in enumerate(names):
        module, _, kind = name.rpartition(".")
        places = merger.places(module)
        own = {place: changes[one] for one, place in places.items() if one in changes}
        tensor = files.read(name)
        if own and kind in ("weight", "bias"):
            tensor = merger.changed(tensor, own, is_bias=kind == "bias")
            missing -= places.keys() if kind == "bias" else set[str]()
        written.add({name: tensor})
        if progress:
            progress("merging an adapter", number + 1, len(names))
    if missing:
        raise ValueError(f"{adapter}: lora_bias must be false for {sorted(missing)[0]}, which has no bias in the model")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    written.finish(folder, config)
    return len(changes)


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

    def changed(self, tensor: Tensor, changes: dict[Place, Change], *, is_bias: bool) -> Tensor:
        """Return a tensor with the changes of the modules that lie in it."""
        is_transposed = self._model.stored.has_inputs_first and tensor.ndim == 2
        numbers: Float32 = tensor.to(torch.float32, copy=True).numpy()
        numbers = numbers.T if is_transposed else numbers
        for place, change in changes.items():
            rows = self._model.part(numbers, place)  # a view
            if change.factors is not None:
                num_columns = numbers.ndim - 1
                rows *= change.factors.reshape(*rows.shape[: rows.ndim - num_columns], *(1,) * num_columns)
            added = change.bias if is_bias else None if change.b is None or change.a is None else change.b @ change.a
            if added is not None:
                rows += added.reshape(rows.shape)
        numbers = np.ascontiguousarray(numbers.T if is_transposed else numbers)
        return torch.from_numpy(numbers).to(tensor.dtype)
