"""Plots of runs: durations of requests and load of replicas."""
# pyright: basic
# matplotlib's own annotations are incomplete.

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pagewood.schedpolicy.simulation.histogram import DurationHistogram
from pagewood.schedpolicy.simulation.metrics import Moment, Observations, Outcome, RequestRecord
from pagewood.schedpolicy.simulation.report import records_of

Runs = Mapping[str, Sequence[Observations]]
"""Observations of the replicas, by policy."""

_STYLES = ("-", "--", "-.", ":")


def draw(folder: Path, runs: Runs, *, num_pages: int, title: str) -> None:
    """Write `cdf.png` (three distributions) and `timeline.png` (the first replica) into a folder, which is created.

    Args:
        folder: Folder for the files.
        runs: Runs to draw.
        num_pages: Pages of a replica.
        title: Title of the plots.
    """
    folder.mkdir(parents=True, exist_ok=True)
    figure, axes = new_figure(title, 3)
    draw_cdf(axes[0], runs, lambda record: record.first_token_after_s, "time to first token, s")
    draw_gap_cdf(axes[1], runs)
    draw_cdf(axes[2], runs, lambda record: record.after_s, "end to end, s")
    save(figure, folder / "cdf.png")
    figure, axes = new_figure(f"{title}, first replica", 3)
    draw_timeline(axes[0], runs, lambda moment: moment.num_running, "running")
    draw_timeline(axes[1], runs, lambda moment: moment.num_waiting, "waiting")
    draw_timeline(axes[2], runs, lambda moment: 100 * moment.num_used / num_pages, "KV in use, %")
    save(figure, folder / "timeline.png")


def new_figure(title: str, num_axes: int) -> tuple[Figure, list[Axes]]:
    """Return a figure with `num_axes` axes side by side."""
    figure = Figure(figsize=(4 * num_axes, 2.8), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=10)
    return figure, [figure.add_subplot(1, num_axes, index + 1) for index in range(num_axes)]


def save(figure: Figure, path: Path) -> None:
    """Write a figure as a small PNG; the same figure gives the same bytes."""
    legend = figure.axes[0].legend(fontsize=8)
    legend.get_frame().set_alpha(0.6)
    figure.savefig(path, dpi=72, metadata={"Software": None})


def draw_cdf(axes: Axes, runs: Runs, value: Callable[[RequestRecord], float], label: str) -> None:
    """Draw the cumulative distribution of a value over the finished requests."""
    for index, (policy, observed) in enumerate(runs.items()):
        values = sorted(value(record) for record in records_of(observed) if record.outcome is Outcome.FINISHED)
        # A few hundred points draw the same line in a smaller file.
        step = max(1, len(values) // 400)
        points = [(values[place], (place + 1) / len(values)) for place in range(0, len(values), step)]
        _curve(axes, policy, index, points)
    _label(axes, label, "part of requests")
    axes.set_xscale("log")


def draw_gap_cdf(axes: Axes, runs: Runs) -> None:
    """Draw the cumulative distribution of the time between two tokens."""
    for index, (policy, observed) in enumerate(runs.items()):
        gaps = DurationHistogram()
        for one in observed:
            gaps.merge(one.gaps)
        seen, points = 0, []
        for seconds, count in gaps.buckets():
            seen += count
            points.append((1e3 * seconds, seen / gaps.num))
        _curve(axes, policy, index, points)
    _label(axes, "between tokens, ms", "part of tokens")
    axes.set_xscale("log")


def draw_timeline(axes: Axes, runs: Runs, value: Callable[[Moment], float], label: str) -> None:
    """Draw a value of the first replica over time."""
    for index, (policy, observed) in enumerate(runs.items()):
        _curve(axes, policy, index, [(moment.at_s, value(moment)) for moment in observed[0].timeline.moments])
    _label(axes, "time, s", label)


def _curve(axes: Axes, policy: str, index: int, points: Sequence[tuple[float, float]]) -> None:
    axes.plot(
        [x for x, _ in points], [y for _, y in points], _STYLES[index % len(_STYLES)], label=policy, linewidth=1.3
    )


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
