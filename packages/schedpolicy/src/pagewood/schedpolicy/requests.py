"""What the policies read of a request: any object with these attributes will do."""

from typing import Any, Protocol


class Waiting(Protocol):
    """A request in the queue: all that most policies read."""

    @property
    def arrival(self) -> int:
        """Sequence number of its first arrival, unique, ascending in time; a preempted request keeps its own."""
        ...

    @property
    def arrived_s(self) -> float:
        """Time of its first arrival, on the clock of the `now_s` that policies are given."""
        ...

    @property
    def priority(self) -> int:
        """Higher goes first. It may change; while the request waits, its order is told so by `update`."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, and those generated so far."""
        ...

    @property
    def num_matched(self) -> int:
        """Leading tokens whose KV is cached, now: a property over a `LiveMatch`, or a number kept fresh."""
        ...

    @property
    def num_generated(self) -> int:
        """Tokens generated so far, over all its runs."""
        ...

    @property
    def max_new_tokens(self) -> int:
        """Tokens that it may generate in all."""
        ...


class LiveMatch(Protocol):
    """The cached prefix of one request, kept true by its cache; a watch of pagewood-radixcache is one.

    A request that has one answers `num_matched` with its `num_tokens`.
    """

    @property
    def num_tokens(self) -> int:
        """Leading tokens whose KV is cached, now."""
        ...


class Running(Protocol):
    """A request that holds pages."""

    @property
    def arrival(self) -> int:
        """Sequence number of its first arrival, unique, ascending in time."""
        ...

    @property
    def priority(self) -> int:
        """Higher goes first; may change while it runs."""
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


class HasPrefix(Protocol):
    """What is read of requests whose prompts are compared with one another."""

    def prefix(self, num_tokens: int) -> bytes:
        """Return bytes that stand for the first `num_tokens` tokens of the prompt (all of it, if it is shorter).

        Four bytes stand for one token, or for as many as the cache keeps together. The bytes of a prefix are a prefix
        of the bytes of whatever it is a prefix of; prompts that may not share KV start with different bytes (the
        hash of their namespace, say, in a multiple of four bytes).
        """
        ...


class HasPrompt(Protocol):
    """What `InBatchDeferral` reads of waiting and running requests, to find prompts that repeat each other."""

    @property
    def arrival(self) -> int:
        """Sequence number of its first arrival, unique."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, plus the tokens generated so far."""
        ...

    @property
    def num_matched(self) -> int:
        """Leading tokens whose KV is cached; read while the request waits."""
        ...

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        ...

    @property
    def num_computed(self) -> int:
        """Leading tokens whose KV is computed and can be matched by others; grows while the request runs.

        It need not be a multiple of the page size: only whole pages are counted.
        """
        ...

    def window(self, start: int, end: int) -> bytes:
        """Return bytes that stand for the tokens [start, end) of the prompt; equal tokens have equal bytes.

        It is a cheap key to find candidates for `num_shared`. Prompts that may not share KV may start with different
        bytes, but need not.
        """
        ...

    def num_shared(self, other: Any, /) -> int:
        """Return the length in tokens of the common prefix of the two prompts; 0 where they may not share KV."""
        ...


class HasTenant(Protocol):
    """What is read of requests whose senders share the machine."""

    @property
    def tenant(self) -> str:
        """Whose request it is."""
        ...


class HasDeadline(Protocol):
    """What is read of requests that are worth little when they are late."""

    @property
    def deadline_s(self) -> float:
        """When it should have ended, on the clock of `now_s`; infinite where that does not matter."""
        ...


class HasClass(Protocol):
    """What is read of requests that belong to a named class of service."""

    @property
    def service_class(self) -> str:
        """Name of its class."""
        ...


class HasTag(Protocol):
    """What is read of requests that run better beside their like: of one adapter, say."""

    @property
    def tag(self) -> str:
        """What it shares with its like."""
        ...


class PrefixWaiting(Waiting, HasPrefix, Protocol):
    """A waiting request whose prompt can be compared."""


class TenantWaiting(Waiting, HasTenant, Protocol):
    """A waiting request of a tenant."""


class DeadlineWaiting(Waiting, HasDeadline, Protocol):
    """A waiting request with a deadline."""


class ClassWaiting(Waiting, HasClass, Protocol):
    """A waiting request of a class."""


class TagWaiting(Waiting, HasTag, Protocol):
    """A waiting request with a tag."""


class FullWaiting(Waiting, HasPrefix, HasTenant, HasDeadline, HasClass, HasTag, Protocol):
    """A waiting request that has what any of the orders reads."""


class TenantRunning(Running, HasTenant, Protocol):
    """A running request of a tenant."""


class DeadlineRunning(Running, HasDeadline, Protocol):
    """A running request with a deadline."""
