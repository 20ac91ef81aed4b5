"""A decoder whose weights have the form that the CPU engine is configured for, from its folder or from the cache."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from pagewood.engine.api import ActivationFormat, Progress, WeightFormat
from pagewood.engine.cache_folder import REMEDY
from pagewood.engine.model_folder.load import load_model
from pagewood.engine.model_folder.model_digest import ModelDigest
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.decoder import Decoder
from pagewood.engine.models.expert_division import division_mark
from pagewood.engine.models.shard import WHOLE, Shard
from pagewood.engine.models.stage import Stage
from pagewood.engine.models.stored.tensor_files import TensorFiles
from pagewood.engine.runner.cpu.compiled.exchange import EXCHANGE
from pagewood.engine.runner.cpu.compiled.hand_over import HAND_OVER
from pagewood.engine.runner.cpu.compiled.instruction import Unit
from pagewood.engine.runner.cpu.compiled.products.packed_weights import ProductLevel, WideLevel
from pagewood.engine.runner.cpu.compiled.products.weight_kind import WeightKind
from pagewood.engine.runner.cpu.program.adapters import CPUAdapters
from pagewood.engine.runner.cpu.program.exchange import Exchange
from pagewood.engine.runner.cpu.program.ops import CPUOps
from pagewood.engine.runner.cpu.program.relay import ChannelRelay
from pagewood.engine.runner.cpu.program.tape import Buffer
from pagewood.engine.runner.cpu.weights.matrix_memory import MatrixMemory
from pagewood.engine.runner.cpu.weights.packer import Packer
from pagewood.engine.runner.cpu.weights.packing import PackedShape, PackedWeight
from pagewood.engine.weights.cache import DamagedFile, PackedReader, PackedWriter, weights_file, weights_folder

_log = logging.getLogger(__name__)

_LAYOUT = b"3"
"""Change it with the layout: files of earlier layouts are then not used."""
_CACHED = ("int8", "int4")
_OF_WHOLE_ROWS = " of whole rows"
"""Marks ranks whose scales are those of one process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A decoder, and what its weights need."""

    model: Decoder[Buffer]
    variants: frozenset[tuple[WeightKind, ProductLevel]]
    """See `CPUOps.variants`."""
    units: Collection[Unit]
    """See `CPUOps.units`."""
    form: WeightFormat
    expert_rows: Mapping[int, NDArray[np.int64]]
    """See `CPUOps.expert_rows`."""
    memory: MatrixMemory

    @property
    def mark(self) -> str:
        """Distinguishes its keys and values from those that other forms or products of the same weights yield."""
        shard = self.model.shard
        form = "" if self.form in ("auto", "float32") else f" {self.form}"
        if not shard.is_whole:
            if shard.by_request:  # all ranks have the same keys and values
                shard = replace(shard, rank=0)
            form += f" {shard}{division_mark(self.model.whole)}{_OF_WHOLE_ROWS * (self.form == 'int8')}"
        if any(kind == WeightKind.BFLOAT16_PAIRS for kind, _ in self.variants):
            return f"{form} by bfloat16"
        is_widened = any(kind.has_codes and isinstance(level, WideLevel) for kind, level in self.variants)
        return f"{form} by float32" if is_widened else form


def load_cpu_model(
    folder: Path,
    form: WeightFormat,
    *,
    activations: ActivationFormat = "auto",
    digest: ModelDigest,
    num_threads: int = 1,
    max_length: int | None = None,
    shard: Shard = WHOLE,
    stage: Stage | None = None,
    change: Callable[[ModelConfig], ModelConfig] | None = None,
    exchange: Exchange | None = None,
    relay: ChannelRelay | None = None,
    adapters: CPUAdapters | None = None,
    progress: Progress | None = None,
    files: TensorFiles | None = None,
    expert_rows: Mapping[int, NDArray[np.int64]] | None = None,
) -> LoadedModel:
    """Load the decoder in `folder`, or a rank's part of it; see `load_model` for errors.

    Weights that are quantised here are kept in a cache folder, and mapped when the model is loaded again. If the folder
    cannot be used, they are in memory only.

    Args:
        folder: holds config.json and safetensors.
        form: of the weights.
        activations: see `Packer`.
        digest: of the folder; weights are kept under it.
        num_threads: that lay out weights.
        max_length: see `load_model`.
        shard: the rank whose part of the model is loaded; each has a file of its own in the cache folder.
        stage: the layers that are loaded, likewise; None: all.
        change: see `load_model`.
        exchange: with the other ranks; None: the model is whole.
        relay: between the stages; None: there is one.
        adapters: of the projections; None: there are none.
        progress: called for every tensor.
        files: in place of the folder's; their weights are in memory only.
        expert_rows: where rows are counted on; None: anew.
    """
    load = partial(
        _load, folder, max_length=max_length, shard=shard, stage=stage, change=change, exchange=exchange, relay=relay,
        adapters=adapters, progress=progress, files=files, expert_rows=expert_rows,
    )  # fmt: skip
    if form not in _CACHED or files is not None:
        return load(Packer(form, activations=activations, num_threads=num_threads))
    digest.begin()
    started = time.monotonic()
    part = _part_of(folder, shard, stage, change)
    if relay is not None and stage is not None and stage.is_last and relay.needs.embeds:
        part += " and the embedding"
    path = _kept_file(digest, form, part)
    if path is not None:
        try:
            reader = PackedReader(path, num_threads=num_threads)

            def take(shape: PackedShape) -> tuple[PackedWeight, bool]:
                return PackedWeight(shape=shape, memory=reader.take(_label(shape), shape.nbytes)), True

            loaded = load(Packer(form, activations=activations, memory=take), reads_matrices=False)
            reader.finish()
            _log.info("%s weights mapped from %s in %.1f s", form, path, time.monotonic() - started)
            return loaded
        except FileNotFoundError:
            pass
        except (DamagedFile, OSError) as error:
            _log.warning("weights are quantised again: %s", error)
    try:
        with PackedWriter(weights_folder()) as writer:

            def add(shape: PackedShape) -> tuple[PackedWeight, bool]:
                return PackedWeight(shape=shape, memory=writer.add(_label(shape), shape.nbytes)), False

            loaded = load(Packer(form, activations=activations, memory=add, num_threads=num_threads))
            identity = digest.wait()  # reading a model takes less time than quantising it
            if identity is None:  # the error has been logged; the memory stays valid without a name
                return loaded
            path = _file_of(identity, form, part)
            writer.finish(path)
        _log.info("weights quantised to %s in %.1f s, kept in %s", form, time.monotonic() - started, path)
        return loaded
    except OSError as error:
        _log.warning(
            "quantised weights cannot be kept in %s, so they are in memory only: %s; %s",
            weights_folder(),
            error,
            REMEDY,
        )
    return load(Packer(form, activations=activations, num_threads=num_threads))


def _part_of(
    folder: Path, shard: Shard, stage: Stage | None, change: Callable[[ModelConfig], ModelConfig] | None
) -> str:
    """Return what distinguishes a rank's part of a model from other parts; empty: the model is whole."""
    layers = "" if stage is None else f"{stage} "
    if shard.is_whole:
        return layers
    own = str(shard) if change is None else f"{shard}{division_mark(change(ModelConfig.from_folder(folder)))}"
    return layers + own + _OF_WHOLE_ROWS


