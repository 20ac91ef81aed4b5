"""The attributes of a request that the policies read; any object that has them can be used."""

from typing import Any, Protocol


class Request(Protocol):
    """The attributes that waiting and running requests have in common."""

    @property
    def arrival(self) -> int:
        """Sequence number of its first arrival: unique, ascending in time, kept when it is preempted."""
        ...

    @property
    def priority(self) -> int:
        """Higher goes first. If it changes while the request waits, call `update` of its order."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt plus the tokens generated so far."""
        ...

    @property
    def num_generated(self) -> int:
        """Tokens generated so far, over all its runs."""
        ...

    @property
    def max_new_tokens(self) -> int:
        """Limit on generated tokens, over all its runs."""
        ...


class Waiting(Request, Protocol):
    """A waiting request; most policies read nothing else."""

    @property
    def arrived_s(self) -> float:
        """Time of its first arrival, on the same clock as `now_s`."""
        ...

    @property
    def num_matched(self) -> int:
        """Leading tokens whose KV is cached now: a property over a `LiveMatch`, or a number that the caller updates."""
        ...


class LiveMatch(Protocol):
    """The length of one request's cached prefix, kept up to date by the cache; a pagewood-radixcache watch is one.

    A request that has a live match returns its `num_tokens` as `num_matched`.
    """

    @property
    def num_tokens(self) -> int:
        """Leading tokens whose KV is cached now."""
        ...


class Running(Request, Protocol):
    """A request that holds pages."""


class HasPrefix(Protocol):
    """A request whose tokens can be compared with those of others."""

    def prefix(self, num_tokens: int) -> bytes:
        """Return bytes that identify the first `num_tokens` tokens (all of them, if there are fewer).

        These are the tokens of the prompt, and after a preemption those of the output too, because both are cached.
        Four bytes stand for one token, or for one page of the cache. If one token sequence is a prefix of another, so
        are their bytes. If two requests may not share KV, their first four bytes differ: for example, those of a
        request in a namespace are a hash of the namespace and the first token. With a hash of the namespace alone, all
        requests of a namespace would be one family.
        """
        ...


class HasPrompt(Protocol):
    """The attributes of waiting and running requests by which `InBatchDeferral` finds repeated prompts."""

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
    """A request of a tenant, where tenants share the engine."""

    @property
    def tenant(self) -> str:
        """Name of the tenant."""
        ...


class HasDeadline(Protocol):
    """A request with a deadline."""

    @property
    def deadline_s(self) -> float:
        """Time by which it should have ended, on the clock of `now_s`; infinity if it has no deadline."""
        ...


class HasClass(Protocol):
    """A request in a named class of service."""

    @property
    def service_class(self) -> str:
        """Name of the class."""
        ...


class HasTag(Protocol):
    """A request that runs better next to requests with the same tag, for example of the same adapter."""

    @property
    def tag(self) -> str:
        """The tag."""
        ...


class PrefixWaiting(Waiting, HasPrefix, Protocol):
    """A waiting request whose prompt can be compared with others."""


class TenantWaiting(Waiting, HasTenant, Protocol):
    """A waiting request of a tenant."""


class DeadlineWaiting(Waiting, HasDeadline, Protocol):
    """A waiting request with a deadline."""


class ClassWaiting(Waiting, HasClass, Protocol):
    """A waiting request in a class of service."""


class TagWaiting(Waiting, HasTag, Protocol):
    """A waiting request with a tag."""


class FullWaiting(Waiting, HasPrefix, HasTenant, HasDeadline, HasClass, HasTag, Protocol):
    """A waiting request with every attribute that any order reads."""
