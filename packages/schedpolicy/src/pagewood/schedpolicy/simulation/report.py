"""The result of a run: percentiles, goodput, fairness and hit rate, as a table and as JSON."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby

from pagewood.schedpolicy.counts import require_real
from pagewood.schedpolicy.simulation.histogram import DurationHistogram
from pagewood.schedpolicy.simulation.metrics import Observations, Outcome, RequestRecord

PERCENTS = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The limits within which a request counts as served well.

    Attributes:
        first_token_s: Longest time to first token, > 0.
        per_token_s: Longest mean time between tokens, > 0.
    """

    first_token_s: float = 2.0
    per_token_s: float = 0.1

    def __post_init__(self) -> None:
        for name in ("first_token_s", "per_token_s"):
            value: float = getattr(self, name)
            require_real(name, value)
            if not value > 0:
                raise ValueError(f"{name} must be > 0, got {value}")

    def is_met(self, record: RequestRecord) -> bool:
        """Return whether a request was served well, and met its deadline if it has one."""
        return (
            record.outcome is Outcome.FINISHED
            and record.first_token_after_s <= self.first_token_s
            and record.per_token_s <= self.per_token_s
            and record.finished_s <= record.deadline_s
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A distribution in five numbers, in seconds; all are 0 if it is empty."""

    mean: float
    p50: float
    p90: float
    p99: float
    longest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSummary:
    """Results of one tenant.

    Attributes:
        num_requests: All requests, including refused ones.
        ttft: Time to first token.
        goodput: Part of its requests that met the objective.
    """

    num_requests: int
    ttft: Spread
    goodput: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Results of one run.

    Attributes:
        num_requests: All requests, including refused ones.
        num_refused: Refused requests.
        duration_s: From the first arrival to the last end.
        ttft: Time to first token.
        itl: Time between two tokens of a request, over all tokens; percentiles within 1%.
        e2e: Time from arrival to end.
        goodput_per_s: Requests per second that met the objective.
        goodput: Part of all requests that met it.
        deadlines_met: Part of the requests with a deadline that met it; 1 if no request has one.
        output_tokens_per_s: Generated tokens per second.
        hit_rate: Part of all prompt tokens that were found in the cache.
        num_preemptions: Number of preemptions.
        num_recomputed: Tokens computed again after preemptions.
        num_steps: Steps of all replicas.
        busy: Mean part of the time in which a replica ran a step.
        overtaken_s: Longest time by which a request arrived after another one on the same replica and was admitted
            before it; 0 if requests are admitted as they arrive, without bound if a request starves.
        service_gap: Largest difference in service between two tenants that both had requests waiting, over all
            replicas. A computed prompt token counts 1, a generated token 2.
        tenants: Results by tenant, for at most the first 16 to appear.
    """

    num_requests: int
    num_refused: int
    duration_s: float
    ttft: Spread
    itl: Spread
    e2e: Spread
    goodput_per_s: float
    goodput: float
    deadlines_met: float
    output_tokens_per_s: float
    hit_rate: float
    num_preemptions: int
    num_recomputed: int
    num_steps: int
    busy: float
    overtaken_s: float
    service_gap: float
    tenants: dict[str, TenantSummary]


_MAX_TENANTS = 16


def spread_of(values: Sequence[float]) -> Spread:
    """Return the spread of a sample, with percentiles by nearest rank."""
    if not values:
        return Spread(mean=0.0, p50=0.0, p90=0.0, p99=0.0, longest=0.0)
    ordered = sorted(values)
    p50, p90, p99 = (ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)] for percent in PERCENTS)
    return Spread(mean=math.fsum(ordered) / len(ordered), p50=p50, p90=p90, p99=p99, longest=ordered[-1])


def records_of(observed: Sequence[Observations]) -> list[RequestRecord]:
    """Return the records of all replicas, sorted by arrival."""
    return sorted((record for one in observed for record in one.records), key=lambda record: record.arrival)


