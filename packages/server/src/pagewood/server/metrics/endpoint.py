"""`GET /metrics`: the text that Prometheus reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from pagewood.server.http.operations import Operation
from pagewood.server.metrics.facts import Facts
from pagewood.server.metrics.families import merged
from pagewood.server.metrics.metrics import CONTENT_TYPE, Metrics
from pagewood.server.metrics.models import model_families
from pagewood.server.metrics.native import native_families, process_families
from pagewood.server.metrics.sglang import sglang_families
from pagewood.server.metrics.vllm import vllm_families
from pagewood.server.protocols.common.models import ModelEntry, Models
from pagewood.server.requests.status import EngineStatus

PATH = "/metrics"


@dataclass(frozen=True, slots=True, eq=False)
class _Collected(Collector):
    """Families that are already complete; their samples will not change."""

    families: Sequence[Metric]

    def collect(self) -> Sequence[Metric]:
        return self.families

    def describe(self) -> Sequence[Metric]:
        return ()  # names are checked by tests, and a registry would collect twice


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MetricsEndpoint:
    """Shows the metrics; each request collects them again."""

    metrics: Metrics
    """Metrics of HTTP and of the processes."""
    models: Models

    def operations(self) -> list[Operation]:
        """Return its operation."""
        return [
            Operation(
                name="Metrics",
                is_overview=True,
                tag="Health",
                method="GET",
                path=PATH,
                endpoint=self.show,
                answer=str,
                answer_type="text/plain",
            )
        ]

    async def show(self, request: Request) -> Response:
        """All metrics, in Prometheus' text format."""
        # Writing the text takes most of the time, and on the event loop all streams would wait for it.
        text = await asyncio.to_thread(text_of, list(self.collect()))
        return Response(text, media_type=CONTENT_TYPE)

    def collect(self) -> Iterator[Metric]:
        """Yield the families of this moment."""
        names, entries = self.models.names, self.models.listed()
        facts = [_facts(entry) for entry in entries if entry.metrics is not None]
        yield from _of_all(facts, lambda one: native_families(one).found)
        only = names[0] if len(names) == 1 else None
        yield from process_families(self.metrics, self.metrics.usage(), model_name=only).found
        yield from model_families(entries).found
        if "vllm" in self.metrics.compat:
            yield from _of_all(facts, lambda one: vllm_families(one).found)
        if "sglang" in self.metrics.compat:
            yield from _of_all(facts, lambda one: [family for some in sglang_families(one) for family in some.found])


def _of_all(facts: Sequence[Facts], families_of: Callable[[Facts], Sequence[Metric]]) -> Sequence[Metric]:
    """Return the families of all models."""
    found = [family for one in facts for family in families_of(one)]
    return found if len(facts) == 1 else merged(found)


def _facts(entry: ModelEntry) -> Facts:
    """Return the facts of a model; while it is not loaded, its engine has none."""
    assert entry.metrics is not None
    service = entry.service
    return Facts.of(
        entry.metrics,
        EngineStatus() if service is None else service.status,
        model_name=entry.name,
        num_live=0 if service is None else service.live.num_live,
        num_ending=0 if service is None else service.live.num_ending,
    )


def text_of(families: Sequence[Metric]) -> bytes:
    """Return families in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(families))
    return generate_latest(registry)
