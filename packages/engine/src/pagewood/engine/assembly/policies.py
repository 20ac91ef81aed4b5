"""Policies of an engine: the caller's own, or those that a configuration names."""

from __future__ import annotations

from dataclasses import dataclass

from pagewood.engine.api import EngineConfig
from pagewood.engine.core.memory.adapters import SlotSharing
from pagewood.engine.core.queue.waiting import Deferral, Order
from pagewood.engine.core.request import Request
from pagewood.engine.core.steps.policies import Budget, Reserve, SkipAhead, Victim
from pagewood.schedpolicy import (
    MATCH_ORDERS,
    ORDERS,
    Ageing,
    InBatchDeferral,
    NewTokenRatio,
    SlotShares,
    budget_named,
    choose_victim,
    order_named,
)
from pagewood.schedpolicy import SkipAhead as BoundedSkipAhead

_MAX_COMPARED = 250_000
"""Tokens that one plan compares to find requests that repeat a prompt in progress: about half a millisecond."""
_READ_BY = {
    "order": ("schedule_policy", "schedule_weights", "schedule_ageing_s"),
    "budget": ("schedule_preset", "prefill_first", "joint_prefill_tokens", "max_prefills"),
    "reserve": ("schedule_conservativeness", "refuse_late"),
}
"""The fields of the configuration that each policy of the caller replaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """The caller's own policies for one engine; None: the policy that the configuration names."""

    order: Order | None = None
    """The order in which waiting requests are considered."""
    reads_matches: bool = False
    """Whether `order` reads `Request.num_matched`, so that it must be kept up to date while requests wait."""
    budget: Budget | None = None
    """The limits of a step; at most `max_running` requests and `max_chunk_tokens` prompt tokens."""
    reserve: Reserve | None = None
    """The memory that is kept for the output of running requests."""
    victim: Victim | None = None
    """Which request is preempted when memory runs out."""
    skip_ahead: SkipAhead | None = None
    """How far admission may look past a request that does not fit."""
    deferral: Deferral | None = None
    """The choice of requests that wait for a prompt that they repeat; needs the prefix cache."""
    slots: SlotSharing | None = None
    """Which requests may run, where those with the same adapter share a slot."""

    def check(self, config: EngineConfig) -> None:
        """Raise ValueError if a configuration sets a field that one of the caller's policies replaces."""
        defaults = EngineConfig()
        for policy, names in _READ_BY.items():
            for name in names if getattr(self, policy) is not None else ():
                if (got := getattr(config, name)) != getattr(defaults, name):
                    raise ValueError(f"{name} must have its default with a policies.{policy}, got {got!r}")
        if self.reads_matches and self.order is None:
            raise ValueError("reads_matches must be false without an order")
        if self.deferral is not None and not config.prefix_cache:
            raise ValueError("policies.deferral must be None without a prefix cache (prefix_cache=False)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenPolicies:
    """Every policy of one engine."""

    order: Order
    is_watching: bool
    """Whether the matches of waiting requests are kept up to date."""
    is_by_deadline: bool
    """Whether requests with an earlier deadline come first."""
    budget: Budget
    reserve: Reserve
    expectation: NewTokenRatio | None
    """The part of their output that requests are expected to generate; None with the caller's own reserve."""
    victim: Victim
    skip_ahead: SkipAhead
    deferral: Deferral | None
    slots: SlotSharing | None
    """None: there are no adapters."""

    def check_pools(self) -> None:
        """Check that the policies fit KV memory that is divided among ranks by request.

        Raises:
            ValueError: one of them reads the matches of waiting requests.
        """
        if self.is_watching:
            raise ValueError(
                "schedule_policy and eviction_policy must not read the matches of waiting requests with "
                "enable_dp_attention, because each rank has matches of its own"
            )


def chosen(config: EngineConfig, own: Policies, *, page_size: int) -> ChosenPolicies:
    """Return the caller's own policies, and otherwise those that a configuration names.

    Raises:
        ValueError: `config.schedule_policy` is unknown.
    """
    name = _order_name(config.schedule_policy)
    ratio = None if own.reserve is not None else NewTokenRatio(scale=config.schedule_conservativeness)
    reserve = own.reserve or ratio
    assert reserve is not None
    reads_matches = own.reads_matches if own.order is not None else name in MATCH_ORDERS
    deferral = own.deferral
    if deferral is None and config.prefix_cache:
        deferral = InBatchDeferral[Request](page_size=page_size, max_compared=_MAX_COMPARED)
    return ChosenPolicies(
        order=own.order or _order(config, name),
        is_watching=config.prefix_cache and (reads_matches or config.eviction_policy == "queue-lru"),
        is_by_deadline=own.order is None and name == "edf",
        budget=own.budget
        or budget_named(
            config.mixing,
            max_running=config.num_rows,
            max_prefill_tokens=config.max_chunk_tokens,
            max_prefills=config.max_prefills,
            joint_prefill_tokens=config.joint_prefill_tokens,
        ),
        reserve=reserve,
        expectation=ratio,
        victim=own.victim or choose_victim,
        skip_ahead=own.skip_ahead or BoundedSkipAhead(max_skipped=8, max_passes=32),
        deferral=deferral,
        slots=None
        if not config.max_adapters
        else own.slots or SlotShares(config.max_adapters, max_passes=config.num_rows),
    )


def _order(config: EngineConfig, name: str) -> Order:
    order = order_named(name, seed=config.seed, notified=True, weights=dict(config.schedule_weights))
    return order if config.schedule_ageing_s is None else Ageing(order, after_s=config.schedule_ageing_s)


def _order_name(name: str) -> str:
    if name.replace("_", "-") not in ORDERS:
        raise ValueError(f"schedule_policy must be one of {', '.join(ORDERS)}, got {name!r}")
    return name.replace("_", "-")
