"""The numbers that every form of the metrics needs, computed once for a scrape."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from pagewood.engine.observe.histogram import Histogram
from pagewood.server.messages import wire
from pagewood.server.messages.measurement import Measurement, Queue
from pagewood.server.metrics.families import Counted, added
from pagewood.server.metrics.metrics import Metrics
from pagewood.server.metrics.requests import Account, RequestMetrics
from pagewood.server.replicas.fleet_status import ServerStatus

_NO_MEASUREMENT = Measurement(
    stage_s={}, step_s=((), (0,), 0.0), step_tokens=((), (0,), 0.0), num_prefill_tokens=0, num_decode_tokens=0,
    num_available_pages=0, num_evicted_pages=0, preempted={}, queue=Queue(), num_parked=0, num_at_quota=0,
    num_compiling=0, num_recalling=0, tiers={},
)  # fmt: skip
_NO_MODEL = wire.Model(max_length=1, vocab_size=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The server at one moment. Sums of a dead engine are 0 until its successor has sent a pulse."""

    metrics: Metrics
    status: ServerStatus
    model_name: str
    model: wire.Model
    counters: Mapping[str, int]
    measurement: Measurement
    is_measured: bool
    """Whether the engine has sent a measurement."""
    num_output: Mapping[Account, int]
    """Tokens that the requests of an account have generated, those of open requests among them."""
    num_live: int
    num_ending: int

    @classmethod
    def of(cls, metrics: Metrics, status: ServerStatus, *, model_name: str, num_live: int, num_ending: int) -> Facts:
        """Return the facts of this moment."""
        num_output = Counter({account: account.num_output_tokens for account in metrics.requests.accounts})
        for account, num in metrics.requests.output_tokens_of_open():
            num_output[account] += num
        return cls(
            metrics=metrics,
            status=status,
            model_name=model_name,
            model=status.model or _NO_MODEL,
            counters=status.counters,
            measurement=status.measurement or _NO_MEASUREMENT,
            is_measured=status.measurement is not None,
            num_output=num_output,
            num_live=num_live,
            num_ending=num_ending,
        )

    @property
    def requests(self) -> RequestMetrics:
        """The measurements of requests."""
        return self.metrics.requests

    def ended(self) -> Counter[str]:
        """Return the ended requests by reason."""
        return sum((account.num_ended for account in self.requests.accounts), Counter[str]())

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of all accounts."""
        return sum(account.num_prompt_tokens for account in self.requests.accounts)

    @property
    def num_cached_tokens(self) -> int:
        """Cached prompt tokens of all accounts."""
        return sum(account.num_cached_tokens for account in self.requests.accounts)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of all accounts."""
        return sum(self.num_output.values())

    def summed(self, name: str) -> Counted:
        """Return the sum of one histogram of all accounts."""
        histograms: list[Histogram] = [getattr(account, name) for account in self.requests.accounts]
        bounds = histograms[0].bounds if histograms else getattr(_EMPTY, name).bounds
        return added(histograms, bounds)

    def queue_s_by_priority(self) -> dict[str, Counted]:
        """Return the times in the queue of all tenants, by priority."""
        found: dict[str, list[Histogram]] = {}
        for account in self.requests.accounts:
            found.setdefault(account.priority, []).append(account.queue_s)
        return {priority: added(histograms, histograms[0].bounds) for priority, histograms in found.items()}

    @property
    def usage(self) -> float:
        """Share of the KV memory that requests hold; evictable cached pages count as free."""
        num_pages = self.counters.get("num_pages", 0)
        if not num_pages or not self.is_measured:
            return 0.0
        return 1 - self.measurement.num_available_pages / num_pages

    @property
    def num_evictable_pages(self) -> int:
        """Cached pages that no request uses."""
        return max(0, self.measurement.num_available_pages - self.counters.get("num_free_pages", 0))

    def recent(self) -> tuple[float, float]:
        """Return the output tokens per second and the share of cached prompt tokens of the last seconds."""
        seconds, growth = self.metrics.recent.growth(time.monotonic())
        if not seconds:
            return 0.0, 0.0
        output, cached, prompt = growth
        return output / seconds, cached / prompt if prompt else 0.0


_EMPTY = Account(tenant="", priority="0")
