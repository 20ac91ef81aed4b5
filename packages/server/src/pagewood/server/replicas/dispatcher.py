"""Sends what comes from the tokenizers to the replica that the router chooses, or to all of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from pagewood.engine.api import (
    Abort,
    FinishReason,
    Flush,
    LoadAdapter,
    PassOn,
    Pause,
    PauseRequest,
    Refusal,
    Refuse,
    Resume,
    ResumeRequest,
    Retain,
    SetPriority,
    Submit,
    UnloadAdapter,
)
from pagewood.engine.weight_commands import (
    CheckWeights,
    JoinGroup,
    LeaveGroup,
    NameVersion,
    Sleep,
    UpdateWeights,
    WakeUp,
)
from pagewood.schedpolicy.routing.load import Report
from pagewood.schedpolicy.routing.placement import Placement, Ticket
from pagewood.schedpolicy.routing.replicas import Role
from pagewood.schedpolicy.routing.router import Router
from pagewood.server.http.errors import ApiError, unavailable
from pagewood.server.messages import wire
from pagewood.server.messages.sleep_state import SleepState
from pagewood.server.replicas.fleet_weights import FleetCommand, FleetWeights, Outcome
from pagewood.server.replicas.placed_request import PlacedRequest, hashes_of
from pagewood.server.replicas.prompts_apart import PromptsApart, has_computed
from pagewood.server.replicas.replica import Replica

_FIXED_PRIORITY = 1 << 62
"""Priority in the router of a request that cannot be sent again, so that no other one displaces it."""

_ForAll = Flush | Pause | Resume | Retain | LoadAdapter | UnloadAdapter | Sleep | WakeUp
"""Commands that all replicas get."""

_BUSY = "weights must be updated, and sleep, one after the other, and adapters be loaded before or afterwards"
_log = logging.getLogger(__name__)

_events: msgspec.msgpack.Decoder[list[dict[str, object]]] = msgspec.msgpack.Decoder(list[dict[str, object]])


class Moving(Protocol):
    """The requests of the server, as `LiveRequests` holds them."""

    def move(self, request_ids: Iterable[str], error: ApiError, *, is_planned: bool) -> None:
        """Send requests again, under new ids; those that cannot be repeated get an error."""
        ...

    def may_move(self, request_id: str) -> bool:
        """Return whether a request can be sent again."""
        ...

    def is_sent(self, request_id: str) -> bool:
        """Return whether a request is under way."""
        ...

    def take(self, answers: wire.Answers) -> None:
        """Pass answers on."""
        ...


@dataclass(slots=True, kw_only=True)
class _Asked:
    """A command that several replicas answer."""

    command: wire.Profile | _ForAll
    open: set[int] = field(default_factory=set[int])  # contents written by: Dispatcher
    """Replicas that have not answered."""
    answer: wire.Answer | None = None  # written by: Dispatcher
    """What they have said together."""


class Dispatcher:
    """Stands between tokenizers and engines where there are several, in the HTTP process.

    The prompt becomes tokens before it comes here, so the router knows which replica has its prefix, and no message
    goes back. A request is sent when a place is free, and until then waits here, in one order for all replicas. It
    moves by the mechanism by which it survives: its replica forgets it, and it comes again from a tokenizer under a new
    id, with the tokens that it has had. So an answer of an earlier stay has an id that no request has.

    If the router names a replica that only computes prompts, that one gets the prompt first, under an id of its own.
    Its answer says that the pages are in the store that the replicas share, and then the replica that decodes gets the
    request. If it is lost or refuses, the other one gets the request at once, and computes what the store lacks.

    Invariants: a request is on one replica at most, and there only if no other one computes its prompt. A place is free
    again when the engine has confirmed the end of its request, or was told to forget it.

    Args:
        router: without replicas; it never ends a request because of deaths, which `LiveRequests` does.
        replicas: in the order of their numbers.
        num_places: requests that an engine runs at once.
        low_priority_first: whether lower priorities are the more important ones.
        moves: whether requests can be sent again at all.
        max_queue_s: a request that waits longer for its first place is refused; None: it waits. On its replica the
            same limit holds for the wait for its first step.
        clock: seconds.
    """

    __slots__ = (
        "_arrivals", "_asked", "_by_arrival", "_clock", "_entries", "_live", "_low_first", "_max_length",
        "_max_queue_s", "_moves", "_moving", "_num_arrivals", "_num_places", "_passing", "_pause", "_prompts",
        "_router", "_sleep", "replicas", "weights",
    )  # fmt: skip

    def __init__(
        self,
        router: Router[PlacedRequest],
        replicas: Sequence[Replica],
        *,
        num_places: int,
        low_priority_first: bool = False,
        moves: bool = True,
        max_queue_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._router = router
        self._max_queue_s = max_queue_s
        self.replicas = replicas
        self._num_places = num_places
        self._low_first = low_priority_first
        self._moves = moves
        self._clock = clock
        self._live: Moving | None = None  # written by: attach
        self._entries: dict[str, PlacedRequest] = {}  # written by: Dispatcher. By the id of the present stay
        self._by_arrival: dict[int, PlacedRequest] = {}  # written by: Dispatcher
        self._max_length = 0  # written by: pulsed
        self._num_arrivals = 0  # written by: _route
        self._arrivals: dict[str, tuple[int, float]] = {}  # written by: renamed, dropped, _route, _pass_on
        """Arrival number and time of requests that come again, by their new id."""
        self._moving: PlacedRequest | None = None  # written by: _displace
        """The request that waits in the router while it gets a new id."""
        self._prompts = PromptsApart(lambda number, frame: self.replicas[number].sender.send(frame))
        self._passing: dict[str, int] = {}  # written by: Dispatcher
        """Replica by id of what passes an engine without being computed."""
        self._asked: dict[str, _Asked] = {}  # written by: Dispatcher
        self._pause: Pause | None = None  # written by: _ask_all
        """What a replica that joins gets first: all are paused."""
        self._sleep = SleepState()  # written by: _joined_answer, _weights_answered
        """What sleeps; a replica that joins sleeps, too."""
        self.weights = FleetWeights(
            replicas, send=self._send_to, changed=self._refresh, answered=self._weights_answered
        )

    def attach(self, live: Moving) -> None:
        """Set the requests of the server, before the first message comes."""
        self._live = live

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place."""
        return self._router.num_waiting

    @property
    def num_at_quota(self) -> int:
        """Those of them that wait because of the quota of their tenant."""
        return self._router.num_held

    @property
    def weight_version(self) -> str:
        """Name of the weights of all replicas that get requests."""
        return self.weights.version

    @property
    def num_cached_blocks(self) -> int:
        """Pages that the replicas have cached, as far as the router knows."""
        return self._router.index.num_blocks

    def waiting_by_priority(self) -> dict[str, int]:
        """Return the numbers of requests that wait, by priority as clients give it."""
        waiting = [one.priority for one in self._entries.values() if one.ticket is None]
        sign = -1 if self._low_first else 1
        return dict(Counter("fixed" if one == _FIXED_PRIORITY else str(sign * one) for one in waiting))

    @property
    def shown(self) -> int:
        """The replica that the dashboard shows in detail: the first one that works."""
        return next((number for number, one in enumerate(self.replicas) if one.is_joined), 0)

    def num_requests(self, replica: int) -> int:
        """Return how many requests of this process a replica has."""
        return self._router.own_load(replica)[0] if self.replicas[replica].is_joined else 0

    def take(self, message: wire.ToRouter) -> None:
        """Take a message of a tokenizer."""
        match message:
            case wire.Routed():
                self._route(message)
            case Abort():
                self._abort(message)
            case SetPriority():
                self._prioritize(message)
            case PauseRequest() | ResumeRequest():
                self._hold(message)
            case Refuse() | PassOn():
                self._pass_on(message)
            case wire.Watch():
                self._send_to(self.shown, message)
            case wire.Profile():
                self._ask(message, [self.shown])
            case LoadAdapter() | Sleep() | WakeUp() if self.weights.is_changing:
                self._refuse(message.request_id, _BUSY, code="weights_busy")
            case Flush() | Pause() | Resume() | Retain() | LoadAdapter() | UnloadAdapter() | Sleep() | WakeUp():
                self._ask_all(message)
            case UpdateWeights() | JoinGroup() | LeaveGroup() | CheckWeights() | NameVersion():
                self._change_weights(message)

    def answered(self, answers: wire.Answers) -> wire.Answers:
        """Note answers of the engines, and return those that are for the requests of the server."""
        found: list[wire.Answer] | None = None
        has_place = False
        for index, answer in enumerate(answers.answers):
            shown: wire.Answer | None = answer
            entry = self._entries.get(answer.request_id)
            if entry is not None and entry.ticket is not None:
                has_place |= self._note(entry, entry.ticket, answer)
            elif answer.request_id in self._prompts:
                shown = None
                if answer.ended:
                    self._prompt_ended(answer)
            elif self.weights.take(answer, answers.replica):
                shown = None
            elif answer.ended:
                self._passing.pop(answer.request_id, None)
                asked = self._asked.get(answer.request_id)
                shown = answer if asked is None else self._joined_answer(asked, answer, answers.replica)
            if shown is not answer and found is None:
                found = list(answers.answers[:index])
            if shown is not None and found is not None:
                found.append(shown)
        if has_place:
            self._dispatch()
        return answers if found is None else wire.Answers(tuple(found), answers.replica)

    def pulsed(self, pulse: wire.Pulse) -> None:
        """Take a pulse: the first one of a process shows that its replica works."""
        number, replica = pulse.replica, self.replicas[pulse.replica]
        if pulse.incarnation != replica.incarnation:
            return
        if not replica.is_joined:
            replica.is_joined, replica.relay = True, pulse.relay
            self._router.join(number, num_places=self._num_places, role=replica.role, position=None)
            self._max_length = pulse.model.max_length
            self._forget_cache(number)
            if self._pause is not None:
                self._send_to(number, self._pause)
            if (sleep := self._sleep.command(f"sleep-{number}-{pulse.incarnation}")) is not None:
                self._send_to(number, sleep)
            self.weights.joined(number)
            self._refresh(number)
        elif pulse.relay != replica.relay:  # reports may have died with the detokenizer
            replica.relay = pulse.relay
            self._forget_cache(number)
            self.weights.relay_changed(number)

    def cache_changed(self, changes: wire.CacheChanges) -> None:
        """Follow what a replica has cached."""
        number, replica = changes.replica, self.replicas[changes.replica]
        if changes.incarnation != replica.incarnation or not replica.is_joined:
            return
        if changes.is_whole:
            replica.shows_cache = False
            self._router.restore(number, changes.number, ())
        try:
            is_followed = self._router.follow(
                number, changes.number, changes.number + 1, _events.decode(changes.events)
            )
        except ValueError:  # it holds nothing for the router from now on, which costs hits and nothing else
            _log.exception("the cache of replica %d cannot be followed", number)
            return
        if not is_followed and not replica.shows_cache:
            self._forget_cache(number)

    def others_changed(self, load: wire.OtherLoad) -> None:
        """Take over what a replica has of the requests of other processes: it takes places, and work."""
        number, replica = load.replica, self.replicas[load.replica]
        if load.incarnation != replica.incarnation or not replica.is_joined:
            return
        num_requests, num_tokens = self._router.own_load(number)
        report = Report(
            at_s=self._clock(),
            num_requests=num_requests + load.num_requests,
            num_prompt_tokens=num_tokens + load.num_prompt_tokens,
        )
        self._router.report(number, report)
        self._dispatch()

    def replica_lost(self, number: int, next_incarnation: int | None, error: ApiError, *, is_planned: bool) -> None:
        """A replica has died, or ends: its requests go to others, and those that wait are untouched.

        The caller has connected its sender to the next process, if that is known; None: it is not.
        """
        replica = self.replicas[number]
        replica.incarnation = next_incarnation
        placed = [one for one in self._entries.values() if one.ticket is not None and one.ticket.replica == number]
        lost = [one for one in placed if one.is_sent]
        passing = [request_id for request_id, at in self._passing.items() if at == number]
        asked = [request_id for request_id, one in self._asked.items() if number in one.open]
        unaided: list[PlacedRequest] = []
        if replica.is_joined:
            replica.is_joined = False
            departure = self._router.leave(number, self._clock(), has_died=False)
            unaided += [placement.request for placement in departure.unaided]
        self._prompts.lost(number)
        self.weights.lost(number)
        for entry in unaided:
            entry.helped = None
            self._start(entry)
        for entry in placed:
            if not entry.is_sent:  # it waits in the router again
                self._prompts.withdraw(entry)
                entry.ticket = None
        for entry in lost:
            entry.ticket = None
            self._router.cancel(entry.arrival, self._clock())  # it comes again with its arrival number
        for request_id in (*passing, *asked):
            self._passing.pop(request_id, None)
            self._asked.pop(request_id, None)
        live = self._moves_of
        live.move([*(entry.request_id for entry in lost), *passing, *asked], error, is_planned=is_planned)
        for entry in lost:  # nothing waits for these but the confirmation of their end
            if self._entries.get(entry.request_id) is entry:
                self._forget(entry)
                self._confirm(entry.request_id)
        for request_id in (*passing, *asked):
            if not live.is_sent(request_id):
                self._confirm(request_id)
        self._dispatch()

    def drain(self, number: int, *, is_draining: bool) -> None:
        """Move the requests of a replica to others and send it no more, also after its death; or send it some again.

        Requests that cannot be sent again end there.

        Raises:
            ApiError: no other replica would answer requests.
        """
        replica = self.replicas[number]
        others = [one for one in self.replicas if one is not replica and one.takes_requests]
        is_needed = replica.role is not Role.PREFILL and all(one.role is Role.PREFILL for one in others)
        if is_draining and is_needed:
            raise unavailable("No other replica answers requests at the moment.", code="last_replica")
        replica.is_draining = is_draining
        self._refresh(number)

    def _refresh(self, number: int) -> None:
        """Send a replica requests, or none any more if it may have none; then those that it has move to others."""
        replica = self.replicas[number]
        if not replica.is_joined:
            return
        self._router.drain(number, drains=not replica.takes_requests)
        if not replica.takes_requests:
            placed = [one for one in self._entries.values() if one.ticket is not None and one.ticket.replica == number]
            for entry in placed:
                if entry.ticket is not None and not entry.is_sent:
                    self._prompts.withdraw(entry)
                    self._router.move(entry.ticket, self._clock())
                    entry.ticket = None
            live = self._moves_of
            moved = [one.request_id for one in placed if one.is_sent and live.may_move(one.request_id)]
            live.move(moved, unavailable("The replica takes no requests.", code="draining"), is_planned=True)
        self._dispatch()

    def relay_lost(self) -> None:
        """The detokenizer has died, and `LiveRequests` has renamed all requests: no answer to earlier ids counts."""
        for entry in tuple(self._entries.values()):
            self._stop(entry)
            self._forget(entry)
        self._passing.clear()
        self._asked.clear()
        self._prompts.clear()
        self.weights.relay_lost()

    def renamed(self, request_id: str, *, new_id: str) -> None:
        """A request will come again under another id. It keeps its arrival number, and so its turn."""
        inherited = self._arrivals.pop(request_id, None)
        if inherited is not None:
            self._arrivals[new_id] = inherited
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return
        if entry is self._moving:
            entry.request_id = new_id
            self._entries[new_id] = entry
            return
        self._stop(entry)
        self._lift_limit(entry)
        self._by_arrival.pop(entry.arrival, None)
        self._arrivals[new_id] = (entry.arrival, entry.arrived_s)

    def dropped(self, request_id: str) -> None:
        """A request that was to come again will not."""
        self._arrivals.pop(request_id, None)

    @property
    def _moves_of(self) -> Moving:
        assert self._live is not None, "attach comes first"
        return self._live

    def _route(self, message: wire.Routed) -> None:
        entry = self._entries.get(message.request_id)
        priority = self._priority(message.request_id, message.priority)
        if entry is not None:  # displaced, and here again
            entry.frame, entry.block_hashes = message.submit, hashes_of(message.block_hashes)
            if entry.ticket is not None:
                self._start(entry)
            elif priority != entry.priority:
                self._route_anew(entry, priority)
            return
        arrival, arrived_s = self._arrivals.pop(message.request_id, (self._num_arrivals, self._clock()))
        self._num_arrivals += arrival == self._num_arrivals
        most = message.max_new_tokens
        entry = PlacedRequest(
            request_id=message.request_id,
            arrival=arrival,
            arrived_s=arrived_s,
            priority=priority,
            tenant=message.tenant,
            num_prompt=message.num_prompt,
            num_generated=message.num_output,
            max_new_tokens=max(0, self._max_length - message.num_prompt) if most is None else most,
            block_hashes=hashes_of(message.block_hashes),
            frame=message.submit,
        )
        verdict = self._router.can_ever_run(entry)
        if not verdict.fits:
            text = f"the request exceeds the quota of its tenant even if it runs alone: {verdict.reason}"
            self._refuse(message.request_id, text, code="quota_exceeded")
            return
        self._entries[message.request_id] = self._by_arrival[arrival] = entry
        self._send_all(self._router.route(entry, self._clock()))
        if self._max_queue_s is not None and entry.ticket is None and not message.num_output:
            left_s = arrived_s + self._max_queue_s - self._clock()
            entry.limit = asyncio.get_running_loop().call_later(max(0.0, left_s), self._expire, entry)

    def _expire(self, entry: PlacedRequest) -> None:
        """Refuse a request that has waited too long for its first place, unless it was to begin paused."""
        assert entry.frame is not None, "it has not been on a replica"
        submit = wire.engine_commands.decode(entry.frame)
        assert isinstance(submit, Submit)
        if submit.is_paused or entry.hold is not None:
            return
        self._stop(entry)
        self._forget(entry)
        text = f"no replica had room for the request within {self._max_queue_s:g} s"
        self._refuse(entry.request_id, text, code="queue_timeout")
        self._dispatch()

    def _abort(self, message: Abort) -> None:
        entry = self._entries.get(message.request_id)
        if entry is None:
            if message.request_id in self._passing:
                self._send_to(self._passing[message.request_id], message)
            for number in self._asked[message.request_id].open if message.request_id in self._asked else ():
                self._send_to(number, message)
            self._dispatch()  # if it was renamed, a place is free since then
        elif entry.ticket is not None and entry.is_sent:
            self._send_to(_number(entry.ticket), message)
        else:
            self._stop(entry)
            self._forget(entry)
            self._confirm(message.request_id)
            self._dispatch()

    def _prioritize(self, message: SetPriority) -> None:
        entry = self._entries.get(message.request_id)
        if entry is None:
            return
        if entry.ticket is not None and entry.is_sent:
            self._send_to(_number(entry.ticket), message)
            return
        if entry.frame is not None:
            submit = wire.engine_commands.decode(entry.frame)
            assert isinstance(submit, Submit)
            entry.frame = wire.encode(msgspec.structs.replace(submit, priority=message.priority))
        if entry.helped is not None:
            self._send_to(entry.helped.replica, msgspec.structs.replace(message, request_id=entry.helped.request_id))
        if entry.ticket is None:
            self._route_anew(entry, self._priority(message.request_id, message.priority))

    def _hold(self, message: PauseRequest | ResumeRequest) -> None:
        entry = self._entries.get(message.request_id)
        if entry is None:
            return
        if entry.ticket is not None and entry.is_sent:
            self._send_to(_number(entry.ticket), message)
        else:
            entry.hold = message

    def _pass_on(self, message: Refuse | PassOn) -> None:
        """Let an engine answer what is not computed; it comes back in its turn."""
        self._arrivals.pop(message.request_id, None)
        entry = self._entries.get(message.request_id)
        if entry is not None:  # displaced, and refused or cancelled on its way here
            self._stop(entry)
            self._forget(entry)
            self._dispatch()
        number = self.shown
        self._passing[message.request_id] = number
        self._send_to(number, message)

    def _refuse(self, request_id: str, text: str, *, code: str) -> None:
        self._pass_on(Refuse(request_id=request_id, refusal=Refusal(message=text, code=code)))

    def _ask_all(self, message: _ForAll) -> None:
        match message:
            case Pause():
                self._pause = msgspec.structs.replace(message, abort=False)
            case Resume():
                self._pause = None
            case _:
                pass
        self._ask(message, [number for number, one in enumerate(self.replicas) if one.is_joined])

    def _ask(self, message: wire.Profile | _ForAll, numbers: Sequence[int]) -> None:
        """Send a command to replicas; they answer together."""
        numbers = [number for number in numbers if self.replicas[number].is_joined]
        if not numbers:
            error = unavailable("No replica works at the moment.", code="not_ready")
            self._moves_of.move([message.request_id], error, is_planned=False)
            return
        self._asked[message.request_id] = _Asked(command=message, open=set(numbers))
        for number in numbers:
            self._send_to(number, message)

    def _joined_answer(self, asked: _Asked, answer: wire.Answer, number: int) -> wire.Answer | None:
        """Return the joint answer of all replicas, if this is the last one."""
        asked.open.discard(number)
        before, asked.answer = asked.answer, answer
        if before is not None:
            numbers = (before.num_cached_tokens, answer.num_cached_tokens)
            worse = before if before.refusal is not None else answer
            asked.answer = msgspec.structs.replace(
                worse, num_cached_tokens=sum(numbers) if isinstance(asked.command, Flush) else max(numbers)
            )
        if asked.open:
            return None
        del self._asked[answer.request_id]
        if asked.answer.refusal is None and isinstance(asked.command, Sleep):
            self._sleep = self._sleep.slept(asked.command)
            if asked.command.drops_weights:
                self.weights.dropped()
        elif asked.answer.refusal is None and isinstance(asked.command, WakeUp):
            self._sleep = self._sleep.woken(asked.command)
            self.weights.settle()
        return asked.answer

    def _change_weights(self, command: FleetCommand) -> None:
        exclusive = LoadAdapter | Sleep | WakeUp
        if self.weights.is_changing or any(isinstance(one.command, exclusive) for one in self._asked.values()):
            self._refuse(command.request_id, _BUSY, code="weights_busy")
        else:
            self.weights.begin(command)

    def _weights_answered(self, command: FleetCommand, outcome: Outcome) -> None:
        """Answer a command for the weights."""
        if isinstance(outcome, ApiError):
            self._moves_of.move([command.request_id], outcome, is_planned=False)
            return
        if isinstance(outcome, Refusal):
            answer = wire.Answer(command.request_id, "", FinishReason.REFUSED, True, outcome, 0, 0, 0)
        else:
            answer = wire.Answer(command.request_id, "", FinishReason.STOP, True, None, 0, 0, 0, computed=(outcome, 0))
            if isinstance(command, UpdateWeights) and command.is_last:
                self._sleep = self._sleep.updated()
        self._moves_of.take(wire.Answers((answer,)))

    def _note(self, entry: PlacedRequest, ticket: Ticket, answer: wire.Answer) -> bool:
        """Note the answer to a request on a replica; return whether a place is free now."""
        entry.num_generated = max(entry.num_generated, answer.num_output_tokens)
        if answer.ended:
            self._forget(entry)
            return self._router.end(ticket, self._clock())
        if not entry.is_computed and answer.num_output_tokens:
            entry.is_computed = True
            self._router.computed(ticket, self._clock())
        return False

    def _dispatch(self) -> None:
        self._send_all(self._router.dispatch(self._clock()))

    def _send_all(self, placements: Sequence[Placement[PlacedRequest]]) -> None:
        for placement in placements:
            if placement.displaced is not None:
                self._displace(placement.displaced)
            entry = placement.request
            entry.ticket, entry.is_computed = placement.ticket, False
            self._lift_limit(entry)
            if placement.prefill is not None:
                assert isinstance(placement.prefill, int)
                self._prompts.name(entry, placement.prefill)
            self._start(entry)

    def _start(self, entry: PlacedRequest) -> None:
        """Send a request to its replica, or its prompt to the one that computes it, unless it is still on its way."""
        if entry.frame is None:
            return
        if entry.helped is not None:
            if self._prompts.begin(entry):
                return
            assert entry.ticket is not None
            self._router.unaid(entry.ticket, self._clock())
        self._send(entry)

    def _prompt_ended(self, answer: wire.Answer) -> None:
        """Send a request to its replica: its prompt is in the shared store, or it will not be."""
        entry = self._prompts.ended(answer.request_id)
        if entry is None or entry.ticket is None:
            return
        if has_computed(answer):
            self._router.computed(entry.ticket, self._clock())
        else:
            self._router.unaid(entry.ticket, self._clock())
        self._send(entry)

    def _send(self, entry: PlacedRequest) -> None:
        assert entry.ticket is not None
        assert entry.frame is not None
        number = _number(entry.ticket)
        self.replicas[number].sender.send(entry.frame)
        if entry.hold is not None:
            self._send_to(number, entry.hold)
            entry.hold = None

    def _displace(self, ticket: Ticket) -> None:
        """Stop a request on its replica; it comes again, and waits in the router meanwhile."""
        entry = self._by_arrival[ticket.arrival]
        if not entry.is_sent:
            self._prompts.withdraw(entry)
            entry.ticket = None
            return
        live, old_id = self._moves_of, entry.request_id
        self._send_to(_number(ticket), Abort(request_id=old_id))
        entry.ticket = entry.frame = None
        self._moving = entry
        error = unavailable("The request had to make room.", code="displaced")
        live.move([old_id], error, is_planned=True)
        self._moving = None
        if entry.request_id != old_id and live.is_sent(entry.request_id):
            return
        self._router.cancel(entry.arrival, self._clock())
        if entry.request_id != old_id:  # it is suspected of deaths, and comes when `Held` lets it
            self._arrivals[entry.request_id] = (entry.arrival, entry.arrived_s)
        self._forget(entry)

    def _route_anew(self, entry: PlacedRequest, priority: int) -> None:
        """Let a waiting request wait with another priority."""
        now_s = self._clock()
        self._router.cancel(entry.arrival, now_s)
        entry.priority = priority
        self._send_all(self._router.route(entry, now_s))

    def _stop(self, entry: PlacedRequest) -> None:
        """Let a replica and the router forget a request; the caller calls `_dispatch` when it can."""
        if entry.ticket is not None and entry.is_sent:
            self._send_to(_number(entry.ticket), Abort(request_id=entry.request_id))
        self._prompts.withdraw(entry)
        entry.ticket = None
        self._router.cancel(entry.arrival, self._clock())

    def _lift_limit(self, entry: PlacedRequest) -> None:
        if entry.limit is not None:
            entry.limit.cancel()
            entry.limit = None

    def _forget(self, entry: PlacedRequest) -> None:
        self._lift_limit(entry)
        self._entries.pop(entry.request_id, None)
        self._by_arrival.pop(entry.arrival, None)

    def _confirm(self, request_id: str) -> None:
        """Confirm the end of a request that no engine has."""
        self._moves_of.take(wire.Answers((wire.Answer(request_id, "", FinishReason.ABORT, True, None, 0, 0, 0),)))

    def _forget_cache(self, number: int) -> None:
        """Count a replica as empty until it has shown all that it has cached."""
        self._router.forget_blocks(number)
        self.replicas[number].shows_cache = True
        self._send_to(number, wire.ShowCache())

    def _priority(self, request_id: str, priority: int) -> int:
        if self._moves and not self._moves_of.may_move(request_id):
            return _FIXED_PRIORITY
        return -priority if self._low_first else priority

    def _send_to(self, number: int, message: wire.ToEngine) -> None:
        self.replicas[number].sender.send(wire.encode(message))


def _number(ticket: Ticket) -> int:
    assert isinstance(ticket.replica, int)
    return ticket.replica
