"""The requests of an engine and where they stand: data, and numbers derived from it.

Positions of one request, left to right:

    0        num_computed      num_launched       num_known          length         max_length
    |  KV readable  |  KV being written  |  host knows the token |  sampled, unseen  |  not yet promised

`num_launched` runs ahead of `num_computed` by the steps in flight, and `length` ahead of `num_known` by the tokens
that the device has been told to sample and that the host has not seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from pagewood.engine.api import FinishReason, SamplingParams
from pagewood.engine.core.arrays import Int32

_NO_TOKEN = b"\xff\xff\xff\xff"


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One request from its arrival to its last answer. Invariant: num_computed <= num_launched <= length."""

    request_id: str
    sampling: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    priority: int  # written by: intake
    namespace: str | None
    carry: bytes
    arrival: int
    arrived_s: float
    num_prompt: int
    max_length: int
    """Prompt plus output at which it ends."""

    tokens: Int32
    """[max_length], known up to num_known."""  # written by: retire
    num_known: int  # written by: retire
    num_computed: int = 0
    """Positions whose KV is written and may be read by others."""  # written by: retire, kv
    finish: FinishReason | None = None  # written by: retire
    answered: bool = False
    """Whether its first Delta is out."""  # written by: retire

    num_launched: int = 0
    """Positions handed to the device since it was admitted."""  # written by: loop
    num_unseen: int = 0
    """Tokens that launched steps will sample."""  # written by: loop
    num_in_flight: int = 0
    """Launched steps that read or write its pages."""  # written by: loop

    num_matched: int = 0
    """Cached prefix tokens, as last probed or taken."""  # written by: kv
    matched_epoch: int = -1
    """State of the cache when num_matched was probed without a watch."""  # written by: kv
    num_cached: int = -1
    """Prompt tokens that its first admission found in the cache; -1: not admitted yet."""  # written by: kv
    watch: object = None
    """What keeps num_matched true while it waits; None: nothing does."""  # written by: kv
    recall: object = None
    """Its KV on the way back from another memory; None: nothing is."""  # written by: kv
    is_recalled: bool = False
    """Whether it has been asked, since it began to wait, what other memories have of it."""  # written by: kv
    row: int = -1
    """Its line in the device tables; -1: none."""  # written by: kv
    pages: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    """[capacity] page ids, known up to num_pages; append-only while it runs."""  # written by: kv
    num_pages: int = 0  # written by: kv
    num_published: int = 0
    """Leading pages that were offered to the cache."""  # written by: kv
    private: np.ndarray[Any, np.dtype[np.bool_]] = field(default_factory=lambda: np.empty(0, np.bool_))
    """[capacity] whether it, and not the cache, owns the page."""  # written by: kv
    lease: object = None
    """Locked path in the cache that covers its published pages; None: no row."""  # written by: kv

    @property
    def length(self) -> int:
        """Tokens known and promised."""
        return self.num_known + self.num_unseen

    @property
    def num_tokens(self) -> int:
        """Tokens that the host knows."""
        return self.num_known

    @property
    def num_generated(self) -> int:
        """Output tokens that the host knows."""
        return self.num_known - self.num_prompt

    @property
    def max_new_tokens(self) -> int:
        """Output tokens that it may have in total."""
        return self.max_length - self.num_prompt

    @property
    def tenant(self) -> str:
        """Who shares the engine with others: its namespace."""
        return self.namespace or ""

    def prefix(self, num_tokens: int) -> bytes:
        """Return its first tokens as bytes, after its namespace between two items that are no token ids."""
        tokens = self.tokens[: min(num_tokens, self.num_known)].tobytes()
        if self.namespace is None:
            return tokens
        name = self.namespace.encode()
        return _NO_TOKEN + name + bytes(-len(name) % len(_NO_TOKEN)) + _NO_TOKEN + tokens


class Queue(Protocol):
    """The waiting requests, in an order that they are asked for."""

    def add(self, request: Request) -> None:
        """Take a request in: a new one, or one that was preempted."""
        ...

    def remove(self, request: Request) -> None:
        """Let a request go that has ended."""
        ...

    def admit(self, request: Request) -> None:
        """Let a request go that runs."""
        ...

    def stop(self, request: Request) -> None:
        """Take note that a request from here runs no more."""
        ...

    def update(self, request: Request) -> None:
        """Take note that a waiting request has another priority, or that more or less of it is cached."""
        ...

    def ordered(self, now_s: float) -> Iterator[Request]:
        """Yield the requests, first to be admitted first; nobody may come or go meanwhile."""
        ...

    def __contains__(self, request: Request, /) -> bool:
        """Return whether the request waits."""
        ...

    def __len__(self) -> int:
        """Return how many wait."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class EngineState:
    """All requests that have no last answer yet, or whose pages are still being read.

    Invariant: a request is in exactly one of the three lists; only `running` and `draining` ones hold a row.
    """

    waiting: Queue
    """Queued, no row."""  # written by: intake, plan, retire
    running: list[Request] = field(default_factory=list["Request"])
    """Holding a row; most deserving first, as `deserving` says."""  # written by: plan, retire, intake
    draining: list[Request] = field(default_factory=list["Request"])
    """Ended, with a launched step that still reads their pages."""  # written by: retire
    by_id: dict[str, Request] = field(default_factory=dict[str, "Request"])
    """The requests that have no last answer yet."""  # written by: intake, retire

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued, running or draining."""
        return not (len(self.waiting) or self.running or self.draining)


def deserving(request: Request) -> tuple[int, int]:
    """Return the rank of a running request: by descending priority, then arrival."""
    return -request.priority, request.arrival
