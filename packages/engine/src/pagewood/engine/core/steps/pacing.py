"""Limits the prompt tokens of a step by how long earlier steps took, so that decoding requests get tokens in time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pagewood.engine.core.queue.state import EngineState
from pagewood.engine.core.steps.grant import Grant


class Chunking(Protocol):
    """Learns how long steps take, and says how many prompt tokens fit into one."""

    def tokens(self, *, num_decode: int, num_kv: int) -> int:
        """Return the prompt tokens of a step beside decodes that read `num_kv` tokens of KV."""
        ...

    def record(self, *, num_prefill: int, num_decode: int, num_kv: int, seconds: float) -> None:
        """Note how long a step took."""
        ...


class Pacing:
    """Measures steps and limits their prompts. A step counts from its launch, or from the end of the step before it."""

    __slots__ = ("_chunking", "_ended_s")

    def __init__(self, chunking: Chunking) -> None:
        """Limit prompts by `chunking`."""
        self._chunking = chunking
        self._ended_s = 0.0  # written by: pacing

    def max_prefill_tokens(self, state: EngineState) -> int:
        """Return the most prompt tokens of the next step."""
        decoding = [request for request in state.running if request.num_launched >= request.num_prompt]
        return self._chunking.tokens(num_decode=len(decoding), num_kv=sum(request.num_launched for request in decoding))

    def ended(self, grants: Sequence[Grant], *, launched_s: float, now_s: float) -> None:
        """Note that a step has ended, whatever it yielded."""
        began_s, self._ended_s = max(launched_s, self._ended_s), now_s
        decoding = [grant for grant in grants if grant.start >= grant.request.num_prompt]
        num_decode = sum(grant.num_tokens for grant in decoding)
        self._chunking.record(
            num_prefill=sum(grant.num_tokens for grant in grants) - num_decode,
            num_decode=num_decode,
            num_kv=sum(grant.start for grant in decoding),
            seconds=now_s - began_s,
        )
