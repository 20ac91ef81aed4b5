"""What an engine measures about its steps: a reading of the clock and an addition for each stage of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from pagewood.engine.core.observe.expert_load import ExpertLoad
from pagewood.engine.core.queue.state import EngineState
from pagewood.engine.core.steps.grant import Grant
from pagewood.engine.observe.histogram import Histogram, Labels

MAX_PRIORITIES = 16
"""Priorities that are counted by themselves; those that come later are counted together."""
_QUEUE_EVERY_S = 0.5
_FEW_REQUESTS = 64
_MAX_SPANS = 200_000
_STEP_BOUNDS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
_TOKENS_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Stage(IntEnum):
    """What the engine's thread does, in the order of a step."""

    INTAKE = 0
    """Takes commands, if there is something to do; while it is idle it measures nothing."""
    PLAN = 1
    BUILD = 2
    """Makes the batch of the planned grants."""
    LAUNCH = 3
    """Hands the batch to the device."""
    CONSTRAIN = 4
    """Fills the masks of grammars."""
    WAIT = 5
    """Waits for the device."""
    RETIRE = 6
    """Applies the result, and sends the answers."""


INTAKE, PLAN, BUILD, LAUNCH, CONSTRAIN, WAIT, RETIRE = map(int, Stage)
"""The stages as plain ints: with members of an Enum, a mark takes four times as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """The live requests at some moment. Counts by priority are as clients give them, and bounded in number."""

    waiting: dict[str, int] = field(default_factory=dict[str, int])
    """Priority -> waiting requests, preempted ones among them."""
    running: dict[str, int] = field(default_factory=dict[str, int])
    oldest_s: float = 0.0
    """How long the oldest waiting request has been in the engine."""


class Measures:
    """Sums and histograms since they were switched on.

    Invariant: the time between two marks belongs to exactly one stage, or to none while the engine is idle.
    """

    __slots__ = (
        "_at_s", "_clock", "_ended_s", "_labels", "_queue", "_queue_s", "_sign", "num_decode_tokens",
        "num_prefill_tokens", "spans", "stage_s", "step_s", "step_tokens",
    )  # fmt: skip

    def __init__(self, clock: Callable[[], float], *, low_priority_first: bool = False) -> None:
        """Begin at this moment.

        Args:
            clock: monotonic seconds.
            low_priority_first: whether the engine negates the priorities of clients.
        """
        self._clock = clock
        self._sign = -1 if low_priority_first else 1
        self._at_s = clock()  # written by: skip, mark
        self._ended_s = 0.0  # written by: ended
        self._labels = Labels(MAX_PRIORITIES)
        self._queue = Queue()  # written by: queue
        self._queue_s = float("-inf")  # written by: queue
        self.stage_s = [0.0] * len(Stage)  # written by: mark
        """Seconds by stage."""
        self.step_s = Histogram(_STEP_BOUNDS_S)
        """From the launch of a step, or the end of the step before it, to its end."""
        self.step_tokens = Histogram(_TOKENS_BOUNDS)
        """Positions of a step."""
        self.num_prefill_tokens = 0  # written by: launched
        self.num_decode_tokens = 0  # written by: launched
        self.spans: list[tuple[int, float, float]] | None = None
        """Stage, beginning and end of every mark, while a profile is taken; None: no profile is taken."""
        # written by: start_spans, take_spans

    def skip(self) -> None:
        """Let the time since the last mark belong to no stage."""
        self._at_s = self._clock()

    def mark(self, stage: int) -> None:
        """Let the time since the last mark belong to `stage`, a `Stage`."""
        began_s, now_s = self._at_s, self._clock()
        self.stage_s[stage] += now_s - began_s
        self._at_s = now_s
        if self.spans is not None and len(self.spans) < _MAX_SPANS:
            self.spans.append((stage, began_s, now_s))

    def launched(self, grants: Sequence[Grant], *, num_tokens: int, is_decode: bool) -> float:
        """Count a step that was just launched and marked; return when that was."""
        num_prefill = 0
        if not is_decode:
            num_prefill = sum(grant.num_tokens for grant in grants if grant.start < grant.request.num_prompt)
        self.num_prefill_tokens += num_prefill
        self.num_decode_tokens += num_tokens - num_prefill
        self.step_tokens.add(num_tokens)
        return self._at_s

    def ended(self, *, launched_s: float) -> None:
        """Count a step whose end was just marked."""
        self.step_s.add(self._at_s - max(launched_s, self._ended_s))
        self._ended_s = self._at_s

    def queue(self, state: EngineState) -> Queue:
        """Return the live requests by priority; with many, at most `_QUEUE_EVERY_S` old."""
        now_s = self._clock()
        if len(state.by_id) > _FEW_REQUESTS and now_s - self._queue_s < _QUEUE_EVERY_S:
            return self._queue
        self._queue_s, oldest_s = now_s, 0.0
        waiting: dict[str, int] = {}
        running: dict[str, int] = {}
        for request in state.by_id.values():
            counts = running
            if request.row < 0:
                counts, oldest_s = waiting, max(oldest_s, now_s - request.arrived_s)
            name = self.priority(request.own_priority)
            counts[name] = counts.get(name, 0) + 1
        self._queue = Queue(waiting=waiting, running=running, oldest_s=oldest_s)
        return self._queue

    def priority(self, priority: int) -> str:
        """Return the label of a priority as the engine has it."""
        return self._labels.of(self._sign * priority)

    def start_spans(self) -> None:
        """Record every mark from now on."""
        self.spans = []

    def take_spans(self) -> list[tuple[int, float, float]]:
        """Return the recorded marks, and record no more."""
        spans, self.spans = self.spans or [], None
        return spans


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterUse:
    """The adapters of live requests, by name."""

    num_slots: int
    """Adapters that requests may use at the same time."""
    running: tuple[str, ...] = ()
    """Ascending; the same for the next field."""
    waiting: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What `Measures` and the parts of an engine have counted; sums since they were switched on, queues now."""

    stage_s: dict[str, float]
    """Stage -> seconds."""
    step_s: tuple[tuple[float, ...], tuple[int, ...], float]
    """Bounds, counts and total of a `Histogram`; the same for the next field."""
    step_tokens: tuple[tuple[float, ...], tuple[int, ...], float]
    num_prefill_tokens: int
    num_decode_tokens: int
    num_available_pages: int
    """Free, or cached and used by no request."""
    num_evicted_pages: int
    preempted: dict[str, int]
    """Priority -> how often a running request went back to the queue."""
    queue: Queue
    num_parked: int
    """Waiting for the prompt of another request."""
    num_at_quota: int
    """Waiting until another request of their tenant stops, because the tenant is at its limit."""
    num_compiling: int
    """Waiting for their grammars."""
    num_recalling: int
    """Waiting for KV from a lower tier."""
    tiers: dict[str, int]
    """Pages copied between tiers, by the name of the count; empty without lower tiers."""
    experts: ExpertLoad | None = None
    """None: rows of experts are not counted."""
    adapters: AdapterUse | None = None
    """None: the engine has no adapters."""


def counts_of(histogram: Histogram) -> tuple[tuple[float, ...], tuple[int, ...], float]:
    """Return the bounds, the counts and the total of a histogram, which will not change."""
    return histogram.bounds, tuple(histogram.counts), histogram.total
