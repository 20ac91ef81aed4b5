"""What an engine and the processes with requests say to each other, one link for each process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from pagewood.engine.api import Abort, Delta, PauseRequest, ResumeRequest, SetPriority, Submit
from pagewood.server.messages import wire
from pagewood.server.messages.token_ids import num_ids
from pagewood.server.replicas.roster import Seat

LEASE_S = 30.0
_UNANSWERED = (wire.Watch, wire.ShowCache, Abort, SetPriority, PauseRequest, ResumeRequest)


class LostEngineError(Exception):
    """The engine process of a replica has ended, or a link to it."""


class Link:
    """What an engine says to one process with requests, with the seat that this one gave to the engine."""

    __slots__ = (
        *("_arrived", "_early", "_end", "_frames", "_num_told", "_others", "_seat", "_tokens", "heard_s"),
        *("num_prompt_tokens", "open", "waiting"),
    )

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._frames: list[bytes] = []  # written by: take. Contents: send
        self._arrived = asyncio.Event()
        self._end: Exception | None = None  # written by: fail
        self._num_told = 0  # written by: in_order
        self._early: dict[int, bytes] = {}  # contents written by: in_order
        self._others = 0, 0  # written by: share
        """What was last said of the requests of other links: their number, and their prompt tokens."""
        self._tokens: dict[str, int] = {}  # contents written by: begin, note
        """Tokens of prompts by request; 0 from the first token of the answer on."""
        self.num_prompt_tokens = 0  # written by: begin, note
        """Their sum."""
        self.open: dict[str, asyncio.Event] = {}  # contents written by: Links
        """Requests that came over it and have not ended, by id; the event is set at their end."""
        self.heard_s = 0.0  # written by: Links
        """When the other side was last heard of."""
        self.waiting = 0  # written by: Links
        """Requests that wait on the other side for a place on any engine."""

    def in_order(self, number: int, frame: bytes) -> list[bytes]:
        """Return the frames that may go now that this one is there: calls through Ray may overtake each other."""
        self._early[number] = frame
        found: list[bytes] = []
        while self._num_told in self._early:
            found.append(self._early.pop(self._num_told))
            self._num_told += 1
        return found

    def send(self, message: wire.FromEngine) -> None:
        """Queue a message of the engine."""
        seat = self._seat
        message = msgspec.structs.replace(message, incarnation=seat.incarnation, replica=seat.number)
        self._frames.append(wire.encode(message))
        self._arrived.set()

    @property
    def num_requests(self) -> int:
        """Requests that came over it, and that take or want a place."""
        return len(self._tokens)

    def begin(self, submit: Submit) -> None:
        """Count a request."""
        num_tokens = num_ids(submit.tokens) + num_ids(submit.output)
        self._tokens[submit.request_id] = num_tokens
        self.num_prompt_tokens += num_tokens

    def note(self, delta: Delta) -> None:
        """Count what an answer has computed, or ended."""
        num_tokens = self._tokens.get(delta.request_id)
        if num_tokens is None:
            return
        if delta.finish is not None:
            del self._tokens[delta.request_id]
        elif delta.num_output_tokens:
            self._tokens[delta.request_id] = 0
        else:
            return
        self.num_prompt_tokens -= num_tokens

    def share(self, num_requests: int, num_prompt_tokens: int, *, is_due: bool) -> None:
        """Say what all links together have besides this one, if it has changed, or anyway if it `is_due`."""
        others = num_requests - self.num_requests, num_prompt_tokens - self.num_prompt_tokens
        if is_due or others != self._others:
            self._others = others
            self.send(wire.OtherLoad(num_requests=others[0], num_prompt_tokens=others[1]))

    def fail(self, error: Exception) -> None:
        """Let `take` raise this when all that was queued is taken."""
        self._end = error
        self._arrived.set()

    async def take(self) -> list[bytes]:
        """Wait for messages, and return all that are queued."""
        await self._arrived.wait()
        if self._end is None:
            self._arrived.clear()
        elif not self._frames:
            raise self._end
        frames, self._frames = self._frames, []
        return frames


class Links:
    """All links of an engine. Invariant: an answer goes over the link on which its request came, and over no other one.

    Several processes use the engine, and each chooses for its own requests only. So each learns at once what the engine
    has of the others' requests, and again with each pulse, because a message may be lost behind the link.

    A process that is not heard of for `LEASE_S` has died, or cannot reach the engine, so its link ends.
    """

    __slots__ = ("_by_name", "_clock", "_of_request", "_pulse", "_to_engine")

    def __init__(self, to_engine: Callable[[bytes], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._to_engine, self._clock = to_engine, clock
        self._by_name: dict[str, Link] = {}  # contents written by: open, close
        self._of_request: dict[str, Link] = {}  # contents written by: tell, take, close
        self._pulse: wire.Pulse | None = None  # written by: take

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place on any engine."""
        return sum(link.waiting for link in self._by_name.values())

    def open(self, name: str, seat: Seat) -> Link:
        """Return a new link, on which the latest pulse waits already."""
        link = self._by_name[name] = Link(seat)
        link.heard_s = self._clock()
        if self._pulse is not None:
            link.send(self._pulse)
        self._share()
        return link

    def close(self, name: str) -> None:
        """Forget a link, and stop what came over it."""
        link = self._by_name.pop(name, None)
        for request_id, ended in () if link is None else link.open.items():
            del self._of_request[request_id]
            self._to_engine(wire.encode(Abort(request_id=request_id)))
            ended.set()
        self._share()

    def tell(self, name: str, number: int, frame: bytes) -> asyncio.Event | None:
        """Give the engine a frame of a link in its turn; `number` counts the frames of the link from 0.

        Returns:
            What is set at the end of the request; None: the command has no answer, or the link is closed.
        """
        link = self._by_name.get(name)
        if link is None:
            return None
        message = wire.engine_commands.decode(frame)
        ended: asyncio.Event | None = None
        if not isinstance(message, _UNANSWERED):
            ended = link.open[message.request_id] = asyncio.Event()
            self._of_request[message.request_id] = link
        if isinstance(message, Submit):
            link.begin(message)
            self._share()
        for one in link.in_order(number, frame):
            self._to_engine(one)
        return ended

    def note_waiting(self, name: str, num: int) -> None:
        """Note how many requests wait on the other side of a link for a place on any engine."""
        if name in self._by_name:
            self._by_name[name].waiting, self._by_name[name].heard_s = num, self._clock()

    def expire(self) -> None:
        """End the links of processes that are not heard of any more."""
        for name, link in tuple(self._by_name.items()):
            if self._clock() - link.heard_s > LEASE_S:
                link.fail(LostEngineError(f"nothing was heard of the process with the requests for {LEASE_S:g} s"))
                self.close(name)

    def take(self, message: wire.FromEngine) -> None:
        """Pass a message of the engine on."""
        match message:
            case wire.Step():
                self._answer(message)
            case wire.Loading() | wire.OtherLoad():
                return
            case wire.Pulse() | wire.Snapshot() | wire.CacheChanges():
                if isinstance(message, wire.Pulse):
                    self._pulse = message
                for link in self._by_name.values():
                    link.send(message)
        self._share(is_due=isinstance(message, wire.Pulse))

    def fail(self, error: Exception) -> None:
        """End all links: the engine has ended."""
        for link in self._by_name.values():
            link.fail(error)
            for ended in link.open.values():
                ended.set()

    def _share(self, *, is_due: bool = False) -> None:
        links = self._by_name.values()
        num_requests = sum(link.num_requests for link in links)
        num_prompt_tokens = sum(link.num_prompt_tokens for link in links)
        for link in links:
            link.share(num_requests, num_prompt_tokens, is_due=is_due and len(links) > 1)

    def _answer(self, step: wire.Step) -> None:
        by_link: dict[Link, list[Delta]] = {}
        for delta in step.deltas:
            link = self._of_request.get(delta.request_id)
            if link is not None:
                by_link.setdefault(link, []).append(delta)
                link.note(delta)
                if delta.finish is not None:
                    del self._of_request[delta.request_id]
                    link.open.pop(delta.request_id).set()
        for link, deltas in by_link.items():
            link.send(wire.Step(tuple(deltas)))
