# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# (vLLM is not a dependency of this package)
"""vLLM's scheduler with any order of this package as its waiting queue.

    vllm serve MODEL --scheduler-cls pagewood.schedpolicy.integrations.vllm.OrderedAsyncScheduler \
        --additional-config '{"pagewood_order": "lpm", "pagewood_ageing_s": 30}'

Written for vLLM 0.33.0. Without async scheduling use `OrderedScheduler`. For an order that needs more than a name,
derive a class and define `make_order`.
"""

from typing import Any

from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from pagewood.schedpolicy import Ageing, Order, RankedOrder, order_named
from pagewood.schedpolicy.integrations.vllm_matches import LiveMatches
from pagewood.schedpolicy.integrations.vllm_queue import OrderedQueue, QueuedRequest


class OrderedScheduler(Scheduler):
    """vLLM's scheduler whose waiting requests are admitted in an order of this package.

    Invariant: the order has exactly the requests of `waiting`; during a step, it also has the request popped last.

    Priorities count only with `--scheduling-policy priority`, and a lower number goes first, as in vLLM. Some orders
    read fields of `SamplingParams.extra_args` (over HTTP `vllm_xargs`): `tenant` for "fair" (otherwise the cache salt
    counts as the tenant), `deadline_s`, seconds after the arrival, for "edf", and `service_class` for "wrr". "tag"
    reads the name of the LoRA adapter.

    Raises:
        ValueError: `pagewood_order` is not the name of an order, or `pagewood_ageing_s` is not a number >= 0.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        manager = self.kv_cache_manager
        is_matched = isinstance(manager.coordinator, UnitaryKVCacheCoordinator)
        self.waiting = OrderedQueue(
            self.make_order(),
            matches=LiveMatches(manager.block_pool, manager.coordinator.block_size) if is_matched else None,
            has_priorities=self.policy == SchedulingPolicy.PRIORITY,
            is_admitted=lambda request: request.status == RequestStatus.RUNNING or self._holds_kv_blocks(request),
        )

    def make_order(self) -> Order[Any]:
        """Return an empty order, the one that `additional_config` names; "fcfs" if it names none.

        Matches are reported to the order, so it may be made with `notified=True`.
        """
        config = self.vllm_config.additional_config
        config = config if isinstance(config, dict) else {}
        name = str(config.get("pagewood_order", "fcfs"))
        if name in ("fcfs", "priority") and self.policy == SchedulingPolicy.PRIORITY:
            order: Order[Any] = RankedOrder(_by_priority_and_time)
        else:
            order = order_named(name, notified=True)
        after_s = config.get("pagewood_ageing_s")
        if after_s is None:
            return order
        if isinstance(after_s, bool) or not isinstance(after_s, int | float):
            raise ValueError(f"pagewood_ageing_s must be a number >= 0, got {after_s!r}")
        return Ageing(order, after_s=after_s)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Plan one step."""
        self.waiting.begin_step()
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self.waiting.settle()

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        result = super()._free_request(request, *args, **kwargs)
        self.waiting.ended(request)
        return result


def _by_priority_and_time(request: QueuedRequest) -> tuple[float, ...]:
    """Rank as vLLM does with priorities: by the time of arrival, which is not always the order of the calls."""
    return -request.priority, request.arrived_s


class OrderedAsyncScheduler(OrderedScheduler, AsyncScheduler):
    """`OrderedScheduler` for async scheduling, which is vLLM's default where the platform allows it."""
