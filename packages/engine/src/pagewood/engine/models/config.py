"""What a decoder must know, read from a Hugging Face folder. Imports neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from pagewood.engine.models.agreement import NUM_MTP_LAYERS, check_fields, must_be
from pagewood.engine.models.end_tokens import tokenizer_end
from pagewood.engine.models.fields import Fields
from pagewood.engine.models.rope_config import LAYER_TYPES, MAX_POSITION, RopeConfig, read_rope
from pagewood.engine.weights.quantisation import check_method
from pagewood.kvpool import MultiHeadLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder in numbers: all differences between Llama, Mistral, Qwen2, Qwen3 and MiMo are values here.

    Raises:
        ValueError: a number is out of its range, or two numbers contradict each other.
    """

    architecture: str
    """The class name in config.json, as in "LlamaForCausalLM"."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    """Longest sequence that the model can be used for, in tokens, with its rope scaled as `rope` says."""
    norm_epsilon: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    """Per layer: how many positions a token sees, itself included; None: itself and all before it."""
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """Whether the heads of q and k are normalised before they are rotated."""
    tied_embeddings: bool
    """Whether the embedding table is also the output projection."""
    eos_token_ids: tuple[int, ...] = ()
    num_mtp_layers: int = 0
    """Layers for multi-token prediction that config.json announces; they are not part of the decoder."""

    def __post_init__(self) -> None:
        for name, high in _LARGEST.items():
            if not 1 <= getattr(self, name) <= high:
                raise ValueError(f"{name} must be in [1, {high}], got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads {self.num_kv_heads}, got {self.num_heads}")
        if self.head_dim < 4 or self.head_dim % 4:
            raise ValueError(f"head_dim must be a multiple of 4, got {self.head_dim}")
        if not 0 < self.norm_epsilon <= 1:
            raise ValueError(f"norm_epsilon must be in (0, 1], got {self.norm_epsilon}")
        if len(self.windows) != self.num_layers:
            raise ValueError(
                f"windows must have one entry for each of {self.num_layers} layers, got {len(self.windows)}"
            )
        if any(window is not None and window < 1 for window in self.windows):
            raise ValueError(
                f"windows must be >= 1, got {min(window for window in self.windows if window is not None)}"
            )
        for token in self.eos_token_ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"eos_token_id must be in [0, {self.vocab_size}), got {token}")

    @property
    def q_size(self) -> int:
        """Elements of all query heads of a token."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of all key heads (or value heads) of a token."""
        return self.num_kv_heads * self.head_dim

    def memory_layout(
        self, *, page_size: int, dtype: str = "float32", order: Literal["NHD", "HND"] = "NHD"
    ) -> MultiHeadLayout:
        """Return the layout of the keys and values of all layers; see `MultiHeadLayout` for the arguments."""
        return MultiHeadLayout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=page_size,
            dtype=dtype,
            order=order,
        )

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read config.json, and if they exist generation_config.json and the tokenizer's end of sequence.

        The end tokens of generation_config.json replace those of config.json. The tokenizer's own end of sequence ends
        a sequence too, if the model can generate it.

        Raises:
            FileNotFoundError: config.json does not exist.
            ValueError: the architecture, or something that it asks for, is not supported; a field is missing, of
                another type or out of its range; or two fields say different things about one number.
        """
        folder = Path(folder)
        fields = Fields.from_file(folder / "config.json")
        generation_path = folder / "generation_config.json"
        generation = Fields.from_file(generation_path) if generation_path.exists() else fields.empty("generation")
        config = _read(fields, generation, *_architecture(fields))
        end = tokenizer_end(folder)
        if end is None or end in config.eos_token_ids or end >= config.vocab_size:
            return config
        return replace(config, eos_token_ids=(*config.eos_token_ids, end))

    @classmethod
    def of_head(cls, fields: Fields, *, qk_norm: bool) -> ModelConfig:
        """Read the layers of a drafting head, which are Llama's, with norms of q and k if `qk_norm`.

        Raises:
            ValueError: see `from_folder`.
        """
        traits = replace(_TRAITS["LlamaForCausalLM"], qk_norm=qk_norm, windows="some")
        if set(fields.texts("layer_types") or ()) == {"full_attention"}:  # of all layers of the target
            fields = replace(fields, values={**fields.values, "layer_types": None})
        return _read(fields, fields.empty("generation"), "LlamaForCausalLM", traits)


_LARGEST: Mapping[str, int] = MappingProxyType(
    {
        "vocab_size": 1 << 24,
        "hidden_size": 1 << 20,
        "intermediate_size": 1 << 22,
        "num_layers": 1 << 12,
        "num_heads": 1 << 14,
        "num_kv_heads": 1 << 14,
        "head_dim": 512,
        "max_position": MAX_POSITION,
    }
)
"""Far more than models have, and little enough to be handled: what a file says is checked before it is acted on."""
_ENCODERS = frozenset(
    {
        "albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "modernbert", "mpnet", "new",
        "nomic_bert", "roberta", "xlm-roberta",
    }
)  # fmt: skip
"""The `model_type` of encoders that make vectors; their errors say why they are not supported."""
_LONGEST_WINDOW = (1 << 31) - 1
_DEFAULT_WINDOW = 4096
"""Where a family has windows and `sliding_window` is absent; null means that there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traits:
    """What an architecture fixes, where its config.json has no field for it."""

    qkv_bias: bool | None
    """None: `attention_bias` decides."""
    output_bias: bool | None
    mlp_bias: bool | None
    qk_norm: bool
    windows: Literal["none", "all", "some"]
    """Which layers have the window of `sliding_window`; "some": those that `use_sliding_window` says."""
    num_kv_heads: int | None = None
    """Where the field is absent. None: num_heads."""
    head_dim: int | None = None
    """None: hidden_size / num_heads."""


