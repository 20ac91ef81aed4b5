# pyright: basic
"""Clients that each send their next request when their answer has ended, in the process of an engine.

Imports nothing of ours, so that every engine is measured by the same lines.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol


class System(Protocol):
    """An engine that is stepped by its caller."""

    vocab_size: int

    def send(self, name: str, tokens: list[int], num_output: int) -> None:
        """Add a request for exactly that many greedy tokens."""
        ...

    def step(self) -> list[tuple[str, int, bool]]:
        """Do one step; return what is new: a request, its number of new tokens, and whether it has ended."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Clients that send one request after the other; a prompt is the shared prefix and tokens of its own."""

    num_clients: int
    num_shared: int
    num_own: int
    num_output: int = 64
    num_each: int = 2
    """Requests of each client."""

    @property
    def length(self) -> int:
        """Tokens of one request at its end."""
        return self.num_shared + self.num_own + self.num_output


@dataclass(slots=True, kw_only=True)
class Times:
    """What clients have seen."""

    first_s: list[float] = field(default_factory=list)
    """Seconds from each request to its first token."""
    between_s: list[float] = field(default_factory=list)
    """Seconds between the tokens of an answer."""
    num_tokens: int = 0
    seconds: float = 0.0

    def add(self, other: Mapping[str, object]) -> None:
        """Add another run, given by its fields."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + other[name])


def run(system: System, load: Load, *, seed: int) -> Times:
    """Let every client send its requests; all begin together."""
    shared_rng, rng = random.Random("shared"), random.Random(seed)
    shared = [shared_rng.randrange(system.vocab_size) for _ in range(load.num_shared)]
    times = Times()
    sent_s: dict[str, float] = {}
    last_s: dict[str, float] = {}
    num_sent = [0] * load.num_clients
    num_open = 0

    def send(client: int) -> None:
        nonlocal num_open
        name = f"{client} {num_sent[client]}"
        num_sent[client] += 1
        num_open += 1
        tokens = shared + [rng.randrange(system.vocab_size) for _ in range(load.num_own)]
        sent_s[name] = perf_counter()
        system.send(name, tokens, load.num_output)

    start_s = perf_counter()
    for client in range(load.num_clients):
        send(client)
    while num_open:
        news = system.step()
        now_s = perf_counter()
        for name, num_new, has_ended in news:
            times.num_tokens += num_new
            if num_new:
                if name in last_s:
                    times.between_s.append(now_s - last_s[name])
                else:
                    times.first_s.append(now_s - sent_s[name])
                last_s[name] = now_s
            if has_ended:
                num_open -= 1
                client = int(name.split()[0])
                if num_sent[client] < load.num_each:
                    send(client)
    times.seconds = perf_counter() - start_s
    expected = load.num_clients * load.num_each * load.num_output
    if times.num_tokens != expected:
        raise RuntimeError(f"the answers must have {expected} tokens, got {times.num_tokens}")
    return times