def summarise(observed: Sequence[Observations], objective: Objective) -> Summary:
    """Summarise the observations of all replicas."""
    records = records_of(observed)
    finished = [record for record in records if record.outcome is Outcome.FINISHED]
    start_s = min(record.arrived_s for record in records)
    duration_s = max(record.finished_s for record in records) - start_s
    gaps = DurationHistogram()
    for one in observed:
        gaps.merge(one.gaps)
    due = [record for record in records if record.deadline_s < math.inf]
    num_met = sum(map(objective.is_met, records))
    num_prompt = sum(record.num_prompt for record in finished)
    return Summary(
        num_requests=len(records),
        num_refused=len(records) - len(finished),
        duration_s=duration_s,
        ttft=spread_of([record.first_token_after_s for record in finished]),
        itl=_spread_of_gaps(gaps),
        e2e=spread_of([record.after_s for record in finished]),
        goodput_per_s=_ratio(num_met, duration_s),
        goodput=num_met / len(records),
        deadlines_met=_ratio(sum(_is_in_time(record) for record in due), len(due)) if due else 1.0,
        output_tokens_per_s=_ratio(sum(record.num_output for record in finished), duration_s),
        hit_rate=_ratio(sum(record.num_hit for record in finished), num_prompt),
        num_preemptions=sum(record.num_preemptions for record in records),
        num_recomputed=sum(record.num_recomputed for record in records),
        num_steps=sum(one.num_steps for one in observed),
        busy=_ratio(math.fsum(one.busy_s for one in observed), duration_s * len(observed)),
        overtaken_s=max(overtaken_s(one.records) for one in observed),
        service_gap=max(one.service.largest for one in observed),
        tenants=_tenants(records, objective),
    )


def overtaken_s(records: Sequence[RequestRecord]) -> float:
    """Return the longest time by which a request of one replica arrived after another and was admitted before it.

    Requests admitted in the same step do not count as admitted one before the other.
    """
    longest_s = latest_s = 0.0
    ordered = sorted((r for r in records if r.admitted_s < math.inf), key=lambda record: record.admitted_s)
    for _, together in groupby(ordered, key=lambda record: record.admitted_s):
        arrivals = [record.arrived_s for record in together]
        longest_s = max(longest_s, latest_s - min(arrivals))
        latest_s = max(latest_s, *arrivals)
    return longest_s


def _tenants(records: Sequence[RequestRecord], objective: Objective) -> dict[str, TenantSummary]:
    by_tenant: dict[str, list[RequestRecord]] = {}
    for record in records:
        if record.tenant in by_tenant or len(by_tenant) < _MAX_TENANTS:
            by_tenant.setdefault(record.tenant, []).append(record)
    return {
        tenant: TenantSummary(
            num_requests=len(own),
            ttft=spread_of([record.first_token_after_s for record in own if record.outcome is Outcome.FINISHED]),
            goodput=sum(map(objective.is_met, own)) / len(own),
        )
        for tenant, own in by_tenant.items()
    }


def _is_in_time(record: RequestRecord) -> bool:
    return record.outcome is Outcome.FINISHED and record.finished_s <= record.deadline_s


def _spread_of_gaps(gaps: DurationHistogram) -> Spread:
    p50, p90, p99 = (gaps.percentile(percent) for percent in PERCENTS)
    return Spread(mean=_ratio(gaps.total_s, gaps.num), p50=p50, p90=p90, p99=p99, longest=gaps.longest_s)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


COLUMNS = (
    "policy", "ttft p50", "p90", "p99", "max", "itl p50", "p99", "e2e p50", "p99",
    "goodput/s", "goodput", "tok/s", "hits", "preempt", "overtaken", "gap", "refused",
)  # fmt: skip


def row_of(policy: str, summary: Summary) -> tuple[str, ...]:
    """Return one line of the table: times in seconds, gaps between tokens in milliseconds, service in thousands."""
    ttft, itl, e2e = summary.ttft, summary.itl, summary.e2e
    seconds = tuple(f"{value:.3g}" for value in (ttft.p50, ttft.p90, ttft.p99, ttft.longest))
    gaps = tuple(f"{1e3 * value:.3g}ms" for value in (itl.p50, itl.p99))
    return (
        policy,
        *seconds,
        *gaps,
        f"{e2e.p50:.3g}",
        f"{e2e.p99:.3g}",
        f"{summary.goodput_per_s:.3g}",
        f"{summary.goodput:.1%}",
        f"{summary.output_tokens_per_s:.0f}",
        f"{summary.hit_rate:.1%}",
        f"{summary.num_preemptions}",
        f"{summary.overtaken_s:.3g}",
        f"{summary.service_gap / 1e3:.3g}k",
        f"{summary.num_refused}",
    )


def table_of(rows: Sequence[Sequence[str]]) -> str:
    """Return lines of aligned columns, the first aligned left and the others right."""
    lines = [COLUMNS, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def json_of(run: dict[str, object], summaries: dict[str, Summary]) -> str:
    """Return the summaries of policies and the settings of the run as JSON; the same run gives the same bytes."""
    policies = {policy: asdict(summary) for policy, summary in summaries.items()}
    return json.dumps({"format": "pagewood-simulation/1", "run": run, "policies": policies}, indent=2) + "\n"
