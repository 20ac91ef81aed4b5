"""A run in words: a table, JSON, pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from pagewood.server.bench.records import Record, Spread, Summary

LAG_LIMIT_S = 0.1
"""If the client itself was busy for longer, its times are doubtful."""
_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")


def table(summary: Summary, *, lag_s: float) -> str:
    """Return a summary as text for a terminal."""
    failed = sum(summary.errors.values())
    cached = f", {summary.num_cached_tokens:,} of them cached" if summary.num_cached_tokens else ""
    lines = [
        f"requests            {summary.num_complete:,} complete, {failed:,} failed, {summary.most_at_once:,} at once",
        f"duration            {summary.duration_s:.2f} s",
        f"prompt tokens       {summary.num_prompt_tokens:,}{cached}",
        f"output tokens       {summary.num_output_tokens:,}",
        f"requests per s      {summary.requests_per_s:,.2f}",
        f"prompt tokens per s {summary.prompt_tokens_per_s:,.1f}",
        f"output tokens per s {summary.output_tokens_per_s:,.1f}",
    ]
    if summary.good_requests_per_s is not None:
        lines.append(f"goodput per s       {summary.good_requests_per_s:,.2f} requests that keep the SLO")
    lines += [f"failed: {kind:<12}{number:,}" for kind, number in summary.errors.items()]
    lines += ["", f"{'milliseconds':<20}" + "".join(f"{name:>11}" for name in _COLUMNS)]
    for name, spread in _spreads(summary):
        if spread is not None:
            lines.append(f"{name:<20}" + "".join(f"{getattr(spread, column):>11,.2f}" for column in _COLUMNS))
    late_s = summary.late_ms.p99 / 1e3 if summary.late_ms is not None else 0.0
    if max(lag_s, late_s) > LAG_LIMIT_S:
        lines += [
            "",
            f"The client was the limit: it was busy for up to {1e3 * lag_s:.0f} ms, and 1% of the requests were sent "
            f"more than {1e3 * late_s:.0f} ms late. Send less at once, or use several clients.",
        ]
    return "\n".join(lines)


def _spreads(summary: Summary) -> Sequence[tuple[str, Spread | None]]:
    return (
        ("time to first token", summary.ttft_ms),
        ("per output token", summary.tpot_ms),
        ("between tokens", summary.itl_ms),
        ("end to end", summary.e2e_ms),
    )


def document(summary: Summary, settings: Mapping[str, Any], *, lag_s: float, records: Sequence[Record]) -> bytes:
    """Return a run as JSON: how it was made, its summary, and each request (seconds since the first was sent)."""
    start_s = min((record.sent_s for record in records), default=0.0)
    requests = [
        {
            "planned_s": record.planned_s - start_s,
            "sent_s": record.sent_s - start_s,
            "chunks_s": [moment - start_s for moment in record.chunks_s],
            "ended_s": record.ended_s - start_s,
            "num_prompt": record.num_prompt,
            "num_cached": record.num_cached,
            "num_output": record.num_output,
            "error": record.error,
        }
        for record in records
    ]
    whole = {"settings": settings, "summary": asdict(summary), "client_lag_s": lag_s, "requests": requests}
    return msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n"


def plot(records: Sequence[Record], path: Path) -> None:
    """Write a picture: distributions of the times, and throughput and requests in flight over the run.

    Raises:
        ValueError: matplotlib is missing, or no request is complete.
    """
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from error
    complete = [record for record in records if record.is_complete]
    if not complete:
        raise ValueError("no request is complete, so there is nothing to draw")
    start_s = min(record.sent_s for record in complete)
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), layout="constrained")
    gaps = [1e3 * gap for record in complete for gap in record.itl_s]
    for axis, name, values in (
        (axes[0][0], "time to first token, ms", [1e3 * record.ttft_s for record in complete]),
        (axes[0][1], "time between tokens, ms", gaps),
    ):
        if values:
            axis.ecdf(values)
        axis.set(xlabel=name, ylabel="share of all")
        axis.grid(alpha=0.3)
    moments = sorted(moment - start_s for record in complete for moment in record.chunks_s)
    axes[1][0].hist(moments, bins=60, histtype="step")
    axes[1][0].set(xlabel="seconds", ylabel="chunks")
    changes = sorted(
        change for record in complete for change in ((record.sent_s - start_s, 1), (record.ended_s - start_s, -1))
    )
    times, counts, now = [0.0], [0], 0
    for moment, change in changes:
        now += change
        times.append(moment)
        counts.append(now)
    axes[1][1].step(times, counts, where="post")
    axes[1][1].set(xlabel="seconds", ylabel="requests in flight")
    figure.savefig(path, dpi=120)  # pyright: ignore[reportUnknownMemberType]  # matplotlib is typed in part only
    pyplot.close(figure)
