"""The keys of an architecture in a GGUF file: keys that are read, keys without effect here, and refused keys."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any, cast

from pagewood.engine.json_fields import Fields
from pagewood.engine.weights.gguf.file import GGUFFile

_log = logging.getLogger(__name__)

LARGEST = 1 << 28
"""The largest size that a key may name."""

_READ = frozenset(
    {
        "context_length", "embedding_length", "block_count", "feed_forward_length", "expert_count",
        "expert_used_count", "expert_weights_norm", "expert_feed_forward_length",
        "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor",
        "rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor",
        "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow", "ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank",
        "ssm.group_count", "shortconv.l_cache", "kda.head_dim",
    }
)  # fmt: skip
"""Keys that are read wherever they have a meaning."""
_WITHOUT_EFFECT = frozenset(
    {
        "vocab_size",  # the rows of the embedding table count
        "tensor_data_layout", "rope.scaling.finetuned", "pooling_type",
        "attention.layer_norm_epsilon",  # for norms of another kind than those that the architecture has
    }
)  # fmt: skip
_OF_EXPERTS: dict[str, tuple[object, ...]] = {
    "expert_shared_count": (0,), "expert_shared_feed_forward_length": (0,), "expert_chunk_feed_forward_length": (0,),
    "expert_group_count": (0, 1), "expert_group_used_count": (0, 1), "expert_group_scale": (0, 1),
    "experts_per_group": (0, 1), "expert_weights_scale": (0, 1), "expert_gating_func": (0, 1),
    "moe_every_n_layers": (0, 1), "interleave_moe_layer_step": (0, 1), "leading_dense_block_count": (0,),
}  # fmt: skip
"""Keys without effect if there are no experts, with the values that stand for nothing or for softmax."""
_ONE: tuple[str, ...] = (
    "logit_scale",
    "residual_scale",
    "embedding_scale",
    "attention.output_scale",
    "rope.scaling.alpha",
)
"""Factors; llama.cpp ignores a factor of 0."""
_ZERO: tuple[str, ...] = (
    "attention.sliding_window", "embedding_length_out", "nextn_predict_layers", "n_deepstack_layers",
    "attn_logit_softcapping", "router_logit_softcapping", "final_logit_softcapping", "rescale_every_n_layers",
    "token_shift_count",
    "full_attention_interval", "activation_sparsity_scale", "embedding_length_per_layer_input", "swiglu_clamp_exp",
    "swiglu_clamp_shexp", "moe_latent_size", "use_parallel_residual", "swin_norm",
    "attention.max_alibi_bias", "attention.clamp_kqv", "attention.q_lora_rank", "attention.kv_lora_rank",
    "attention.relative_buckets_count", "attention.temperature_length", "attention.temperature_scale",
    "attention.key_length_mla", "attention.value_length_mla", "attention.key_length_swa", "attention.value_length_swa",
    "attention.shared_kv_layers", "attention.sliding_window_pattern", "attention.indexer.head_count",
    "attention.indexer.key_length", "attention.indexer.top_k", "attention.group_norm_groups",
    "rope.dimension_count_swa", "rope.dimension_sections", "rope.freq_base_swa", "ssm.dt_b_c_rms",
)  # fmt: skip
"""Features that most architectures lack: the value must then be 0, false or a list of these."""


class Keys:
    """The keys of a file's architecture. Invariant: a key that was asked for is not refused for its value."""

    __slots__ = ("_fields", "_file", "_read", "name", "source")

    def __init__(self, file: GGUFFile, name: str) -> None:
        """Show the keys that begin with `name` and a dot."""
        self.source = str(file.path)
        self.name = name
        self._fields = Fields(self.source, file.metadata)
        self._file = file
        self._read: set[str] = set()  # written by: _named

    @property
    def read(self) -> frozenset[str]:
        """The keys that were asked for, without the name."""
        return frozenset(self._read)

    def integer(self, key: str, default: int | None = None, *, low: int = 0, high: int = LARGEST) -> int:
        """Return a whole number.

        Raises:
            ValueError: it is missing, of another type, or out of its range; so do all methods.
        """
        return self._fields.integer(self._named(key), default, low=low, high=high)

    def size(self, key: str, default: int | None = None) -> int:
        """Return a whole number of at least 1."""
        return self.integer(key, default, low=1)

    def first_size(self, key: str, default: int | None = None) -> int:
        """Return a whole number of at least 1, the first of a list."""
        found = self.integers(key)
        if not found:
            return self.size(key, default)
        if found[0] < 1:
            raise ValueError(f"{self.source}: {self.name}.{key} must be at least 1, got {found[0]}")
        return found[0]

    def sizes(self, key: str, num_layers: int) -> Sequence[int]:
        """Return a whole number of at least 1 for each layer, of a list or a number for all."""
        found = list(self.integers(key))
        found = found * num_layers if len(found) == 1 else found
        if len(found) != num_layers or min(found) < 1:
            raise ValueError(
                f"{self.source}: {self.name}.{key} must be a number >= 1 for each of {num_layers} layers, "
                f"got {found!r:.80}"
            )
        return found

    def only_size(self, key: str, default: int | None = None) -> int:
        """Return a whole number of at least 1, of a number for all layers or a list in which others are 0.

        `default` is that of an absent key, or of zeros alone.
        """
        found = {one for one in self.integers(key) if one}
        if len(found) > 1:
            raise ValueError(
                f"{self.source}: {self.name}.{key} must be one number in all layers, or 0, got {sorted(found)!r:.80}"
            )
        if not found and default is not None:
            return default
        return found.pop() if found else self.size(key)

    def are_set(self, key: str, num_layers: int) -> list[bool]:
        """Return for each layer whether a number is not 0, of a list of them or a number for all.

        A list may name more layers, for multi-token prediction.
        """
        found = list(self.integers(key))
        found = found * num_layers if len(found) == 1 else found
        if len(found) < num_layers:
            raise ValueError(
                f"{self.source}: {self.name}.{key} must be a number for each of {num_layers} layers, got {len(found)}"
            )
        return [one > 0 for one in found[:num_layers]]

    def number(self, key: str, default: float | None = None, *, low: float, high: float) -> float:
        """Return a number."""
        return self._fields.number(self._named(key), default, low=low, high=high)

    def flag(self, key: str, default: bool) -> bool:
        """Return whether something is so."""
        return self._fields.flag(self._named(key), default)

    def integers(self, key: str) -> Sequence[int]:
        """Return a list of whole numbers, or of flags; one for a number alone, none for an absent key."""
        value = self._fields.values.get(self._named(key), [])
        values = cast("list[object]", value) if isinstance(value, list) else [value]
        if not all(isinstance(one, int) and 0 <= one <= LARGEST for one in values):
            raise ValueError(f"{self.source}: {self.name}.{key} must be whole numbers, got {value!r:.80}")
        return cast("list[int]", values)

    def has_tensor(self, name: str) -> bool:
        """Return whether the file has a tensor, which says more than its keys do about some features."""
        return name in self._file.tensors

    def has_in_layers(self, name: str) -> bool:
        """Return whether a layer has a tensor of this name."""
        return any(one.startswith("blk.") and one.endswith(f".{name}") for one in self._file.tensors)

    def vector(self, name: str) -> Sequence[float]:
        """Return the numbers of a tensor of the kind F32 with one axis; none if the file lacks it."""
        stored = self._file.tensors.get(name)
        if stored is None:
            return []
        if stored.kind != "F32" or len(stored.shape) != 1:
            raise ValueError(f"{self.source}: {name} must be F32 of one axis, got {stored.kind} of {stored.shape}")
        return cast("list[float]", self._file.raw(name).view("<f4").tolist())

    def _named(self, key: str) -> str:
        self._read.add(key)
        return f"{self.name}.{key}"


