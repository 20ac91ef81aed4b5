"""Namespaces: names of parts of a cache that share no pages."""

from enum import Enum
from typing import Any, TypeAlias, cast

Namespace: TypeAlias = str | tuple[str | int | None, ...] | None
"""The name of a namespace: a string, or a tuple such as (salt, adapter, version); None is one of them."""


class AnyNamespace(Enum):
    """The type of `ANY`."""

    ANY = "any"


ANY = AnyNamespace.ANY
"""Stands for no namespace in particular, where None would be a namespace."""


def require_namespace(namespace: Any) -> None:
    """Check a namespace that the cache has not seen before.

    Raises:
        ValueError: it is not None, a string that UTF-8 can encode, or a tuple of such strings, ints and None.
    """
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
