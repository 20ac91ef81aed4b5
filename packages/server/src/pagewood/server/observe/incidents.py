"""Counts of incidents and of the server's reactions, for operators."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from pagewood.server.replicas.fleet_status import ServerStatus
from pagewood.server.requests.status import EngineState


@dataclass(slots=True, kw_only=True)
class Incidents:
    """Counts since the server was started. Invariant: a count only grows; `recovery_s` is that of the last recovery."""

    restarts: Counter[str] = field(default_factory=Counter[str])  # written by: Supervisor
    """Processes that were started again after their death, by the name of their stage."""
    recovery_s: float | None = None  # written by: Recovery
    """How long the server was not ready after the last death of a process, seconds; None: there was none."""
    num_retried: int = 0  # written by: live
    """Requests that a dead process held and the server sent again."""
    num_lost: int = 0  # written by: live
    """Requests that ended with an error because a process died."""
    stuck: Counter[str] = field(default_factory=Counter[str])  # written by: Watchdog
    """Incidents found by the watchdog, by kind: device, loop, admission, silent."""
    num_kills: int = 0  # written by: Watchdog
    """Processes that the watchdog killed."""
    refused: Counter[str] = field(default_factory=Counter[str])  # written by: door, models.pool
    """Requests that were refused because of load, by reason: full, late."""
    num_slow_readers: int = 0  # written by: live
    """Requests that ended because their client read too slowly."""
    num_drained: int = 0  # written by: Shutdown
    """Requests that ended by themselves while the server stopped."""
    num_cut_off: int = 0  # written by: Shutdown
    """Requests that had not ended when the time to stop was over."""

    def totals(self) -> dict[str, int]:
        """Return the counts, without the names of processes and causes."""
        return {
            "restarts": self.restarts.total(),
            "retried": self.num_retried,
            "lost": self.num_lost,
            "stuck": self.stuck.total(),
            "kills": self.num_kills,
            "refused": self.refused.total(),
            "slow_readers": self.num_slow_readers,
        }

    def by_kind(self) -> dict[tuple[str, str], int]:
        """Return the counts by kind and process; kinds that concern no single process have an empty one."""
        return {
            **{("restart", process): num for process, num in self.restarts.items()},
            **{(f"stuck_{what}", "engine"): num for what, num in self.stuck.items()},
            **{(f"refused_{why}", ""): num for why, num in self.refused.items()},
            ("retried", ""): self.num_retried,
            ("lost", ""): self.num_lost,
            ("killed", ""): self.num_kills,
            ("slow_reader", ""): self.num_slow_readers,
        }


class Recovery:
    """Measures how long the server is not ready after the death of a process.

    Args:
        status: of the engine.
        incidents: where the time is noted.
    """

    __slots__ = ("_began_s", "_incidents", "_status")

    def __init__(self, status: ServerStatus, incidents: Incidents) -> None:
        self._status = status
        self._incidents = incidents
        self._began_s: float | None = None  # written by: began, check

    def began(self) -> None:
        """Note the death of a process; the first one counts until the server is ready again."""
        if self._began_s is None:
            self._began_s = self._status.clock()

    def check(self) -> None:
        """Note the time if the server is ready again."""
        if self._began_s is not None and self._status.state is EngineState.READY:
            self._incidents.recovery_s = self._status.clock() - self._began_s
            self._began_s = None