_TRAITS: Mapping[str, _Traits] = MappingProxyType(
    {
        "LlamaForCausalLM": _Traits(qkv_bias=None, output_bias=None, mlp_bias=None, qk_norm=False, windows="none"),
        "MistralForCausalLM": _Traits(
            qkv_bias=False, output_bias=False, mlp_bias=False, qk_norm=False, windows="all", num_kv_heads=8
        ),
        "Qwen2ForCausalLM": _Traits(
            qkv_bias=True, output_bias=False, mlp_bias=False, qk_norm=False, windows="some", num_kv_heads=32
        ),
        "MiMoForCausalLM": _Traits(
            qkv_bias=True, output_bias=False, mlp_bias=False, qk_norm=False, windows="some", num_kv_heads=32
        ),
        "Qwen3ForCausalLM": _Traits(
            qkv_bias=None, output_bias=None, mlp_bias=False, qk_norm=True, windows="some", num_kv_heads=32, head_dim=128
        ),
    }
)


def _read(fields: Fields, generation: Fields, architecture: str, traits: _Traits) -> ModelConfig:
    check_method(fields)
    check_fields(fields)
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"{fields.source}: hidden_act must be silu, got {activation!r}")
    num_layers = _size(fields, "num_hidden_layers", "num_layers")
    num_heads = _size(fields, "num_attention_heads", "num_heads")
    hidden_size = _size(fields, "hidden_size", "hidden_size")
    vocab_size = _size(fields, "vocab_size", "vocab_size")
    head_dim = _size(fields, "head_dim", "head_dim", traits.head_dim or _even_share(fields, hidden_size, num_heads))
    absent_kv_heads = num_heads if "num_key_value_heads" in fields.values else traits.num_kv_heads or num_heads
    max_position = _size(fields, "max_position_embeddings", "max_position")
    rope = read_rope(fields, head_dim=head_dim, max_position=max_position)
    eos_token_ids = (
        generation.integers("eos_token_id", high=vocab_size - 1) or fields.integers("eos_token_id", high=vocab_size - 1)
    )  # fmt: skip
    try:
        return ModelConfig(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=_size(fields, "intermediate_size", "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_size(fields, "num_key_value_heads", "num_kv_heads", absent_kv_heads),
            head_dim=head_dim,
            max_position=rope.longest(max_position),
            norm_epsilon=fields.number("rms_norm_eps", 1e-6, low=1e-30, high=1),
            rope=rope,
            windows=_windows(fields, traits, num_layers),
            qkv_bias=_bias(fields, "attention_bias", traits.qkv_bias),
            output_bias=fields.flag("attention_bias", False) if traits.output_bias is None else traits.output_bias,
            mlp_bias=_bias(fields, "mlp_bias", traits.mlp_bias),
            qk_norm=traits.qk_norm,
            tied_embeddings=fields.flag("tie_word_embeddings", False),
            eos_token_ids=eos_token_ids,
            num_mtp_layers=max(fields.integer(name, 0, high=_LARGEST["num_layers"]) for name in NUM_MTP_LAYERS),
        )
    except ValueError as error:
        raise error if fields.source in str(error) else ValueError(f"{fields.source}: {error}") from error


def _size(fields: Fields, field: str, name: str, default: int | None = None) -> int:
    """Return a whole number from 1 to the largest that `ModelConfig.name` may be."""
    return fields.integer(field, default, low=1, high=_LARGEST[name])


def _architecture(fields: Fields) -> tuple[str, _Traits]:
    names = fields.texts("architectures") or ()
    for name in names:
        if name in _TRAITS:
            return name, _TRAITS[name]
    wanted = " or ".join(names[:3])[:80] or "no architecture"
    if fields.text("model_type", "") in _ENCODERS:
        wanted += ", an encoder: its tokens see later ones, so it needs its whole text in one step and no KV cache"
    raise ValueError(f"{fields.source}: architectures must name one of {', '.join(_TRAITS)}, got {wanted}")


def _even_share(fields: Fields, hidden_size: int, num_heads: int) -> int | None:
    """Return the size of a head where nothing names it; None if the heads have no whole number of elements.

    Raises:
        ValueError: nothing names it, and it cannot be derived.
    """
    if hidden_size % num_heads and fields.values.get("head_dim") is None:
        raise ValueError(
            f"{fields.source}: hidden_size must be a multiple of num_attention_heads {num_heads} where head_dim is "
            f"absent, got {hidden_size}"
        )
    return hidden_size // num_heads or None


def _bias(fields: Fields, name: str, fixed: bool | None) -> bool:
    """Return whether there is a bias; an architecture that has no choice must not be asked for another one."""
    if fixed is None:
        return fields.flag(name, False)
    must_be(fields, name, fixed)
    return fixed


def _windows(fields: Fields, traits: _Traits, num_layers: int) -> tuple[int | None, ...]:
    kinds = _layer_types(fields, num_layers)
    window = _window(fields, traits)
    if kinds is None:
        first = 0 if traits.windows == "all" else fields.integer("max_window_layers", 28, high=_LONGEST_WINDOW)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if window is None and "sliding_attention" in kinds:
        if traits.windows == "none":
            raise ValueError(f"{fields.source}: layer_types must not name sliding_attention in this architecture")
        asked = {
            name: fields.values[name] for name in ("sliding_window", "use_sliding_window") if name in fields.values
        }
        raise ValueError(
            f"{fields.source}: layer_types may name sliding_attention only where sliding_window is not null and "
            f"use_sliding_window is not false, got {asked!r:.80}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _window(fields: Fields, traits: _Traits) -> int | None:
    """Return the window of the layers that have one, or None if none has."""
    if traits.windows == "some" and not fields.flag("use_sliding_window", False):
        return None
    if traits.windows == "none":
        if fields.flag("use_sliding_window", True):
            must_be(fields, "sliding_window")
        return None
    if "sliding_window" in fields.values and fields.values["sliding_window"] is None:
        return None
    return fields.integer("sliding_window", _DEFAULT_WINDOW, low=1, high=_LONGEST_WINDOW)


def _layer_types(fields: Fields, num_layers: int) -> tuple[str, ...] | None:
    kinds = fields.texts("layer_types")
    if kinds is None:
        return None
    unknown = sorted(set(kinds) - LAYER_TYPES)
    if unknown:
        raise ValueError(
            f"{fields.source}: layer_types must be full_attention or sliding_attention, got {unknown[0][:80]!r}"
        )
    if len(kinds) != num_layers:
        raise ValueError(f"{fields.source}: layer_types must have {num_layers} entries, got {len(kinds)}")
    return kinds
