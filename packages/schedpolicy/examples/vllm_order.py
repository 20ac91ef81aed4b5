# pyright: basic, reportMissingImports=false
"""An order of your own for vLLM: urgent classes first, each by longest cached prefix, and nothing waits for ever.

PYTHONPATH=packages/schedpolicy/examples vllm serve MODEL --scheduler-cls vllm_order.UrgentFirst
curl ... -d '{"messages": [...], "vllm_xargs": {"service_class": "urgent"}}'
"""

from typing import Any

from pagewood.schedpolicy import Ageing, MultilevelOrder, Order, order_named
from pagewood.schedpolicy.integrations.vllm import OrderedAsyncScheduler


class UrgentFirst(OrderedAsyncScheduler):
    """vLLM's scheduler with this order."""

    def make_order(self) -> Order[Any]:
        """Return an empty order."""
        by_class = MultilevelOrder(
            lambda request: request.service_class == "urgent", lambda: order_named("lpm", notified=True)
        )
        return Ageing(by_class, after_s=30)
