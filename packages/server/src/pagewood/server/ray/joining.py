"""The engines of a process with requests: it links itself to each that comes, and lets each go that leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pagewood.server.messages.links import Sender
from pagewood.server.ray.calls import ReplicaLeftError
from pagewood.server.replicas.roster import Roster, Seat

POLL_S = 0.05
NOTE_S = 1.0
"""Least time between two notes to an engine; far less than `link.LEASE_S`."""
RETRY_S = 0.5

_log = logging.getLogger(__name__)


class Engines(Protocol):
    """Calls of engines."""

    async def watch(self, changed: Callable[[Sequence[str]], None]) -> None:
        """Call `changed` in this event loop with the replicas that take calls, now and whenever they are others."""

    def link(self, replica: str, seat: Seat) -> AsyncGenerator[Sequence[bytes]]:
        """Yield the kind of an engine, then what it says."""
        ...

    async def tell(self, replica: str, number: int, frame: bytes) -> None:
        """Give an engine a command; return when its answer has ended."""

    async def note_waiting(self, replica: str, num: int) -> None:
        """Tell an engine how many requests wait for a place on any engine."""

    async def wake(self) -> None:
        """Wait until there is an engine; Ray Serve starts one if there is none."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Joined:
    """An engine with a link. Numbers what is sent to it, because calls may overtake each other."""

    name: str
    seat: Seat
    engines: Engines
    follower: asyncio.Task[None]
    num_sent: int = 0  # written by: send
    is_leaving: bool = False  # written by: Joining, _call
    """Whether it gets no further calls, so that its end is expected."""
    calls: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])  # contents written by: send

    def send(self, frame: bytes) -> None:
        """Send a frame."""
        call = asyncio.create_task(self._call(self.num_sent, frame))
        self.num_sent += 1
        self.calls.add(call)
        call.add_done_callback(self.calls.discard)

    async def _call(self, number: int, frame: bytes) -> None:
        try:
            await self.engines.tell(self.name, number, frame)
        except Exception as error:  # it is lost
            self.is_leaving |= isinstance(error, ReplicaLeftError)
            _log.info("a call of replica %s has failed: %s", self.name, error)
            self.follower.cancel()


class Joining:
    """Keeps a link to every engine that Ray Serve has.

    Invariant: an engine has a number in the roster while it has a link. If the link ends, its requests go on in others.

    Args:
        roster: numbers the engines.
        engines: calls them.
        relay: gets what they say.
        kind: engines of another kind are left alone.
        is_wanted: whether there are requests.
    """

    __slots__ = (
        *("_engines", "_is_wanted", "_joined", "_kind", "_linked", "_noted_s", "_relay", "_replicas"),
        *("_roster", "_tasks"),
    )

    def __init__(
        self, roster: Roster, engines: Engines, relay: Sender, *, kind: str, is_wanted: Callable[[], bool]
    ) -> None:
        self._roster, self._engines, self._relay = roster, engines, relay
        self._kind, self._is_wanted = kind, is_wanted
        self._replicas: set[str] = set()  # written by: _changed
        """Those that take calls."""
        self._linked: set[str] = set()  # contents written by: _changed, _link
        """Those that have a link, get one, or are of another kind."""
        self._joined: dict[str, _Joined] = {}  # contents written by: _follow
        self._tasks: set[asyncio.Task[None]] = set()  # contents written by: _begin
        self._noted_s = 0.0  # written by: _note

    async def run(self) -> None:
        """Link engines until cancelled."""
        try:
            await self._engines.watch(self._changed)
            while True:
                await asyncio.sleep(POLL_S)
                try:
                    if not self._replicas and self._is_wanted():
                        await self._engines.wake()
                    await self._note()
                except Exception:
                    _log.warning("no engine could be called; another try follows", exc_info=True)
                    await asyncio.sleep(RETRY_S)
        finally:
            for task in (tasks := [*self._tasks]):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _changed(self, replicas: Sequence[str]) -> None:
        """Link the engines that come, and let those go that leave."""
        self._replicas = {*replicas}
        for name in self._replicas - self._linked:
            self._linked.add(name)
            self._begin(self._link(name))
        for name, joined in self._joined.items():
            if name not in self._replicas and not joined.is_leaving:
                joined.is_leaving = True
                self._begin(self._empty(joined))

    async def _link(self, name: str) -> None:
        """Follow an engine until it is lost; then try again, if it is still there."""
        while name in self._replicas:
            follower = self._begin(self._follow(name))
            await asyncio.wait((follower,))
            if not follower.cancelled() and follower.exception() is None:  # it is of another kind
                return
            await asyncio.sleep(RETRY_S)
        self._linked.discard(name)

    async def _follow(self, name: str) -> None:
        """Pass on what an engine says, until its link ends."""
        seat, follower = self._roster.reserve(), asyncio.current_task()
        said = self._engines.link(name, seat)
        assert follower is not None
        joined = _Joined(name=name, seat=seat, engines=self._engines, follower=follower)
        try:
            (kind,) = await anext(said)
            if kind.decode() != self._kind:
                _log.info("replica %s gets no requests, because it is of another kind: %s", name, kind.decode())
                return
            self._joined[name] = joined
            self._roster.join(seat, joined)
            self._changed([*self._replicas])  # it may have left meanwhile
            async for frames in said:
                for frame in frames:
                    self._relay.send(frame)
        except Exception as error:
            _log.log(logging.INFO if joined.is_leaving else logging.WARNING, "replica %s is lost: %s", name, error)
            raise
        finally:
            self._joined.pop(name, None)
            for call in tuple(joined.calls):
                call.cancel()
            self._roster.leave(seat, is_planned=joined.is_leaving)
            await said.aclose()

    async def _empty(self, joined: _Joined) -> None:
        """Move the requests of an engine to others as soon as there are some, and close its link then."""
        while self._roster.num_requests(joined.seat) and joined.name in self._joined:
            self._roster.move_away(joined.seat)
            await asyncio.sleep(POLL_S)
        joined.follower.cancel()

    async def _note(self) -> None:
        """Tell engines how many requests wait, which also shows them that this process lives."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._noted_s >= NOTE_S:
            self._noted_s = now_s
            names = [name for name, one in self._joined.items() if not one.is_leaving]
            calls = (self._engines.note_waiting(name, self._roster.num_waiting) for name in names)
            await asyncio.gather(*calls, return_exceptions=True)  # its link shows that one is lost

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
