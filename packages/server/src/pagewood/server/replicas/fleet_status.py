"""The state of several engines together, in the words of the state of one."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from msgspec.structs import replace

from pagewood.engine.weight_commands import SLEEP_TAGS, SleepTag
from pagewood.server.messages import wire
from pagewood.server.messages.measurement import Counts, Measurement, Queue
from pagewood.server.messages.sleep_state import SleepState
from pagewood.server.requests.status import EngineState, EngineStatus

_STATES = frozenset(
    {
        *("num_waiting", "num_running", "num_draining", "num_held", "num_stuck"),
        *("num_pages", "num_free_pages", "num_cached_pages", "num_retained_pages"),
    }
)
"""Counters that say how it is now. The others only grow."""


class RouterQueue(Protocol):
    """The requests that wait for a place on any replica."""

    @property
    def num_waiting(self) -> int:
        """Their number."""
        ...

    @property
    def num_at_quota(self) -> int:
        """Those of them that wait because of the quota of their tenant."""
        ...

    def waiting_by_priority(self) -> dict[str, int]:
        """Return their numbers by priority, as clients give it."""
        ...

    @property
    def weight_version(self) -> str:
        """Name of the weights of all replicas that get requests."""
        ...


@dataclass(slots=True, kw_only=True)
class FleetStatus:
    """Several engines as one: it is ready if one that answers requests is, and its numbers are sums.

    Invariant: sums of what only grows never fall, although an engine counts from 0 after its death.
    """

    replicas: Sequence[EngineStatus]
    """By number."""
    router: RouterQueue
    """Its requests wait, as those in the queue of an engine do."""
    num_prefill: int = 0
    """The first ones of `replicas`, which compute prompts for the others, and answer no request."""
    is_elastic: bool = False
    """Whether engines come and go, so that requests wait while none works."""
    clock: Callable[[], float] = time.monotonic
    sleep: SleepState = field(default_factory=SleepState)  # written by: common.service
    """What sleeps. The next engine process begins like that."""
    paused: Literal["no", "in_place", "retract"] = "no"  # written by: common.service
    """Whether `/pause` has paused the engines, and how."""
    past_counters: Counter[str] = field(default_factory=Counter[str])  # contents written by: lost
    """What dead engines had counted."""
    past_measurement: Measurement | None = None  # written by: lost
    """What dead engines had measured."""

    def take(self, message: wire.Loading | wire.Pulse) -> None:
        """Note a message of an engine."""
        self.replicas[message.replica].take(message)

    def lost(self, replica: int, *, next_incarnation: int) -> None:
        """Note that the process of an engine died, and expect the next one."""
        status = self.replicas[replica]
        self.past_counters.update({name: num for name, num in status.counters.items() if name not in _STATES})
        if status.measurement is not None:
            self.past_measurement = _sum_of([status.measurement], self.past_measurement, is_past=True)
        status.lost(next_incarnation=next_incarnation)

    def relay_lost(self, *, next_incarnation: int) -> None:
        """Note that the detokenizer process died."""
        for status in self.replicas:
            status.relay_lost(next_incarnation=next_incarnation)

    def is_current(self, message: wire.Snapshot) -> bool:
        """Return whether a message is of the engine process that counts."""
        return self.replicas[message.replica].is_current(message)

    @property
    def incarnation(self) -> int:
        """Engine processes that were replaced by others."""
        return sum(one.incarnation for one in self.replicas)

    @property
    def model(self) -> wire.Model | None:
        """The model, which all have; the memory is that of one of them."""
        return next((one.model for one in self.replicas if one.model is not None), None)

    @property
    def adapter_versions(self) -> dict[str, str]:
        """Versions of the loaded adapters, by name; while they differ, that of one engine."""
        return {name: version for one in self.replicas for name, version in one.adapter_versions.items()}

    @property
    def weight_version(self) -> str:
        """Name of the weights of all engines that get requests."""
        return self.router.weight_version

    @property
    def weights_digest(self) -> str | None:
        """What tells KV of these weights apart; while engines differ, that of one."""
        return next((one.weights_digest for one in self.replicas if one.state is EngineState.READY), None)

    @property
    def asleep(self) -> tuple[SleepTag, ...]:
        """What sleeps in some engine."""
        return tuple(tag for tag in SLEEP_TAGS if any(tag in one.asleep for one in self.replicas))

    @property
    def counters(self) -> dict[str, int]:
        """Sums of the counters of all engines."""
        found = Counter(self.past_counters)
        for one in self.replicas:
            found.update(one.counters)
        found["num_waiting"] += self.router.num_waiting
        return dict(found)

    @property
    def free_pages_by_rank(self) -> tuple[int, ...]:
        """Free pages of the ranks of all engines, in the order of the engines, where ranks divide KV by request."""
        return tuple(num for one in self.replicas for num in one.free_pages_by_rank)

    @property
    def speculation(self) -> wire.Speculation | None:
        """Sums of the counts of drafts; None: no engine speculates, or none has sent a pulse."""
        found = [one.speculation for one in self.replicas if one.speculation is not None]
        if len(found) < 2:
            return found[0] if found else None
        return replace(
            found[0],
            num_drafted=sum(one.num_drafted for one in found),
            num_accepted=sum(one.num_accepted for one in found),
            drafted_by_position=_columns(one.drafted_by_position for one in found),
            accepted_by_position=_columns(one.accepted_by_position for one in found),
            draft_s=sum(one.draft_s for one in found),
            verify_s=sum(one.verify_s for one in found),
            num_rebuilt=sum(one.num_rebuilt for one in found),
            num_postponed=sum(one.num_postponed for one in found),
            num_short=sum(one.num_short for one in found),
        )

    @property
    def measurement(self) -> Measurement | None:
        """Sums of the measurements; None: no engine measures, or none has sent a pulse."""
        found = [one.measurement for one in self.replicas if one.measurement is not None]
        if not found:
            return None
        joint, router = _sum_of(found, self.past_measurement), self.router
        waiting = _counts((joint.queue.waiting, router.waiting_by_priority()))
        return replace(
            joint, queue=replace(joint.queue, waiting=waiting), num_at_quota=joint.num_at_quota + router.num_at_quota
        )

    @property
    def state(self) -> EngineState:
        """READY if an engine that answers requests is; otherwise the state of one that is nearest to it."""
        if self._waits_for_engines:
            return EngineState.READY
        states = {one.state for one in self.replicas[self.num_prefill :]}
        order = (EngineState.READY, EngineState.OUTDATED, EngineState.STALLED, EngineState.STARTING, EngineState.DOWN)
        return next(state for state in order if state in states)

    @property
    def detail(self) -> str:
        """What the engines are doing, in words; those that serve are named if others do not."""
        state = self.state
        if self._waits_for_engines:
            return "no engine works at the moment; requests wait for one"
        if state is EngineState.READY:
            others = [
                f"replica {number}: {one.detail}"
                for number, one in enumerate(self.replicas)
                if one.state is not EngineState.READY and (not self.is_elastic or one.pulse_s is not None)
            ]
            return "; ".join(["serving", *others])
        return next(one.detail for one in self.replicas[self.num_prefill :] if one.state is state)

    @property
    def _waits_for_engines(self) -> bool:
        """Whether there is no engine, and one may come."""
        return (
            self.is_elastic
            and self.model is not None
            and all(one.pulse_s is None and not one.is_cut_off for one in self.replicas)
        )

    @property
    def seconds_since_pulse(self) -> float | None:
        """Time since the last pulse of any engine; None before the first."""
        return min(
            (one.seconds_since_pulse for one in self.replicas if one.seconds_since_pulse is not None), default=None
        )

    @property
    def step_s(self) -> float:
        """The longest present step."""
        return max(one.step_s for one in self.replicas)


ServerStatus: TypeAlias = EngineStatus | FleetStatus
"""The state of the engine, or of several."""


def _sum_of(found: Sequence[Measurement], past: Measurement | None, *, is_past: bool = False) -> Measurement:
    """Return the sum of measurements; of `past` ones, and with `is_past`, only what never falls counts."""
    all_of = [*found, *([] if past is None else [past])]
    now = () if is_past else found
    first = found[0]
    return replace(
        first,
        stage_s=_by_key(one.stage_s for one in all_of),
        step_s=_joined(one.step_s for one in all_of),
        step_tokens=_joined(one.step_tokens for one in all_of),
        num_prefill_tokens=sum(one.num_prefill_tokens for one in all_of),
        num_decode_tokens=sum(one.num_decode_tokens for one in all_of),
        num_evicted_pages=sum(one.num_evicted_pages for one in all_of),
        preempted=_counts(one.preempted for one in all_of),
        tiers=_counts(one.tiers for one in all_of),
        num_available_pages=sum(one.num_available_pages for one in now),
        queue=Queue(
            waiting=_counts(one.queue.waiting for one in now),
            running=_counts(one.queue.running for one in now),
            oldest_s=max((one.queue.oldest_s for one in now), default=0.0),
        ),
        num_parked=sum(one.num_parked for one in now),
        num_at_quota=sum(one.num_at_quota for one in now),
        num_compiling=sum(one.num_compiling for one in now),
        num_recalling=sum(one.num_recalling for one in now),
    )


def _by_key(found: Iterable[Mapping[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for one in found:
        for name, number in one.items():
            sums[name] = sums.get(name, 0) + number
    return sums


def _counts(found: Iterable[Mapping[str, int]]) -> dict[str, int]:
    sums = Counter[str]()
    for one in found:
        sums.update(one)
    return dict(sums)


def _columns(found: Iterable[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*found, strict=True)))


def _joined(found: Iterable[Counts]) -> Counts:
    """Return the sum of histograms with the same bounds."""
    all_of = list(found)
    return all_of[0][0], _columns(counts for _, counts, _ in all_of), sum(total for _, _, total in all_of)
