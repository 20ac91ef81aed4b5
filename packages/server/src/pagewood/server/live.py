"""The requests that the server holds: sent to a tokenizer, answered, cancelled, or failed with their process."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from pagewood.server import wire
from pagewood.server.errors import (
    ApiError,
    aborted,
    deadline_exceeded,
    failed,
    overloaded,
    too_many_at_once,
    unavailable,
)
from pagewood.server.links import Sender
from pagewood.server.loads import TokenizerLoads

Take = Callable[[int, wire.Answer], bool]
"""Takes an answer at once, with the index of its request; False: it must be queued."""


class AnswerQueue:
    """A queue with one reader. While the reader waits, its `take` may accept answers on the spot.

    Every token passes here. An answer that is taken wakes no task, which would cost more than to write it.
    """

    __slots__ = ("_items", "_reader", "_take")

    def __init__(self) -> None:
        self._items: deque[tuple[int, wire.Answer] | Exception] = deque()
        self._reader: asyncio.Future[None] | None = None
        """Set while the reader waits."""  # written by: _append, get
        self._take: Take | None = None
        """Of the reader that waits."""  # written by: _append, get

    def empty(self) -> bool:
        """Return whether it holds nothing."""
        return not self._items

    def put(self, index: int, answer: wire.Answer) -> None:
        """Pass an answer to the reader, or append it."""
        if self._take is not None:
            try:
                if self._take(index, answer):
                    return
            except Exception as error:  # it ends this reader, and no other one
                self._append(error)
                return
        self._append((index, answer))

    def fail(self, error: ApiError) -> None:
        """Append an error."""
        self._append(error)

    def get_nowait(self) -> tuple[int, wire.Answer] | Exception:
        """Return the oldest item; there is one."""
        return self._items.popleft()

    async def get(self, take: Take | None = None) -> tuple[int, wire.Answer] | Exception:
        """Wait for an item, and return the oldest; `take` gets the answers that come meanwhile."""
        while not self._items:
            self._reader, self._take = asyncio.get_running_loop().create_future(), take
            try:
                await self._reader
            finally:
                self._take = None
        return self._items.popleft()

    def _append(self, item: tuple[int, wire.Answer] | Exception) -> None:
        self._items.append(item)
        reader, self._reader, self._take = self._reader, None, None
        if reader is not None and not reader.done():
            reader.set_result(None)


@dataclass(slots=True, kw_only=True, eq=False)
class LiveGroup:
    """The requests of one HTTP request. `next` returns its answers, each with the index of its request.

    The requests are those of the first prompt, in the order of its answers, then those of the next prompt.
    """

    prompt_param: str
    """The client's name of the prompt field."""
    grammar_param: str | None = None
    """The client's name of the field with the grammar; None: it sent none."""
    param_names: Mapping[str, str] = field(default_factory=dict[str, str])
    """The client's names of further fields of the engine, where they differ."""
    names: frozenset[str] = frozenset()
    """Names by which a client may refer to the HTTP request."""
    queue: AnswerQueue = field(default_factory=AnswerQueue)
    open_ids: set[str] = field(default_factory=set[str])  # written by: LiveRequests
    """Requests of this group that still wait for their last answer."""
    room: int = 0
    """Most requests that it may have at a time, if it gets further ones; 0: it gets none."""
    priority: int | None = None  # written by: LiveRequests
    """Of further requests, if it was changed."""
    deadline: asyncio.TimerHandle | None = None  # written by: LiveRequests
    """Ends it when its time is over; None: it has no deadline."""

    async def next(self, take: Take | None = None) -> tuple[int, wire.Answer]:
        """Wait for the next answer that `take` does not take at once; it must take no answer with a `finish`.

        Raises:
            ApiError: a request of the group was refused, or a process that held it died.
            Exception: `take` has failed.
        """
        item = await self.queue.get(take)
        if isinstance(item, Exception):
            raise item
        index, answer = item
        if answer.finish is not None:
            names = {"prompt": self.prompt_param, "grammar": self.grammar_param, **self.param_names}
            error = failed(answer.finish, answer.refusal, names=names)
            if error is not None:
                raise error
        return index, answer


@dataclass(slots=True, kw_only=True, eq=False)
class _LiveRequest:
    group: LiveGroup
    index: int
    tokenizer: int
    answered: bool = False  # written by: LiveRequests


