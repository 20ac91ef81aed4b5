"""Limits on what HTTP clients may send, how slowly, and over how many connections."""

from __future__ import annotations

import resource
from dataclasses import dataclass

RESERVED_DESCRIPTORS = 64
"""File descriptors that the HTTP process needs for itself: sockets of other processes, files, the event loop."""
SPARE_CONNECTIONS = 16
"""Connections beyond the limit, so that `/health` and `/ready` still answer."""
MOST_CONNECTIONS = 8192
"""Default limit if the process may have many descriptors: up to 64 KiB of each request wait in a buffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Limits of the HTTP process.

    Raises:
        ValueError: a limit is not positive.
    """

    max_connections: int = 512
    """Open connections; beyond it the connection that was idle longest is closed, and new requests get 503."""
    num_spare_connections: int = SPARE_CONNECTIONS
    """Further connections, whose requests get 503 unless they ask for health or readiness."""
    max_head_bytes: int = 64 * 1024
    """Request line and headers of one request; also the trailer of a chunked body."""
    max_body_bytes: int = 16 * 1024 * 1024
    """Body of one request."""
    max_buffered_bytes: int = 256 * 1024 * 1024
    """Bodies of all requests that are still being received."""
    head_timeout_s: float = 20.0
    """Time for the head of a request, from its first byte; for the first request, from the start of the connection."""
    body_timeout_s: float = 30.0
    """Time for the body of a request, beyond the time that it takes at `min_body_rate`."""
    min_body_rate: int = 16 * 1024
    """Lowest speed at which a body may arrive, bytes per second."""
    keep_alive_s: int = 75
    """Time that a connection may be idle between two requests."""
    linger_s: float = 5.0
    """Time during which the rest of a refused request is read and dropped, so that its client sees the answer."""
    peer_check_s: float = 0.25
    """Time between two checks whether the client of a half-closed connection is gone."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")


def default_max_connections() -> int:
    """Return the default limit: the connections that open files allow, at most `MOST_CONNECTIONS`."""
    possible = possible_connections()
    return MOST_CONNECTIONS if possible is None else min(MOST_CONNECTIONS, possible)


def possible_connections() -> int | None:
    """Return how many connections fit the process's limit of open files (`ulimit -n`); None if it has no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else max(1, soft - RESERVED_DESCRIPTORS - SPARE_CONNECTIONS)
