"""The content of `pagewood top`, and its plain form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagewood.engine.observe.view import EngineView, RequestView
from pagewood.server.dashboard.live_data import Live
from pagewood.server.dashboard.processes import ProcessLoad
from pagewood.server.dashboard.rates import Percentiles

HEADINGS = ("REQUEST", "STATE", "OUTPUT", "CACHED", "AGE", "TENANT", "WHY IT WAITS")
_WIDTHS = (26, 10, 8, 8, 9, 12)


@dataclass(slots=True, kw_only=True)
class Screen:
    """The newest data of each kind. Invariant: fields that a message leaves out keep their earlier values."""

    live: Live | None = None  # written by: take
    engine: EngineView | None = None  # written by: take
    processes: tuple[ProcessLoad, ...] = ()  # written by: take
    names: Sequence[str] = ()
    """Names of the engine's requests."""  # written by: take

    def take(self, live: Live) -> None:
        """Take a message."""
        if self.live is not None and live.rates is None:
            live = Live(
                **{name: getattr(live, name) for name in Live.__struct_fields__ if name != "rates"},
                rates=self.live.rates,
            )
        self.live = live
        if live.engine is not None:
            self.engine, self.names = live.engine, live.names
        if live.processes is not None:
            self.processes = live.processes

    def figures(self) -> list[tuple[str, str]]:
        """Return names and values of the most important numbers."""
        live, engine = self.live, self.engine
        if live is None or engine is None:
            return []
        running = sum(request.stage in ("running", "paused") for request in engine.requests)
        draining = sum(request.stage == "draining" for request in engine.requests)
        pool, rates = engine.pool, live.rates
        used = pool.num_locked + pool.num_private
        found = [
            ("running", f"{running} of {engine.num_rows}"),
            ("waiting", str(engine.num_requests - running - draining)),
            ("KV used", f"{share(used, pool.num_pages)}, {share(pool.num_cached, pool.num_pages)} more cached"),
        ]
        if rates is None:
            return found
        cached = "-" if rates.cached_share is None else f"{rates.cached_share:.0%}"
        return [
            *found,
            ("output", f"{rates.output_tokens:,.0f} tokens/s"),
            ("prompts", f"{rates.prompt_tokens:,.0f} tokens/s"),
            ("from cache", cached),
            ("first token", spread(rates.first_token)),
            ("between tokens", spread(rates.between_tokens)),
            ("steps", f"{rates.steps:,.0f}/s, {rates.busy:.0%} busy"),
        ]

    def rows(self) -> list[tuple[str, ...]]:
        """Return the cells of each request, as in `HEADINGS`."""
        if self.engine is None:
            return []
        return [_cells(*pair) for pair in zip(self.engine.requests, self.names, strict=True)]


def _cells(request: RequestView, name: str) -> tuple[str, ...]:
    cached = "-" if request.num_cached is None else share(request.num_cached, request.num_prompt)
    left = f"deadline in {duration(request.left_s)}" if request.left_s is not None else ""
    return (
        name or request.request_id,
        request.stage,
        str(request.num_output),
        cached,
        duration(request.age_s),
        request.tenant or "-",
        request.why or left,
    )


def plain(screen: Screen, *, width: int) -> list[str]:
    """Return lines of text of at most `width` characters."""
    live = screen.live
    if live is None:
        return []
    lines = [f"{live.model}: {live.detail}", ""]
    figures = [f"{name} {value}" for name, value in screen.figures()]
    lines += ["   ".join(figures[start : start + 3]) for start in range(0, len(figures), 3)]
    lines += ["", _line(HEADINGS), *map(_line, screen.rows())]
    lines += ["", *(f"{one.name:<14}{one.pid:>8}{one.cpu:>7.0%}{size(one.rss_bytes):>10}" for one in screen.processes)]
    return [_printable(line)[:width].rstrip() for line in lines]


def _line(cells: Sequence[str]) -> str:
    fixed = "".join(f"{shortened(cell, width - 1):<{width}}" for cell, width in zip(cells, _WIDTHS, strict=False))
    return fixed + cells[-1]


def _printable(text: str) -> str:
    """Return text without control characters: ids and tenants come from clients."""
    return "".join(char if char.isprintable() else "?" for char in text)


def shortened(text: str, width: int) -> str:
    """Return the beginning and the end of a text that is too long."""
    return text if len(text) <= width else f"{text[: width - 8]}..{text[-6:]}"


def share(part: float, whole: float) -> str:
    """Return a share in percent."""
    return f"{part / whole:.0%}" if whole else "-"


def duration(seconds: float) -> str:
    """Return a time with a unit that suits it."""
    if seconds < 0.1:
        return f"{1e3 * seconds:.{1 if seconds < 0.01 else 0}f} ms"
    return f"{seconds:.{2 if seconds < 10 else 1}f} s" if seconds < 100 else f"{seconds / 60:.1f} min"


def spread(values: Percentiles | None) -> str:
    """Return the median and the 99th percentile."""
    return "-" if values is None else f"{duration(values.p50)}, p99 {duration(values.p99)}"


def size(num_bytes: int) -> str:
    """Return a size with a unit."""
    return f"{num_bytes / 2**30:.2f} GB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MB"
