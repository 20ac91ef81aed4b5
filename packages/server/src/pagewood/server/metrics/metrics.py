"""All counts of the HTTP process, and the text that Prometheus reads."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pagewood.server.metrics.processes import ProcessUsage, usage_of
from pagewood.server.metrics.recent import Recent
from pagewood.server.metrics.requests import RequestMetrics
from pagewood.server.observe.incidents import Incidents
from pagewood.server.replicas.fleet_status import ServerStatus

if TYPE_CHECKING:
    from pagewood.server.http.exchange import Exchange
    from pagewood.server.jobs.worker import JobCounts

Compat = Literal["vllm", "sglang"]
COMPAT: tuple[Compat, ...] = ("vllm", "sglang")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_METHODS = frozenset({"GET", "POST", "DELETE", "OPTIONS", "HEAD"})
_OTHER = "other"


def _own_process() -> Mapping[str, int]:
    return {"http": os.getpid()}


@dataclass(slots=True, kw_only=True, eq=False)
class Metrics:
    """The counts of the HTTP process. Invariant: labels have a bounded number of values, and none is a client's
    text."""

    requests: RequestMetrics = field(default_factory=RequestMetrics)
    compat: Collection[Compat] = ()
    """Servers under whose names the series are shown, too."""
    processes: Callable[[], Mapping[str, int]] = _own_process
    """Returns name -> process id of the server's processes."""  # written by: serve
    num_connections: Callable[[], int] = lambda: 0
    """Returns how many connections are open."""  # written by: serve
    jobs: Callable[[], JobCounts] | None = None
    """Returns what has become of batches; None: the server keeps none."""  # written by: serve, memory_server
    paths: Collection[str] = ()
    """Paths that have counts of their own."""  # written by: Frontend.app
    started_s: float = field(default_factory=time.time)
    """Unix time, seconds."""
    exchanges: Counter[tuple[str, str, int]] = field(default_factory=Counter[tuple[str, str, int]])
    """HTTP requests by method, path and status."""  # contents written by: answered
    errors: Counter[str] = field(default_factory=Counter[str])
    """HTTP requests by the code of their error."""  # contents written by: answered
    incidents: Incidents = field(default_factory=Incidents)
    """Incidents, counted by the rest of the server."""
    recent: Recent = field(default_factory=Recent)

    def answered(self, exchange: Exchange) -> None:
        """Count an HTTP request that is over."""
        method = exchange.method if exchange.method in _METHODS else _OTHER
        path = exchange.path if exchange.path in self.paths else _OTHER
        self.exchanges[method, path, exchange.status] += 1
        if exchange.error_code:
            self.errors[exchange.error_code] += 1

    def pulsed(self, status: ServerStatus) -> None:
        """Take the measurements of the engine."""
        found = status.measurement
        if found is not None:
            accounts = self.requests.accounts
            cached = sum(account.num_cached_tokens for account in accounts)
            prompt = sum(account.num_prompt_tokens for account in accounts)
            self.recent.note(time.monotonic(), (found.num_decode_tokens, cached, prompt))

    def usage(self) -> dict[str, ProcessUsage]:
        """Return the use of CPU time, memory and files by each process of the server."""
        return usage_of(self.processes())
