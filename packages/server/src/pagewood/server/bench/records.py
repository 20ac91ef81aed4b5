"""The record of one request, and the times computed from it.

The definitions are those of `vllm bench serve`: the time to first token ends with the first chunk that has content, the
time between tokens is the time between two such chunks, regardless of their number of tokens, and the time per output
token is the rest of the answer divided by the tokens after the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True, kw_only=True)
class Record:
    """One request. All times are seconds of one clock; they are filled in by the client that sends it."""

    planned_s: float
    """When it was due to be sent."""
    sent_s: float = 0.0  # written by: client
    chunks_s: list[float] = field(default_factory=list[float])  # written by: client
    """When each chunk with content came."""
    ended_s: float = 0.0  # written by: client
    """When the answer was complete, or failed."""
    num_prompt: int = 0  # written by: client
    """Tokens as the server counts them; 0: the server reports no count."""
    num_cached: int = 0  # written by: client
    num_output: int = 0  # written by: client
    """Tokens as the server counts them, or chunks if it reports no count."""
    error: str | None = None  # written by: client
    """Kind of the error, such as "429" or "connection"; None: the answer is complete."""
    text: str = ""  # written by: client, run
    """The answer, if a later turn needs it, or the server's message about an error."""

    @property
    def is_complete(self) -> bool:
        """Whether there is a whole answer."""
        return self.error is None and bool(self.chunks_s)

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.chunks_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        """Time to the last chunk with content."""
        return self.chunks_s[-1] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None: there is only one."""
        return (self.e2e_s - self.ttft_s) / (self.num_output - 1) if self.num_output > 1 else None

    @property
    def itl_s(self) -> list[float]:
        """Times between chunks."""
        return [later - earlier for earlier, later in pairwise(self.chunks_s)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Limits in seconds that a request must keep to count as good; None: no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    itl_s: float | None = None
    """Seconds of the longest gap between two chunks."""
    e2e_s: float | None = None

    def holds(self, record: Record) -> bool:
        """Return whether a complete request keeps all limits."""
        found = (record.ttft_s, record.tpot_s, max(record.itl_s, default=None), record.e2e_s)
        limits = (self.ttft_s, self.tpot_s, self.itl_s, self.e2e_s)
        return all(limit is None or value is None or value <= limit for value, limit in zip(found, limits, strict=True))


def parse_objective(text: str) -> Objective:
    """Return the objective in a text such as "ttft=200ms,tpot=50ms".

    Raises:
        ValueError: it names something else, or a time is wrong.
    """
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in ("ttft", "tpot", "itl", "e2e") or f"{name}_s" in limits:
            raise ValueError(f"an SLO must be different ones of ttft, tpot, itl and e2e with a time, got '{part}'")
        limits[f"{name}_s"] = parse_seconds(value)
    return Objective(**limits)


def parse_seconds(text: str) -> float:
    """Return the seconds in a text such as "200ms", "1.5s" or "2".

    Raises:
        ValueError: it is not a positive time.
    """
    number, unit = (text[:-2], 1e-3) if text.endswith("ms") else (text.removesuffix("s"), 1.0)
    try:
        seconds = float(number) * unit
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"a time must be positive, such as 200ms or 1.5s, got '{text}'")
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Percentiles of a number, by linear interpolation; in the unit of the number."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Return the percentiles of some values; None if there are none."""
        if not values:
            return None
        ordered = sorted(values)
        return cls(
            mean=sum(ordered) / len(ordered),
            p50=_percentile(ordered, 0.5),
            p90=_percentile(ordered, 0.9),
            p95=_percentile(ordered, 0.95),
            p99=_percentile(ordered, 0.99),
            max=ordered[-1],
        )


def _percentile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The result of a run. Times are milliseconds; rates are per second, over `duration_s`."""

    duration_s: float
    """From the first request sent to the last answer complete."""
    num_complete: int
    errors: dict[str, int]
    """Kind -> requests."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    good_requests_per_s: float | None
    """Complete requests that keep the objective; None: no objective was given."""
    most_at_once: int
    """Requests in flight."""
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None
    e2e_ms: Spread | None
    late_ms: Spread | None
    """How much later than planned requests were sent: if this is long, the client is the limit."""


def summarise(records: Sequence[Record], objective: Objective | None = None) -> Summary:
    """Return the summary of records.

    Raises:
        ValueError: there are no records.
    """
    if not records:
        raise ValueError("records must have at least one request, got none")
    complete = [record for record in records if record.is_complete]
    errors: dict[str, int] = {}
    for record in records:
        if not record.is_complete:
            kind = record.error or "empty answer"
            errors[kind] = errors.get(kind, 0) + 1
    start_s = min(record.sent_s for record in records)
    duration_s = max(record.ended_s for record in records) - start_s
    num_output = sum(record.num_output for record in complete)
    num_prompt = sum(record.num_prompt for record in complete)

    def rate(number: float) -> float:
        return number / duration_s if duration_s > 0 else 0.0

    def spread(values: Sequence[float]) -> Spread | None:
        return Spread.of([1e3 * value for value in values])

    good = None if objective is None else rate(sum(map(objective.holds, complete)))
    return Summary(
        duration_s=duration_s,
        num_complete=len(complete),
        errors=dict(sorted(errors.items())),
        num_prompt_tokens=num_prompt,
        num_cached_tokens=sum(record.num_cached for record in complete),
        num_output_tokens=num_output,
        requests_per_s=rate(len(complete)),
        prompt_tokens_per_s=rate(num_prompt),
        output_tokens_per_s=rate(num_output),
        good_requests_per_s=good,
        most_at_once=_most_at_once(records),
        ttft_ms=spread([record.ttft_s for record in complete]),
        tpot_ms=spread([value for record in complete if (value := record.tpot_s) is not None]),
        itl_ms=spread([gap for record in complete for gap in record.itl_s]),
        e2e_ms=spread([record.e2e_s for record in complete]),
        late_ms=spread([record.sent_s - record.planned_s for record in records]),
    )


def _most_at_once(records: Sequence[Record]) -> int:
    changes = sorted(
        change for record in records for change in ((record.sent_s, 1), (record.ended_s, -1)) if record.ended_s > 0
    )
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most
