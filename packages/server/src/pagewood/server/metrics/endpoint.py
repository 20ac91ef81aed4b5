"""`GET /metrics`: the text that Prometheus reads."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from pagewood.server.http.operations import Operation
from pagewood.server.metrics.facts import Facts
from pagewood.server.metrics.metrics import CONTENT_TYPE, Metrics
from pagewood.server.metrics.native import native_families
from pagewood.server.metrics.sglang import sglang_families
from pagewood.server.metrics.vllm import vllm_families
from pagewood.server.replicas.fleet_status import ServerStatus
from pagewood.server.requests.live import LiveRequests

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
    status: ServerStatus
    live: LiveRequests
    model_name: str

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
        facts = Facts.of(
            self.metrics,
            self.status,
            model_name=self.model_name,
            num_live=self.live.num_live,
            num_ending=self.live.num_ending,
        )
        yield from native_families(facts, self.metrics.usage()).found
        if "vllm" in self.metrics.compat:
            yield from vllm_families(facts).found
        if "sglang" in self.metrics.compat:
            for families in sglang_families(facts):
                yield from families.found


def text_of(families: Sequence[Metric]) -> bytes:
    """Return families in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(families))
    return generate_latest(registry)
