"""What distinguishes an architecture, where its config.json has no field for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pagewood.engine.models.families.mixture import Mixture
from pagewood.engine.models.parts.layer import FrameConfig


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
    activation_field: str = "hidden_act"
    norm_offset: float = 0.0
    """See `NormConfig`."""
    scales_embeddings: bool = False
    """Whether embeddings are multiplied by the square root of their size."""
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
        own = frozenset({self.activation_field, self.scale_field or self.activation_field})
        own |= frozenset() if self.mixer == "attention" else {"rope_interleave"}
        return own if self.mixture is None else own | self.mixture.reads
