"""The tensors of a GGUF file under the names, and with the rows in the order, of Hugging Face's decoders."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import cast

import numpy as np

from pagewood.engine.weights.checkpoint_formats import Array, Format
from pagewood.engine.weights.gguf.architecture import QKV, Architecture, Modules, Order, Piece
from pagewood.engine.weights.gguf.blocks import GGUFBlocks
from pagewood.engine.weights.gguf.config import architecture_of, config_of
from pagewood.engine.weights.gguf.file import BLOCKS, GGUFFile
from pagewood.engine.weights.gguf.latents import SplitProjection
from pagewood.engine.weights.gguf.parts import open_gguf
from pagewood.engine.weights.gguf.plain import PLAIN, as_float32
from pagewood.engine.weights.gguf.rope import TENSORS
from pagewood.engine.weights.matrix_forms import F32
from pagewood.engine.weights.matrix_parts import in_order

_LAYER = re.compile(
    r"blk\.(\d{1,6})\.([a-z_]+(?:_\d)?|ssm_conv1d(?:_[qkv])?|(?:nextn|shortconv)\.[a-z_]+)"
    r"(?:(?<=ssm_[ad])|\.(weight|bias|scale))",
    re.ASCII,
)
_OUTSIDE = MappingProxyType(
    {
        "token_embd.weight": "model.embed_tokens.weight",
        "position_embd.weight": "model.embed_positions.weight",
        "output_norm.weight": "model.norm.weight",
        "token_embd_norm.weight": "model.norm.weight",  # that of LFM2, behind its last layer
        "output_norm.bias": "model.norm.bias",
        "output.weight": "lm_head.weight",
        "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
        "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
        "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
    }
)
_PARAMETERS = (
    "attn_sinks", "exp_probs_b", "ffn_down_exps.scale", "ffn_gate_inp.scale", "layer_output_scale", "ssm_a", "ssm_d",
    "ssm_dt",
)  # fmt: skip
"""Tensors whose names end with ".weight", ".bias" or ".scale" in GGUF only, or nowhere."""
_NORMS = ("norm.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight")
"""Ends of the names of norms."""
_OF_RESULTS = "linear_attn.norm.weight"
"""The norm to which the converter adds nothing."""
_ROWS = ("shared_expert_gate", "moe_statics.e_score_correction_bias")
"""Ends of the names of modules and parameters that are stored as vectors, and are matrices of one row."""
_XIELU = ("alpha_p", "alpha_n", "beta", "eps")
"""The parameters of an activation, which are keys in GGUF, with a number for each layer."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor is stored."""

    stored: str
    expert: int | None = None
    """Which part of the tensor of all experts; None: it is not of several experts."""
    is_row: bool = False
    """Whether it is stored as a vector, and is a matrix of one row."""
    rows: slice | Order | None = None
    """Which rows of the tensor, or of the expert's part; None: all."""
    heads: Order | None = None
    """The stored place of each head among the inputs; None: they are in their order."""
    shape: tuple[int, ...] | None = None
    """Its shape, if the converter changed it; see `Architecture.shapes`."""

    def shape_of(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Return its shape in a tensor of the shape `stored`."""
        shape = stored if self.expert is None else stored[1:]
        if self.shape is not None:
            wanted = [size or stored[-1] for size in self.shape]
            left = math.prod(shape) // max(1, -math.prod(wanted))
            shape = tuple(left if size == -1 else size for size in wanted)
        if isinstance(self.rows, slice):
            shape = (self.rows.stop - self.rows.start, *shape[1:])
        elif self.rows is not None:
            shape = (len(self.rows), *shape[1:])
        return (1, *shape) if self.is_row else shape


class GGUFTensors:
    """The tensors of a decoder. Invariant: rows of queries and keys are in the order of halves, not of pairs."""

    __slots__ = ("_adds_one", "_file", "_heads", "_numbers", "_places", "_split")

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            FileNotFoundError: there is no such file, or a part of it is missing.
            ValueError: see `open_gguf` and `config_of`; or a tensor is not one of all experts.
        """
        self._file = open_gguf(path)
        config, own = config_of(self._file), architecture_of(self._file)
        count = cast("int", self._file.metadata.get(f"{self._file.metadata['general.architecture']}.expert_count", 0))
        heads = (config["num_attention_heads"], config["num_key_value_heads"], config["num_key_value_heads"])
        self._split = _split_projections(self._file) if own.has_latents else {}
        modules = own.all_modules(config)
        hidden = {name for one in self._split.values() for name in (one.keys, one.values)}
        self._places = {
            name: place
            for stored in self._file.tensors
            if stored not in hidden
            for name, place in _places(self._file, stored, own, modules, config["num_hidden_layers"], count, heads)
        }
        self._numbers = _parameters(self._file, config["num_hidden_layers"])
        self._adds_one = own.adds_one
        self._heads: dict[str, int] = {}
        if own.has_pairs:
            self._heads = {"q_proj": heads[0], "k_proj": heads[1]}

    def names(self) -> Collection[str]:
        """Return all names."""
        return self._places.keys() | self._numbers.keys() | self._split.keys()

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        """Return the shape and the type of a tensor."""
        if name in self._numbers:
            return (1,), "F32"
        if name in self._split:
            return self._split[name].shape, "F32"
        place = self._places[name]
        stored = self._file.tensors[place.stored]
        return place.shape_of(stored.shape), stored.kind

    def array(self, name: str) -> Array:
        """Return plain numbers (BF16 as uint16), or the bytes of blocks, one row of them for each row of a matrix."""
        if name in self._numbers:
            return self._numbers[name]
        if name in self._split:
            return self._split[name].joined(self._file)
        place = self._places[name]
        stored, raw = self._file.tensors[place.stored], self._file.raw(place.stored)
        if stored.kind in PLAIN:
            raw = raw.view(PLAIN[stored.kind]).reshape(stored.shape)
        if place.expert is not None:
            raw = raw[place.expert]
        if place.shape is not None:
            raw = raw.reshape(replace(place, rows=None).shape_of(stored.shape))
        if place.rows is not None:
            raw = raw[place.rows]
        if place.is_row:
            raw = raw[None]
        if place.heads is not None and self._has_whole_heads(place):
            raw = in_order(raw, place.heads)
        if name.endswith(".A_log"):
            return self._logarithms(place.stored, as_float32(raw))
        if self._adds_one and name.endswith(_NORMS) and not name.endswith(_OF_RESULTS):
            return as_float32(raw) - np.float32(1)
        heads = self._heads.get(name.split(".")[-2]) if "." in name else None
        if heads is None or len(raw) % (2 * heads):
            return raw
        # llama.cpp rotates neighbours in a head; the file has element i of the first half before element i of the
        # second.
        return raw[np.arange(len(raw)).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)]

    def format_of(self, name: str) -> Format | None:
        """Return the format of a matrix; None: plain numbers."""
        kind = self.header(name)[1] if name in self._places else "F32"
        if kind in PLAIN:
            return None
        place = self._places[name]
        has_order = place.heads is not None and not self._has_whole_heads(place)
        return GGUFBlocks(kind=kind, heads=place.heads if has_order else None)

    def _has_whole_heads(self, place: _Place) -> bool:
        """Whether no block of a matrix has inputs of several heads."""
        stored = self._file.tensors[place.stored]
        [block] = (numbers for kind, numbers, _ in BLOCKS.values() if kind == stored.kind)
        return place.heads is not None and stored.shape[-1] // len(place.heads) % block == 0

    def _logarithms(self, stored: str, numbers: F32) -> F32:
        """Return the logarithms of rates of decay.

        Raises:
            ValueError: they are not stored as negative numbers.
        """
        if not (np.isfinite(numbers) & (numbers < 0)).all():
            raise ValueError(f"{self._file.path}: {stored} must hold negative numbers, got {numbers.max():g}")
        return np.log(-numbers)

    def is_unneeded(self, name: str) -> bool:
        """Whether a tensor repeats a part of the configuration."""
        return name in TENSORS


