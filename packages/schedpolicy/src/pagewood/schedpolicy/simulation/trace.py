"""What is simulated: requests with their times, lengths and the identity of their contents."""

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request of a trace.

    Contents are known by keys: a key stands for a whole block *and everything before it*, so two requests share the
    first n blocks exactly if their n-th keys are equal. Prompts are never needed.

    Attributes:
        arrived_s: Seconds since the start of the trace, >= 0.
        num_prompt: Tokens of the prompt, >= 1.
        num_output: Tokens that it generates in the end, >= 1.
        max_new_tokens: Tokens that it asks for at most, >= num_output; what a scheduler can know.
        keys: One per block from the start of the prompt; they may go on into the output (for a later turn that
            repeats it). What lies beyond the last key is shared with nobody.
        tenant: Whose it is.
        priority: Higher goes first.
        tag: Routing tag, and name of its class of service; "" for none.
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
        if not 0 <= self.arrived_s < math.inf:
            raise ValueError(f"arrived_s must be >= 0 and finite, got {self.arrived_s}")
        for name in ("num_prompt", "num_output"):
            value: int = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        if self.max_new_tokens < self.num_output:
            raise ValueError(f"max_new_tokens must be >= num_output ({self.num_output}), got {self.max_new_tokens}")
        if self.deadline_s is not None and not 0 < self.deadline_s < math.inf:
            raise ValueError(f"deadline_s must be > 0 and finite, got {self.deadline_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests by arrival.

    Invariant: `arrived_s` never falls from one request to the next.

    Attributes:
        name: Where it is from.
        requests: At least one.
        block_size: Tokens that a key stands for.
    """

    name: str
    requests: tuple[TraceRequest, ...]
    block_size: int

    def __post_init__(self) -> None:
        if not self.requests:
            raise ValueError(f"requests must not be empty: {self.name} has none")
        if self.block_size < 1:
            raise ValueError(f"block_size must be >= 1, got {self.block_size}")
        previous = 0.0
        for index, request in enumerate(self.requests):
            if request.arrived_s < previous:
                raise ValueError(f"requests must be sorted by arrived_s, got {request.arrived_s} at {index}")
            previous = request.arrived_s

    def page_keys(self, request: TraceRequest, page_size: int) -> tuple[int, ...]:
        """Return the keys of the whole pages of `request` that others can share.

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


def scaled(trace: Trace, *, rate: float) -> Trace:
    """Return the trace played `rate` times as fast.

    Raises:
        ValueError: `rate` is not > 0 and finite.
    """
    if not 0 < rate < math.inf:
        raise ValueError(f"rate must be > 0 and finite, got {rate}")
    requests = tuple(replace(request, arrived_s=request.arrived_s / rate) for request in trace.requests)
    return Trace(name=trace.name, requests=requests, block_size=trace.block_size)
