"""Reads the URL of a server that keeps pages."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceUrl:
    """The parts of `SCHEME://HOST[:PORT][/PATH][?name=value&..]`."""

    host: str
    port: int | None
    path: str
    """Without the first slash."""
    options: dict[str, str]
    timeout_s: float
    """The option of this name, > 0 and finite."""

    @classmethod
    def parse(cls, url: str, *, form: str, options: Collection[str]) -> "PlaceUrl":
        """Return the parts of a URL.

        Args:
            url: The URL.
            form: How it must look, for messages; its scheme is the one that the URL must have.
            options: Names that may follow the question mark, once each, beside `timeout_s`.

        Raises:
            ValueError: A part is wrong, unknown or missing, or there is a password, which the message does not repeat.
        """
        scheme, names = form.partition("://")[0], sorted({*options, "timeout_s"})
        try:
            parts = urlsplit(url)
            host, port, pairs = parts.hostname, parts.port, parse_qsl(parts.query, strict_parsing=bool(parts.query))
        except ValueError as error:
            raise ValueError(f"a {scheme} URL must be {form}: {error}") from None
        if parts.username is not None or parts.password is not None:
            instead = ", but ?user=NAME&password_file=FILE" if "password_file" in options else ""
            raise ValueError(f"a {scheme} URL must have no password{instead}")
        if parts.scheme != scheme or not host or parts.fragment:
            raise ValueError(f"a {scheme} URL must be {form}, got {url!r}")
        given = dict(pairs)
        if not given.keys() <= set(names) or len(given) < len(pairs):
            raise ValueError(f"a {scheme} URL may have each of {', '.join(names)} once, got {url!r}")
        try:
            timeout_s = float(given.get("timeout_s", 2.0))
        except ValueError:
            timeout_s = math.nan
        if not 0 < timeout_s < math.inf:
            raise ValueError(f"timeout_s of a {scheme} URL must be > 0 and finite, got {given['timeout_s']!r}")
        return cls(host=host, port=port, path=parts.path.removeprefix("/"), options=given, timeout_s=timeout_s)