def _split_projections(file: GGUFFile) -> dict[str, SplitProjection]:
    """Return the projections of latents that are stored in two tensors, by their names in Hugging Face's decoders."""
    found = (_LAYER.fullmatch(stored) for stored in file.tensors)
    return {
        f"model.layers.{int(one[1])}.self_attn.kv_b_proj.weight": SplitProjection.of(file, one[0])
        for one in found
        if one is not None and one[2] == "attn_k_b"
    }


def _places(
    file: GGUFFile,
    stored: str,
    architecture: Architecture,
    modules: Modules,
    num_layers: int,
    num_experts: int,
    num_heads: tuple[int, int, int],
) -> Iterator[tuple[str, _Place]]:
    """Yield the tensors in a stored one by their names in Hugging Face's decoders; an unknown name stays unchanged.

    `num_heads` are those of queries, keys and values.

    Raises:
        ValueError: a tensor of all experts has not one part for each, or one of several modules cannot be divided.
    """
    found = _LAYER.fullmatch(stored)
    own = "" if found is None else f"{found[2]}.scale" if found[3] == "scale" else found[2]
    number = -1 if found is None else int(found[1]) - num_layers
    if architecture.prediction and number >= 0 and own in architecture.prediction:
        yield f"{architecture.prediction[own]}.weight", _Place(stored)
        return
    if found is None or own not in modules:
        yield _OUTSIDE.get(stored, stored), _Place(stored)
        return
    module, shape = modules[own], file.tensors[stored].shape
    layer = f"mtp.layers.{number}." if architecture.prediction and number >= 0 else f"model.layers.{int(found[1])}."
    changed = architecture.shapes.get(own) if found[3] != "bias" else None
    if changed is not None and file.tensors[stored].kind not in PLAIN:
        raise ValueError(f"{file.path}: {stored} must hold plain numbers, got {file.tensors[stored].kind}")
    if isinstance(module, tuple) and isinstance(module[0], Piece):
        for name, place in _pieces(file, stored, cast("tuple[Piece, ...]", module), changed):
            yield f"{layer}{name}" if own in _PARAMETERS else f"{layer}{name}.{found[3]}", place
        return
    if isinstance(module, tuple):
        of_experts = "{}" in str(module[0])
        shares = num_heads if module == QKV else (1,) * len(module)
        if len(shape) < 1 + of_experts or shape[int(of_experts)] % sum(shares):
            raise ValueError(f"{file.path}: {stored} must hold parts of {shares} times as many rows, got shape {shape}")
        if of_experts and shape[0] != num_experts:
            raise _wrong_count(file, stored, num_experts)
        size, start = shape[int(of_experts)] // sum(shares), 0
        for one, share in zip(module, shares, strict=True):
            rows = slice(start, start + share * size)
            start = rows.stop
            for expert in range(num_experts) if of_experts else [None]:
                yield f"{layer}{one}.{found[3]}".format(expert), _Place(stored, expert, rows=rows)
        return
    name = f"{layer}{module}" if own in _PARAMETERS else f"{layer}{module}.{found[3]}"
    if "{}" not in name:
        is_row = len(shape) == 1 and name.removesuffix(".weight").endswith(_ROWS)
        yield name, _Place(stored, is_row=is_row, shape=changed)
        return
    if len(shape) < 2 or shape[0] != num_experts:
        raise _wrong_count(file, stored, num_experts)
    for expert in range(num_experts):
        yield name.format(expert), _Place(stored, expert)


