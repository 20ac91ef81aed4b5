"""What distinguishes the experts of an architecture, where its config.json has no field for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pagewood.engine.models.parts.experts import ExpertNames
from pagewood.engine.models.parts.feed_forward import Activation

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names of the number of experts; a file may have several."""
NUM_CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
"""Names of the number of experts of a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Properties of the experts of an architecture."""

    names: ExpertNames = field(default_factory=ExpertNames)
    size: str = "moe_intermediate_size"
    """Field with the size of an expert."""
    dense_size: str = "intermediate_size"
    """Field with the size of the feed-forward of a layer without experts."""
    dense_layers: Literal["none", "step", "first", "range", "listed"] = "none"
    """The layers without experts; "step": `decoder_sparse_step` and `mlp_only_layers` say which; "first":
    `first_k_dense_replace`; "range": those outside `moe_layer_start_index` to `moe_layer_end_index`, and all but each
    n-th of `moe_layer_interval`; "listed": those that `moe_layers` or `interleave_moe_layer_step` leave out."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    scores_chosen_only: bool = False
    """See `RouterConfig`, also for the next five."""
    has_choice_bias: bool = False
    choice_bias_field: str | None = None
    """Field that says whether there is a bias for the choice, absent: as `has_choice_bias` says; None: that counts."""
    has_groups: bool = False
    """Whether `n_group` and `topk_group` are read, unless `topk_method` is greedy."""
    best_of_group: int = 1
    epsilon: float = 0.0
    activation: Activation | None = None
    """None: `hidden_act` decides."""
    has_biases: bool = False
    """Whether the router and the experts have biases."""
    weighs_inputs: bool = False
    renormalises: bool | None = None
    """None: `norm_topk_prob` decides."""
    renormalises_by_default: bool = False
    """The value of `norm_topk_prob` if it is absent."""
    least_sum: str | None = None
    """Field with what the sum of weights is at least."""
    has_factors: bool = False
    """See `RouterConfig`."""
    factor: str | None = None
    """Field with what multiplies the weights."""
    shared_size: str | None = None
    """Field with the size of the shared experts; 0: there are none."""
    num_shared: str | None = None
    """Field with the number of shared experts, each of the size of an expert."""
    has_shared_gate: bool = False
    latent_size: str | None = None
    """Field with the number of elements that experts read in place of the hidden state; null: they read that one."""

    @property
    def reads(self) -> frozenset[str]:
        """Fields that families without experts refuse."""
        return frozenset({*NUM_EXPERTS, *NUM_CHOSEN})
