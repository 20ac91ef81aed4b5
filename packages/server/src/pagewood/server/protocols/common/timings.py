"""The times of a request's events, as answers show them."""

from __future__ import annotations

import time

import msgspec

from pagewood.engine.api import RequestTimings
from pagewood.server.messages import wire


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a prompt that one step has computed."""

    planned_s: float
    """When the step was planned, Unix time."""
    tokens: int


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """The times of an answer's events in the engine, as Unix seconds, and numbers under the names of llama.cpp."""

    arrived_s: float
    """When the engine got the request."""
    queued_s: float | None
    """When it entered the queue, which is later if its grammar had to be compiled; null: it never entered the queue."""
    admitted_s: float | None
    """When it got memory, and its first step was planned; null: it never got memory."""
    chunks: tuple[Chunk, ...]
    """The steps that computed its prompt, at most the first 256."""
    preemptions: int
    preempted_s: tuple[float, ...]
    """When it was preempted, at most the first 256 times."""
    first_token_s: float | None
    """When the engine sent its first token; null: there is no token."""
    finished_s: float
    cache_n: int
    """Tokens of the prompt that were cached."""
    prompt_n: int
    """Tokens of the prompt that were not cached."""
    prompt_ms: float
    """From its admission to its first token."""
    predicted_n: int
    """Tokens of the answer, with the one that ended it."""
    predicted_ms: float
    """From its first token to its end."""


def timings_of(answer: wire.Answer) -> Timings | msgspec.UnsetType:
    """Return the times of the last message of an answer; UNSET if not requested."""
    if answer.timings is None:
        return msgspec.UNSET
    return timings(
        answer.timings,
        num_prompt=answer.num_prompt_tokens,
        num_cached=answer.num_cached_tokens,
        num_output=answer.num_output_tokens,
    )


def timings(found: RequestTimings, *, num_prompt: int, num_cached: int, num_output: int) -> Timings:
    """Return the shown times of a request, whose clock is that of `time.monotonic`."""
    offset_s = time.time() - time.monotonic()

    def unix(at_s: float | None) -> float | None:
        return None if at_s is None else at_s + offset_s

    admitted_s, first_s, end_s = found.admitted_s, found.first_token_s, found.finished_s
    began_s = end_s if admitted_s is None else admitted_s
    return Timings(
        arrived_s=found.arrived_s + offset_s,
        queued_s=unix(found.queued_s),
        admitted_s=unix(admitted_s),
        chunks=tuple(Chunk(planned_s=at_s + offset_s, tokens=num) for at_s, num in found.chunks),
        preemptions=found.num_preempted,
        preempted_s=tuple(at_s + offset_s for at_s in found.preempted_s),
        first_token_s=unix(first_s),
        finished_s=end_s + offset_s,
        cache_n=num_cached,
        prompt_n=num_prompt - num_cached,
        prompt_ms=((end_s if first_s is None else first_s) - began_s) * 1e3,
        predicted_n=num_output,
        predicted_ms=0.0 if first_s is None else (end_s - first_s) * 1e3,
    )
