"""The page of plots, drawn from tables of the records in `benchmarks/results`, so that both say the same."""

# pyright: basic
# matplotlib's own annotations are incomplete.

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

_COLOURS = ("#00897b", "#f9a825", "#7e57c2", "#9e9e9e")
_TEXT = {"light": "#212121", "dark": "#eceff1"}
_RECORDS = "benchmarks/results"
_NUMBER = re.compile(r"[\d,]*\.?\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Bars for some numbers of a table.

    Attributes:
        name: of its files.
        title: what is compared.
        record: file with the table.
        header: how the first line of the table begins.
        unit: of the numbers, and which of them are better.
        columns: the columns that are drawn, by their names.
        only: what a line of the table must contain to be drawn; "" for all.
        by_column: whether a group of bars is a column, and a colour a line; otherwise a group is a line.
    """

    name: str
    title: str
    record: str
    header: str
    unit: str
    columns: Sequence[str]
    only: str = ""
    by_column: bool = False


PLOTS = (
    Plot(
        name="radixcache", title="A request's calls of a prefix cache", record="2026-11-22-peers.md",
        header="| | page | SGLang | mini-sglang |", unit="us of the processor, pages of 16 tokens; less is better",
        columns=("RadixCache + PageAllocator", "SGLang", "mini-sglang"), only="| 16 |",
    ),
    Plot(
        name="dense", title="A dense model of 307 million parameters, float32", record="2026-11-29-models.md",
        header="| Gemma-3-like", unit="output tokens/s on two cores; more is better", columns=("1 request", "8", "32"),
        by_column=True,
    ),
    Plot(
        name="experts", title="A mixture of experts, 1,485 million parameters, float32", record="2026-11-29-models.md",
        header="| Qwen3-MoE-like", unit="output tokens/s on two cores; more is better",
        columns=("1 request", "8", "32"), by_column=True,
    ),
    Plot(
        name="encoders", title="all-MiniLM-L6-v2", record="2026-11-29-encoders.md", header="| tokens of a text |",
        unit="texts/s on two cores, by tokens of a text; more is better",
        columns=("Pagewood", "sentence-transformers 6.2"),
    ),
    Plot(
        name="second-turn", title="First token of a second turn, hybrid model of 531 million parameters",
        record="2026-11-29-hybrids.md", header="| prompt | cached tokens |",
        unit="ms, by tokens of the first prompt; less is better",
        columns=("first token, hit", "miss", "`transformers`"),
    ),
    Plot(
        name="prompts-apart", title="Long prompts computed apart, two engines", record="2026-11-29-fleet.md",
        header="| set-up | gap p50", unit="ms; less is better", columns=("gap p50", "p99", "chat: first token p50"),
        by_column=True,
    ),
    Plot(
        name="hit-rate", title="Found in caches of 8 replicas, Mooncake's trace of conversations",
        record="2026-11-29-fleet.md", header="| sent | hit rate |", unit="% of prompt tokens; more is better",
        columns=("hit rate",), by_column=True,
    ),
)  # fmt: skip


def plots_pages(root: Path, address: str) -> Iterator[tuple[str, str | bytes]]:
    """Yield the page and its pictures; `address` is that of the repository.

    Raises:
        ValueError: a record lacks a table, or a table a column.
    """
    lines = [
        "# Plots", "",
        "Drawn from the tables of the records when this site is built. Each record names machine, date and command; "
        "ranges, and what was not measured, stand there, too.", "",
    ]  # fmt: skip
    for plot in PLOTS:
        text = (root / _RECORDS / plot.record).read_text()
        table = read_table(text, plot)
        for theme in _TEXT:
            yield f"results/plots/{plot.name}-{theme}.svg", draw(plot, table, theme)
        picture = " ".join(f"![{plot.title}](plots/{plot.name}-{theme}.svg#only-{theme})" for theme in _TEXT)
        about = text.split("\n\n")[1].replace("\n", " ")
        link = f"[Record]({address}/blob/main/{_RECORDS}/{plot.record})"
        lines += [f"## {plot.title}", "", picture, "", f"{link}: {about}", ""]
    yield "results/plots.md", "\n".join(lines)


def read_table(text: str, plot: Plot) -> dict[str, dict[str, float]]:
    """Return the numbers of a plot, by the name of the line and that of the column.

    Raises:
        ValueError: the table is not there, or lacks a column.
    """
    lines = iter(text.splitlines())
    header = next((line for line in lines if line.startswith(plot.header)), None)
    if header is None:
        raise ValueError(f"{plot.record} must have a table that begins with {plot.header!r}")
    names = _cells(header)
    missing = [name for name in plot.columns if name not in names]
    if missing:
        raise ValueError(f"the table {plot.header!r} of {plot.record} must have columns {', '.join(missing)}")
    next(lines)
    found: dict[str, dict[str, float]] = {}
    for line in lines:
        if not line.startswith("|"):
            break
        if plot.only in line:
            cells = dict(reversed([*zip(names, _cells(line), strict=True)]))  # of columns with one name, the first
            found[_cells(line)[0].replace("`", "")] = {name: _number(cells[name]) for name in plot.columns}
    return found


def draw(plot: Plot, table: dict[str, dict[str, float]], theme: str) -> bytes:
    """Return a picture for a theme; the same table gives the same bytes."""
    if plot.by_column:
        groups, series = list(plot.columns), list(table)
        values = [[table[line][column] for column in groups] for line in series]
    else:
        groups, series = list(table), list(plot.columns)
        values = [[table[line][column] for line in groups] for column in series]
    colour = _TEXT[theme]
    with rc_context({
        "svg.hashsalt": plot.name, "svg.fonttype": "none", "font.size": 9, "font.family": "sans-serif",
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), colour),
    }):  # fmt: skip
        figure = Figure(figsize=(7, 0.5 + 0.2 * len(groups) * (len(series) + 1)), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        height = 0.8 / len(series)
        for index, (name, numbers) in enumerate(zip(series, values, strict=True)):
            places = [group + (index - (len(series) - 1) / 2) * height for group in range(len(groups))]
            bars = axes.barh(places, numbers, height, color=_COLOURS[index], label=name.replace("`", ""))
            axes.bar_label(bars, [f"{number:,.6g}" if number else "not measured" for number in numbers], padding=3)
        axes.set_yticks(range(len(groups)), groups)
        axes.invert_yaxis()
        axes.set_xlabel(plot.unit)
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
        if len(series) > 1:
            figure.legend(loc="outside upper right", ncols=len(series), frameon=False)
        out = io.BytesIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return out.getvalue()


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _number(cell: str) -> float:
    """Return the first number of a cell; 0 if it has none."""
    found = _NUMBER.search(cell)
    return 0.0 if found is None else float(found[0].replace(",", ""))
