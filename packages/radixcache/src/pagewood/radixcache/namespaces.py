"""Namespaces: names of parts of a cache that share no pages."""

from enum import Enum
from typing import Any, NamedTuple, TypeAlias, cast

Namespace: TypeAlias = str | tuple[str | int | None, ...] | None
"""The name of a namespace: a string, or a tuple such as a `CacheKey`; None is one of them."""


class CacheKey(NamedTuple):
    """A namespace with named parts: what the KV of a sequence depends on besides its tokens.

    It is the tuple of its parts, so it goes wherever a tuple does, and its parts are never confused, whatever text they
    contain. Images are not among them: they matter from their positions on only, see `with_extra_keys`.

    Make one with `of`. A key that says nothing but its `namespace` is not a namespace, because that value is one
    already; caches refuse it.

    Attributes:
        namespace: the requests with the same value share cached prefixes: a tenant, or the salt of a client.
        adapter: the name of the adapter.
        adapter_version: changes when another adapter is loaded under its name.
        weights_version: changes when the weights of the model are updated.
        rope: the numbers that rotate positions, for a model that chooses among several by the length of a request.
    """

    namespace: str | None = None
    adapter: str | None = None
    adapter_version: str | int | None = None
    weights_version: str | int | None = None
    rope: str | int | None = None

    @classmethod
    def of(
        cls,
        namespace: str | None,
        *,
        adapter: str | None = None,
        adapter_version: str | int | None = None,
        weights_version: str | int | None = None,
        rope: str | int | None = None,
    ) -> Namespace:
        """Return the namespace with these parts: `namespace` itself if all others are None."""
        key = cls(namespace, adapter, adapter_version, weights_version, rope)
        return key if key.has_more else namespace

    @property
    def has_more(self) -> bool:
        """Whether it says more than its `namespace`."""
        return any(part is not None for part in self[1:])


class AnyNamespace(Enum):
    """The type of `ANY`."""

    ANY = "any"


ANY = AnyNamespace.ANY
"""Stands for no namespace in particular, where None would be a namespace."""


def require_namespace(namespace: Any) -> None:
    """Check a namespace that the cache has not seen before.

    Raises:
        ValueError: it is not None, a string that UTF-8 can encode, or a tuple of such strings, ints and None; or it is
            a `CacheKey` of nothing but a namespace.
    """
    if isinstance(namespace, CacheKey) and not namespace.has_more:
        raise ValueError(f"namespace must be {namespace.namespace!r} where a key says nothing else, got {namespace!r}")
    parts = cast("tuple[Any, ...]", namespace) if isinstance(namespace, tuple) else (namespace,)
    for part in parts:
        if isinstance(part, str):
            try:
                part.encode()
            except UnicodeEncodeError:
                raise ValueError(f"namespace must be text that UTF-8 can encode, got {namespace!r}") from None
        elif part is not None and not (isinstance(namespace, tuple) and type(part) is int):
            raise ValueError(f"namespace must be a str, a tuple of str, int and None, or None, got {namespace!r}")


def encode(namespace: Namespace) -> bytes:
    """Return bytes that stand for a namespace; those of two namespaces are never the same.

    Raises:
        ValueError: `namespace` is not a namespace.
    """
    require_namespace(namespace)
    if namespace is None:
        return b""
    if isinstance(namespace, str):
        return b":" + namespace.encode()
    return b"(" + b"".join(map(_encode_part, namespace))


def _encode_part(part: str | int | None) -> bytes:
    kind, data = (b"n", b"") if part is None else (b"s" if isinstance(part, str) else b"i", str(part).encode())
    return b"%b%d:%b" % (kind, len(data), data)
