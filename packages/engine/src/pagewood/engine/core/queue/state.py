"""All requests of an engine, by where they stand."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from pagewood.engine.core.queue.waiting import WaitingQueue
from pagewood.engine.core.request import Request


@dataclass(slots=True, kw_only=True, eq=False)
class EngineState:
    """The requests whose last answer has not been made, and those whose pages a launched step still reads.

    Invariant: a request is in exactly one of `compiling`, `waiting`, `running`, `held` and `draining`; those that run
    and drain hold a row, those that are held may.
    """

    waiting: WaitingQueue
    """Queued, without a row."""  # written by: intake, rest, plan, priority_preemption, pausing, renewal, retire
    rank: Callable[[Request], Any]
    """Sort key of running requests: the smallest is the last to be preempted."""
    on_end: Callable[[Request], None] | None = None
    """Called with each running request that ends by itself, before it leaves."""
    compiling: list[Request] = field(default_factory=list["Request"])
    """Not queued, because their grammars are being compiled, their images are being encoded, or the cache has not said
    how much it has of them; in no order."""  # written by: intake, renewal, retire
    num_loading: int = 0
    """Adapters whose folders are being read, and updates of weights."""  # written by: intake, rest
    weight_version: str = ""
    """The name of the weights that compute the steps; empty: those that the engine began with."""
    # written by: rest
    num_constrained: int = 0
    """Requests with a matcher whose last answer has not been made."""  # written by: intake, retire
    num_reported: int = 0
    """Requests whose output tokens have log probabilities, until their last answer."""
    # written by: intake, retire
    running: list[Request] = field(default_factory=list["Request"])
    """Holding a row, sorted by rank."""  # written by: state
    draining: list[Request] = field(default_factory=list["Request"])
    """Ended, but a launched step still reads their pages."""  # written by: retire
    has_priorities: bool = False
    """Whether any request since the engine was last empty has had a priority other than 0."""
    # written by: intake
    held: list[Request] = field(default_factory=list["Request"])
    """Paused alone, in the order in which they were; those in place hold a row while memory lasts."""
    # written by: pausing
    paused: Literal["no", "in_place", "retract"] = "no"
    """Whether steps are launched, and if not, whether running requests leave."""  # written by: rest
    by_id: dict[str, Request] = field(default_factory=dict[str, "Request"])
    """The requests whose last answer has not been made, by `request_id`."""  # written by: intake, retire

    @property
    def is_idle(self) -> bool:
        """Whether nothing is compiled, loaded, queued, running, paused alone or draining."""
        return not (
            len(self.waiting) or self.running or self.held or self.draining or self.compiling or self.num_loading
        )

    @property
    def is_resting(self) -> bool:
        """Whether nothing will change before a command arrives: idle, or paused with nothing left to do.

        Requests may still wait: those whose tenant is at its limit because its other requests are paused alone.
        """
        if self.held and any(request.pause == "retract" and request.row >= 0 for request in self.held):
            return False
        if self.paused == "no":
            can_run = len(self.waiting) > self.num_behind_paused or self.waiting.num_recalling
            return not (can_run or self.running or self.draining or self.compiling or self.num_loading)
        leaving = self.paused == "retract" and self.running
        return not (leaving or self.draining or self.compiling or self.num_loading)

    @property
    def num_behind_paused(self) -> int:
        """While no request runs: the waiting requests whose tenant is at its limit and has requests paused in place."""
        if not self.held or not len(self.waiting):
            return 0
        return self.waiting.num_at_quota_of({request.tenant for request in self.held if request.row >= 0})

    @property
    def holders(self) -> list[Request]:
        """The requests that hold a row."""
        return [*self.running, *self.draining, *(request for request in self.held if request.row >= 0)]

    def run(self, request: Request) -> None:
        """Add a request that has just been given a row to the running ones, by rank."""
        insort(self.running, request, key=self.rank)

    def stop(self, request: Request) -> None:
        """Remove a request that ended or was preempted from the running ones."""
        self.running.remove(request)
        self.waiting.stopped(request)

    def suspend(self, request: Request) -> None:
        """Take a running request out without ending its turn: it keeps its row, but no request waits for its prompt."""
        self.running.remove(request)
        self.waiting.suspended(request)

    def go_on(self, request: Request) -> None:
        """Add a suspended request to the running ones again."""
        self.run(request)
        self.waiting.resumed(request)

    def sort_running(self) -> None:
        """Restore the order of the running requests after a rank has changed."""
        self.running.sort(key=self.rank)
