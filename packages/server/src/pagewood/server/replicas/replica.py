"""One of several engines, as the HTTP process sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagewood.schedpolicy.routing.replicas import Role
from pagewood.server.messages.links import Sender
from pagewood.server.requests.status import EngineStatus


@dataclass(slots=True, kw_only=True)
class Replica:
    """One engine, as the dispatcher sees it."""

    sender: Sender
    status: EngineStatus = field(default_factory=EngineStatus)
    """What it says of itself."""
    role: Role = Role.BOTH
    is_draining: bool = False  # written by: Dispatcher
    """Whether it gets no further requests, also from the next process."""
    incarnation: int | None = 0  # written by: Dispatcher
    """The process that counts; None: none does, because one is ended on purpose."""
    is_joined: bool = False  # written by: Dispatcher
    """Whether it works, so that it gets commands, and is known to the router."""
    relay: int = 0  # written by: Dispatcher
    """The detokenizer process that passes its messages on."""
    shows_cache: bool = False  # written by: Dispatcher
    """Whether it was asked for all that it has cached, and has not sent it yet."""

    @property
    def takes_requests(self) -> bool:
        """Whether the router may send it requests."""
        return self.is_joined and not self.is_draining and not self.status.outdated