def _pieces(
    file: GGUFFile, stored: str, pieces: tuple[Piece, ...], changed: tuple[int, ...] | None
) -> Iterator[tuple[str, _Place]]:
    """Yield the pieces of a tensor by the names of their modules.

    Raises:
        ValueError: the tensor has another number of rows, or its inputs are not as many heads.
    """
    shape = file.tensors[stored].shape
    whole = _Place(stored, shape=changed).shape_of(shape)
    num_rows = sum(len(piece.rows) for piece in pieces if piece.rows is not None)
    for piece in pieces:
        if piece.rows is not None and whole[0] != num_rows:
            raise ValueError(f"{file.path}: {stored} must have {num_rows} rows, got shape {shape}")
        if piece.heads is not None and whole[-1] % len(piece.heads):
            raise ValueError(f"{file.path}: {stored} must have inputs of {len(piece.heads)} heads, got shape {shape}")
        yield piece.module, _Place(stored, rows=piece.rows, heads=piece.heads, shape=changed)


def _wrong_count(file: GGUFFile, stored: str, num_experts: int) -> ValueError:
    shape = file.tensors[stored].shape
    return ValueError(f"{file.path}: {stored} must hold one part for each of {num_experts} experts, got {shape}")


def _parameters(file: GGUFFile, num_layers: int) -> dict[str, Array]:
    """Return the parameters of activations that are keys, by their names in Hugging Face's decoders.

    Raises:
        ValueError: there is not one number for each layer.
    """
    found: dict[str, Array] = {}
    for parameter in _XIELU:
        key = f"xielu.{parameter}"
        if key not in file.metadata:
            continue
        value: object = file.metadata[key]
        numbers = cast("list[object]", value) if isinstance(value, list) else [value] * num_layers
        if len(numbers) != num_layers or not all(isinstance(number, int | float) for number in numbers):
            raise ValueError(f"{file.path}: {key} must be a number for each of {num_layers} layers, got {value!r:.80}")
        for layer, number in enumerate(numbers):
            found[f"model.layers.{layer}.mlp.act_fn.{parameter}"] = np.array([number], np.float32)
    return found
