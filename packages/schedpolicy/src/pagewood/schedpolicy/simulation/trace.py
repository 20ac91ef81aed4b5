"""Traces: requests with their times, lengths and keys that identify their contents."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pagewood.schedpolicy.counts import require_count, require_real

_MAX_NAME = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request of a trace.

    Keys identify contents: a key stands for a whole block *and everything before it*, so two requests share the first n
    blocks if and only if their n-th keys are equal. The text of prompts is not needed.

    Attributes:
        arrived_s: Seconds since the start of the trace, >= 0.
        num_prompt: Tokens of the prompt, >= 1.
        num_output: Tokens that it generates, >= 1.
        max_new_tokens: Its limit on generated tokens, >= num_output; the scheduler knows only this.
        keys: One per block from the start of the prompt, any integers; they may continue into the output (for a later
            turn that repeats it). Tokens beyond the last key are not shared.
        tenant: Its tenant.
        priority: Higher goes first.
        tag: Routing tag, also the name of its class of service; "" for none.
        deadline_s: Seconds after its arrival by which it should be finished; None for none.
    """

    arrived_s: float
    num_prompt: int
    num_output: int
    max_new_tokens: int
    keys: tuple[int, ...] = ()
    tenant: str = ""
    priority: int = 0
    tag: str = ""
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        require_real("arrived_s", self.arrived_s)
        if not 0 <= self.arrived_s < math.inf:
            raise ValueError(f"arrived_s must be >= 0 and finite, got {self.arrived_s}")
        require_count("priority", self.priority)
        require_count("max_new_tokens", self.max_new_tokens)
        for key in self.keys:
            if type(key) is not int:
                require_count("keys", key)
        for name in ("num_prompt", "num_output"):
            value: int = getattr(self, name)
            require_count(name, value, least=1)
        if self.max_new_tokens < self.num_output:
            raise ValueError(f"max_new_tokens must be >= num_output ({self.num_output}), got {self.max_new_tokens}")
        if self.deadline_s is not None:
            require_real("deadline_s", self.deadline_s)
        if self.deadline_s is not None and not 0 < self.deadline_s < math.inf:
            raise ValueError(f"deadline_s must be > 0 and finite, got {self.deadline_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests in the order of arrival.

    Invariant: `arrived_s` never decreases from one request to the next.

    Attributes:
        name: Name of the file or workload.
        requests: At least one.
        block_size: Tokens that a key stands for.
    """

    name: str
    requests: tuple[TraceRequest, ...]
    block_size: int

    def __post_init__(self) -> None:
        if not self.requests:
            raise ValueError(f"requests must not be empty: {self.name} has none")
        require_count("block_size", self.block_size, least=1)
        previous = 0.0
        for index, request in enumerate(self.requests):
            if request.arrived_s < previous:
                raise ValueError(f"requests must be sorted by arrived_s, got {request.arrived_s} at {index}")
            previous = request.arrived_s

    def page_keys(self, request: TraceRequest, page_size: int) -> tuple[int, ...]:
        """Return the keys of the whole pages of a request that other requests can share.

        Raises:
            ValueError: Neither of `page_size` and `block_size` divides the other.
        """
        num_pages = (request.num_prompt + request.num_output - 1) // page_size
        if page_size == self.block_size:
            return request.keys[:num_pages]
        if self.block_size % page_size == 0:
            ratio = self.block_size // page_size
            num_blocks = -(-num_pages // ratio)
            pages = (key * ratio + part for key in request.keys[:num_blocks] for part in range(ratio))
            return tuple(pages)[:num_pages]
        if page_size % self.block_size == 0:
            ratio = page_size // self.block_size
            return request.keys[ratio - 1 :: ratio][:num_pages]
        raise ValueError(f"page_size must divide block_size ({self.block_size}) or be a multiple, got {page_size}")

    def page_names(self, page_size: int) -> Iterator[tuple[int, ...]]:
        """Yield for each request the names of all whole pages that it computes.

        These are its keys, followed by names that no other page has: an engine caches the end of a prompt and the
        output too, and they take room, although nothing in the trace repeats them. A name is an int32: keys that are
        too large for it are numbered in the order of their first use.

        Raises:
            ValueError: Neither of `page_size` and `block_size` divides the other.
        """
        ratio = max(1, self.block_size // page_size)
        least = min((min(request.keys) for request in self.requests if request.keys), default=0)
        most = max((max(request.keys) for request in self.requests if request.keys), default=0)
        numbers: dict[int, int] | None = None
        num_used = -min(0, least) * ratio
        if max(num_used, (most + 1) * ratio) > _MAX_NAME // 2:
            numbers, num_used = {}, 0
        for request in self.requests:
            keys = self.page_keys(request, page_size)
            if numbers is not None:
                keys = tuple(numbers.setdefault(key, len(numbers)) for key in keys)
            num_own = (request.num_prompt + request.num_output - 1) // page_size - len(keys)
            yield (*keys, *range(-num_used - 1, -num_used - 1 - num_own, -1))
            num_used += num_own


def scaled(trace: Trace, *, rate: float) -> Trace:
    """Return the trace sped up by the factor `rate`.

    Raises:
        ValueError: `rate` is not > 0 and finite.
    """
    require_real("rate", rate)
    if not 0 < rate < math.inf:
        raise ValueError(f"rate must be > 0 and finite, got {rate}")
    requests = tuple(replace(request, arrived_s=request.arrived_s / rate) for request in trace.requests)
    return Trace(name=trace.name, requests=requests, block_size=trace.block_size)
