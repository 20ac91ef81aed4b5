"""From a folder with plain weights to one with codes, layer by layer.

Legend: N outputs, K inputs, G groups of inputs.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagewood.engine.api import Progress
from pagewood.engine.model_folder.load import check_weights
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.stored.checkpoint import Checkpoint
from pagewood.engine.models.stored.naming import Naming
from pagewood.engine.models.stored.stored_tensors import StoredTensors
from pagewood.engine.models.stored.tensor_files import TensorFiles, open_tensors
from pagewood.engine.models.stored.tied import EMBEDDING, stored_name
from pagewood.engine.quantise.calibration import Calibration
from pagewood.engine.quantise.compressed_folder import CompressedFolder
from pagewood.engine.quantise.layers import Projection, ReadLayer, read_layers, run_layer
from pagewood.engine.quantise.rounding import Rounded, relative_error, round_to_nearest, round_with_feedback
from pagewood.engine.quantise.scheme import Scheme

_log = logging.getLogger(__name__)

_SCALE_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedMatrix:
    """The errors of a rounded matrix."""

    name: str
    shape: tuple[int, int]
    weight_error: float
    """Norm of the error over the norm of the weights."""
    output_error: float | None
    """The same for the outputs with the inputs of calibration; None: there were none, as there are none without
    calibration, and for an expert that no token chose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The summary of a written folder."""

    matrices: Sequence[QuantisedMatrix]
    ignored: Sequence[str]
    """Linear modules that stay unchanged: the output projection, and those whose inputs the groups do not divide."""
    num_bytes_before: int
    """Bytes of all tensors."""
    num_bytes_after: int


def quantise_model(
    folder: Path,
    out: Path,
    scheme: Scheme,
    *,
    calibration: Calibration | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Write the model in `folder` to `out` with the matrices of its layers rounded; other tensors stay unchanged.

    Scales have the dtype of the matrix. One layer is in memory at a time, as float32; with calibration also a Hessian
    for each of its projections, and the states of all texts. Inputs are computed by layers that are already rounded.

    Args:
        folder: holds config.json and plain weights.
        out: a new or empty folder.
        scheme: what to round to.
        calibration: needed by the method gptq; with nearest it only measures the errors of outputs.
        progress: called for every layer.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the architecture is not supported, the weights are quantised already or not finite, `out` is not
            empty, there is no calibration for gptq, or there is one for layers that need more than the residual stream.
    """
    if scheme.method == "gptq" and calibration is None:
        raise ValueError("calibration must be given for the method gptq, got None")
    config = ModelConfig.from_folder(folder)
    if calibration is not None and (config.inputs is not None or config.has_shared_memory):
        raise ValueError(
            f"{folder}: calibration must be None for a model whose layers read more than the residual stream, such as "
            "keys of earlier layers, got one; the method nearest needs none"
        )
    check_weights(folder, config)
    files = open_tensors(folder)
    _check_plain(folder, files)
    written = CompressedFolder(out)
    checkpoint = Checkpoint(folder, dtype=torch.float32)
    states = None if calibration is None else _embedded(folder, files, calibration.tokens) * config.embedding_multiplier
    done: set[str] = set()
    matrices: list[QuantisedMatrix] = []
    for layer in read_layers(config, checkpoint):
        if states is not None:
            for projection in layer.projections:
                projection.watch()
            run_layer(layer, states, config)
            if scheme.method == "gptq":
                _log_idle(layer)
        rounded: dict[str, Rounded] = {}
        for projection in layer.projections:
            matrices += _round(projection, scheme, files, rounded)
            projection.unwatch()
        for name, part in rounded.items():
            written.add(_stored(name.removesuffix(".weight"), part, scheme))
        done |= rounded.keys()
        if states is not None:
            states = run_layer(layer, states, config)
        if progress:
            progress(f"quantising layers to {scheme.format}", layer.index + 1, config.num_layers)
    rest = [name for name in files.names() if name not in done]
    for name in rest:
        written.add({name: files.read(name)})
    ignored = _ignored(files, rest)
    own: Any = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    written.finish(folder, {**own, "quantization_config": scheme.configuration(ignored)})
    before = sum(_num_bytes(files, name) for name in files.names())
    return Summary(matrices=matrices, ignored=ignored, num_bytes_before=before, num_bytes_after=written.num_bytes)


