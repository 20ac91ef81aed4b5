"""Explains the decisions about one request, from a decision log: one line for each event of the request.

Nothing is guessed: a reason is a note of the part of the core that decided.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagewood.engine.core.reasons import Reason
from pagewood.engine.decision_log import words
from pagewood.engine.decision_log.frames import Header, Plan, Record
from pagewood.engine.decision_log.log_file import Log
from pagewood.engine.decision_log.turn import CLOSERS

_MOST_EVICTIONS = 4096
"""Evictions that are remembered, so that a miss names the request that needed their memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One event of a request."""

    unix_s: float
    """When it began."""
    after_s: float
    """Seconds from the arrival of the request to that time."""
    kind: str
    """arrived, compiled, waited, admitted, cache, prompt, stalled, first_token, weights, preempted, paused, resumed,
    priority, aborted or ended."""
    text: str
    """A sentence."""
    request_id: str
    """Id in the engine."""
    numbers: dict[str, float | str] = field(default_factory=dict[str, "float | str"])
    """The numbers of the sentence, by name."""


def why(path: Path, name: str) -> list[Line]:
    """Return the events of a request in a log, in order of time.

    Args:
        path: of the log.
        name: id of the request in the engine, or one under which its client knows it; several answers to a prompt share
            it.

    Raises:
        ValueError: the log cannot be read, or has no such request.
        FileNotFoundError: there is no such file.
    """
    log = Log.at(path)
    lines = _Reader(log.header, name).lines(log)
    if not lines:
        since = ", whose oldest part was dropped" if log.header.first else ""
        raise ValueError(f"request must be one that arrived in the log{since}, got {name!r}")
    return lines


@dataclass(slots=True, kw_only=True)
class _Span:
    """A state that lasts for some plans."""

    kind: str
    text: str
    begin_s: float
    num_plans: int = 0  # written by: why
    sizes: list[int] = field(default_factory=list[int])
    """Tokens of its plans."""  # contents written by: why


@dataclass(slots=True, kw_only=True)
class _Life:
    """The data of a request while its lines are made."""

    request_id: str
    arrived_s: float
    num_prompt: int = 0
    arrival: int = 0
    """0: not known yet."""  # written by: why
    is_compiling: bool = False
    """Whether its grammar is compiled, so that it is not in the queue."""  # written by: why
    is_running: bool = False  # written by: why
    was_admitted: bool = False  # written by: why
    note: tuple[int, ...] = ()
    """The latest lasting note about it while it waits."""  # written by: why
    span: _Span | None = None
    """The lasting state now."""  # written by: why
    num_done: int = 0
    """Positions granted so far."""  # written by: why
    num_steps: int = 0
    """Steps that computed its output."""  # written by: why
    first_s: float = 0.0
    """When its first token came."""  # written by: why


class _Reader:
    """Reads a log from its beginning, and makes the lines of the requests with a name."""

    def __init__(self, header: Header, name: str) -> None:
        self._name = name
        self._unix_s = header.unix_s - header.clock_s
        self._page_size: int = header.info["page_size"]
        self._names: dict[int, str] = {}
        """Names of requests, by arrival."""
        self._shown: dict[str, str] = {}
        """The same, by id; requests without another name are left out."""
        self._lives: dict[str, _Life] = {}
        """Requests that have not ended, by id."""
        self._lines: list[Line] = []
        self._closing: tuple[int, ...] = (0, 0, 0)
        """Why the latest plan examined no further waiting requests."""
        self._target = 0
        """Prompt tokens that the target for the duration of steps allows; 0: there is none."""
        self._grants: dict[int, tuple[int, ...]] = {}
        """The grants of the latest plan, by arrival."""
        self._evictions: deque[tuple[float, float, int]] = deque(maxlen=_MOST_EVICTIONS)
        """First and last reading of the clock of a turn, and the request that pages were evicted for."""
        self._now_s = header.clock_s
        self._version = ""
        """The name of the weights that have computed the latest tokens."""

    def lines(self, log: Log) -> list[Line]:
        """Return all lines."""
        for frame in log.frames():
            if isinstance(frame, Header):
                self._grants, self._closing = {}, (0, 0, 0)
                continue
            self._now_s = frame.clock[0] if frame.clock else self._now_s
            for kind, values in frame.commands:
                self._command(kind, values)
            self._names.update((arrival, self._shown.get(name, name)) for arrival, name in frame.names)
            ids = {name: arrival for arrival, name in frame.names}
            for life in self._lives.values():
                life.arrival = ids.get(life.request_id, life.arrival)
            for note in frame.notes:
                self._note(note, frame)
            for plan in frame.plans:
                self._plan(plan)
            for time_s, version in frame.versions:
                self._changed(time_s, version)
            for event in frame.events:
                self._event(*event)
        for life in self._lives.values():
            self._close(life)
            self._say(life, "ended", f"the log ends while it {'runs' if life.is_running else 'waits'}")
        return sorted(self._lines, key=lambda line: line.unix_s)

    def _command(self, kind: str, values: Mapping[str, Any]) -> None:
        request_id = values["request_id"]
        life = self._lives.get(request_id)
        if values.get("names"):
            self._shown[request_id] = min(values["names"], key=len)
        if kind == "Submit" and self._name in (request_id, *values.get("names", ())) and life is None:
            life = _Life(
                request_id=request_id,
                arrived_s=self._now_s,
                num_prompt=len(values["tokens"]) // 4,
                is_compiling="grammar" in (values.get("sampling") or {}),
            )
            self._lives[request_id] = life
            self._say(life, "arrived", words.arrival(values, life.num_prompt), prompt_tokens=life.num_prompt)
        elif kind == "Refuse" and self._name == request_id and life is None:
            life = self._lives[request_id] = _Life(request_id=request_id, arrived_s=self._now_s)
            self._say(life, "arrived", "arrived, and could not be queued")
        elif kind == "Abort" and life is not None:
            self._say(life, "aborted", "its client ended it")
        elif kind == "SetPriority" and life is not None:
            priority = values.get("priority", 0)
            self._say(life, "priority", f"its priority was set to {priority}", priority=priority)
        elif kind == "Pause":
            leave = "running requests give their memory back" if values.get("retract") else "no step is planned"
            for life in self._lives.values():
                self._close(life)
                self._say(life, "paused", f"the engine was paused: {leave}")
        elif kind == "Sleep":
            for life in self._lives.values():
                self._close(life)
                self._say(life, "paused", "the engine was put to sleep")
        elif kind in ("Resume", "WakeUp"):
            how = "resumed" if kind == "Resume" else "woken"
            for life in self._lives.values():
                self._say(life, "resumed", f"the engine was {how}")

    def _note(self, note: tuple[int, ...], record: Record) -> None:
        reason, arrival, other, *numbers = note
        if reason == 0 or reason in CLOSERS:
            self._closing = note
            for life in self._lives.values():  # noted again, except for parked ones
                if life.note and life.note[0] not in (Reason.PARKED, Reason.HELD_BACK):
                    life.note = ()
            return
        if reason == Reason.LIMITED_BY_TARGET:
            self._target = numbers[0]
        elif reason == Reason.EVICTED and record.clock:
            self._evictions.append((record.clock[0], record.clock[-1], arrival))
        life = next((life for life in self._lives.values() if life.arrival == arrival), None)
        if life is None:
            return
        match reason:
            case Reason.PASSED_OVER | Reason.PARKED | Reason.RECALLING | Reason.HELD_BACK | Reason.PLACE_KEPT:
                life.note = note
            case Reason.UNPARKED:
                life.note = ()
            case Reason.COMPILED:
                self._close(life)
                life.is_compiling = False
                seconds = self._now_s - life.arrived_s
                self._say(life, "compiled", f"its grammar was compiled in {seconds:.3f} s", seconds=seconds)
            case Reason.ADMITTED:
                self._admitted(life, numbers, record)
            case Reason.PREEMPTED | Reason.GAVE_WAY | Reason.RETRACTED:
                self._close(life)
                life.is_running, life.note = False, ()
                text = words.preemption(Reason(reason), self._names.get(other, ""), is_own=other == arrival)
                text += f"; {words.tokens(life.num_done)} of it had been computed"
                self._say(life, "preempted", text, reason=Reason(reason).name.lower(), tokens=life.num_done)
            case Reason.NO_CHUNK | Reason.NO_PAGE | Reason.MUST_LEAVE | Reason.NO_DECODE | Reason.MASKS_OF_OTHERS:
                self._last(life, "stalled", words.stall(Reason(reason), self._names.get(other, "")))
            case _:
                pass

    def _admitted(self, life: _Life, numbers: Sequence[int], record: Record) -> None:
        self._close(life)
        num_cached, num_first, num_wanted = numbers
        name, version = next((rest for arrival, *rest in record.adapters if arrival == life.arrival), ("", ""))
        text = words.admission(num_cached, num_first, num_wanted, is_again=life.was_admitted, adapter=name)
        used: dict[str, Any] = {"adapter": name, "adapter_version": version} if name else {}
        self._say(
            life, "admitted", text, cached_tokens=num_cached, first_step_tokens=num_first, missing_tokens=num_wanted,
            **used,
        )  # fmt: skip
        miss = next((miss for miss in record.misses if miss[0] == life.arrival), None)
        if miss is not None and not life.was_admitted:
            _, cause, num_reusable, num_cached, first_difference, num_possible, evicted_by, evicted_s = miss
            winner = ""
            if evicted_s is not None:
                found = (arrival for begin, end, arrival in reversed(self._evictions) if begin <= evicted_s <= end)
                winner = self._names.get(next(found, 0), "")
            text = words.cached(
                cause, num_cached=num_cached, num_reusable=num_reusable, num_possible=num_possible,
                first_difference=first_difference, page_size=self._page_size, evicted_by=evicted_by,
                evicted_ago_s=None if evicted_s is None else self._now_s - evicted_s, evicted_for=winner,
            )  # fmt: skip
            more: dict[str, Any] = {"evicted_for": winner} if winner else {}
            if evicted_s is not None:
                more |= {"evicted_by": evicted_by, "evicted_unix_s": self._unix_s + evicted_s}
            self._say(
                life, "cache", text, cause=cause, cached_tokens=num_cached, reusable_tokens=num_reusable,
                possible_tokens=num_possible, first_difference=first_difference, **more,
            )  # fmt: skip
        life.is_running, life.was_admitted, life.note = True, True, ()

    def _plan(self, plan: Plan) -> None:
        if plan.grants is None:
            self._grants = {arrival: (start + 1, *rest) for arrival, (start, *rest) in self._grants.items()}
        else:
            numbers = plan.grants
            self._grants = {numbers[i]: numbers[i + 1 : i + 5] for i in range(0, len(numbers), 5)}
        for life in self._lives.values():
            grant = self._grants.get(life.arrival)
            if not life.is_running:
                self._wait(life)
            elif grant is not None:
                self._granted(life, *grant)
            elif life.span is not None and life.span.kind == "stalled":
                life.span.num_plans += 1

    def _wait(self, life: _Life) -> None:
        """Count a plan in which a request was not admitted."""
        note = life.note or self._closing
        if life.is_compiling:
            text = "its grammar was being compiled"
        elif life.arrival and note[1] == life.arrival:
            text = words.waiting(note, self._names)
        elif note[1]:
            name = self._names.get(note[1], "of an unknown name")
            reason = words.waiting(note, self._names)
            text = f"it was behind request {name}, for which {reason}"
        elif note[0]:
            text = words.waiting(note, self._names)
        else:
            text = "its turn did not come"
        span = self._last(life, "waited", text)
        span.num_plans += 1

    def _granted(self, life: _Life, start: int, num_tokens: int, num_promised: int, is_admitted: int) -> None:
        if start >= life.num_prompt or (num_tokens == 1 and num_promised and start + 1 > life.num_prompt):
            self._close(life)
            life.num_steps += 1
        else:
            why_not_more = "" if num_promised else words.chunk(self._target)
            if life.span is not None and life.span.kind != "prompt":
                self._close(life)
            span = life.span or self._last(life, "prompt", why_not_more)
            span.num_plans += 1
            span.sizes.append(num_tokens)
            if num_promised:
                self._close(life)
        life.num_done = start + num_tokens

    def _event(self, time_s: float, request_id: str, kind: str, code: str, num_output: int) -> None:
        life = self._lives.get(request_id)
        if life is None:
            return
        if kind == "first":
            life.first_s = time_s
            by = f", computed by weights {self._version}" if self._version else ""
            more = {"weights": self._version} if by else {}
            self._say(life, "first_token", f"its first token was sent{by}", at_s=time_s, **more)
            return
        self._close(life, at_s=time_s)
        speed = ""
        if life.first_s and num_output > 1 and time_s > life.first_s:
            each_ms = (time_s - life.first_s) / (num_output - 1) * 1e3
            speed = f", {each_ms:.1f} ms from token to token"
        text = words.end(kind, code, num_output, life.num_steps) + speed
        self._say(life, "ended", text, at_s=time_s, reason=kind, code=code, output_tokens=num_output)
        del self._lives[request_id]

    def _changed(self, time_s: float, version: str) -> None:
        """Note that tokens are of other weights from here on."""
        self._version = version
        for life in self._lives.values():
            if life.first_s and life.is_running:
                text = f"weights {version} have computed its tokens from here on"
                self._say(life, "weights", text, at_s=time_s, weights=version)

    def _last(self, life: _Life, kind: str, text: str) -> _Span:
        """Return the span of a lasting state; a different state before it ends."""
        if life.span is None or (life.span.kind, life.span.text) != (kind, text):
            self._close(life)
            life.span = _Span(kind=kind, text=text, begin_s=self._now_s)
        return life.span

    def _close(self, life: _Life, *, at_s: float | None = None) -> None:
        """End the lasting state now."""
        span, life.span = life.span, None
        if span is None:
            return
        seconds = (self._now_s if at_s is None else at_s) - span.begin_s
        if span.kind == "prompt":
            text = words.prompt(span.sizes, span.text)
            self._say(life, "prompt", text, at_s=span.begin_s, tokens=sum(span.sizes), steps=span.num_plans)
        elif span.num_plans:
            did = "waited" if span.kind == "waited" else "got no token for"
            steps = "one plan" if span.num_plans == 1 else f"{span.num_plans} plans"
            text = f"{did} {seconds:.3f} s ({steps}): {span.text}"
            self._say(life, span.kind, text, at_s=span.begin_s, seconds=seconds, plans=span.num_plans)

    def _say(self, life: _Life, kind: str, text: str, *, at_s: float | None = None, **numbers: Any) -> None:
        now_s = self._now_s if at_s is None else at_s
        self._lines.append(
            Line(
                unix_s=self._unix_s + now_s,
                after_s=now_s - life.arrived_s,
                kind=kind,
                text=text,
                request_id=life.request_id,
                numbers=numbers,
            )
        )
