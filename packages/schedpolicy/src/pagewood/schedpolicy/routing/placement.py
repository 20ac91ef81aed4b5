"""What the router reads of a request, and what it answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from pagewood.schedpolicy.requests import HasTenant, Request
from pagewood.schedpolicy.routing.prefix_index import BlockHash
from pagewood.schedpolicy.routing.replicas import ReplicaName


class RoutedRequest(Request, HasTenant, Protocol):
    """A request that is sent to a replica.

    `num_tokens` and `num_generated` grow while it is answered: after a move or a death they say what a replica must
    compute again. `arrival` is unique over the fleet. `priority` and `tenant` do not change.
    """

    num_matched: int
    """Tokens that are cached on the replica that it is sent to, and before that, on the replica that has most."""
    # written by: router

    @property
    def arrived_s(self) -> float:
        """Time of its arrival, on the clock of `now_s`."""
        ...

    @property
    def block_hashes(self) -> Sequence[BlockHash]:
        """Names of the whole blocks of its tokens, from the start, in the form of the replicas' events."""
        ...


R = TypeVar("R", bound=RoutedRequest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """A request on a replica. It is valid until the request ends, is moved, or its replica dies.

    Attributes:
        arrival: Arrival number of the request.
        attempt: Counts the replicas that got the request, from 1.
        replica: The replica that answers it.
    """

    arrival: int
    attempt: int
    replica: ReplicaName


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement(Generic[R]):
    """A request to send to a replica now.

    Attributes:
        request: The request.
        ticket: Identifies what comes back from the replica.
        prefill: The replica that computes the prompt; None if the one that answers does.
        displaced: The ticket of a request of lower priority on the same replica, which must be stopped there first; it
            waits again, and keeps its tokens. None if there was a place.
    """

    request: R
    ticket: Ticket
    prefill: ReplicaName | None = None
    displaced: Ticket | None = None

    @property
    def replica(self) -> ReplicaName:
        """The replica that answers the request."""
        return self.ticket.replica


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure(Generic[R]):
    """What the requests of a replica that has left need.

    Attributes:
        waiting: They wait again, and come back from `dispatch`.
        ended: Their replicas have died too often; the router has forgotten them.
        unaided: Placements whose prompt the replica computed: send the requests to `replica` now, which computes it.
    """

    waiting: tuple[R, ...]
    ended: tuple[R, ...]
    unaided: tuple[Placement[R], ...]
