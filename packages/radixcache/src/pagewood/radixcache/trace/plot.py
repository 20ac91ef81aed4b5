# pyright: basic
# (most of matplotlib's signatures are untyped)
"""Plots of hit rates by capacity."""

from importlib.util import find_spec
from pathlib import Path

from pagewood.radixcache.trace.report import Report

_MARKERS = "osD^vP*XdhH<>"


def can_plot() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def save_plot(report: Report, path: Path) -> None:
    """Plot one curve per policy, together with the upper bounds, and write it to a file.

    Args:
        report: the hit rates to plot.
        path: the file; its suffix selects the format, for example .png.

    Raises:
        ModuleNotFoundError: `can_plot()` is false (`pip install 'pagewood-radixcache[plot]'`).
    """
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    axes = figure.add_subplot(title=report.title, xlabel="capacity, blocks", ylabel="hit rate of blocks", xscale="log")
    axes.plot(report.capacities, report.bound, color="0.25", linestyle="--", label="farthest next use")
    axes.axhline(report.unbounded, color="0.6", linestyle=":", label="infinite cache")
    best_first = sorted(report.hit_rates.items(), key=lambda curve: -curve[1][-1])
    for index, (policy, rates) in enumerate(best_first):
        axes.plot(report.capacities, rates, marker=_MARKERS[index % len(_MARKERS)], markersize=5, label=policy)
    axes.set_ylim(bottom=0)
    axes.set_xticks(report.capacities, [f"{capacity:,}" for capacity in report.capacities])
    axes.minorticks_off()
    axes.grid(color="0.9")
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(path)