def _kept_file(digest: ModelDigest, form: WeightFormat, part: str) -> Path | None:
    """Return the file for weights of a form, or None if it cannot exist yet.

    If weights of any model are kept in this form, this waits for the digest: to read a model takes less time than to
    quantise it again.
    """
    has_some = any(weights_folder().glob(f"*.{form}"))
    identity = digest.wait() if has_some else digest.known()
    return None if identity is None else _file_of(identity, form, part)


def _file_of(identity: bytes, form: WeightFormat, part: str) -> Path:
    """Return the file for the weights of a model, or for a rank's part of them."""
    return weights_file(_LAYOUT + identity + part.encode(), form)


def _load(
    folder: Path,
    packer: Packer,
    *,
    max_length: int | None,
    shard: Shard,
    stage: Stage | None,
    change: Callable[[ModelConfig], ModelConfig] | None,
    exchange: Exchange | None,
    relay: ChannelRelay | None,
    adapters: CPUAdapters | None,
    progress: Progress | None,
    files: TensorFiles | None,
    expert_rows: Mapping[int, NDArray[np.int64]] | None,
    reads_matrices: bool = True,
) -> LoadedModel:
    if adapters is not None:
        adapters.begin()
    ops = CPUOps(packer, exchange=exchange, adapters=adapters, expert_rows=expert_rows)
    dtype = torch.float32 if packer.form == "float32" else None
    model = load_model(
        folder,
        ops,
        dtype=dtype,
        maps_plain=True,
        reads_matrices=reads_matrices,
        max_length=max_length,
        shard=shard,
        stage=stage,
        relay=relay,
        change=change,
        progress=progress,
        files=files,
    )
    return LoadedModel(
        model=model,
        variants=frozenset(ops.variants),
        units=tuple(ops.units) if relay is None else (*ops.units, EXCHANGE, HAND_OVER),
        form=packer.form,
        expert_rows=ops.expert_rows,
        memory=MatrixMemory.of(packer),
    )


def _label(shape: PackedShape) -> str:
    return f"{shape.kind.name} {shape.size} x {shape.inputs}, groups of {shape.group}"
