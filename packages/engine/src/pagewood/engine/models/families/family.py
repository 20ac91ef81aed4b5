"""What distinguishes an architecture, where its config.json has no field for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pagewood.engine.models.families.mixture import Mixture
from pagewood.engine.models.families.stored_layout import StoredLayout
from pagewood.engine.models.parts.layer import FrameConfig
from pagewood.engine.models.parts.norm import NormConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Properties of an architecture that have no field in config.json."""

    mixer: Literal["attention", "latents", "indexed latents"] = "attention"
    """What the layers see earlier tokens with; "indexed": only as many of them as `index_topk` says."""
    qkv_bias: bool | None = False
    """None: `attention_bias` decides."""
    output_bias: bool | None = False
    """None: `attention_bias` decides."""
    mlp_bias: bool | None = False
    """None: `mlp_bias` decides."""
    qk_norm: Literal["none", "heads", "whole"] = "none"
    """Whether q and k have norms, of each head or of all heads together."""
    windows: Literal["none", "all", "some", "periodic"] = "none"
    """The layers with the window of `sliding_window`; "some": those that `use_sliding_window` selects; "periodic": all
    but each n-th, where n is `sliding_window_pattern`."""
    has_local_rope: bool = False
    """Whether layers with a window have a rope of their own."""
    scale_field: str | None = None
    """Field whose inverse square root is the scale of the attention; None: the size of a head."""
    field_names: Mapping[str, str] = field(default_factory=dict[str, str])
    """The family's own names of fields, by the names that others have for them."""
    knows: frozenset[str] = frozenset()
    """Fields that other families refuse."""
    ignores: frozenset[str] = frozenset()
    """Other families' names of fields that mean something else here, or nothing."""
    activations: Mapping[str, str] = field(default_factory=dict[str, str])
    """What names of activations mean, where that differs from other families."""
    is_gated: bool = True
    """Whether feed-forwards have a gate, see `FeedForward` and `PlainFeedForward`."""
    norm: NormConfig = field(default_factory=lambda: NormConfig(epsilon=1e-6))
    """The norms, with the epsilon that they have if no field names it."""
    scales_embeddings: bool = False
    """Whether embeddings are multiplied by the square root of their size."""
    stored: StoredLayout | None = None
    """The layout of checkpoints; None: Llama's."""
    other_parts: tuple[str, ...] = ()
    """Prefixes of tensors of other models in the checkpoint; with any, the decoder's fields are in `text_config`."""
    mixture: Mixture | None = None
    """Properties of its experts; None: no layer has any."""
    frame: FrameConfig = field(default_factory=FrameConfig)
    defaults: Mapping[str, object] = field(default_factory=dict[str, object])
    """Values of fields that are absent."""

    @property
    def reads(self) -> frozenset[str]:
        """Fields that other families refuse, or know by another name."""
        scale = set[str]() if self.scale_field is None else {self.scale_field}
        latent = set[str]() if self.mixer == "attention" else {"rope_interleave"}
        mixture = frozenset[str]() if self.mixture is None else self.mixture.reads
        return self.knows | scale | latent | mixture | set(self.field_names.values())
