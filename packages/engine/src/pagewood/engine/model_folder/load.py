"""From a Hugging Face folder to a decoder or a drafting head that is ready to run."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from pagewood.engine.api import Progress
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.decoder import Decoder
from pagewood.engine.models.fields.end_tokens import token_ids
from pagewood.engine.models.head import Head
from pagewood.engine.models.head_config import HeadConfig, is_mtp_tensor
from pagewood.engine.models.ops import A, Linear, Ops, Projection
from pagewood.engine.models.parts.attention import AttentionConfig
from pagewood.engine.models.parts.latent_attention import LatentAttentionConfig
from pagewood.engine.models.shard import WHOLE, Shard
from pagewood.engine.models.stage import Relay, Stage
from pagewood.engine.models.stored.checkpoint import Checkpoint, Found
from pagewood.engine.models.stored.head_order import RowOrder
from pagewood.engine.models.stored.tensor_files import TensorFiles
from pagewood.engine.models.stored.tied import EMBEDDING, OUTPUT
from pagewood.engine.models.torch_ops import TorchOps
from pagewood.engine.weights.nearest import joined

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """Matrices of the same inputs that a decoder holds as one, whose headers have been checked."""

    parts: Sequence[Found]
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of what is needed of all parts."""
        shapes = [one.shape(self.columns) for one in self.parts]
        return sum(rows for rows, _ in shapes), shapes[0][1]


class _Headers:
    """`HeadWeights` that read and compare only the headers and the token map."""

    __slots__ = ("_checkpoint", "matrices")

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.matrices: list[Fused] = []  # written by: stack

    def stack(
        self,
        parts: Sequence[tuple[str, int]],
        *columns: int,
        order: RowOrder | None = None,
        inputs: range | None = None,
    ) -> torch.Tensor:
        found = self._checkpoint.check(parts, *columns, order=order, inputs=inputs)
        if columns:
            self.matrices.append(Fused(parts=found, columns=columns[0]))
        return torch.empty(0)

    def numbers(self, name: str, rows: int, columns: int, *, order: RowOrder | None = None) -> torch.Tensor:
        self._checkpoint.check([(name, rows)], columns, order=order)
        return torch.empty(0)

    def exact(self, name: str, rows: int, *columns: int, order: RowOrder | None = None) -> torch.Tensor:
        del order
        self._checkpoint.check([(name, rows)], *columns)
        return torch.empty(0)

    def integers(self, name: str, rows: int) -> torch.Tensor:
        return self._checkpoint.integers(name, rows)


class _Shapes:
    """`Weights` whose plain matrices are not read: they are tensors without memory, on the device `meta`."""

    __slots__ = ("_checkpoint",)

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def stack(
        self,
        parts: Sequence[tuple[str, int]],
        *columns: int,
        order: RowOrder | None = None,
        inputs: range | None = None,
    ) -> torch.Tensor:
        if not columns:
            return self._checkpoint.stack(parts, order=order)
        found = self._checkpoint.check(parts, *columns, order=order, inputs=inputs)
        if any(one.format is not None for one in found):
            return cast("torch.Tensor", joined(self._checkpoint.read(found, columns[0])))
        return torch.empty(Fused(parts=found, columns=columns[0]).shape, device="meta")

    def numbers(self, name: str, rows: int, columns: int, *, order: RowOrder | None = None) -> torch.Tensor:
        return self._checkpoint.numbers(name, rows, columns, order=order)

    def exact(self, name: str, rows: int, *columns: int, order: RowOrder | None = None) -> torch.Tensor:
        return self._checkpoint.exact(name, rows, *columns, order=order)