def _check_plain(folder: Path, files: TensorFiles) -> None:
    if isinstance(files, StoredTensors):
        raise ValueError(
            f"{folder}: weights must have the names and the arrangement of Llama's to be quantised to a folder, got "
            "those of another architecture; the option --weights quantises them when they are loaded"
        )
    for name in files.names():
        form = files.format_of(name)
        if form is not None:
            raise ValueError(f"{folder}: weights must be plain numbers to be quantised, got {name} of {form.name}")


def _log_idle(layer: ReadLayer) -> None:
    idle = [projection for projection in layer.projections if not projection.num_inputs]
    if idle:
        _log.warning(
            "no token of the calibration reaches %d of %d projections of layer %d, which are rounded to nearest; "
            "the first is %s",
            len(idle), len(layer.projections), layer.index, idle[0].parts[0][0],
        )  # fmt: skip


def _embedded(folder: Path, files: TensorFiles, tokens: Tensor) -> Tensor:
    """Return the embeddings `[texts, tokens, E] float32`; the table is not read whole."""
    table = files.read(stored_name(folder, _own_name(files, EMBEDDING), files.names()))
    return table[tokens].float()


def _own_name(files: TensorFiles, name: str) -> str:
    """Return the name that a tensor of the decoder has in the files."""
    return Naming.of(files.names()).stored(name)


def _round(
    projection: Projection, scheme: Scheme, files: TensorFiles, known: dict[str, Rounded]
) -> list[QuantisedMatrix]:
    """Round the matrices of a projection that are not `known` yet; the projection then computes with rounded ones.

    It may have some rows of a matrix of which another projection with the same inputs has others.
    """
    hessian, columns = projection.hessian if projection.num_inputs else None, projection.weight.shape[1]
    if not scheme.fits(columns):
        return []
    order = np.arange(len(projection.weight)) if projection.order is None else projection.order
    rows: list[QuantisedMatrix] = []
    start = 0
    for part, size in projection.parts:
        name = _own_name(files, part)
        if name not in known:
            own = files.read(name).float()
            dtype = _SCALE_DTYPES.get(files.header(name)[1], torch.float32)
            try:
                if scheme.method == "gptq" and hessian is not None:
                    known[name] = round_with_feedback(own, hessian, scheme, dtype)
                else:
                    known[name] = round_to_nearest(own, scheme, dtype)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            values = known[name].values()
            rows.append(
                QuantisedMatrix(
                    name=name,
                    shape=(size, columns),
                    weight_error=relative_error(own, values),
                    output_error=None if hessian is None else relative_error(own, values, hessian),
                )
            )
        here = np.flatnonzero((order >= start) & (order < start + size))
        values = known[name].values()[torch.from_numpy(order[here] - start)]
        projection.weight.index_copy_(0, torch.from_numpy(here), values)
        start += size
    return rows


def _stored(module: str, rounded: Rounded, scheme: Scheme) -> dict[str, Tensor]:
    """Return the tensors of a matrix as compressed-tensors names them."""
    if scheme.format == "int8":
        return {f"{module}.weight": rounded.codes, f"{module}.weight_scale": rounded.scales}
    pairs = (rounded.codes + 8).view(torch.uint8).view(len(rounded.codes), -1, 2)
    packed = pairs[:, :, 0] | pairs[:, :, 1] << 4  # the low four bits of a byte come first, as the bytes of a word do
    return {
        f"{module}.weight_packed": packed.contiguous().view(torch.int32),
        f"{module}.weight_scale": rounded.scales,
        f"{module}.weight_shape": torch.tensor(rounded.codes.shape),
    }


def _ignored(files: TensorFiles, rest: Sequence[str]) -> list[str]:
    """Return the modules with matrices that were not rounded, without the embedding table; the head always."""
    matrices = [name.removesuffix(".weight") for name in rest if name.endswith(".weight")]
    linear = [name for name in matrices if len(files.header(f"{name}.weight")[0]) == 2 and "embed" not in name]
    return ["lm_head", *sorted(set(linear) - {"lm_head"})]


def _num_bytes(files: TensorFiles, name: str) -> int:
    shape, dtype = files.header(name)
    return math.prod(shape) * {"BF16": 2, "F16": 2, "F64": 8, "I64": 8}.get(dtype, 4)
