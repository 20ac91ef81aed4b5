"""The events of one turn of an engine's loop, and their conversion to a record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from pagewood.engine.api import CachedPrefix, Command, Delta, FinishReason
from pagewood.engine.core.reasons import Reason
from pagewood.engine.core.request import Request
from pagewood.engine.core.steps.grant import Grant
from pagewood.engine.decision_log.frames import Plan, Record, Result
from pagewood.engine.decision_log.plain import Renaming, plain_command

CLOSERS = frozenset(
    {
        Reason.CLOSED_FOR_MEMORY, Reason.CLOSED_FOR_TOKENS, Reason.CLOSED_FOR_PLACES, Reason.NO_TOKENS, Reason.NO_PLACE,
        Reason.NO_MEMORY,
    }
)  # fmt: skip
"""Reasons why a plan examines no further waiting requests."""
_LASTING = frozenset({Reason.PASSED_OVER, Reason.PARKED, Reason.RECALLING, Reason.HELD_BACK, Reason.PLACE_KEPT})
"""Reasons that often hold for many steps."""
_MOST_REMEMBERED = 4096
"""Requests whose lasting reason is remembered, so that it is written once."""
_ONE = np.int32(1)


class Note(NamedTuple):
    """Arguments of `Notes.note`."""

    reason: Reason
    request: Request | None
    other: Request | None
    numbers: tuple[int, ...]
    prefix: CachedPrefix | None = None
    """The cached prefix of an admitted request."""


class PlanHeard(NamedTuple):
    """A plan. Its grants do not change."""

    grants: Sequence[Grant]
    is_decode: bool
    num_preempted: int
    num_waiting: int
    num_running: int
    num_free_pages: int


class ResultHeard(NamedTuple):
    """A copy of the parts of a `StepResult` that decisions depend on."""

    tokens: bytes
    counts: np.ndarray[Any, np.dtype[np.int32]] | None
    excluded: tuple[int, ...]
    num_scored: int
    pooled: tuple[bool, ...]
    fault: str = ""


@dataclass(slots=True)
class Turn:
    """The events so far. The engine's thread writes it, and then hands it over."""

    clock: list[float] = field(default_factory=list[float])
    # contents written by: recorder
    commands: list[tuple[Command, Delta | None]] = field(default_factory=list[tuple[Command, Delta | None]])
    # contents written by: recorder
    ends: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list[tuple[int, Mapping[str, Any]]])
    # contents written by: recorded_work
    exchanges: list[bool] = field(default_factory=list[bool])
    # contents written by: recorded_work
    towers: list[int] = field(default_factory=list[int])
    # contents written by: recorded_work
    matchers: list[tuple[int, int, str, Any]] = field(default_factory=list[tuple[int, int, str, Any]])
    # contents written by: recorded_grammars
    drafts: list[list[int] | None] = field(default_factory=list["list[int] | None"])
    # contents written by: recorder
    cache: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    # contents written by: recorder
    launches: list[str] = field(default_factory=list[str])
    # contents written by: recorder
    results: list[ResultHeard] = field(default_factory=list[ResultHeard])
    # contents written by: recorder
    plans: list[PlanHeard] = field(default_factory=list[PlanHeard])
    # contents written by: recorder
    notes: list[Note] = field(default_factory=list[Note])
    # contents written by: recorder
    answers: list[tuple[float, Sequence[Delta]]] = field(default_factory=list[tuple[float, Sequence[Delta]]])
    # contents written by: recorder

    @property
    def is_empty(self) -> bool:
        """Whether nothing happened that could change the engine's state."""
        return not (
            self.commands or self.plans or self.results or self.notes or self.answers or self.ends or self.cache
        )


