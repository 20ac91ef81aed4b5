"""A lower bound on the time of a case: each step takes the time of its bytes or of its arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from end_to_end.cases import Case
from end_to_end.model import BYTES_PER_VALUE, ModelShape

CHUNK = 512
"""Prompt tokens per step; the engine's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The limits of a machine."""

    bytes_per_s: float
    flops_per_s: Mapping[tuple[str, int], float]
    """Rate by projection and rows: the faster of the engine's and torch's, with weights in the cache if they fit."""

    def flops_for(self, name: str, num_rows: int) -> float:
        """Return the rate of a projection at the measured number of rows that is nearest to `num_rows`."""
        measured = [rows for shape, rows in self.flops_per_s if shape == name]
        nearest = min(measured, key=lambda rows: max(rows, num_rows) / min(rows, num_rows))
        return self.flops_per_s[name, nearest]

    @property
    def peak_flops_per_s(self) -> float:
        """The best rate of all projections."""
        return max(self.flops_per_s.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """The lower bound of a case, and what limits its decode steps."""

    prefill_s: float
    decode_s: float
    decode_bytes_s: float
    """The part of `decode_s` that reading the weights and the KV would take alone."""
    num_output: int
    num_decoded: int

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second over the whole time."""
        return self.num_output / (self.prefill_s + self.decode_s)

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens per second of the decode steps alone."""
        return self.num_decoded / self.decode_s

    @property
    def decode_bandwidth_tokens_per_s(self) -> float:
        """Tokens per second of the decode steps alone, if arithmetic took no time."""
        return self.num_decoded / self.decode_bytes_s


def roofline(case: Case, model: ModelShape, rates: Rates) -> Roofline:
    """Add up the steps of a case; a shared prefix is computed once, and read once per step like all weights."""
    num_prompt = case.num_shared + case.num_requests * case.num_own
    prefill_s = 0.0
    for start in range(0, num_prompt, CHUNK):
        count = min(CHUNK, num_prompt - start)
        # how far each token looks back: grows over the shared part, restarts after it for the own part of each request
        context = start + count / 2 if start + count <= case.num_shared else case.num_shared + case.num_own / 2
        kv_read = min(start, case.num_shared)
        prefill_s += max(_step(model, rates, rows=count, sampled=0, context=context, kv_read=kv_read))
    prefill_s += max(_head(model, rates, case.num_requests))
    decode_s = decode_bytes_s = 0.0
    for step in range(1, case.num_output):
        own = case.num_own + step
        bytes_s, flops_s = _step(
            model,
            rates,
            rows=case.num_requests,
            sampled=case.num_requests,
            context=case.num_shared + own,
            kv_read=case.num_shared + case.num_requests * own,
        )
        decode_s += max(bytes_s, flops_s)
        decode_bytes_s += bytes_s
    return Roofline(
        prefill_s=prefill_s,
        decode_s=decode_s,
        decode_bytes_s=decode_bytes_s,
        num_output=case.num_requests * case.num_output,
        num_decoded=case.num_requests * (case.num_output - 1),
    )


def _step(
    model: ModelShape, rates: Rates, *, rows: int, sampled: int, context: float, kv_read: int
) -> tuple[float, float]:
    """Return the seconds that a step takes for its bytes, and those for its arithmetic."""
    num_bytes = kv_read * model.kv_bytes_per_token
    # scores and weighted sums: two products of head_dim per query head and position
    flops_s = 4 * rows * context * model.hidden_size * model.num_layers / rates.peak_flops_per_s
    for linear in model.linears():
        num_bytes += linear.num_weights * BYTES_PER_VALUE
        flops_s += 2 * rows * linear.num_weights / rates.flops_for(linear.name, rows)
    head_bytes_s, head_flops_s = _head(model, rates, sampled) if sampled else (0.0, 0.0)
    return num_bytes / rates.bytes_per_s + head_bytes_s, flops_s + head_flops_s


def _head(model: ModelShape, rates: Rates, rows: int) -> tuple[float, float]:
    head = model.head()
    return (
        head.num_weights * BYTES_PER_VALUE / rates.bytes_per_s,
        2 * rows * head.num_weights / rates.flops_for(head.name, rows),
    )