class LiveRequests:
    """Every request from its arrival until the engine has ended it.

    Invariant: a client gets exactly one end of each request, whichever process dies. A request keeps to one tokenizer;
    cancellations and priorities take the same way, so none overtakes its request.

    Args:
        tokenizers: a sender to each tokenizer.
        limit: largest number of requests.
    """

    __slots__ = ("_ending", "_growing", "_limit", "_live", "_loads", "_tokenizers")

    def __init__(self, tokenizers: Sequence[Sender], *, limit: int) -> None:
        if not tokenizers:
            raise ValueError("tokenizers must hold at least one sender, got 0")
        self._tokenizers = tokenizers
        self._limit = limit
        self._live: dict[str, _LiveRequest] = {}  # written by: submit, _answer, close, _fail
        # Cancelled requests whose end the engine has not confirmed yet, with the tokenizer that got the cancellation.
        self._ending: dict[str, int] = {}  # written by: _answer, close, fail_all
        self._growing: set[LiveGroup] = set()
        """Open groups that may get further requests; their room is kept free."""  # written by: submit, close
        self._loads = TokenizerLoads(len(tokenizers))

    @property
    def num_live(self) -> int:
        """Requests that a client waits for."""
        return len(self._live)

    @property
    def num_ending(self) -> int:
        """Requests that no client waits for, and whose end the engine has not confirmed yet."""
        return len(self._ending)

    def submit(
        self,
        prompts: Sequence[wire.NewRequest],
        *,
        prompt_param: str,
        grammar_param: str | None = None,
        param_names: Mapping[str, str] | None = None,
        names: frozenset[str] = frozenset(),
        room: int = 0,
    ) -> LiveGroup:
        """Send the prompts of one HTTP request to the tokenizers; the caller must `close` the group.

        Args:
            prompts: one message for each; the engine gets a request for each of its answers.
            prompt_param: the client's name of the prompt field.
            grammar_param: the client's name of the field with the grammar; None: it sent none.
            param_names: the client's names of further fields of the engine, where they differ.
            names: names by which a client may refer to the HTTP request.
            room: most requests at a time, if `extend` will add some to the group: that many stay reserved for it.

        Raises:
            ApiError: the server holds too many requests, or could never hold this many, or a prompt cannot be a
                message; no prompt was sent.
        """
        num_requests = max(room, sum(len(prompt.request_ids) for prompt in prompts))
        if num_requests > self._limit:
            is_several = num_requests > len(prompts)
            param, what = ("n", "answers") if is_several else (prompt_param, "prompts")
            raise too_many_at_once(num_requests, self._limit, param=param, what=what)
        num_reserved = sum(group.room - len(group.open_ids) for group in self._growing)
        if len(self._live) + len(self._ending) + num_reserved + num_requests > self._limit:
            raise overloaded(self._limit)
        group = LiveGroup(
            prompt_param=prompt_param,
            grammar_param=grammar_param,
            param_names=param_names or {},
            names=names,
            room=room,
        )
        self._send(group, prompts)
        if room:
            self._growing.add(group)
        return group

    def extend(self, group: LiveGroup, prompts: Sequence[wire.Generate]) -> None:
        """Send further prompts of a group that has room for them; all its earlier requests are answered."""
        assert not group.open_ids
        assert sum(len(prompt.request_ids) for prompt in prompts) <= group.room
        if group.priority is not None:
            prompts = [msgspec.structs.replace(prompt, priority=group.priority) for prompt in prompts]
        self._send(group, prompts)

    def close(self, group: LiveGroup) -> None:
        """Cancel the open requests of a group, whose client has all answers or has left."""
        self._growing.discard(group)
        if group.deadline is not None:
            group.deadline.cancel()
        self._cancel_all(group)

    def end_at(self, group: LiveGroup, deadline_s: float) -> None:
        """End a group with an error if it is still open at that time, seconds on the clock of `time.monotonic`."""
        left_s = max(0.0, deadline_s - time.monotonic())
        group.deadline = asyncio.get_running_loop().call_later(left_s, self._end, group, deadline_exceeded())

    def prioritize(self, name: str, priority: int) -> bool:
        """Change the priority of the HTTP requests with that name; return whether there are any."""
        named = [(request_id, request) for request_id, request in self._live.items() if name in request.group.names]
        for request_id, request in named:
            message = wire.Prioritize(request_id=request_id, priority=priority)
            self._tokenizers[request.tokenizer].send(wire.encode(message))
        growing = [group for group in self._growing if name in group.names]
        for group in growing:
            group.priority = priority
        return bool(named or growing)

    def abort(self, name: str) -> int:
        """End the HTTP requests with that name; each gets an error. Return how many there are."""
        groups = {request.group for request in self._live.values()} | self._growing
        named = [group for group in groups if name in group.names]
        for group in named:
            self._end(group, aborted())
        return len(named)

    def take(self, answers: wire.Answers) -> None:
        """Pass the answers of one step to their groups."""
        live = self._live
        for answer in answers.answers:
            request = live.get(answer.request_id)
            if request is not None and request.answered and answer.finish is None:
                request.group.queue.put(request.index, answer)
            else:
                self._answer(answer, request)

    def tokenizer_lost(self, tokenizer: int) -> None:
        """Fail the requests that were in a tokenizer that died, and repeat the cancellations that were in it."""
        error = unavailable("The tokenizer of this request died.", code="tokenizer_lost")
        self._loads.clear(tokenizer)
        for request_id, request in tuple(self._live.items()):
            if request.tokenizer == tokenizer and not request.answered:
                self._fail(request_id, error)
        for request_id, cancelled_at in self._ending.items():
            if cancelled_at == tokenizer:
                self._send_cancel(request_id, tokenizer)

    def fail_all(self, error: ApiError) -> None:
        """Fail all requests: the engine or the detokenizer died, so no later end of a request can be trusted."""
        for request_id in tuple(self._live):
            self._fail(request_id, error)
        for group in self._growing:  # between two steps it has no request that could fail
            group.queue.fail(error)
        self._ending.clear()
        for tokenizer in range(len(self._tokenizers)):
            self._loads.clear(tokenizer)

    def fail(self, answers: wire.Answers, error: ApiError) -> None:
        """Fail the requests of a message that could not be passed on."""
        for answer in answers.answers:
            self._loads.remove(answer.request_id)
            if answer.ended:
                self._ending.pop(answer.request_id, None)
            if answer.request_id in self._live:
                self._fail(answer.request_id, error)

    def _send(self, group: LiveGroup, prompts: Sequence[wire.NewRequest]) -> None:
        indices = itertools.count()
        for prompt, frame in zip(prompts, _frames(prompts), strict=True):
            tokenizer = self._loads.add(prompt.request_id, len(frame))
            for request_id in prompt.request_ids:
                self._live[request_id] = _LiveRequest(group=group, index=next(indices), tokenizer=tokenizer)
                group.open_ids.add(request_id)
            self._tokenizers[tokenizer].send(frame)

    def _answer(self, answer: wire.Answer, request: _LiveRequest | None) -> None:
        """Pass on the first or the last answer of a request, or one that no client waits for."""
        self._loads.remove(answer.request_id)
        if answer.ended:
            self._ending.pop(answer.request_id, None)
        if request is None:
            return
        request.answered = True
        request.group.queue.put(request.index, answer)
        if answer.finish is not None:
            self._forget(answer.request_id)
            if not answer.ended:  # ended by a stop string, which the engine does not know
                self._cancel(answer.request_id, request)

    def _end(self, group: LiveGroup, error: ApiError) -> None:
        """Cancel the open requests of a group, whose client gets an error."""
        self._cancel_all(group)
        group.queue.fail(error)

    def _cancel_all(self, group: LiveGroup) -> None:
        for request_id in tuple(group.open_ids):
            self._cancel(request_id, self._forget(request_id))

    def _fail(self, request_id: str, error: ApiError) -> None:
        """End a request for its client, and cancel it: it may still be on its way to the engine."""
        request = self._forget(request_id)
        request.group.queue.fail(error)
        self._send_cancel(request_id, request.tokenizer)

    def _cancel(self, request_id: str, request: _LiveRequest) -> None:
        self._ending[request_id] = request.tokenizer
        self._send_cancel(request_id, request.tokenizer)

    def _send_cancel(self, request_id: str, tokenizer: int) -> None:
        self._tokenizers[tokenizer].send(wire.encode(wire.Cancel(request_id=request_id)))

    def _forget(self, request_id: str) -> _LiveRequest:
        request = self._live.pop(request_id)
        request.group.open_ids.discard(request_id)
        return request


def _frames(prompts: Sequence[wire.NewRequest]) -> list[bytes]:
    """Return the frame of each prompt.

    Raises:
        ApiError: a chat template's variable, a document or a tool has a value that no message can carry.
    """
    try:
        return [wire.encode(prompt) for prompt in prompts]
    except (OverflowError, RecursionError) as error:
        raise ApiError(
            "Integers in the request must be in [-2**63, 2**64), and objects not nested too deeply.",
            code="invalid_value",
        ) from error


def new_request_id(prefix: str) -> str:
    """Return a unique id, such as `chatcmpl-8c1f...`."""
    return f"{prefix}-{uuid.uuid4().hex}"