class TurnEncoder:
    """Makes records of turns. Invariant: its output depends only on the turns since the last `restart`."""

    __slots__ = ("_arrivals", "_closing", "_lasting", "_limit", "_named", "_number", "_renaming", "_starts", "_version")

    def __init__(self, renaming: Renaming) -> None:
        self._renaming = renaming
        self._number = 0  # written by: encode
        self.restart()

    @property
    def number(self) -> int:
        """Number of the next record."""
        return self._number

    def restart(self) -> None:
        """Begin a file, whose records do not depend on earlier files."""
        self._arrivals: list[int] = []  # written by: restart, _plan
        self._starts: list[int] = []  # written by: restart, _plan
        self._closing: tuple[int, int] = (0, 0)  # written by: restart, _notes
        self._limit = -1  # written by: restart, _notes
        self._lasting: dict[int, tuple[int, int]] = {}  # written by: restart, _notes
        self._named: dict[int, str] = {}  # written by: restart, encode
        self._version = ""
        """The name of the weights that have computed the latest tokens."""  # written by: restart, encode

    def encode(self, turn: Turn) -> Record:
        """Return the next record."""
        self._number += 1
        names: dict[int, str] = {}
        for note in turn.notes:
            for request in (note.request, note.other):
                if request is not None and request.arrival not in self._named:
                    self._named[request.arrival] = names[request.arrival] = request.request_id
        for plan in turn.plans:
            for grant in () if plan.is_decode else plan.grants:
                if grant.request.arrival not in self._named:
                    self._named[grant.request.arrival] = names[grant.request.arrival] = grant.request.request_id
        if len(self._named) > 16 * _MOST_REMEMBERED:
            self._named.clear()
        refused: list[tuple[str, str]] = []
        versions: list[tuple[float, str]] = []
        events: list[tuple[float, str, str, str, int]] = []
        for time_s, deltas in turn.answers:
            for delta in deltas:
                if delta.tokens and delta.weights != self._version:
                    self._version = delta.weights
                    versions.append((time_s, delta.weights))
                if not delta.first and delta.finish is None:
                    continue
                code = "" if delta.refusal is None else delta.refusal.code or delta.refusal.param or ""
                if delta.first and delta.tokens:
                    events.append((time_s, delta.request_id, "first", "", len(delta.tokens)))
                if delta.finish is not None:
                    events.append((time_s, delta.request_id, delta.finish.value, code, delta.num_output_tokens))
                if delta.finish is FinishReason.REFUSED:
                    refused.append((delta.request_id, code))
        return Record(
            number=self._number - 1,
            commands=tuple(plain_command(command, answer, self._renaming) for command, answer in turn.commands),
            clock=tuple(turn.clock),
            ends=tuple((number, self._end(values)) for number, values in turn.ends),
            towers=tuple(turn.towers),
            exchanges=() if all(turn.exchanges) else tuple(turn.exchanges),
            matchers=tuple(self._matchers(turn)),
            drafts=tuple(turn.drafts),
            cache=turn.cache,
            launches=tuple(turn.launches) if any(turn.launches) else (),
            results=tuple(map(self._result, turn.results)),
            plans=tuple(map(self._plan, turn.plans)),
            refused=tuple(refused),
            versions=tuple(versions),
            adapters=tuple(
                (note.request.arrival, note.request.adapter.name, note.request.adapter.version)
                for note in turn.notes
                if note.reason is Reason.ADMITTED and note.request is not None and note.request.adapter is not None
            ),
            notes=tuple(self._notes(turn)),
            names=tuple(names.items()),
            misses=tuple(
                (note.request.arrival, *astuple(note.prefix))
                for note in turn.notes
                if note.prefix is not None and note.request is not None
            ),
            events=tuple(events),
        )

    def _end(self, values: Mapping[str, Any]) -> dict[str, Any]:
        found = dict(values)
        if "invocation" in found:
            found["invocation"] = self._renaming.ids(found["invocation"])
        if "digests" in found:
            found["digests"] = tuple(map(self._renaming.digest, found["digests"]))
        return found

    def _matchers(self, turn: Turn) -> list[tuple[int, int, str, Any]]:
        return [
            (index, place, method, list(self._renaming.ids(answer)) if method == "forced" else answer)
            for index, place, method, answer in turn.matchers
        ]

    def _result(self, result: ResultHeard) -> Result:
        return Result(
            tokens=self._renaming.tokens(result.tokens),
            counts=None if result.counts is None or (result.counts == _ONE).all() else result.counts.tobytes(),
            excluded=result.excluded,
            num_scored=result.num_scored,
            pooled=result.pooled,
            fault=result.fault,
        )

    def _plan(self, plan: PlanHeard) -> Plan:
        grants = plan.grants
        arrivals = [grant.request.arrival for grant in grants]
        starts = [grant.start for grant in grants]
        is_plain = plan.is_decode and sum([grant.num_tokens for grant in grants]) == len(grants)
        goes_on = (
            is_plain
            and len(grants) > 0
            and arrivals == self._arrivals
            and starts == [start + 1 for start in self._starts]
        )
        self._arrivals, self._starts = (arrivals, starts) if is_plain else ([], [])
        return Plan(
            grants=None
            if goes_on
            else tuple(
                number
                for grant, arrival in zip(grants, arrivals, strict=True)
                for number in (arrival, grant.start, grant.num_tokens, grant.num_promised, int(grant.is_admitted))
            ),
            num_preempted=plan.num_preempted,
            num_waiting=plan.num_waiting,
            num_running=plan.num_running,
            num_free_pages=plan.num_free_pages,
        )

    def _notes(self, turn: Turn) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        closing: tuple[int, ...] = (0, 0, 0)
        for note in turn.notes:
            if note.reason in CLOSERS:
                closing = _numbers(note)
        if turn.plans and closing[:2] != self._closing:
            self._closing = (closing[0], closing[1])
            self._lasting.clear()
            found.append(closing)
        if len(self._lasting) > _MOST_REMEMBERED:
            self._lasting.clear()
        for note in turn.notes:
            reason, arrival, other, *numbers = _numbers(note)
            if reason in CLOSERS:
                continue
            if reason == Reason.LIMITED_BY_TARGET:
                if numbers[0] == self._limit:
                    continue
                self._limit = numbers[0]
            elif reason in _LASTING:
                if self._lasting.get(arrival) == (reason, other):
                    continue
                self._lasting[arrival] = (reason, other)
            else:
                self._lasting.pop(arrival, None)
            found.append((reason, arrival, other, *numbers))
        return found


def _numbers(note: Note) -> tuple[int, ...]:
    return (
        int(note.reason),
        0 if note.request is None else note.request.arrival,
        0 if note.other is None else note.other.arrival,
        *note.numbers,
    )
