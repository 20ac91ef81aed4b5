"""What the policies read of a request: any object with these attributes will do."""

from typing import Protocol


class Waiting(Protocol):
    """A request in the queue."""

    @property
    def arrival(self) -> int:
        """Sequence number of its first arrival, unique, ascending in time; a preempted request keeps its own."""
        ...

    @property
    def arrived_s(self) -> float:
        """Time of its first arrival, on the clock of the `now_s` that orders are given."""
        ...

    @property
    def priority(self) -> int:
        """Higher goes first."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, and those generated before a preemption."""
        ...

    @property
    def num_matched(self) -> int:
        """Leading tokens whose KV is cached; kept up to date only where the order's `needs_match` is true."""
        ...

    @property
    def num_generated(self) -> int:
        """Tokens generated before a preemption."""
        ...

    @property
    def max_new_tokens(self) -> int:
        """Tokens that it may generate in all."""
        ...


class Running(Protocol):
    """A request that holds pages."""

    @property
    def arrival(self) -> int:
        """Sequence number of its first arrival, unique, ascending in time."""
        ...

    @property
    def priority(self) -> int:
        """Higher goes first."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, and those generated so far."""
        ...

    @property
    def num_generated(self) -> int:
        """Tokens generated so far, over all its runs."""
        ...

    @property
    def max_new_tokens(self) -> int:
        """Tokens that it may generate in all."""
        ...
