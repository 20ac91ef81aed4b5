"""Families of Prometheus' text format from numbers; the collector and the aliases are made of these."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from pagewood.engine.observe.histogram import Histogram

Labelled = Iterable[tuple[Mapping[str, str], float]]
Counted = tuple[Sequence[float], Sequence[int], float]
"""Bounds, counts between them, and the total of the values."""


class Families:
    """Families under one prefix, all with the same first labels. Invariant: each name is added once."""

    __slots__ = ("_common", "_prefix", "found")

    def __init__(self, prefix: str, common: Mapping[str, str] | None = None) -> None:
        """Start without families; `common` are labels of every sample."""
        self._prefix = prefix
        self._common = dict(common or {})
        self.found: list[Metric] = []  # written by: gauge, counter, histogram

    def gauge(self, name: str, text: str, value: float | Labelled) -> None:
        """Add a gauge, with one value or with labelled ones."""
        family = GaugeMetricFamily(self._prefix + name, text)
        self._fill(family, self._prefix + name, value)

    def counter(self, name: str, text: str, value: float | Labelled) -> None:
        """Add a counter; `name` has no `_total`."""
        family = CounterMetricFamily(self._prefix + name, text)
        self._fill(family, f"{self._prefix}{name}_total", value)

    def histogram(self, name: str, text: str, values: Iterable[tuple[Mapping[str, str], Counted]]) -> None:
        """Add a histogram with labelled counts."""
        full = self._prefix + name
        family = HistogramMetricFamily(full, text)
        for labels, (bounds, counts, total) in values:
            every = {**self._common, **labels}
            sums = list(accumulate(counts))
            for bound, num in zip((*bounds, float("inf")), sums, strict=True):
                family.add_sample(f"{full}_bucket", {**every, "le": _shown(bound)}, num)
            family.add_sample(f"{full}_count", every, sums[-1])
            family.add_sample(f"{full}_sum", every, total)
        self.found.append(family)

    def _fill(self, family: Metric, name: str, value: float | Labelled) -> None:
        no_labels: dict[str, str] = {}
        values: Labelled = [(no_labels, value)] if isinstance(value, (int, float)) else value
        for labels, number in values:
            family.add_sample(name, {**self._common, **labels}, number)
        self.found.append(family)


def merged(found: Iterable[Metric]) -> list[Metric]:
    """Return families of several models as one family for each name; their samples differ in a label."""
    families: dict[str, Metric] = {}
    for family in found:
        joint = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
        for sample in family.samples:
            joint.add_sample(sample.name, sample.labels, sample.value)
    return list(families.values())


def counted(histogram: Histogram) -> Counted:
    """Return the counts of a histogram."""
    return histogram.bounds, histogram.counts, histogram.total


def added(histograms: Iterable[Histogram], bounds: Sequence[float]) -> Counted:
    """Return the sum of histograms with equal bounds."""
    counts, total = [0] * (len(bounds) + 1), 0.0
    for one in histograms:
        counts = [num + other for num, other in zip(counts, one.counts, strict=True)]
        total += one.total
    return bounds, counts, total


def coarser(fine: Counted, bounds: Sequence[float]) -> Counted:
    """Return the same counts with fewer bounds, all of which `fine` has.

    Raises:
        ValueError: `fine` lacks a bound.
    """
    fine_bounds, counts, total = fine
    missing = set(bounds) - set(fine_bounds)
    if missing:
        raise ValueError(f"bounds must be among those of the histogram, got {sorted(missing)}")
    sums = dict(zip((*fine_bounds, float("inf")), accumulate(counts), strict=True))
    at_most = [sums[bound] for bound in (*bounds, float("inf"))]
    return bounds, [high - low for high, low in zip(at_most, [0, *at_most], strict=False)], total


def _shown(bound: float) -> str:
    """Return a bound as prometheus-client writes it."""
    return "+Inf" if bound == float("inf") else str(float(bound))