def check_keys(file: GGUFFile, keys: Keys, *, head_dim: int) -> None:
    """Refuse keys of an architecture that would change the result and were not read.

    Args:
        file: with the keys.
        keys: after the configuration was read from them.
        head_dim: elements of a head, from which the usual scale of attention follows.

    Raises:
        ValueError: a key asks for something that is not supported.
    """
    name, read = keys.name, keys.read
    metadata = file.metadata
    plain_values: dict[str, tuple[object, ...]] = {**dict.fromkeys(_ONE, (0, 1)), **dict.fromkeys(_ZERO, (0,))}
    if metadata.get(f"{name}.expert_count", 0):
        plain_values |= _OF_EXPERTS
    for key, plain in plain_values.items():
        if key in read:
            continue
        value = metadata.get(f"{name}.{key}", plain[0])
        values = cast("list[object]", value) if isinstance(value, list) else [value]
        if any(one not in plain for one in values):
            raise ValueError(f"{file.path}: {name}.{key} must be absent or {plain[-1]}, got {value!r:.80}")
    if metadata.get(f"{name}.attention.causal", True) is not True:
        raise ValueError(
            f"{file.path}: {name}.attention.causal must be absent or true, got {metadata[f'{name}.attention.causal']!r}"
        )
    if "attention.scale" in read:
        return
    usual = head_dim**-0.5
    scale = metadata.get(f"{name}.attention.scale", 0)
    if scale and not (isinstance(scale, float) and math.isclose(scale, usual, rel_tol=1e-5)):
        raise ValueError(
            f"{file.path}: {name}.attention.scale must be absent or 1 / sqrt({head_dim}), {usual:.6g}, "
            f"got {scale!r:.80}"
        )


def unknown_keys(file: GGUFFile, name: str) -> list[str]:
    """Return the unknown keys of an architecture."""
    known = {*_READ, *_WITHOUT_EFFECT, *_OF_EXPERTS, *_ONE, *_ZERO, "attention.causal", "attention.scale"}
    own = (key.removeprefix(f"{name}.") for key in file.metadata if key.startswith(f"{name}."))
    return [f"{name}.{key}" for key in own if key not in known]


def log_ignored(file: GGUFFile, name: str) -> None:
    """Log the ignored keys that might change the result: unknown ones, and advice on sampling."""
    if unknown := unknown_keys(file, name):
        _log.warning("%s: keys that are not known are ignored: %s", file.path, ", ".join(unknown))
    advice = [
        key
        for key in file.metadata
        if key.startswith("general.sampling.") and key.rpartition(".")[2] not in ("temp", "top_k", "top_p", "min_p")
    ]
    if advice:
        _log.warning("%s: its advice on drawing tokens is not followed in %s", file.path, ", ".join(advice))


def some_windows(keys: Keys, num_layers: int, *, period: int, window: int = 0) -> dict[str, Any]:
    """Return the fields of windows in all but each n-th layer; a file may name n, or all layers that have one."""
    window = keys.integer("attention.sliding_window", window, high=LARGEST)
    named = keys.integers("attention.sliding_window_pattern")
    if len(named) <= 1:
        period = named[0] if named else period
        named = [period == 0 or layer % period < period - 1 for layer in range(num_layers)]
    if len(named) != num_layers:
        raise ValueError(
            f"{keys.source}: {keys.name}.attention.sliding_window_pattern must be a number or have {num_layers} "
            f"items, got {len(named)}"
        )
    kinds = ["sliding_attention" if window and has_one else "full_attention" for has_one in named]
    return {"sliding_window": window or None, "layer_types": kinds}
