"""The requests that the server holds: sent to a tokenizer, answered, cancelled, or failed with their process."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import msgspec

from pagewood.engine.seeds import arrival_seed
from pagewood.server.http.current import current_exchange
from pagewood.server.http.errors import (
    ApiError,
    aborted,
    deadline_exceeded,
    deadly,
    too_slow_reader,
    unavailable,
)
from pagewood.server.keys.caller import Caller, current_caller
from pagewood.server.messages import wire
from pagewood.server.messages.links import Sender
from pagewood.server.observe.incidents import Incidents
from pagewood.server.observe.logs import request_fields
from pagewood.server.requests.door import Door
from pagewood.server.requests.forecast import Forecast
from pagewood.server.requests.held import Held
from pagewood.server.requests.live_group import HoldMode, LiveGroup
from pagewood.server.requests.live_request import HELD, SETTLED_ANSWERS, LiveRequest, messages_again
from pagewood.server.requests.outgoing import Outgoing
from pagewood.server.requests.prompts import frames_of, is_computed, paused, priority_of, stamped
from pagewood.server.requests.resting_jobs import RestingJobs

_log = logging.getLogger(__name__)


class RequestWatch(Protocol):
    """Is notified when requests begin and end."""

    def submitted(self, message: wire.NewRequest) -> None:
        """Note that the requests of a message are sent to a tokenizer for the first time."""
        ...

    def renamed(self, request_id: str, *, new_id: str) -> None:
        """Note that a request will be sent again, with another id; its answer goes on where it was."""
        ...

    def left(self, request_id: str, *, has_failed: bool) -> None:
        """Note that no client waits for a request any more; it may have ended before."""
        ...


class Placing(Protocol):
    """Chooses an engine for each request, where there are several."""

    def renamed(self, request_id: str, *, new_id: str) -> None:
        """Note that a request is stopped, and will be sent again with another id."""
        ...

    def dropped(self, request_id: str) -> None:
        """Note that a request with a new id will not be sent."""
        ...


class LiveRequests:
    """Every request from its arrival until the engine has ended it.

    Invariant: a client gets exactly one end of each request, whichever process dies.

    A death ends no request: it is sent again with the seed and the tokens that it has had (`live_request`), and goes on
    behind them. Its reader notices a pause. Deadlines go on meanwhile. A request that was paused stays so. One that has
    not got on after `max_retries` deaths more ends with an error (`held` says which are suspected). Commands change the
    engine and are not repeated.

    Args:
        tokenizers: a sender to each tokenizer.
        limit: largest number of requests.
        max_retries: how often in a row a request is sent again, without having got on; 0: never.
        seed: from which the seeds of requests without one are made, so that they keep them.
        max_first_answer_s: requests whose first answer is predicted to take longer are refused; None: no limit.
        incidents: where lost, repeated and refused requests are counted.
        forecast: predicts.
        watch: is notified when requests begin and end; None: nothing is.
        placing: is notified of new ids, where there are several engines; None: there is one.
        num_jobs_beside: lines of batches that go on while other requests are there; the rest of them wait.
    """

    __slots__ = (
        *("_door", "_forecast", "_growing", "_held", "_incidents", "_is_away", "_jobs", "_live", "_max_retries"),
        *("_num_seeds", "_out", "_placing", "_seed", "_watch"),
    )

    def __init__(
        self,
        tokenizers: Sequence[Sender],
        *,
        limit: int,
        max_retries: int = 0,
        seed: int = 0,
        max_first_answer_s: float | None = None,
        incidents: Incidents | None = None,
        forecast: Forecast | None = None,
        watch: RequestWatch | None = None,
        placing: Placing | None = None,
        num_jobs_beside: int = 0,
    ) -> None:
        self._incidents = Incidents() if incidents is None else incidents
        self._forecast = Forecast() if forecast is None else forecast
        self._door = Door(
            limit=limit, max_first_answer_s=max_first_answer_s, incidents=self._incidents, forecast=self._forecast
        )
        self._out = Outgoing(tokenizers, self._forecast)
        self._jobs = RestingJobs(self._set_hold, num_beside=num_jobs_beside)
        self._watch = watch
        self._placing = placing
        self._max_retries = max_retries
        self._seed = seed
        self._num_seeds = 0  # written by: _kept. Seeds that were made
        self._live: dict[str, LiveRequest] = {}  # written by: _send, _rename, _remove
        self._held = Held()
        self._is_away = False  # written by: lost, resume. Whether requests wait until the server is ready again
        self._growing: set[LiveGroup] = set()
        """Open groups that may get further requests; their room is kept free."""  # written by: submit, close

    @property
    def num_live(self) -> int:
        """Requests that a client waits for."""
        return len(self._live)

    @property
    def num_ending(self) -> int:
        """Requests that no client waits for, and whose end the engine has not confirmed yet."""
        return self._out.num_ending

    @property
    def num_held(self) -> int:
        """Requests that wait to be sent again."""
        return len(self._held)

    @property
    def has_repeats(self) -> bool:
        """Whether requests that a dead process held, and those that come meanwhile, wait for the next process."""
        return self._max_retries > 0

    @property
    def is_interrupted(self) -> bool:
        """Whether `resume` must be called when the server is ready."""
        return self._is_away or self._out.lacks_marks

    @property
    def is_closed(self) -> bool:
        """Whether the server takes no further requests, because it stops."""
        return self._door.is_closed

    @property
    def incidents(self) -> Incidents:
        """Where lost, repeated and refused requests are counted."""
        return self._incidents

    @property
    def is_draining(self) -> bool:
        """Whether the server takes no further requests for the time being."""
        return self._door.is_draining

    def set_draining(self, is_draining: bool) -> None:
        """Take no further requests, or take them again."""
        self._door.is_draining = is_draining

    def close_door(self) -> None:
        """Refuse all further requests: the server stops."""
        self._door.is_closed = True

    def submit(
        self,
        prompts: Sequence[wire.NewRequest],
        *,
        prompt_param: str,
        grammar_param: str | None = None,
        param_names: Mapping[str, str] | None = None,
        names: frozenset[str] = frozenset(),
        room: int = 0,
        is_probe: bool = False,
    ) -> LiveGroup:
        """Send the prompts of one HTTP request to the tokenizers; the caller must `close` the group.

        They get the tenant of the present caller and its namespace, and count for the quota of its key. While a process
        that has died is started again, they wait as those that it held.

        Args:
            prompts: one message for each; the engine gets a request for each of its answers.
            prompt_param: the client's name of the prompt field.
            grammar_param: the client's name of the field with the grammar; None: it sent none.
            param_names: the client's names of further fields of the engine, where they differ.
            names: names by which a client may refer to the HTTP request.
            room: most requests at a time, if `extend` will add some to the group: that many stay reserved for it.
            is_probe: whether it comes from the server itself, so that it has no limit and is not repeated.

        Raises:
            ApiError: the server holds too many requests, or could never hold this many, or would answer too late, or
                stops, the key allows no more or no such priority, or a prompt cannot be a message; no prompt was sent.
        """
        computed = [prompt for prompt in prompts if is_computed(prompt)]
        self._door.check_open(is_computed=bool(computed) and not is_probe)
        caller = Caller(is_admin=True) if is_probe else current_caller()
        may_repeat = self.has_repeats and len(computed) == len(prompts) and not is_probe
        rests = caller.is_job and self._jobs.must_rest
        prompts = stamped(caller, paused(prompts) if rests else prompts)
        if may_repeat:
            prompts = [self._kept(prompt) for prompt in prompts]
        num_requests = max(room, sum(len(wire.ids_of(prompt)) for prompt in prompts))
        self._door.check_number(caller, num_requests, num_prompts=len(prompts), prompt_param=prompt_param)
        if not is_probe:
            self._door.check_places(caller, num_requests, self._num_places)
        frames = frames_of(prompts)
        if self._live and not is_probe:
            self._door.check_delay(num_bytes=sum(map(len, frames)), priority=max(map(priority_of, prompts), default=0))
        exchange = current_exchange.get()
        group = LiveGroup(
            prompt_param=prompt_param,
            grammar_param=grammar_param,
            param_names=param_names or {},
            names=names,
            room=room,
            may_repeat=may_repeat,
            caller=caller,
            engine_ids=[] if exchange is None else exchange.engine_ids,
            hold="in_place" if rests else None,
        )
        if caller.quota is not None and computed:
            caller.quota.admit(takes_place=not caller.is_job)
            group.quota = None if caller.is_job else caller.quota
        if not is_probe and any(isinstance(prompt, wire.Generate) for prompt in prompts):
            self._jobs.begin(group)
        group.engine_ids += [request_id for prompt in prompts for request_id in wire.ids_of(prompt)]
        self._send(group, prompts, frames)
        if room:
            self._growing.add(group)
        return group

    def extend(self, group: LiveGroup, prompts: Sequence[wire.Generate]) -> None:
        """Send further prompts of a group that has room for them; all its earlier requests are answered.

        If a process has died since then, they are sent when the server is ready.
        """
        assert not group.open_ids
        assert sum(len(wire.ids_of(prompt)) for prompt in prompts) <= group.room
        if group.priority is not None:
            prompts = [prompt.with_options(priority=group.priority) for prompt in prompts]
        messages = stamped(group.caller, paused(prompts) if group.is_paused else prompts)
        self._send(group, messages, frames_of(messages))

    def close(self, group: LiveGroup) -> None:
        """Cancel the open requests of a group, whose client has all answers or has left."""
        self._growing.discard(group)
        self._jobs.end(group)
        if group.deadline is not None:
            group.deadline.cancel()
        if group.quota is not None:
            group.quota.end()
            group.quota = None
        self._cancel_all(group)

    def end_at(self, group: LiveGroup, deadline_s: float) -> None:
        """End a group with an error if it is still open at that time, seconds on the clock of `time.monotonic`."""
        left_s = max(0.0, deadline_s - time.monotonic())
        group.deadline = asyncio.get_running_loop().call_later(left_s, self._end, group, deadline_exceeded())

    def prioritize(self, name: str, priority: int) -> bool:
        """Change the priority of the HTTP requests with that name that the present caller may change.

        Returns:
            Whether there are any.

        Raises:
            ApiError: the caller may not have that priority.
        """
        caller = current_caller()
        caller.check_priority(priority)
        named = [
            (request_id, request)
            for request_id, request in self._live.items()
            if _is_named(request.group, name, caller)
        ]
        for request_id, request in named:
            self._out.prioritize(request_id, request.tokenizer, priority)
        growing = [group for group in self._growing if _is_named(group, name, caller)]
        for group in {*growing, *(request.group for _, request in named)}:
            group.priority = priority
        return bool(named or growing)

    def hold(self, name: str, mode: HoldMode) -> int:
        """Pause the HTTP requests with that name, or go on with them; return how many requests they have now.

        They stay so if they are sent again after a death, and so do further requests of a group that gets some.
        """
        known = dict.fromkeys([*(request.group for request in self._live.values()), *self._growing])
        groups = [group for group in known if name in group.names]
        for group in groups:
            self._set_hold(group, mode)
        return sum(len(group.open_ids) or group.room for group in groups)

    def _set_hold(self, group: LiveGroup, mode: HoldMode) -> None:
        """Pause all requests of a group, or go on with them."""
        group.hold = mode
        for request_id in tuple(group.open_ids):
            self._out.hold(request_id, self._live[request_id].tokenizer, mode)
            if mode != "resume" and self._held.excuse(request_id):  # it is in no step
                self._send_held()

    def watch(self, message: wire.Watch) -> None:
        """Send the engine a message that has no answer; it takes the way of the requests."""
        self._out.watch(message)

    def names(self, request_id: str) -> frozenset[str]:
        """Return the names by which a client may refer to the HTTP request of a request; none if it has ended."""
        request = self._live.get(request_id)
        return frozenset() if request is None else request.group.names

    def named_like(self, text: str, *, limit: int) -> list[str]:
        """Return the ids of up to `limit` requests with a text in one of their names, in any case."""
        text = text.lower()
        found = (
            request_id
            for request_id, request in self._live.items()
            if any(text in name.lower() for name in (request_id, *request.group.names))
        )
        return list(itertools.islice(found, limit))

    def abort(self, name: str) -> int:
        """End the HTTP requests with that name that the present caller may end; each gets an error, or what there is.

        Returns:
            How many there are.
        """
        caller = current_caller()
        groups = {request.group for request in self._live.values()} | self._growing
        named = [group for group in groups if _is_named(group, name, caller)]
        for group in named:
            if group.shows_partial and all(self._live[one].answered for one in group.open_ids):
                for one in group.open_ids:  # its answer says what there is of it
                    self._out.cancel(one, self._live[one].tokenizer)
            else:
                self._end(group, aborted())
        return len(named)

    def take(self, answers: wire.Answers) -> None:
        """Pass the answers of one step to their groups."""
        live = self._live
        for answer in answers.answers:
            request = live.get(answer.request_id)
            if request is not None and request.is_settled and answer.finish is None:
                request.output.extend(answer.output)
                if answer.logprobs is not None:
                    request.note_kept(answer.logprobs.tokens)
                if request.group.queue.put(request.index, answer) and request.group.is_sending:
                    self._incidents.num_slow_readers += 1
                    self._end(request.group, too_slow_reader())
            else:
                self._answer(answer, request)

    def tokenizer_lost(self, tokenizer: int) -> None:
        """Send the messages of a dead tokenizer again: requests if they may be repeated, cancellations always.

        Requests that cannot be sent again fail.
        """
        self._out.lost(tokenizer)
        lost = [one for one in self._live.items() if one[1].tokenizer == tokenizer and not one[1].answered]
        self._hold_all(lost, unavailable("The tokenizer of this request died.", code="tokenizer_lost"))
        if not self._is_away:
            self._send_held()
        for request_id, request in self._live.items():
            if request.tokenizer == tokenizer and request.group.hold is not None:  # it may be lost
                self._out.hold(request_id, tokenizer, request.group.hold)
        self._out.restarted(tokenizer)

    def lost(self, error: ApiError, *, is_planned: bool = False) -> None:
        """The engine or the detokenizer died, so no later answer to a request can be trusted.

        Requests wait, and `resume` sends them again when the server is ready. Those that cannot be repeated fail.

        Args:
            error: for these.
            is_planned: whether the process was replaced on purpose, so that no request is suspected.
        """
        self._is_away = True
        under_way = [one for one in self._live.items() if one[1].tokenizer != HELD]
        self._hold_all(under_way, error, is_planned=is_planned)
        for group in self._growing:  # between two steps it has no request that could fail
            if not group.may_repeat:
                group.queue.fail(error)
        self._out.forget_all()

    def move(self, request_ids: Iterable[str], error: ApiError, *, is_planned: bool) -> None:
        """Send requests again that a replica held; while the server is not ready, they wait for `resume`.

        Args:
            request_ids: of the replica; those that have ended are passed over.
            error: for those that cannot be repeated.
            is_planned: as in `lost`.
        """
        moved = [(request_id, self._live[request_id]) for request_id in request_ids if request_id in self._live]
        self._hold_all(moved, error, is_planned=is_planned)
        if not self._is_away:
            self._send_held()

    def may_move(self, request_id: str) -> bool:
        """Return whether a request can be sent again."""
        request = self._live.get(request_id)
        return request is not None and request.frame is not None

    def is_sent(self, request_id: str) -> bool:
        """Return whether a request is live, and not held."""
        request = self._live.get(request_id)
        return request is not None and request.tokenizer != HELD

    def resume(self) -> None:
        """Send the requests that are held: the server is ready again."""
        self._is_away = False
        self._out.mark_all()
        self._send_held()

    def fail_all(self, error: ApiError) -> None:
        """Fail all requests, those that are held, too."""
        for request_id in tuple(self._live):
            self._fail(request_id, error)
        for group in self._growing:
            group.queue.fail(error)
        self._out.forget_all()

    def fail(self, answers: wire.Answers, error: ApiError) -> None:
        """Fail the requests of a message that could not be passed on."""
        for answer in answers.answers:
            self._out.failed(answer)
            if answer.request_id in self._live:
                self._fail(answer.request_id, error)

    def _num_places(self, tenant: str | None = None) -> int:
        """Return how many places are taken, or reserved for groups that grow: by a tenant, or by all."""
        holders = [one.group.caller.tenant for one in self._live.values()] + self._out.tenants_ending
        reserved = [(group.caller.tenant, group.room - len(group.open_ids)) for group in self._growing]
        num_reserved = sum(number for holder, number in reserved if tenant is None or holder == tenant)
        return (len(holders) if tenant is None else holders.count(tenant)) + num_reserved

    def _send(self, group: LiveGroup, prompts: Sequence[wire.NewRequest], frames: Sequence[bytes]) -> None:
        index = 0
        for prompt, frame in zip(prompts, frames, strict=True):
            if self._watch is not None:
                self._watch.submitted(prompt)
            is_held = self._is_away and group.may_repeat
            tokenizer = HELD if is_held else self._out.send(prompt, frame)
            for place, request_id in enumerate(wire.ids_of(prompt)):
                self._live[request_id] = LiveRequest(
                    group=group,
                    index=index,
                    place=place,
                    frame=frame if group.may_repeat else None,
                    tokenizer=tokenizer,
                )
                index += 1
                group.open_ids.add(request_id)
                if is_held:
                    self._held.hold(request_id)

    def _kept(self, prompt: wire.NewRequest) -> wire.NewRequest:
        """Return a message that can be continued: it has a seed, and its tokens come with its answers."""
        if not isinstance(prompt, wire.Generate) or prompt.options.pooling is not None:
            return prompt
        sampling = prompt.options.sampling
        if sampling.seed is None and sampling.temperature:
            self._num_seeds += 1
            prompt = prompt.with_options(sampling=replace(sampling, seed=arrival_seed(self._seed, self._num_seeds)))
        return msgspec.structs.replace(prompt, text=msgspec.structs.replace(prompt.text, keeps_output=True))

    def _hold_all(self, lost: Sequence[tuple[str, LiveRequest]], error: ApiError, *, is_planned: bool = False) -> None:
        """Hold requests that are lost with a process until they are sent again; those that cannot be, fail."""
        self._held.died(request_id for request_id, _ in lost)
        for request_id, request in lost:
            if request.frame is None:
                self._incidents.num_lost += 1
                self._fail(request_id, error)
                continue
            request.num_deaths += not (is_planned or request.group.is_paused)
            if request.num_deaths > self._max_retries:
                self._incidents.num_lost += 1
                _log.error(
                    "request %s (%s) is ended: %d processes in a row died that held it",
                    request_id,
                    ", ".join(sorted(request.group.names)) or "without another name",
                    request.num_deaths,
                    extra=request_fields(request_id),
                )
                self._fail(request_id, deadly(error, request.num_deaths))
                continue
            self._rename(request_id, new_request_id("req"))

    def _rename(self, request_id: str, new_id: str) -> None:
        """Cancel a request, and hold it with a new id.

        The old one may still be on its way, and nothing of it may be mistaken for an answer to the new one.
        """
        if self._watch is not None:
            self._watch.renamed(request_id, new_id=new_id)
        if self._placing is not None:
            self._placing.renamed(request_id, new_id=new_id)
        request = self._remove(request_id)
        self._out.cancel(request_id, request.tokenizer)
        request.tokenizer, request.num_answers, request.is_settled = HELD, 0, False
        self._live[new_id] = request
        request.group.open_ids.add(new_id)
        request.group.engine_ids.append(new_id)
        self._held.hold(new_id, num_deaths=0 if request.group.is_paused else request.num_deaths)
        self._incidents.num_retried += 1

    def _send_held(self) -> None:
        """Send the requests that are held and may go now."""
        requests = {request_id: self._live[request_id] for request_id in self._held.take()}
        messages = messages_again(requests)
        for message, frame in zip(messages, frames_of(messages), strict=True):
            tokenizer = self._out.send(message, frame)
            for request_id in wire.ids_of(message):
                self._live[request_id].tokenizer = tokenizer

    def _answer(self, answer: wire.Answer, request: LiveRequest | None) -> None:
        """Pass on the first or the last answer of a request, or one that no client waits for."""
        is_mark = self._out.take(answer)
        if request is None:
            if answer.ended and not is_mark:
                self._forecast.ended(num_left=len(self._live) + self._out.num_ending)
            return
        if not request.num_answers and not request.output:
            request.num_cached_tokens = answer.num_cached_tokens
        request.num_answers += 1
        request.output.extend(answer.output)
        if answer.logprobs is not None:
            request.note_kept(answer.logprobs.tokens)
        request.group.queue.put(request.index, answer)
        if answer.finish is not None:
            self._forget(answer.request_id)
            if not answer.ended:  # ended by a stop string, which the engine does not know
                self._cancel(answer.request_id, request)
            else:
                self._forecast.ended(num_left=len(self._live) + self._out.num_ending)
        elif not request.num_deaths or request.num_answers >= SETTLED_ANSWERS:
            request.is_settled, request.num_deaths = True, 0
            self._drop_held(answer.request_id)

    def _drop_held(self, request_id: str) -> None:
        """Note that a request is held or suspected no longer; the next suspects may follow."""
        if self._held.drop(request_id) and not self._is_away:
            self._send_held()

    def _end(self, group: LiveGroup, error: ApiError) -> None:
        """Cancel the open requests of a group, whose client gets an error."""
        self._cancel_all(group)
        group.queue.fail(error)

    def _cancel_all(self, group: LiveGroup) -> None:
        for request_id in tuple(group.open_ids):
            self._cancel(request_id, self._forget(request_id))

    def _fail(self, request_id: str, error: ApiError) -> None:
        """End a request for its client, and cancel it: it may still be on its way to the engine."""
        request = self._forget(request_id, has_failed=True)
        request.group.queue.fail(error)
        self._out.cancel(request_id, request.tokenizer)

    def _cancel(self, request_id: str, request: LiveRequest) -> None:
        self._out.end(request_id, request.tokenizer, tenant=request.group.caller.tenant)

    def _forget(self, request_id: str, *, has_failed: bool = False) -> LiveRequest:
        if self._watch is not None:
            self._watch.left(request_id, has_failed=has_failed)
        request = self._remove(request_id)
        if self._placing is not None and request.tokenizer == HELD:
            self._placing.dropped(request_id)
        self._drop_held(request_id)
        return request

    def _remove(self, request_id: str) -> LiveRequest:
        request = self._live.pop(request_id)
        request.group.open_ids.discard(request_id)
        return request


def new_request_id(prefix: str) -> str:
    """Return a unique id, such as `chatcmpl-8c1f...`."""
    return f"{prefix}-{uuid.uuid4().hex}"


def _is_named(group: LiveGroup, name: str, caller: Caller) -> bool:
    """Return whether a group has that name, and is one that the caller may change."""
    return name in group.names and caller.owns(group.caller.tenant)