def check_weights(folder: str | Path, config: ModelConfig, *, files: TensorFiles | None = None) -> int:
    """Compare the headers of a folder's safetensors with a configuration; return the number of weights.

    Args:
        folder: of the model.
        config: of the model.
        files: in place of the folder's.

    Raises:
        FileNotFoundError: a file is missing, or there are only pickled weights.
        ValueError: the tensors are not those that the model needs, or a tied output projection, which is not read,
            differs from the embedding.
    """
    checkpoint = Checkpoint(folder, dtype=torch.float32, files=files)
    Decoder(config, _Headers(checkpoint), TorchOps(), device=torch.device("cpu"))
    if config.tied_embeddings:
        why = "tie_word_embeddings is true in config.json; false uses both"
        checkpoint.check_copy(OUTPUT, EMBEDDING, why=why)
    checkpoint.finish(ignored=lambda name: _is_redundant(name, config))
    return checkpoint.num_elements


def adaptable_projections(folder: str | Path) -> list[Projection]:
    """Return the projections of the whole model in `folder` that adapters may change; only headers are read.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the architecture is not supported, or the tensors are not those that the model needs.
    """
    ops = TorchOps()
    headers = _Headers(Checkpoint(folder, dtype=torch.float32))
    Decoder(ModelConfig.from_folder(folder), headers, ops, device=torch.device("cpu"))
    return ops.projections


def open_matrices(checkpoint: Checkpoint, config: ModelConfig, *, shard: Shard = WHOLE) -> list[Fused]:
    """Return all matrices of a decoder, or of a rank's part of it, in the order in which it reads them.

    `Checkpoint.read` reads their numbers.

    Raises:
        ValueError: the tensors are not those that the model needs.
    """
    headers = _Headers(checkpoint)
    Decoder(config, headers, TorchOps(), device=torch.device("cpu"), shard=shard)
    return headers.matrices


def layer_bytes(folder: str | Path, config: ModelConfig, *, is_stored: bool) -> tuple[list[int], int]:
    """Return the bytes of the matrices of each layer, and of the output projection; only headers are read.

    Args:
        folder: of the model.
        config: of the model.
        is_stored: whether weights keep the form in which they are stored; otherwise all elements count the same.

    Raises:
        ValueError: the tensors are not those that the model needs.
    """
    checkpoint = Checkpoint(folder, dtype=torch.float32)
    layers, head = [0] * config.num_layers, 0
    for matrix in open_matrices(checkpoint, config):
        for one in matrix.parts:
            size = checkpoint.num_bytes(one, matrix.columns) if is_stored else math.prod(one.shape(matrix.columns))
            layer = re.search(r"(?:^|\.)layers\.(\d{1,6})\.", one.name, re.ASCII)
            if layer is not None:
                layers[int(layer[1])] += size
            elif one.name.endswith("embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"):
                head += size
    return layers, head


def load_model(
    folder: str | Path,
    ops: Ops[A],
    *,
    dtype: torch.dtype | None = torch.float32,
    device: torch.device | None = None,
    maps_plain: bool = False,
    reads_matrices: bool = True,
    max_length: int | None = None,
    shard: Shard = WHOLE,
    stage: Stage | None = None,
    relay: Relay[A] | None = None,
    change: Callable[[ModelConfig], ModelConfig] | None = None,
    keeps_float8: bool = False,
    progress: Progress | None = None,
    files: TensorFiles | None = None,
) -> Decoder[A]:
    """Read the weights of `folder` straight into the decoder's fused parameters.

    Args:
        folder: holds config.json and safetensors.
        ops: the arithmetic of the device, which keeps the weights in the form that it computes with.
        dtype: of the parameters; weights on disk are converted. None: matrices keep their dtype, vectors become
            float32.
        device: where the parameters lie; each tensor goes there from the file. None: the CPU.
        maps_plain: whether `ops` takes plain matrices as `StackedRows`; see `Checkpoint`.
        reads_matrices: whether `ops` needs the numbers of plain matrices; otherwise they are tensors without memory.
        max_length: tokens of the longest request; see `ModelConfig.for_length`. None: as many as possible.
        shard: the rank whose part of the model is read.
        stage: the layers that are read; None: all.
        relay: see `Decoder`.
        change: applied to what config.json says, as in `models.expert_division`; None: nothing is changed.
        keeps_float8: whether `ops` takes experts as `ScaledCodes`; see `Checkpoint`.
        progress: called for every tensor.
        files: in place of the folder's, which are not read then.

    Raises:
        FileNotFoundError: a file is missing, or there are only pickled weights.
        ValueError: the architecture is not supported, or the tensors are not those that the model needs. This is found
            out before memory is taken for any of them.
    """
    config = ModelConfig.from_folder(folder)
    if max_length is not None:
        config = config.for_length(max_length)
    if change is not None:
        config = change(config)
    check_weights(folder, config, files=files)
    if config.other_parts:
        _log.info(
            "%s: the text model is read without the tensors that begin with %s",
            folder,
            ", ".join(config.other_parts),
        )
    if _chooses_tokens(config):
        _log.info(
            "%s: attention sees all tokens, as the model does up to index_topk; its indexer is not read, and requests "
            "are at most %d tokens long",
            folder,
            config.max_position,
        )
    device = device or torch.device("cpu")
    checkpoint = Checkpoint(
        folder, dtype=dtype, device=device, maps_plain=maps_plain, keeps_float8=keeps_float8, progress=progress,
        files=files,
    )  # fmt: skip
    weights = checkpoint if reads_matrices else _Shapes(checkpoint)
    decoder = Decoder(config, weights, ops, device=device, shard=shard, stage=stage, relay=relay)
    checkpoint.finish(ignored=lambda name: stage is not None or _is_redundant(name, config))
    return decoder


