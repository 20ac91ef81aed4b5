"""The numbers of engines that are started elsewhere, and that come and go while the server runs."""

from __future__ import annotations

from dataclasses import dataclass

from pagewood.server.http.errors import unavailable
from pagewood.server.messages.links import Sender
from pagewood.server.replicas.dispatcher import Dispatcher
from pagewood.server.replicas.fleet_status import FleetStatus
from pagewood.server.replicas.replica import Replica
from pagewood.server.requests.status import EngineStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A number for one engine, whose messages carry both fields."""

    number: int
    incarnation: int
    """Engines that had the number before."""


class _Line:
    """Sends to the engine that has a number now; without one, frames are dropped."""

    __slots__ = ("sender",)

    def __init__(self) -> None:
        self.sender: Sender | None = None  # written by: Roster

    def send(self, frame: bytes) -> None:
        if self.sender is not None:
            self.sender.send(frame)


class Roster:
    """Gives each engine that comes a number for `Dispatcher` and `FleetStatus`, and takes it back when it leaves.

    Invariant: a number without an engine looks like an engine that has died; the next one has a higher incarnation.

    Args:
        most: engines that are expected; it bounds how many requests the server takes.
    """

    __slots__ = ("_dispatcher", "_lines", "_status", "_taken", "most", "replicas", "statuses")

    def __init__(self, *, most: int) -> None:
        self.most = most
        self._taken: set[int] = set()  # contents written by: reserve, leave
        self._lines: list[_Line] = []  # contents written by: _add
        self.replicas: list[Replica] = []  # contents written by: _add
        self.statuses: list[EngineStatus] = []  # contents written by: _add
        self._add()

    def attach(self, dispatcher: Dispatcher, status: FleetStatus) -> None:
        """Set what follows the engines; this comes before everything else."""
        self._dispatcher, self._status = dispatcher, status

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place on any engine."""
        return self._dispatcher.num_waiting

    def reserve(self) -> Seat:
        """Return a free number."""
        if len(self._taken) == len(self.statuses):
            self._add()
        number = min({*range(len(self.statuses))} - self._taken)
        self._taken.add(number)
        return Seat(number=number, incarnation=self.statuses[number].incarnation)

    def join(self, seat: Seat, sender: Sender) -> None:
        """Send an engine what is meant for its number: requests from its first pulse on."""
        self._lines[seat.number].sender = sender

    def move_away(self, seat: Seat) -> None:
        """Move the requests of an engine to others, and send it no more, if any other one works."""
        others = (one for number, one in enumerate(self.replicas) if number != seat.number)
        if any(one.takes_requests for one in others) and not self.replicas[seat.number].is_draining:
            self._dispatcher.drain(seat.number, is_draining=True)

    def num_requests(self, seat: Seat) -> int:
        """Return how many requests an engine has."""
        return self._dispatcher.num_requests(seat.number)

    def leave(self, seat: Seat, *, is_planned: bool) -> None:
        """Take a number back. The requests of its engine go on in others, or wait for one."""
        number, incarnation = seat.number, seat.incarnation + 1
        self._lines[number].sender = None
        self._status.lost(number, next_incarnation=incarnation)
        error = unavailable("The engine of the request has ended.", code="engine_lost")
        self._dispatcher.replica_lost(number, incarnation, error, is_planned=is_planned)
        self._dispatcher.drain(number, is_draining=False)
        self._taken.discard(number)

    def _add(self) -> None:
        line = _Line()
        self._lines.append(line)
        self.statuses.append(EngineStatus())
        self.replicas.append(Replica(sender=line, status=self.statuses[-1]))
