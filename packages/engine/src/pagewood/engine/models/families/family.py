"""What distinguishes an architecture, where its config.json has no field for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pagewood.engine.models.families.mixture import NUM_EXPERTS, Mixture
from pagewood.engine.models.families.stored_layout import StoredLayout
from pagewood.engine.models.parts.gated_delta import Projections
from pagewood.engine.models.parts.layer import FrameConfig
from pagewood.engine.models.parts.norm import NormConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Properties of an architecture that have no field in config.json."""

    mixer: Literal["attention", "latents", "indexed latents"] = "attention"
    """What the layers see earlier tokens with; "indexed": only as many of them as `index_topk` says."""
    recurrence: Literal["none", "convolution", "delta", "channels", "space"] = "none"
    """What layers without attention are: short convolutions, gated delta rules with a decay for each head or for each
    channel, state spaces; "none": all have it."""
    recurrent_name: str = "linear_attn"
    """The name of these parts of layers."""
    recurrent_frame: FrameConfig | None = None
    """The frame of these layers, with that name; None: that of other layers, with that name."""
    recurrent_epsilon: float | None = None
    """That of norms of results in these layers; None: that of other norms."""
    delta_projections: Projections = "joined"
    """See `GatedDeltaConfig`."""
    sizes_by_heads: bool = False
    """Whether state spaces have as many values as their heads have together, whatever `mamba_expand` says."""
    has_mixers_beside: bool = False
    """Whether each layer has attention and a state space beside each other, see `MixersBesideConfig`."""
    has_single_parts: bool = False
    """Whether each layer is a mixer, a feed-forward or experts alone, which `hybrid_override_pattern` may say."""
    has_output_gate: bool = False
    """See `AttentionConfig`."""
    widens_by_two_thirds: bool = False
    """Whether feed-forwards have two thirds of `intermediate_size`, unless `block_auto_adjust_ff_dim` is false, times
    `block_ffn_dim_multiplier`, and up to a multiple of `block_multiple_of`."""
    qkv_bias: bool | None = None
    """None: a flag decides, the first of `bias_fields`."""
    output_bias: bool | None = None
    """None: the second flag decides."""
    mlp_bias: bool | None = False
    """None: the third flag decides."""
    bias_fields: tuple[str, str, str] = ("attention_bias", "attention_bias", "mlp_bias")
    """Flags of biases: of the projections to q, k and v, of the output of attentions, and of feed-forwards."""
    logits_bias_field: str | None = None
    """Field that says whether the output projection has a bias; None: it never has one."""
    qk_norm: Literal["none", "heads", "whole", "plain"] = "none"
    """Whether q and k have norms, of each head or of all heads together; "plain": of each head, without weights, in
    layers that rotate them."""
    qk_norm_flag: str | None = None
    """Field that says whether there are such norms, false if it is absent; None: there are."""
    qk_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    qk_norm_follows: bool = False
    """See `AttentionConfig`."""
    qkv_is_fused: bool = False
    """See `AttentionConfig`."""
    gate_is_fused: bool = False
    """See `FeedForwardConfig.is_fused`."""
    rotary_share: float | None = None
    """Share of a head that is rotated if `partial_rotary_factor` is absent; None: heads are rotated whole."""
    has_neighbours: bool = False
    """See `AttentionConfig`."""
    rotated_layers: Literal["all", "windows", "listed", "typed", "based", "none"] = "all"
    """The layers with a rope; "windows": those with a window, or all if `sliding_window` is null; "listed": those with
    a 1 in `no_rope_layers`, or all but each n-th, where n is `no_rope_layer_interval`; "typed": all if
    `position_embedding_type` is rope, otherwise none; "based": all if a field names the base of the rope."""
    temperature: Literal["none", "all", "unrotated"] = "none"
    """The layers with a temperature; "all": its scale is `llama_4_scaling_beta` of the rope; "unrotated": `attn_scale`
    of layers that do not rotate, if `attn_temperature_tuning` is true."""
    has_static_alpha: bool = False
    """Whether a dynamic rope with `alpha` has one base, stretched by it, for all positions."""
    windows: Literal["none", "all", "some", "periodic", "chunks", "around"] = "none"
    """The layers with the window of `sliding_window`; "some": those that `use_sliding_window` selects; "periodic": all
    but each n-th, where n is `sliding_window_pattern`; "chunks": those that rotate, with chunks of
    `attention_chunk_size` positions; "around": of an encoder, all but each n-th from the first on, where n is
    `global_attn_every_n_layers`, half of `local_attention` on both sides."""
    has_local_rope: bool = False
    """Whether layers with a window have a rope of their own."""
    theta: float = 1e4
    """The base of a rope if no field names it."""
    local_theta: float = 1e4
    """With `has_local_rope`: the same of layers with a window."""
    local_theta_field: str = "rope_local_base_freq"
    """With `has_local_rope`: the field with the base of layers with a window."""
    has_sinks: bool = False
    """Whether every query head has a score without a value in its softmax."""
    has_distances: bool = False
    """See `AttentionConfig`."""
    scale_field: str | None = None
    """Field whose inverse square root is the scale of the attention; None: the size of a head."""
    field_names: Mapping[str, str] = field(default_factory=dict[str, str])
    """The family's own names of fields, by the names that others have for them."""
    knows: frozenset[str] = frozenset()
    """Fields that other families refuse."""
    computed_elsewhere: frozenset[str] = frozenset()
    """Fields with which `transformers` computes the model, unless they are absent, null or false; the parts here do
    not."""
    ignores: frozenset[str] = frozenset()
    """Other families' names of fields that mean something else here, or nothing."""
    activations: Mapping[str, str] = field(default_factory=dict[str, str])
    """What names of activations mean, where that differs from other families."""
    is_gated: bool = True
    """Whether feed-forwards have a gate, see `FeedForward` and `PlainFeedForward`."""
    norm: NormConfig = field(default_factory=lambda: NormConfig(epsilon=1e-6))
    """The norms, with the epsilon that they have if no field names it."""
    has_learned_positions: bool = False
    """Whether an embedding of its position is added to that of a token."""
    is_encoder: bool = False
    """Whether tokens see later ones, embeddings have a norm, unless `embeds_without_norm`, and there is no output
    projection."""
    embeds_without_norm: bool = False
    """Whether embeddings of an encoder have no norm."""
    has_typed_tokens: bool = False
    """See `ModelConfig`."""
    begins_without_norm: bool = False
    """Whether the first layer has no norm before its mixer."""
    has_last_norm: bool = True
    """Whether there is a norm behind the last layer."""
    positions_follow_padding: bool = False
    """Whether the first position is the row behind that of the padding token in the table of positions."""
    scales_embeddings: bool = False
    """Whether embeddings are multiplied by the square root of their size."""
    has_own_kinds: bool = False
    """Whether layers that see all positions have heads of their own, and the last layers no keys and values, as in
    `fields.layer_kinds`, with inputs and scalars of layers."""
    without_experts: Family | None = None
    """The family to take instead of one with experts if a file says that there are none."""
    by_text_type: Mapping[str, Family] = field(default_factory=dict[str, "Family"])
    """Families to take instead, by the `model_type` in `text_config`."""
    stored: StoredLayout | None = None
    """The layout of checkpoints; None: Llama's."""
    other_parts: tuple[str, ...] = ()
    """Prefixes of tensors of other models in the checkpoint; with any, the decoder's fields are in `text_config`."""
    mixture: Mixture | None = None
    """Properties of its experts; None: no layer has any."""
    frame: FrameConfig = field(default_factory=FrameConfig)
    defaults: Mapping[str, object] = field(default_factory=dict[str, object])
    """Values of fields that are absent."""

    def of_file(self, values: Mapping[str, object]) -> Family:
        """Return the family for a file with these fields: that without experts if the file has none."""
        has_experts = any(values.get(name) for name in NUM_EXPERTS)
        return self if has_experts or self.without_experts is None else self.without_experts

    @property
    def reads(self) -> frozenset[str]:
        """Fields that other families refuse, or know by another name."""
        scale = set[str]() if self.scale_field is None else {self.scale_field}
        latent = set[str]() if self.mixer == "attention" else {"rope_interleave"}
        mixture = frozenset[str]() if self.mixture is None else self.mixture.reads
        flags = {"no_rope_layers"} if self.rotated_layers == "listed" else set[str]()
        if self.rotated_layers == "typed":
            flags.add("position_embedding_type")
        if self.windows == "chunks":
            flags |= {"attention_chunk_size", "attn_temperature_tuning"}
        if self.qk_norm != "none":
            flags.add(self.qk_norm_flag or "use_qk_norm")
        return self.knows | scale | latent | mixture | flags | set(self.field_names.values())
