"""The router of the replicas of a server."""

from __future__ import annotations

from random import Random

from pagewood.engine.api import EngineConfig
from pagewood.schedpolicy.admission.quotas import Quota, Quotas
from pagewood.schedpolicy.routing.router import Router, default_order
from pagewood.server.replicas.placed_request import PlacedRequest

MAX_MOVES = 3
"""How often a request makes room for one of higher priority."""
MAX_DEATHS = 1 << 30
"""Deaths of replicas with a request after which the router ends it: `LiveRequests` decides that."""


MIN_APART_TOKENS = 256
"""An engine that decodes computes up to this many tokens of a prompt itself: another one would save it a step."""


def make_router(
    config: EngineConfig, *, moves: bool = True, min_apart_tokens: int = MIN_APART_TOKENS
) -> Router[PlacedRequest]:
    """Return the router for engines with this configuration, without replicas.

    Its order is by priority, within a priority by equal shares of tenants, with ageing over all of them. The order that
    is configured holds within an engine. With the order "fair", the shares have the weights that are configured.

    Args:
        config: of each engine.
        moves: whether a request can make room for another one.
        min_apart_tokens: of a prompt that a replica which decodes computes itself.
    """
    quotas = {
        one.tenant: Quota(
            max_running=one.max_running,
            max_tokens_in_flight=one.max_tokens_in_flight,
            max_kv_tokens=one.max_kv_tokens,
        )
        for one in config.quotas
    }
    weights = dict(config.schedule_weights) if config.schedule_policy == "fair" else {}
    return Router(
        block_size=config.page_size,
        rng=Random(config.seed),
        order=default_order(weights),
        quotas=Quotas(quotas, default=quotas.pop("*", None)) if quotas else None,
        max_moves=MAX_MOVES if moves else 0,
        max_deaths=MAX_DEATHS,
        min_apart_tokens=min_apart_tokens,
    )
