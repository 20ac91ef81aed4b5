"""A request of a simulated fleet, over all replicas that it runs on."""

from collections.abc import Sequence

from pagewood.schedpolicy.routing.placement import Ticket
from pagewood.schedpolicy.simulation.request import SimRequest
from pagewood.schedpolicy.simulation.trace import TraceRequest


class RoutedSimRequest:
    """What the router reads of a request, and the parts of it on replicas.

    Invariant: `ticket` is the valid one while it is on a replica, and None while it waits.
    """

    __slots__ = (
        "arrival", "arrived_s", "block_hashes", "helped_by", "helper", "max_new_tokens", "num_matched", "part",
        "priority", "spec", "tenant", "ticket",
    )  # fmt: skip

    def __init__(self, arrival: int, spec: TraceRequest, keys: Sequence[int], num_shared: int, page_size: int) -> None:
        """Start as a request that has just arrived.

        Args:
            arrival: Its number in the trace.
            spec: The request in the trace.
            keys: Names of its whole pages.
            num_shared: Number of these, from the start, that other requests can share.
            page_size: Tokens per page.
        """
        self.arrival = arrival
        self.arrived_s = spec.arrived_s
        self.priority = spec.priority
        self.tenant = spec.tenant
        self.max_new_tokens = spec.max_new_tokens
        self.spec = spec
        self.block_hashes = keys[:num_shared]
        self.num_matched = 0  # written by: routing.router
        self.ticket: Ticket | None = None  # written by: routed
        self.part = SimRequest(arrival, spec, keys, page_size)
        """The request on the replica that answers it, or on the last one that did."""  # written by: routed
        self.helper: SimRequest | None = None
        """Its prompt on the replica that computes it for another; None if none does."""  # written by: routed
        self.helped_by = -1
        """The replica of `helper`, or of the last one."""  # written by: routed

    @property
    def num_generated(self) -> int:
        """Tokens generated, as of the last event of its replica."""
        return self.part.num_generated

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt plus the tokens generated."""
        return self.part.num_tokens
