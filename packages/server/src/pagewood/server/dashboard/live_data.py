"""Live data for viewers of the dashboard: keeps the engine sending while viewers exist, and joins all sources."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
from collections.abc import AsyncGenerator

import msgspec

from pagewood.engine.observe.view import EngineView
from pagewood.server.dashboard.processes import Processes, ProcessLoad
from pagewood.server.dashboard.rates import Rates, RateWindow
from pagewood.server.messages import wire
from pagewood.server.replicas.division import role_of
from pagewood.server.replicas.fleet_status import FleetStatus, ServerStatus
from pagewood.server.requests.live import LiveRequests

logger = logging.getLogger(__name__)

_MADE_UP = re.compile("[0-9a-f]{32}")
"""An `x-request-id` that the server made."""
MAX_FOUND = 50
"""Most requests that are shown because a viewer searches for them."""
LEASE_S = 3.0
"""How long the engine sends snapshots after the last `Watch`."""
RENEW_S = 1.0
"""How often `Watch` is sent; also how often something is sent if the engine sends nothing."""


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One of several engines."""

    replica: int
    role: str
    status: str
    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """The server at one moment."""

    number: int
    """Counts the messages to viewers."""
    model: str
    status: str
    """The same as in `/ready`."""
    detail: str
    """What the engine is doing, in words."""
    num_live: int
    """Requests that a client waits for, in any stage."""
    names: list[str]
    """For each of `engine.requests`, a name by which it can be aborted; empty: no name."""
    rates: Rates | None
    processes: tuple[ProcessLoad, ...] | None
    """None: unchanged since the previous message."""
    shows_text: bool
    """Whether branches of the prefix cache have a text."""
    engine: EngineView | None
    """None: the engine has sent nothing since the previous message. With several, it is the first one that works."""
    replicas: tuple[ReplicaLoad, ...] = ()
    """Empty: there is one engine."""


class Watchers:
    """The viewers. Invariant: a `Watch` is sent, and a message is made, only while viewers exist.

    All viewers get the same bytes. A slow viewer misses messages, and keeps no message in memory.

    Args:
        shows_text: whether branches of the prefix cache have a text.
    """

    __slots__ = (
        "_arrived", "_finds", "_message", "_num", "_number", "_processes", "_shows_text", "_snapshot", "_task",
        "_window",
    )  # fmt: skip

    def __init__(self, *, shows_text: bool = False) -> None:
        self._shows_text = shows_text
        self._num = 0  # written by: follow
        self._finds: list[str] = []
        """The search text of each viewer that searches."""  # contents written by: follow
        self._task: asyncio.Task[None] | None = None  # written by: follow
        self._snapshot: wire.Snapshot | None = None  # written by: take, _message_of
        self._arrived = asyncio.Event()
        """Set when a snapshot has come."""  # written by: take, _run
        self._message: asyncio.Future[bytes] | None = None
        """The next message; an empty one is the end."""  # written by: follow, _run
        self._number = 0  # written by: _message_of
        self._window = RateWindow()  # written by: _run
        self._processes = Processes()

    @property
    def num_watching(self) -> int:
        """Number of viewers."""
        return self._num

    def take(self, snapshot: wire.Snapshot) -> None:
        """Take a snapshot of the engine."""
        self._snapshot = snapshot
        self._arrived.set()

    async def follow(
        self, live: LiveRequests, status: ServerStatus, model_name: str, *, find: str = ""
    ) -> AsyncGenerator[bytes]:
        """Yield messages, each the JSON of a `Live`, until the caller closes this, or `close` is called.

        Args:
            live: the requests of the server.
            status: of the engine.
            model_name: for the messages.
            find: a part of names; requests that have it are in the messages even if they are far back in the queue.
        """
        self._num += 1
        self._finds += [find] if find else []
        if self._task is None:
            self._message = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._run(live, status, model_name), name="live data")
        try:
            while True:
                assert self._message is not None
                message = await asyncio.shield(self._message)
                if not message:
                    return
                yield message
        finally:
            self._num -= 1
            if find:
                self._finds.remove(find)
            if not self._num:
                self._task.cancel()
                self._task = self._message = None

    def close(self) -> None:
        """End the messages of all viewers: the model is unloaded."""
        if self._task is not None and self._message is not None and not self._message.done():
            self._task.cancel()
            self._message.set_result(b"")

    async def _run(self, live: LiveRequests, status: ServerStatus, model_name: str) -> None:
        """Make messages until cancelled."""
        loop = asyncio.get_running_loop()
        self._window, self._snapshot = RateWindow(), None
        renewed_s, looked_s = float("-inf"), float("-inf")
        while True:
            now_s = loop.time()
            if now_s - renewed_s >= RENEW_S:
                renewed_s = now_s
                found = dict.fromkeys(name for find in self._finds for name in live.named_like(find, limit=MAX_FOUND))
                wanted = tuple(itertools.islice(found, MAX_FOUND))
                live.watch(wire.Watch(for_s=LEASE_S, shows_tokens=self._shows_text, wanted=wanted))
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RENEW_S):
                    await self._arrived.wait()
            processes = None
            if loop.time() - looked_s >= RENEW_S:
                looked_s = loop.time()
                processes = self._processes.look()
            try:
                data = self._message_of(live, status, model_name, processes)
            except Exception:  # a defect must not end the stream silently
                logger.exception("live data cannot be made")
                continue
            message, self._message = self._message, loop.create_future()
            if message is not None:
                message.set_result(data)

    def _message_of(
        self,
        live: LiveRequests,
        status: ServerStatus,
        model_name: str,
        processes: tuple[ProcessLoad, ...] | None,
    ) -> bytes:
        snapshot, self._snapshot = self._snapshot, None
        view, rates, names = None, None, list[str]()
        if snapshot is not None and status.is_current(snapshot):
            view = snapshot.view
            self._window.add(view)
            rates = self._window.rates(view.now_s)
            names = [_shown_name(live.names(request.request_id)) for request in view.requests]
        self._number += 1
        return msgspec.json.encode(
            Live(
                number=self._number,
                model=model_name,
                status=status.state.value,
                detail=status.detail,
                num_live=live.num_live,
                names=names,
                rates=rates,
                processes=processes,
                shows_text=self._shows_text,
                engine=view,
                replicas=_replicas(status),
            )
        )


def _replicas(status: ServerStatus) -> tuple[ReplicaLoad, ...]:
    if not isinstance(status, FleetStatus):
        return ()
    return tuple(
        ReplicaLoad(
            replica=number,
            role=role_of(number, num_prefill=status.num_prefill).value,
            status=one.state.value,
            num_running=one.counters.get("num_running", 0),
            num_waiting=one.counters.get("num_waiting", 0),
            num_pages=one.counters.get("num_pages", 0),
            num_free_pages=one.counters.get("num_free_pages", 0),
        )
        for number, one in enumerate(status.replicas)
    )


def _shown_name(names: frozenset[str]) -> str:
    """Return a name that the client knows, such as `chatcmpl-...`, rather than an id that the server made up."""
    return min(names, key=lambda name: (bool(_MADE_UP.fullmatch(name)), name), default="")