def check_head(folder: str | Path, config: HeadConfig, *, files: TensorFiles | None = None) -> int:
    """Compare the headers of a folder's safetensors with a head's configuration; return the number of weights.

    With `files`, these are in place of the folder's: copies of the target's tensors may then be those before an update.

    Raises:
        FileNotFoundError: a file is missing, or there are only pickled weights.
        ValueError: the tensors are not those that the head needs, its token map leads out of the vocabulary, or a copy
            of one of the target's tensors, which is not read, differs from it.
    """
    checkpoint = Checkpoint(folder, dtype=torch.float32, files=files)
    ops = TorchOps()
    embedding, output = ops.tied_embedding(torch.empty(0))
    Head(config, _Headers(checkpoint), ops, embedding=embedding, output=output, device=torch.device("cpu"))
    targets_output = EMBEDDING if config.layer.tied_embeddings else OUTPUT
    for prefix in config.names.ignored if config.kind == "mtp" and files is None else ():
        original = EMBEDDING if prefix.endswith("embed_tokens.") else targets_output
        checkpoint.check_copy(f"{prefix}weight", original, why="a head shares its target's")
    checkpoint.finish(ignored=lambda name: _is_not_of_head(name, config))
    return checkpoint.num_elements


def load_head(
    folder: str | Path,
    target: Decoder[A],
    ops: Ops[A],
    *,
    captured: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    progress: Progress | None = None,
    files: TensorFiles | None = None,
    alone: Callable[[Linear[A]], Linear[A]] = lambda linear: linear,
) -> Head[A]:
    """Read the drafting head of `target` from a folder, or the part of it that the target's rank has.

    Args:
        folder: of an EAGLE-3 head, or the target's own if its checkpoint has layers for multi-token prediction; only
            the first of these layers is read.
        target: the model that the head drafts for; the head shares its embedding and its output projection where the
            folder has none of its own.
        ops: see `load_model`, as `dtype`, `device` and `progress`.
        captured: replaces the hidden states that the folder names, see `Decoder.states`.
        dtype: of the parameters.
        device: where the parameters lie.
        progress: called for every tensor.
        files: in place of the folder's, which are not read then.
        alone: returns the target's embedding and its output projection without what adapters add.

    Raises:
        FileNotFoundError: a file is missing, or there are only pickled weights.
        ValueError: there is no head, its kind is not supported, it does not fit the target, or the tensors are not
            those that it needs. This is checked before any memory is allocated for them.
    """
    config = HeadConfig.from_folder(folder, target.whole, captured=captured)
    check_head(folder, config, files=files)
    device = device or torch.device("cpu")
    checkpoint = Checkpoint(folder, dtype=dtype, device=device, progress=progress, files=files)
    head = Head(
        config,
        checkpoint,
        ops,
        embedding=alone(target.embedding),
        output=alone(target.head),
        device=device,
        shard=target.shard,
    )
    checkpoint.finish(ignored=lambda name: _is_not_of_head(name, config))
    return head


