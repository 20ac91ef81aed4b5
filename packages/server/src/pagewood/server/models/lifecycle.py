"""One of several models between its loads: its state, the requests that wait for it, and those that use it."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import TYPE_CHECKING, Literal

from pagewood.server.models.served_model import ServedModel
from pagewood.server.requests.status import EngineState

if TYPE_CHECKING:
    from pagewood.server.protocols.common.models import Loads, ModelEntry, ModelState


class Phase(Enum):
    """What the processes of a model are doing."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    ENDING = "ending"


Leaving = Literal["idle", "memory", "request"]
"""Why a model is unloaded when no request uses it."""


@dataclass(slots=True, kw_only=True, eq=False)
class Waiter:
    """A request that waits until its model is loaded."""

    number: int
    """Its place in the order of arrival, over all models."""
    arrived: asyncio.Future[None]
    """Done when the model is loaded, and counts the request as a use; or with the reason of a failure."""


@dataclass(slots=True, kw_only=True, eq=False)
class Lifecycle:
    """One of several models. Invariant: while `num_uses` is not 0, its processes run and are not ended on purpose."""

    model: ServedModel
    number: int
    is_pinned: bool
    """Whether it is loaded at the start, and stays."""
    keep_s: float
    """How long it stays without use, seconds; infinity: until memory is needed."""  # written by: pool
    need_bytes: int
    """What it takes, or would take."""  # written by: loader
    loads: Loads
    phase: Phase = Phase.UNLOADED  # written by: pool
    leaving: Leaving | None = None
    """Why it is unloaded when no request uses it; None: it stays."""  # written by: pool, room
    waiters: deque[Waiter] = field(default_factory=deque[Waiter])  # contents written by: pool
    num_uses: int = 0
    """Requests that use it."""  # written by: pool
    last_used_s: float = 0.0  # written by: pool
    failure: str | None = None
    """Why its last load failed; None: it did not."""  # written by: pool
    outcome: asyncio.Future[str | None] | None = None
    """Result of the present load: None, or why it failed. None: it is not loading."""  # written by: pool
    work: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])
    """Tasks of its processes."""  # written by: loader
    num_ends: int = 0
    """How often its processes were ended."""  # written by: loader
    timer: asyncio.TimerHandle | None = None
    """When its idle time is over."""  # written by: pool

    @property
    def name(self) -> str:
        """Clients' name."""
        return self.model.name

    @property
    def is_usable(self) -> bool:
        """Whether a request may use it now."""
        return self.phase is Phase.LOADED and self.leaving is None

    @property
    def is_wanted(self) -> bool:
        """Whether it must be loaded for a request."""
        return self.phase is Phase.UNLOADED and bool(self.waiters)

    def is_idle(self, now_s: float) -> bool:
        """Return whether its idle time is over."""
        return self.is_usable and not (self.is_pinned or self.num_uses or self.waiters) and self._left_s(now_s) <= 0

    def entry(self, now_s: float) -> ModelEntry:
        """Return it at this moment."""
        from pagewood.server.protocols.common.models import ModelEntry

        model = self.model
        return ModelEntry(
            name=self.name,
            created=model.started,
            adapters=model.adapters,
            template=model.template(),
            incidents=model.metrics.incidents,
            metrics=model.metrics if model.config.metrics else None,
            service=model.service if self.phase is Phase.LOADED else None,
            model=model.model,
            state=self._state(now_s),
            loads=self.loads,
        )

    def _state(self, now_s: float) -> ModelState:
        from pagewood.server.protocols.common.models import ModelState

        values = {Phase.LOADING: "loading", Phase.LOADED: "loaded"}
        left_s = self._left_s(now_s)
        return ModelState(
            value=values.get(self.phase, "unloaded"),  # type: ignore[arg-type]
            detail=self._detail(),
            waiting=len(self.waiters),
            running=self.num_uses,
            pinned=self.is_pinned,
            draining=self.phase is Phase.LOADED and self.leaving is not None,
            expires_at=_time(left_s) if self.is_usable and not self.num_uses and math.isfinite(left_s) else None,
            memory_bytes=self.need_bytes,
            failed=self.failure is not None,
            reason=self.failure,
        )

    def _detail(self) -> str:
        match self.phase:
            case Phase.LOADING:
                return "its processes start" if self.model.group is None else self.model.group.status.detail
            case Phase.LOADED if self.leaving is not None:
                return f"is unloaded when its {self.num_uses} running requests have ended"
            case Phase.LOADED:
                assert self.model.group is not None
                status = self.model.group.status
                return "serving" if status.state is EngineState.READY else status.detail
            case Phase.ENDING:
                return "its processes end"
            case Phase.UNLOADED:
                return "waits until there is memory for it" if self.waiters else "is loaded when a request comes"

    def _left_s(self, now_s: float) -> float:
        return math.inf if self.is_pinned else self.last_used_s + self.keep_s - now_s


def _time(left_s: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=max(0.0, left_s))).isoformat().replace("+00:00", "Z")
