"""What llama.cpp's name of an architecture means in Hugging Face's decoders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.weights.gguf.keys import Keys

Config = Mapping[str, Any]
Order = NDArray[np.int64]
ReadKeys = Callable[[Keys, Config], dict[str, Any]]
"""From the keys and the fields that all architectures have to more fields, or other values."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What a stored tensor has of a module."""

    module: str
    rows: Order | None = None
    """The stored row of each row; None: it has all rows, in their order."""
    heads: Order | None = None
    """The stored place of each head among the inputs; None: they are in their order."""


Modules = Mapping[str, str | tuple[str, ...] | tuple[Piece, ...]]
"""Modules of a layer by llama.cpp's name."""


def _no_more(keys: Keys, config: Config) -> dict[str, Any]:
    return {}


def _no_modules(config: Config) -> Modules:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """An architecture as llama.cpp knows it."""

    family: str
    """The class in Hugging Face's configurations."""
    model_type: str
    others: tuple[str, ...] = ()
    """Classes of other models with this name: their keys tell them apart, see `more`, or they compute the same."""
    more: ReadKeys = _no_more
    epsilon: str = "attention.layer_norm_rms_epsilon"
    """Key of the epsilon of its norms."""
    has_pairs: bool = False
    """Whether the converter reorders the rows of queries and keys, so that the elements that are rotated together are
    neighbours."""
    rotates_part: bool = False
    """Whether a part of each head may be rotated alone."""
    adds_one: bool = False
    """Whether norms are stored with the 1 added that the model adds."""
    has_latents: bool = False
    """Whether keys and values are made of latents. Then `more` knows the sizes of a head."""
    has_own_kinds: bool = False
    """Whether keys may be lists with a number for each layer, and `rope_freqs.weight` says which elements are rotated.
    Then `more` reads both."""
    has_growth: bool = False
    """Whether `rope.scaling.yarn_log_multiplier` is `mscale_all_dim`, beside an `mscale` of 1."""
    has_recurrence: bool = False
    """Whether some layers have no attention, so that numbers of heads may be 0 for these layers, or for all."""
    modules: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict[str, str | tuple[str, ...]])
    """Modules of a layer by llama.cpp's name, where they differ from `MODULES`. A name with ".scale" is that of a
    vector beside the module."""
    modules_of: Callable[[Config], Modules] = _no_modules
    """More of them, which follow from the configuration."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    """Shapes that the converter changes, by llama.cpp's name; 0: the last dimension of the stored tensor, -1: what is
    left."""
    prediction: Mapping[str, str] = field(default_factory=dict[str, str])
    """Names of modules for multi-token prediction, where the layers behind the decoder's are those of `mtp.layers`."""

    def all_modules(self, config: Config) -> Modules:
        """Return all modules of a layer, also that in which gates and the others of experts are one."""
        found = {**MODULES, **self.modules, **self.modules_of(config)}
        return {**found, "ffn_gate_up_exps": tuple(str(found[f"ffn_{one}_exps"]) for one in ("gate", "up"))}


QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
"""Modules whose rows are those of query heads, of key heads, and of as many value heads."""
MODULES: Mapping[str, str | tuple[str, ...]] = MappingProxyType(
    {
        "attn_qkv": QKV,
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.experts.{}.gate_proj",
        "ffn_up_exps": "mlp.experts.{}.up_proj",
        "ffn_down_exps": "mlp.experts.{}.down_proj",
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    }
)
"""The modules of a layer by llama.cpp's name; "{}" is the number of an expert.

Several modules are one below the other in the stored tensor, of one size unless they are `QKV`.
"""
