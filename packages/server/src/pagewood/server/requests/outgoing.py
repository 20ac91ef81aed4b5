"""What was sent to the tokenizers and is not known to have passed the engine: requests, cancellations, and marks."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from pagewood.engine.api import Abort, PauseRequest, ResumeRequest, SetPriority
from pagewood.server.messages import wire
from pagewood.server.messages.links import Sender
from pagewood.server.requests.forecast import Forecast
from pagewood.server.requests.live_group import HoldMode
from pagewood.server.requests.live_request import HELD
from pagewood.server.requests.loads import TokenizerLoads
from pagewood.server.requests.prompts import priority_of


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ending:
    """A cancelled request whose end the engine has not confirmed yet."""

    tokenizer: int
    """Index of the tokenizer that got the cancellation."""
    tenant: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    """The state at the first message of a new tokenizer process; when that is answered, all before it is done."""

    tokenizer: int
    cancelled: Sequence[str]
    """Requests whose cancellation was sent before it. If the engine has not ended them now, it never got them."""


class Outgoing:
    """The way of messages to the engine, through one tokenizer or another.

    Invariant: what belongs to a request goes to the tokenizer that got the request, so nothing overtakes it. Messages
    for a request that is `HELD` are not sent: its state goes with it when it is sent.

    Args:
        tokenizers: a sender to each tokenizer.
        forecast: measures how fast requests pass.
    """

    __slots__ = ("_ending", "_forecast", "_loads", "_marks", "_tokenizers")

    def __init__(self, tokenizers: Sequence[Sender], forecast: Forecast) -> None:
        if not tokenizers:
            raise ValueError("tokenizers must hold at least one sender, got 0")
        self._tokenizers = tokenizers
        self._forecast = forecast
        self._loads = TokenizerLoads(len(tokenizers))
        self._ending: dict[str, _Ending] = {}  # written by: end, take, failed, forget_all
        self._marks: dict[str, _Mark] = {}  # written by: _mark, take, failed, restarted, forget_all. By id

    @property
    def num_ending(self) -> int:
        """Cancelled requests whose end the engine has not confirmed yet."""
        return len(self._ending)

    @property
    def tenants_ending(self) -> list[str]:
        """The tenant of each of them."""
        return [one.tenant for one in self._ending.values()]

    @property
    def lacks_marks(self) -> bool:
        """Whether `mark_all` must be called: a tokenizer has a new process, and nothing will show that it works."""
        return len(self._marks) < len(self._loads.away)

    def send(self, prompt: wire.NewRequest, frame: bytes) -> int:
        """Send a request to the tokenizer with the least to do, and return its index."""
        tokenizer = self._loads.add(prompt.request_id, len(frame))
        self._forecast.sent(prompt.request_id, num_bytes=len(frame), priority=priority_of(prompt))
        self._tokenizers[tokenizer].send(frame)
        return tokenizer

    def watch(self, message: wire.Watch) -> None:
        """Send a message that belongs to no request and has no answer."""
        self._tokenizers[self._loads.lightest].send(wire.encode(message))

    def prioritize(self, request_id: str, tokenizer: int, priority: int) -> None:
        """Send the priority that a request has now."""
        self._send_to(tokenizer, SetPriority(request_id=request_id, priority=priority))

    def hold(self, request_id: str, tokenizer: int, mode: HoldMode) -> None:
        """Pause a request, or let it go on."""
        self._send_to(
            tokenizer,
            ResumeRequest(request_id=request_id)
            if mode == "resume"
            else PauseRequest(request_id=request_id, retract=mode == "retract"),
        )

    def cancel(self, request_id: str, tokenizer: int) -> None:
        """Let the engine forget a request."""
        self._forecast.dropped(request_id)
        self._send_to(tokenizer, Abort(request_id=request_id))

    def end(self, request_id: str, tokenizer: int, *, tenant: str) -> None:
        """Cancel a request that keeps its place until the engine has confirmed its end."""
        if tokenizer != HELD:
            self._ending[request_id] = _Ending(tokenizer=tokenizer, tenant=tenant)
        self.cancel(request_id, tokenizer)

    def take(self, answer: wire.Answer) -> bool:
        """Take the first or the last answer of a request; return whether it was the answer to a mark."""
        self._loads.remove(answer.request_id)
        self._forecast.begun(answer.request_id)
        if answer.ended:
            self._ending.pop(answer.request_id, None)
        mark = self._marks.pop(answer.request_id, None)
        if mark is None:
            return False
        self._loads.back(mark.tokenizer)
        for request_id in mark.cancelled:
            self._ending.pop(request_id, None)
        return True

    def failed(self, answer: wire.Answer) -> None:
        """Take an answer that could not be passed on."""
        self._loads.remove(answer.request_id)
        self._marks.pop(answer.request_id, None)
        if answer.ended:
            self._ending.pop(answer.request_id, None)

    def lost(self, tokenizer: int) -> None:
        """Note that a tokenizer died; `restarted` follows when its requests are seen to."""
        self._loads.lost(tokenizer)

    def restarted(self, tokenizer: int) -> None:
        """Send the next process of a tokenizer the cancellations that the dead one may not have passed on.

        The requests keep their places until the engine has confirmed their end, or has answered a mark behind the
        cancellations: then it never got them.
        """
        cancelled = [request_id for request_id, ending in self._ending.items() if ending.tokenizer == tokenizer]
        for request_id in cancelled:
            self.cancel(request_id, tokenizer)
        self._marks = {name: mark for name, mark in self._marks.items() if mark.tokenizer != tokenizer}
        self._mark(tokenizer, cancelled)

    def mark_all(self) -> None:
        """Send marks to the tokenizers that have a new process; the answers to earlier ones may be lost."""
        for tokenizer in self._loads.away - {mark.tokenizer for mark in self._marks.values()}:
            self._mark(tokenizer, ())

    def forget_all(self) -> None:
        """Note that nothing that was sent before this moment is answered."""
        self._ending.clear()
        self._marks.clear()
        for tokenizer in range(len(self._tokenizers)):
            self._loads.clear(tokenizer)

    def _mark(self, tokenizer: int, cancelled: Sequence[str]) -> None:
        """Send a tokenizer a message whose answer shows that all before it has passed the tokenizer and the engine."""
        message = wire.Encode(request_id=f"mark-{uuid.uuid4().hex}", prompt=wire.TokenPrompt(tokens=bytes(4)))
        self._marks[message.request_id] = _Mark(tokenizer=tokenizer, cancelled=cancelled)
        self._send_to(tokenizer, message)

    def _send_to(self, tokenizer: int, message: wire.ToTokenizer) -> None:
        if tokenizer != HELD:
            self._tokenizers[tokenizer].send(wire.encode(message))
