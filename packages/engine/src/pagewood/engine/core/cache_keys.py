"""The keys of cached prefixes: what the KV of a request depends on besides its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from pagewood.engine.core.adapter import Adapter

Key: TypeAlias = str | tuple[str | int | None, ...] | None
"""The namespace of a client, or a tuple that begins with it."""


class MakeKey(Protocol):
    """Composes a key of its parts, so that two keys are equal if and only if all parts are."""

    def __call__(
        self,
        namespace: str | None,
        *,
        adapter: str | None = None,
        adapter_version: str | None = None,
        weights_version: str | None = None,
        rope: str | None = None,
    ) -> Key:
        """Return the key of KV in a namespace.

        Args:
            namespace: of the client.
            adapter: the name of the adapter that computed it; None: the model alone did.
            adapter_version: which adapter of that name.
            weights_version: which weights of the model; None: those that the engine began with.
            rope: the set of factors that rotated it; None: the first.
        """
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
    weights: str | None = None
    """Which weights compute now; None: those that the engine began with."""

    def is_long(self, max_length: int) -> bool:
        """Return whether a request of at most `max_length` tokens, prompt and output, has the second set."""
        return self.short_length is not None and max_length > self.short_length

    def of(self, namespace: str | None, *, is_long: bool, adapter: Adapter | None = None) -> Key:
        """Return the key of a request; that of the model if its adapter computes from some position on only."""
        adapter = None if adapter is None or adapter.invocation else adapter
        return self.make(
            namespace,
            adapter=None if adapter is None else adapter.name,
            adapter_version=None if adapter is None else adapter.version,
            weights_version=self.weights,
            rope="long" if is_long else None,
        )

    def renewed(self, key: Key, *, is_long: bool, adapter: Adapter | None) -> Key:
        """Return what `of` returns for the namespace of a key that was made for other weights."""
        namespace = namespace_of(key)
        assert not isinstance(namespace, int)
        return self.of(namespace, is_long=is_long, adapter=adapter)

    def all_of(self, namespace: str | None, *, adapter: Adapter | None = None) -> list[Key]:
        """Return every key under which a text of a namespace may be cached, with this adapter or without one."""
        choices = (False,) if self.short_length is None else (False, True)
        return [self.of(namespace, is_long=is_long, adapter=adapter) for is_long in choices]


def namespace_of(key: Key) -> str | int | None:
    """Return the part of a key that says whose it is."""
    return key[0] if isinstance(key, tuple) else key
