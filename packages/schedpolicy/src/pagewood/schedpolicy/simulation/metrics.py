"""Observations of one replica: the times of every request, the gaps between tokens, and the load."""

from dataclasses import dataclass
from enum import Enum

from pagewood.schedpolicy.simulation.histogram import DurationHistogram
from pagewood.schedpolicy.simulation.service import ServiceGap

_MAX_MOMENTS = 600


class Outcome(Enum):
    """How a request ended."""

    FINISHED = "finished"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request, after its end.

    Attributes:
        arrival: Its number in the trace.
        replica: Number of its replica.
        tenant: Its tenant.
        outcome: How it ended.
        reason: Why it was refused; "" if it was not.
        arrived_s: Time of arrival.
        admitted_s: Time of its first admission; infinite if it was refused.
        first_token_s: Time of its first token; infinite if it was refused.
        finished_s: Time of its end.
        num_prompt: Tokens of the prompt.
        num_output: Tokens generated.
        num_hit: Tokens of the prompt found in the cache when it was first admitted.
        num_preemptions: Number of its preemptions.
        num_recomputed: Tokens computed again after preemptions.
        deadline_s: Time by which it should have ended; infinite if it has no deadline.
    """

    arrival: int
    replica: int
    tenant: str
    outcome: Outcome
    reason: str
    arrived_s: float
    admitted_s: float
    first_token_s: float
    finished_s: float
    num_prompt: int
    num_output: int
    num_hit: int
    num_preemptions: int
    num_recomputed: int
    deadline_s: float

    @property
    def first_token_after_s(self) -> float:
        """Time to first token."""
        return self.first_token_s - self.arrived_s

    @property
    def after_s(self) -> float:
        """Time from arrival to end."""
        return self.finished_s - self.arrived_s

    @property
    def per_token_s(self) -> float:
        """Mean time between its tokens; 0 if it has only one."""
        return (self.finished_s - self.first_token_s) / (self.num_output - 1) if self.num_output > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Moment:
    """Load of a replica at one time."""

    at_s: float
    num_running: int
    num_waiting: int
    num_used: int
    """Pages that running requests hold."""
    num_cached: int
    """Cached pages that no running request holds."""


class Timeline:
    """Moments spread evenly over the run so far. Invariant: there are at most 600, however long the run is."""

    __slots__ = ("_next_s", "_spacing_s", "moments")

    def __init__(self) -> None:
        """Start with no moments."""
        self.moments: list[Moment] = []  # written by: Timeline
        self._next_s = 0.0
        self._spacing_s = 0.0

    def is_due(self, at_s: float) -> bool:
        """Return whether to add a moment at this time."""
        return at_s >= self._next_s

    def add(self, moment: Moment) -> None:
        """Add a moment; halves the number of moments when there are too many."""
        self.moments.append(moment)
        if len(self.moments) == _MAX_MOMENTS:
            self.moments = self.moments[::2]
            span_s = self.moments[-1].at_s - self.moments[0].at_s
            self._spacing_s = span_s / len(self.moments)
        self._next_s = moment.at_s + self._spacing_s


class Observations:
    """Observations of one replica; the report reads them after the run."""

    __slots__ = (
        "busy_s", "gaps", "num_decode_tokens", "num_prefill_tokens", "num_steps", "records", "service", "timeline",
    )  # fmt: skip

    def __init__(self) -> None:
        """Start with no observations."""
        self.records: list[RequestRecord] = []  # written by: recorder, routed
        self.gaps = DurationHistogram()
        """Times between two tokens of one request, preemptions included."""  # written by: recorder
        self.timeline = Timeline()  # written by: recorder
        self.service = ServiceGap()
        self.num_steps = 0  # written by: recorder
        self.num_prefill_tokens = 0  # written by: recorder
        self.num_decode_tokens = 0  # written by: recorder
        self.busy_s = 0.0  # written by: recorder
