"""The keys of cached prefixes: what the KV of a request depends on besides its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

Key: TypeAlias = str | tuple[str | int | None, ...] | None
"""The namespace of a client, or a tuple that begins with it."""


class MakeKey(Protocol):
    """Composes a key of its parts, so that two keys are equal if and only if all parts are."""

    def __call__(self, namespace: str | None, *, rope: str | None = None) -> Key:
        """Return the key of KV in a namespace that was rotated by the set of factors `rope`; None: the first."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheKeys:
    """The keys of a model's KV.

    A model with two sets of factors for rotations has one for requests of at most `short_length` tokens, and one for
    longer ones. Keys and values of both cannot be mixed, so a request has one set from its start to its end, chosen by
    the longest that it can become.
    """

    make: MakeKey
    short_length: int | None = None
    """None: the model has one set for all requests."""

    def is_long(self, max_length: int) -> bool:
        """Return whether a request of at most `max_length` tokens, prompt and output, has the second set."""
        return self.short_length is not None and max_length > self.short_length

    def of(self, namespace: str | None, *, is_long: bool) -> Key:
        """Return the key of a request."""
        return self.make(namespace, rope="long" if is_long else None)

    def all_of(self, namespace: str | None) -> list[Key]:
        """Return every key under which a text of a namespace may be cached."""
        choices = (False,) if self.short_length is None else (False, True)
        return [self.of(namespace, is_long=is_long) for is_long in choices]


def namespace_of(key: Key) -> str | int | None:
    """Return the part of a key that says whose it is."""
    return key[0] if isinstance(key, tuple) else key
