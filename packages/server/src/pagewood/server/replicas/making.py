"""The router of the replicas of a server."""

from __future__ import annotations

from random import Random

from pagewood.engine.api import EngineConfig
from pagewood.schedpolicy.admission.quotas import Quota, Quotas
from pagewood.schedpolicy.routing.router import Router
from pagewood.server.replicas.placed_request import PlacedRequest

MAX_MOVES = 3
"""How often a request makes room for one of higher priority."""
MAX_DEATHS = 1 << 30
"""Deaths of replicas with a request after which the router ends it: `LiveRequests` decides that."""


def make_router(config: EngineConfig, *, moves: bool = True) -> Router[PlacedRequest]:
    """Return the router for engines with this configuration, without replicas.

    Its order is by priority, within a priority by equal shares of tenants, with ageing over all of them. The order that
    is configured holds within an engine.

    Args:
        config: of each engine.
        moves: whether a request can make room for another one.
    """
    quotas = {
        one.tenant: Quota(
            max_running=one.max_running,
            max_tokens_in_flight=one.max_tokens_in_flight,
            max_kv_tokens=one.max_kv_tokens,
        )
        for one in config.quotas
    }
    return Router(
        block_size=config.page_size,
        rng=Random(config.seed),
        quotas=Quotas(quotas, default=quotas.pop("*", None)) if quotas else None,
        max_moves=MAX_MOVES if moves else 0,
        max_deaths=MAX_DEATHS,
    )
