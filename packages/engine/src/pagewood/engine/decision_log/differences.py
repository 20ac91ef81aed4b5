"""The first difference between a logged record and the same turn in a replay, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pagewood.engine.core.reasons import Reason
from pagewood.engine.decision_log.frames import Plan, Record

_GRANT = ("start", "tokens", "promised tokens", "is_admitted")
_NUMBERS = {
    "num_preempted": "preempted requests",
    "num_waiting": "waiting requests",
    "num_running": "running requests",
    "num_free_pages": "free pages",
}


def difference(logged: Record, found: Record, *, names: Mapping[int, str], num_plans: int) -> str:
    """Return the first difference: a refusal, a plan, or the reasons of a plan.

    Args:
        logged: of the log.
        found: of the replay.
        names: ids of the requests of the log so far, by arrival.
        num_plans: plans of the log up to and including this record.
    """
    names = {**names, **dict(found.names)}
    where = f"record {logged.number}, step {num_plans}"
    if logged.clock:
        where += f", at {logged.clock[0]:.6f} s of the engine's clock"
    if logged.refused != found.refused:
        return f"{where}: refused requests are {_refused(found)} in the replay, and {_refused(logged)} in the log"
    if len(logged.plans) != len(found.plans):
        return f"{where}: {len(found.plans)} plans were made in the replay, and {len(logged.plans)} in the log"
    for ours, theirs in zip(found.plans, logged.plans, strict=True):
        text = _plan_difference(ours, theirs, names)
        if text is not None:
            return f"{where}: {text}"
    for ours, theirs in zip((*found.notes, None), (*logged.notes, None), strict=False):
        if ours != theirs:
            one, other = _note(ours, names), _note(theirs, names)
            return f"{where}: the reasons differ: {one} in the replay, and {other} in the log"
    if found.versions != logged.versions:
        return f"{where}: weights are {_versions(found)} in the replay, and {_versions(logged)} in the log"
    if found.adapters != logged.adapters:
        return (
            f"{where}: adapters are {_adapters(found, names)} in the replay, and {_adapters(logged, names)} in the log"
        )
    return f"{where}: the encodings differ"


def _plan_difference(found: Plan, logged: Plan, names: Mapping[int, str]) -> str | None:
    if found.grants != logged.grants:
        if found.grants is None or logged.grants is None:
            goes_on = "only goes on with the step before it"
            return f"the plan {'' if found.grants is None else 'of the log '}{goes_on}, and that of the " + (
                "log does not" if found.grants is None else "replay does not"
            )
        ours, theirs = _by_request(found.grants), _by_request(logged.grants)
        for arrival in sorted({*ours, *theirs}):
            one, other = ours.get(arrival), theirs.get(arrival)
            if one is None or other is None:
                got, lacks = ("log", "replay") if one is None else ("replay", "log")
                grant = one or other
                assert grant is not None
                return (
                    f"{_name(arrival, names)} got {grant[1]} tokens from position {grant[0]} on in the {got}, "
                    f"and none in the {lacks}"
                )
            for field, own, logged_value in zip(_GRANT, one, other, strict=True):
                if own != logged_value:
                    return f"{_name(arrival, names)}: {field} is {own} in the replay, and {logged_value} in the log"
        return "the grants have another order"
    for field, text in _NUMBERS.items():
        own, logged_value = getattr(found, field), getattr(logged, field)
        if own != logged_value:
            return f"there are {own} {text} in the replay, and {logged_value} in the log"
    return None


def _by_request(grants: Sequence[int]) -> dict[int, tuple[int, ...]]:
    return {grants[i]: tuple(grants[i + 1 : i + 5]) for i in range(0, len(grants), 5)}


def _name(arrival: int, names: Mapping[int, str]) -> str:
    return f"request {names[arrival]}" if arrival in names else f"the request with arrival number {arrival}"


def _refused(record: Record) -> str:
    return ", ".join(f"{name} ({code})" if code else name for name, code in record.refused) or "none"


def _versions(record: Record) -> str:
    return ", then ".join(repr(name) for _, name in record.versions) or "as before"


def _adapters(record: Record, names: Mapping[int, str]) -> str:
    found = [f"{name} ({version}) for {_name(arrival, names)}" for arrival, name, version in record.adapters]
    return ", ".join(found) or "none"


def _note(note: Sequence[int] | None, names: Mapping[int, str]) -> str:
    if note is None:
        return "no further one"
    reason, arrival, other, *numbers = note
    what = Reason(reason).name.lower() if reason else "the queue was examined to its end"
    about = f" for {_name(arrival, names)}" if arrival else ""
    because = f" because of {_name(other, names)}" if other else ""
    return f"{what}{about}{because}" + (f" {numbers}" if numbers else "")