def check_draft(folder: str | Path, target_folder: str | Path) -> ModelConfig:
    """Return the configuration of a draft model whose vocabulary is the target's.

    Raises:
        FileNotFoundError: a config.json is missing.
        ValueError: the architecture is not supported, or the vocabularies differ in size. If both folders have a
            tokenizer.json: a token has different ids in the two.
    """
    config, target = ModelConfig.from_folder(folder), ModelConfig.from_folder(target_folder)
    if config.vocab_size != target.vocab_size:
        raise ValueError(
            f"{Path(folder) / 'config.json'}: vocab_size of a draft model must be the target's {target.vocab_size}, "
            f"got {config.vocab_size}"
        )
    if config.is_encoder or target.is_encoder:
        raise ValueError(f"a draft model and its target must be decoders, got {config.architecture}")
    if config.states is not None:
        raise ValueError(
            f"{Path(folder) / 'config.json'}: a draft model must have no recurrent layers, got {config.architecture}"
        )
    files = [Path(path) / "tokenizer.json" for path in (folder, target_folder)]
    if all(file.is_file() for file in files):
        own, others = (token_ids(file) for file in files)
        different = sorted(token for token in own.keys() | others.keys() if own.get(token) != others.get(token))
        if different:
            first = different[0]
            raise ValueError(
                f"{files[0]} must have the tokens of {files[1]}, got {len(different)} with other ids, the first is "
                f"{first[:80]!r}: {own.get(first)} and {others.get(first)}"
            )
    return config


def load_draft(
    folder: str | Path,
    target_folder: str | Path,
    ops: Ops[A],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    shard: Shard = WHOLE,
    progress: Progress | None = None,
) -> Decoder[A]:
    """Read a draft model for the model in `target_folder`; the other arguments are those of `load_model`.

    Raises:
        FileNotFoundError: see `load_model`.
        ValueError: see `check_draft` and `load_model`.
    """
    check_draft(folder, target_folder)
    return load_model(folder, ops, dtype=dtype, device=device, shard=shard, progress=progress)


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Whether a tensor repeats the configuration or another tensor, or belongs to a drafting head."""
    return (
        name.endswith("rotary_emb.inv_freq")
        or (config.tied_embeddings and name in (OUTPUT, f"language_model.{OUTPUT}"))
        or name.startswith(config.other_parts)
        or is_mtp_tensor(name, config)
        or _is_shared(name, config)
        or (".indexer." in name and _chooses_tokens(config))
    )


def _is_shared(name: str, config: ModelConfig) -> bool:
    """Whether a tensor would make keys or values for a layer that reads those of another layer."""
    found = re.fullmatch(r".*layers\.(\d{1,6})\.self_attn\.[kv]_(?:proj|norm)\.\w+", name, re.ASCII)
    if found is None or int(found[1]) >= config.num_layers:
        return False
    mixer = config.layers[int(found[1])].mixer
    return isinstance(mixer, AttentionConfig) and mixer.source is not None


def _chooses_tokens(config: ModelConfig) -> bool:
    """Whether the model would attend to some tokens only in a sequence that is longer than the longest one here."""
    mixers = [layer.mixer for layer in config.layers]
    return any(isinstance(mixer, LatentAttentionConfig) and mixer.longest is not None for mixer in mixers)


def _is_not_of_head(name: str, config: HeadConfig) -> bool:
    """Whether a head has no use for a tensor of its checkpoint."""
    if name.endswith("rotary_emb.inv_freq") or name.startswith(config.names.ignored):
        return True
    if ".indexer." in name and _chooses_tokens(config.layer):
        return True
    return config.kind == "mtp" and not name.startswith(tuple(f"{prefix}." for prefix in config.names.layers))
