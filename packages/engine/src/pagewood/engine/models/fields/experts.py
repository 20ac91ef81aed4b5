"""The fields of mixtures of experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from pagewood.engine.json_fields import Fields, check_same
from pagewood.engine.models.families.mixture import NUM_CHOSEN, NUM_EXPERTS, Mixture
from pagewood.engine.models.fields.agreement import must_be
from pagewood.engine.models.limits import LARGEST, read_size
from pagewood.engine.models.ops import CLAMP_ALPHA, CLAMP_LIMIT
from pagewood.engine.models.parts.experts import ExpertsConfig, RouterConfig
from pagewood.engine.models.parts.feed_forward import ExpertActivation, FeedForwardConfig
from pagewood.engine.models.parts.plain_feed_forward import PlainFeedForwardConfig

AnyDense = FeedForwardConfig | PlainFeedForwardConfig
"""A feed-forward without experts."""
_LARGEST_LAYER = LARGEST["num_layers"]


def read_experts(
    fields: Fields, mixture: Mixture, dense: AnyDense, num_layers: int
) -> tuple[AnyDense | ExpertsConfig, ...]:
    """Return the feed-forward of each layer of a model with experts.

    Args:
        fields: of config.json, with the defaults of the family.
        mixture: the fixed properties of its experts.
        dense: what all feed-forwards share beside their size.
        num_layers: of the model.

    Raises:
        ValueError: a field is missing, of another type or out of its range, or contradicts another one.
    """
    sparse = _sparse_layers(fields, mixture, num_layers)
    own = dense if all(sparse) else _resized(dense, read_size(fields, mixture.dense_size, "intermediate_size"))
    if not any(sparse):
        return (own,) * num_layers
    count = _number(fields, NUM_EXPERTS, "num_experts")
    if count == 0:
        raise ValueError(f"{fields.source}: {_name(fields, NUM_EXPERTS)} must be >= 1, got 0")
    size = read_size(fields, mixture.size, "intermediate_size")
    if mixture.activation == "clamped":
        must_be(fields, "swiglu_alpha", CLAMP_ALPHA)
        must_be(fields, "swiglu_limit", CLAMP_LIMIT)
    router = _router(fields, mixture, count)
    shared = _shared_size(fields, mixture, size)
    activation = mixture.activation or dense.activation
    if isinstance(dense, PlainFeedForwardConfig) and activation != "relu_squared":
        raise ValueError(f"{fields.source}: the activation of experts without gates must be relu2, got {activation}")
    experts = ExpertsConfig(
        size=size,
        router=router,
        activation=cast("ExpertActivation", activation),
        has_bias=mixture.has_biases,
        latent_size=_latent_size(fields, mixture),
        has_latent_bias=dense.has_bias,
        weighs_inputs=mixture.weighs_inputs,
        shared=_resized(dense, shared) if shared else None,
        has_shared_gate=mixture.has_shared_gate and bool(shared),
        names=mixture.names,
    )
    return tuple(experts if is_sparse else own for is_sparse in sparse)


def _router(fields: Fields, mixture: Mixture, count: int) -> RouterConfig:
    must_be(fields, "scoring_func", mixture.score)
    renormalises = mixture.renormalises
    if renormalises is None:
        renormalises = fields.flag("norm_topk_prob", mixture.renormalises_by_default)
    else:
        must_be(fields, "norm_topk_prob", renormalises)
    groups, chosen_groups = 1, 1
    if mixture.has_groups and fields.text("topk_method", "none") != "greedy":
        groups, chosen_groups = (fields.integer(name, 1, low=1, high=count) for name in ("n_group", "topk_group"))
    elif not mixture.has_groups:
        must_be(fields, "n_group", 1)
    try:
        return RouterConfig(
            num_experts=count,
            num_chosen=_number(fields, NUM_CHOSEN, "num_experts"),
            score=mixture.score,
            scores_chosen_only=mixture.scores_chosen_only,
            has_bias=mixture.has_biases,
            has_choice_bias=_has_choice_bias(fields, mixture),
            num_groups=groups,
            num_chosen_groups=chosen_groups,
            best_of_group=mixture.best_of_group,
            renormalises=renormalises,
            has_factors=mixture.has_factors,
            epsilon=mixture.epsilon,
            least_sum=0.0 if mixture.least_sum is None else fields.number(mixture.least_sum, 1e-12, low=0, high=1),
            factor=1.0 if mixture.factor is None else fields.number(mixture.factor, 1.0, low=1e-6, high=1e6),
        )
    except ValueError as error:
        raise error if fields.source in str(error) else ValueError(f"{fields.source}: {error}") from error


def _has_choice_bias(fields: Fields, mixture: Mixture) -> bool:
    if mixture.choice_bias_field is None:
        return mixture.has_choice_bias
    return fields.flag(mixture.choice_bias_field, mixture.has_choice_bias)


def _latent_size(fields: Fields, mixture: Mixture) -> int | None:
    """Return how many elements experts read that do not read the hidden state; None: they do."""
    if mixture.latent_size is None or fields.values.get(mixture.latent_size) is None:
        return None
    return read_size(fields, mixture.latent_size, "hidden_size")


def _shared_size(fields: Fields, mixture: Mixture, size: int) -> int:
    """Return the size of the shared experts, all in one; 0: there are none."""
    if mixture.shared_size is not None:
        return fields.integer(mixture.shared_size, 0, high=LARGEST["intermediate_size"])
    if mixture.num_shared is not None:
        return size * fields.integer(mixture.num_shared, 0, high=LARGEST["num_experts"])
    return 0


def _sparse_layers(fields: Fields, mixture: Mixture, num_layers: int) -> Sequence[bool]:
    """Return whether each layer has experts."""
    layers = range(num_layers)
    match mixture.dense_layers:
        case "none":
            return [True] * num_layers
        case "step":
            step = fields.integer("decoder_sparse_step", 1, low=1, high=_LARGEST_LAYER)
            dense = fields.integers("mlp_only_layers", high=_LARGEST_LAYER)
            return [layer not in dense and (layer + 1) % step == 0 for layer in layers]
        case "first" if (kinds := fields.texts("mlp_layer_types")) is not None:
            if len(kinds) != num_layers or not {*kinds} <= {"dense", "sparse"}:
                raise ValueError(
                    f"{fields.source}: mlp_layer_types must call each of {num_layers} layers dense or sparse, "
                    f"got {kinds!r:.80}"
                )
            return [kind == "sparse" for kind in kinds]
        case "first":
            must_be(fields, "moe_layer_freq", 1)
            first = fields.integer("first_k_dense_replace", 0, high=_LARGEST_LAYER)
            return [layer >= first for layer in layers]
        case "range":
            step = fields.integer("moe_layer_interval", 1, low=1, high=_LARGEST_LAYER)
            first = fields.integer("moe_layer_start_index", 0, high=_LARGEST_LAYER)
            last = fields.integer("moe_layer_end_index", -1, low=-1, high=_LARGEST_LAYER)
            last = num_layers - 1 if last == -1 else last
            return [first <= layer <= last and (layer + 1) % step == 0 for layer in layers]
        case "listed":
            if fields.values.get("moe_layers") is not None:
                listed = fields.integers("moe_layers", high=num_layers - 1)
                return [layer in listed for layer in layers]
            step = fields.integer("interleave_moe_layer_step", 1, low=1, high=_LARGEST_LAYER)
            return [(layer + 1) % step == 0 for layer in layers]


def _resized(dense: AnyDense, size: int) -> AnyDense:
    return replace(dense, size=size)


def _name(fields: Fields, names: Sequence[str]) -> str:
    """Return which of several names of a field the file has; the first if it has none."""
    return next((name for name in names if fields.values.get(name) is not None), names[0])


def _number(fields: Fields, names: Sequence[str], largest: str) -> int:
    check_same(fields.source, [(name, fields.values.get(name)) for name in names])
    return fields.integer(_name(fields, names), high=LARGEST[largest])
