"""The configuration of a decoder, read from a Hugging Face folder. Imports neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pagewood.engine.json_fields import Fields
from pagewood.engine.models.families.family import Family
from pagewood.engine.models.families.registry import FAMILIES
from pagewood.engine.models.fields.agreement import NUM_MTP_LAYERS, check_fields
from pagewood.engine.models.fields.end_tokens import tokenizer_end
from pagewood.engine.models.fields.layers import read_layers
from pagewood.engine.models.fields.multipliers import read_multiplier, read_output
from pagewood.engine.models.limits import LARGEST, check_size, read_size
from pagewood.engine.models.memory import layer_groups, memory_layout, state_layout
from pagewood.engine.models.parts.attention import AttentionConfig, Order
from pagewood.engine.models.parts.choice import WithPages, paged_part
from pagewood.engine.models.parts.experts import ExpertsConfig, RouterConfig
from pagewood.engine.models.parts.experts_beside import ExpertsBesideConfig
from pagewood.engine.models.parts.latent_attention import LatentAttentionConfig
from pagewood.engine.models.parts.layer import LayerConfig
from pagewood.engine.models.parts.layer_inputs import LayerInputsConfig
from pagewood.engine.models.parts.norm import NormConfig
from pagewood.engine.models.parts.output import OutputConfig
from pagewood.engine.models.parts.rope import PositionConfig, PositionNumbers, RopeConfig
from pagewood.engine.models.shard import Shard
from pagewood.engine.models.stage import Stage
from pagewood.engine.weights.quantisation import check_method
from pagewood.kvpool import LatentLayout, LayerGroups, MultiHeadLayout, StateLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A model: a list of layers, each made of parts, with the embedding before and the output projection after them.

    An encoder has no output projection. Its embedding stands in its place, and is not used so, because nothing is
    generated.

    Raises:
        ValueError: a number is out of its range, or two numbers contradict each other.
    """

    architecture: str
    """The class name in config.json, as in "LlamaForCausalLM"."""
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    norm: NormConfig
    """The norm before the output projection."""
    max_position: int
    """Longest sequence that the model supports, in tokens, including the scaling of its ropes."""
    tied_embeddings: bool
    """Whether the embedding table is also the output projection."""
    embedding_multiplier: float = 1.0
    """Multiplies the embeddings of tokens."""
    output: OutputConfig = field(default_factory=OutputConfig)
    has_logits_bias: bool = False
    """Whether the output projection has a bias."""
    has_learned_positions: bool = False
    """Whether the embedding of its position is added to that of a token."""
    first_position: int = 0
    """Row of the first position in the table of these embeddings."""
    num_token_types: int = 0
    """Kinds of tokens that have an embedding; that of the first kind is added to all tokens. 0: there are none."""
    has_typed_tokens: bool = False
    """Whether each token is in the vocabulary once for each of these kinds, those of a kind behind those of the one
    before it. So the second text of a pair has tokens of its own."""
    has_embedding_norm: bool = False
    """Whether embeddings have a norm before the first layer."""
    has_last_norm: bool = True
    """Whether there is a norm behind the last layer."""
    eos_token_ids: tuple[int, ...] = ()
    num_mtp_layers: int = 0
    """Layers for multi-token prediction that config.json announces; they are not part of the decoder."""
    other_parts: tuple[str, ...] = ()
    """Prefixes of tensors that belong to other parts of the checkpoint, such as a model of images."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "max_position"):
            check_size(name, getattr(self, name))
        check_size("num_layers", len(self.layers))
        if self.states is None and not self.paged:
            raise ValueError("layers must not all be without a mixer, got no attention and no recurrent layer")
        if len({layer.inputs for layer in self.layers}) > 1:
            raise ValueError("layers must all have the same inputs, or none of them")
        if self.inputs is not None and self.inputs.vocab_size < self.vocab_size:
            raise ValueError(
                f"vocab_size_per_layer_input must be at least vocab_size {self.vocab_size}, "
                f"got {self.inputs.vocab_size}"
            )
        lengths = {rope.short_length for rope in self.ropes} - {None}
        if len(lengths) > 1:
            raise ValueError(f"original_max_position_embeddings must be the same for all ropes, got {lengths}")
        for token in self.eos_token_ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"eos_token_id must be in [0, {self.vocab_size}), got {token}")

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def is_encoder(self) -> bool:
        """Whether tokens see later ones, so that a text is computed in one step and makes vectors only."""
        return any(isinstance(layer.mixer, AttentionConfig) and layer.mixer.sees_later for layer in self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Per layer: the number of positions that a token sees, itself included; None: itself and all before it."""
        return tuple(layer.mixer.window for layer in self.layers)

    def for_length(self, length: int) -> ModelConfig:
        """Return the model for requests of at most `length` tokens, for which a rope may need no second set."""
        layers = [replace(layer, mixer=layer.mixer.for_length(length)) for layer in self.layers]
        return replace(self, layers=tuple(layers))

    def for_shard(self, shard: Shard) -> ModelConfig:
        """Return what a rank has: its heads, their memory and its part of every feed-forward.

        Raises:
            ValueError: a number cannot be divided among the ranks.
        """
        return self if shard.is_whole else replace(self, layers=tuple(one.for_shard(shard) for one in self.layers))

    def for_stage(self, stage: Stage | None) -> ModelConfig:
        """Return what a stage has; None: the model is whole.

        Raises:
            ValueError: one of its layers reads the keys and values of an earlier stage.
        """
        if stage is None:
            return self
        layers: list[LayerConfig] = []
        for index, layer in enumerate(self.layers[stage.first : stage.stop], stage.first):
            source = _source(layer)
            if source is not None:
                if source < stage.first:
                    raise ValueError(f"{stage} must have layer {source}, whose memory layer {index} reads")
                mixer = layer.mixer
                assert isinstance(mixer, AttentionConfig)
                layer = replace(layer, mixer=replace(mixer, source=source - stage.first))
            layers.append(layer)
        return replace(self, layers=tuple(layers))

    @property
    def cuts(self) -> tuple[int, ...]:
        """Layers before which the model can be cut into stages: those behind read no memory of those before."""
        sources = [_source(layer) for layer in self.layers]
        needed = [index if source is None else source for index, source in enumerate(sources)]
        return tuple(cut for cut in range(1, self.num_layers) if min(needed[cut:]) >= cut)

    @property
    def short_length(self) -> int | None:
        """The longest request that has the first of two sets of factors for rotations; None: there is one set."""
        lengths = [rope.short_length for rope in self.ropes if rope.short_length is not None]
        return min(lengths, default=None)

    def is_short(self, length: int) -> bool:
        """Return whether a request of at most `length` tokens has the first of two sets of factors."""
        return self.short_length is not None and length <= self.short_length

    @property
    def position_configs(self) -> tuple[PositionConfig, ...]:
        """The ropes and temperatures of all layers, each once, and before them what embeddings of positions need."""
        found = dict.fromkeys(one for layer in self.layers for one in layer.mixer.position_configs)
        numbers = (PositionNumbers(length=self.max_position),) if self.has_learned_positions else ()
        return (*numbers, *found)

    @property
    def paged(self) -> tuple[WithPages, ...]:
        """The mixers that have pages, of the layers with such a one."""
        mixers = (paged_part(layer.mixer) for layer in self.layers)
        return tuple(mixer for mixer in mixers if mixer is not None)

    @property
    def states(self) -> StateLayout | None:
        """The layout of the states of recurrent layers; None: there are none."""
        return state_layout([layer.mixer for layer in self.layers])

    @property
    def attentions(self) -> tuple[AttentionConfig, ...]:
        """The attention of each layer that has heads."""
        return tuple(mixer for mixer in self.paged if isinstance(mixer, AttentionConfig))

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The ropes among them."""
        return tuple(one for one in self.position_configs if isinstance(one, RopeConfig))

    @property
    def num_idle_parameters(self) -> int:
        """Number of parameters that the computation of a token does not read, because other experts have them."""
        parts = [layer.feed_forward for layer in self.layers]
        kinds = (ExpertsConfig, ExpertsBesideConfig)
        return sum(part.num_idle(self.hidden_size) for part in parts if isinstance(part, kinds))

    @property
    def expert_shape(self) -> tuple[int, int] | None:
        """Its layers, and how many experts a token has in each that has experts; None: no layer has."""
        chosen = {router.num_chosen for router in self.routers if router is not None}
        return (self.num_layers, max(chosen)) if chosen else None

    @property
    def routers(self) -> tuple[RouterConfig | None, ...]:
        """The router of each layer; None: the layer has no experts."""
        parts = [layer.feed_forward for layer in self.layers]
        parts = [part.experts if isinstance(part, ExpertsBesideConfig) else part for part in parts]
        return tuple(part.router if isinstance(part, ExpertsConfig) else None for part in parts)

    @property
    def head_dims(self) -> tuple[int, ...]:
        """Elements of a head, each size once."""
        return tuple(dict.fromkeys(mixer.head_dim for mixer in self.paged if isinstance(mixer, AttentionConfig)))

    @property
    def has_shared_memory(self) -> bool:
        """Whether a layer reads the keys and values of another one."""
        mixers = (layer.mixer for layer in self.layers)
        return any(isinstance(mixer, AttentionConfig) and mixer.source is not None for mixer in mixers)

    @property
    def inputs(self) -> LayerInputsConfig | None:
        """What layers add of each token beside its embedding; None: nothing."""
        return self.layers[0].inputs

    def groups(self, *, max_length: int) -> LayerGroups:
        """Return the groups of layers whose memory can be given back apart, for sequences of at most `max_length`."""
        return layer_groups([layer.mixer for layer in self.layers], max_length=max_length)

    def memory_layout(
        self, *, page_size: int, dtype: str = "float32", order: Order = "NHD", groups: LayerGroups | None = None
    ) -> MultiHeadLayout | LatentLayout:
        """Return the layout of the keys and values of all layers, or of the layers of one of some groups.

        See `MultiHeadLayout` for the other arguments.

        Raises:
            ValueError: layers need memory of different shapes.
        """
        groups = groups or self.groups(max_length=1)
        mixers = [layer.mixer for layer in self.layers]
        return memory_layout(mixers, groups, page_size=page_size, dtype=dtype, order=order)

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read config.json, and if they exist generation_config.json and the tokenizer's end of sequence.

        The end tokens of generation_config.json replace those of config.json. The tokenizer's own end of sequence ends
        a sequence too, if the model can generate it.

        Raises:
            FileNotFoundError: config.json does not exist.
            ValueError: the architecture or one of its features is not supported; a field is missing, of another type or
                out of its range; or two fields have different values for one number.
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
        family = replace(FAMILIES["LlamaForCausalLM"], qk_norm="heads" if qk_norm else "none", windows="some")
        if set(fields.texts("layer_types") or ()) == {"full_attention"}:  # for all layers of the target
            fields = replace(fields, values={**fields.values, "layer_types": None})
        return _read(fields, fields.empty("generation"), "LlamaForCausalLM", family)


def _source(layer: LayerConfig) -> int | None:
    """Return the layer whose keys and values a layer reads; None: it has its own."""
    return layer.mixer.source if isinstance(layer.mixer, AttentionConfig) else None


_OUTSIDE = ("eos_token_id", "quantization_config", "tie_word_embeddings")
"""Fields of a decoder that a larger model may have outside of `text_config`."""
_NULL_COUNTS = (
    "num_key_value_heads", "attn_logit_softcapping", "final_logit_softcapping", "sliding_window", "head_dim",
    "mamba_d_ssm",
)  # fmt: skip
"""Fields that may be null: as many heads as for queries, no soft cap, no window, the hidden size by the heads, and a
multiple of the hidden size."""
_OTHER_ENCODERS = frozenset({"albert", "camembert", "deberta", "deberta-v2", "electra", "mpnet", "new"})
"""The `model_type` of encoders for which there is no table; their errors name those for which there is one."""


def _read(fields: Fields, generation: Fields, architecture: str, family: Family) -> ModelConfig:
    fields = _text_fields(fields, family)
    if family.by_text_type:
        family = family.by_text_type.get(fields.text("model_type", ""), family)
    family = family.of_file(fields.values)
    check_method(fields)
    check_fields(fields, read=family.reads, ignored=family.ignores, usual=family.defaults)
    fields = _with_defaults(fields.renamed(family.field_names), family)
    vocab_size = read_size(fields, "vocab_size", "vocab_size")
    hidden_size = read_size(fields, "hidden_size", "hidden_size")
    eos_token_ids = (
        generation.integers("eos_token_id", high=vocab_size - 1) or fields.integers("eos_token_id", high=vocab_size - 1)
    )  # fmt: skip
    try:
        epsilon = fields.number("rms_norm_eps", family.norm.epsilon, low=1e-30, high=1)
        norm = replace(family.norm, epsilon=epsilon)
        layers = read_layers(fields, family, hidden_size=hidden_size, norm=norm)
        max_position = read_size(fields, "max_position_embeddings", "max_position")
        first_position = 0
        if family.positions_follow_padding:
            first_position = fields.integer("pad_token_id", 1, low=0, high=max_position - 2) + 1
        if not family.has_local_rope:
            max_position = _longest(layers, max_position)
        choices = {layer.mixer.longest for layer in layers if isinstance(layer.mixer, LatentAttentionConfig)}
        num_token_types = fields.integer("type_vocab_size", 0, high=vocab_size) if family.is_encoder else 0
        return ModelConfig(
            architecture=architecture,
            vocab_size=vocab_size * (num_token_types if family.has_typed_tokens and num_token_types else 1),
            hidden_size=hidden_size,
            layers=layers,
            norm=norm,
            max_position=min([max_position - first_position, *(longest for longest in choices if longest is not None)]),
            tied_embeddings=fields.flag("tie_word_embeddings", False),
            embedding_multiplier=_embedding_multiplier(fields, family, hidden_size),
            output=read_output(fields),
            has_logits_bias=family.logits_bias_field is not None and fields.flag(family.logits_bias_field, False),
            has_learned_positions=family.has_learned_positions,
            first_position=first_position,
            num_token_types=num_token_types,
            has_typed_tokens=family.has_typed_tokens and num_token_types > 1,
            has_embedding_norm=family.is_encoder and not family.embeds_without_norm,
            has_last_norm=family.has_last_norm,
            other_parts=family.other_parts,
            eos_token_ids=eos_token_ids,
            num_mtp_layers=max(fields.integer(name, 0, high=LARGEST["num_layers"]) for name in NUM_MTP_LAYERS),
        )
    except ValueError as error:
        raise error if fields.source in str(error) else ValueError(f"{fields.source}: {error}") from error


def _longest(layers: Sequence[LayerConfig], max_position: int) -> int:
    """Return the number of usable positions of layers whose ropes are the same."""
    ropes = [one for layer in layers for one in layer.mixer.position_configs if isinstance(one, RopeConfig)]
    return ropes[0].longest(max_position) if ropes else max_position


def _text_fields(fields: Fields, family: Family) -> Fields:
    """Return the fields of the decoder; in a larger model, including those outside of `text_config`.

    Old files of larger models have no `text_config`.
    """
    if not family.other_parts or ("text_config" not in fields.values and "hidden_size" in fields.values):
        return fields
    text = fields.section("text_config") or fields.empty("text_config")
    outside = {name: fields.values[name] for name in _OUTSIDE if name in fields.values}
    tied = {name: outside[name] for name in ("tie_word_embeddings",) if outside.get(name) is not None}
    return replace(text, values={**outside, **text.values, **tied})  # the larger model has the output projection


def _embedding_multiplier(fields: Fields, family: Family, hidden_size: int) -> float:
    return hidden_size**0.5 if family.scales_embeddings else read_multiplier(fields, "embedding_multiplier")


def _with_defaults(fields: Fields, family: Family) -> Fields:
    """Return the fields, with the family's defaults for absent ones.

    Null counts as absent, except for fields where it has a meaning of its own.
    """
    missing = {
        name: value
        for name, value in family.defaults.items()
        if name not in fields.values or (fields.values[name] is None and name not in _NULL_COUNTS)
    }
    return fields.over(missing) if missing else fields


def _architecture(fields: Fields) -> tuple[str, Family]:
    names = fields.texts("architectures") or ()
    for name in names:
        if name in FAMILIES:
            return name, FAMILIES[name]
    wanted = " or ".join(names[:3])[:80] or "no architecture"
    if fields.text("model_type", "") in _OTHER_ENCODERS:
        encoders = (name for name, family in FAMILIES.items() if family.is_encoder)
        wanted += f", an encoder other than {', '.join(encoders)}"
    known = ", ".join(dict.fromkeys(name.partition("For")[0] for name, own in FAMILIES.items() if not own.is_encoder))
    raise ValueError(f"{fields.source}: architectures must name one of {known}, most with ForCausalLM, got {wanted}")
