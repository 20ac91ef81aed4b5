"""The tensors of a GGUF file under the names, and with the rows in the order, of Hugging Face's decoders."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from types import MappingProxyType

import numpy as np

from pagewood.engine.weights.checkpoint_formats import Array, Format
from pagewood.engine.weights.gguf.blocks import GGUFBlocks
from pagewood.engine.weights.gguf.config import config_of, has_interleaved_heads
from pagewood.engine.weights.gguf.parts import open_gguf

_LAYER = re.compile(r"blk\.(\d{1,6})\.([a-z_]+)\.(weight|bias)", re.ASCII)
_IN_LAYER = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
_OUTSIDE = MappingProxyType(
    {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
)
_PLAIN = MappingProxyType({"F32": "<f4", "F16": "<f2", "BF16": "<u2"})


class GGUFTensors:
    """The tensors of a decoder. Invariant: rows of queries and keys are in the order of halves, not of pairs."""

    __slots__ = ("_file", "_heads", "_names")

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            FileNotFoundError: there is no such file, or a part of it is missing.
            ValueError: see `open_gguf` and `config_of`.
        """
        self._file = open_gguf(path)
        self._names = {_decoder_name(name): name for name in self._file.tensors}
        config = config_of(self._file)
        self._heads = {}
        if has_interleaved_heads(self._file):
            self._heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}

    def names(self) -> Collection[str]:
        """Return all names."""
        return self._names

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        """Return the shape and the type of a tensor."""
        stored = self._file.tensors[self._names[name]]
        return stored.shape, stored.kind

    def array(self, name: str) -> Array:
        """Return plain numbers (BF16 as uint16), or the bytes of blocks, one row of them for each row of a matrix."""
        own = self._names[name]
        stored, raw = self._file.tensors[own], self._file.raw(own)
        if stored.kind in _PLAIN:
            raw = raw.view(_PLAIN[stored.kind]).reshape(stored.shape)
        heads = self._heads.get(name.split(".")[-2]) if "." in name else None
        if heads is None or len(raw) % (2 * heads):
            return raw
        # llama.cpp rotates neighbours in a head; the file has element i of the first half before element i of the
        # second.
        return raw[np.arange(len(raw)).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)]

    def format_of(self, name: str) -> Format | None:
        """Return the format of a matrix; None: plain numbers."""
        kind = self.header(name)[1] if name in self._names else "F32"
        return None if kind in _PLAIN else GGUFBlocks(kind=kind)

    def is_unneeded(self, name: str) -> bool:
        """Whether a tensor repeats a part of the configuration."""
        return name == "rope_freqs.weight"


def _decoder_name(name: str) -> str:
    """Return the name of a tensor in Hugging Face's decoders; an unknown name stays unchanged."""
    found = _LAYER.fullmatch(name)
    if found and found[2] in _IN_LAYER:
        return f"model.layers.{int(found[1])}.{_IN_LAYER[found[2]]}.{found[3]}"
    return _OUTSIDE.get(name, name)
