"""Compressed bodies of requests: gzip and zstd, decoded in small pieces."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Protocol

from starlette.datastructures import Headers

from pagewood.server.http.errors import ApiError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PIECE_BYTES = 64 * 1024
"""Longest piece that is decoded at once, so that other requests do not wait for it."""
MAX_MEMBERS = 1024
"""Most gzip members or zstd frames of a body; each costs time, also if it is empty."""
MAX_WINDOW_LOG = 23
"""Memory of a zstd decoder: 8 MiB, as RFC 9659 has it for HTTP."""


class Decoder(Protocol):
    """Decodes one gzip member or zstd frame; the interface is that of the standard library."""

    @property
    def eof(self) -> bool:
        """Whether the member is complete."""
        ...

    @property
    def needs_input(self) -> bool:
        """Whether decoding can continue only with more data."""
        ...

    @property
    def unused_data(self) -> bytes:
        """The data after the member."""
        ...

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """Take data, and return at most `max_length` bytes."""
        ...


class _Gzip:
    """A decoder of one gzip member, which also checks its length and its checksum."""

    __slots__ = ("_inner", "needs_input")

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        self.needs_input = True  # written by: decompress

    @property
    def eof(self) -> bool:
        """Whether the member is complete."""
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        """The data after the member."""
        return self._inner.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """Take data, and return at most `max_length` bytes."""
        found = self._inner.decompress(self._inner.unconsumed_tail + data, max_length)
        self.needs_input = not self._inner.unconsumed_tail and len(found) < max_length
        return found


def _zstd() -> Decoder:
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: MAX_WINDOW_LOG})


_CODINGS: dict[str, Callable[[], Decoder]] = {"gzip": _Gzip, "x-gzip": _Gzip, "zstd": _zstd}


def coding_of(headers: Headers) -> Callable[[], Decoder] | None:
    """Return the maker of decoders for the body of a request; None: the body is not encoded.

    Raises:
        ApiError: 415 if its coding is not supported, or if it has several.
    """
    written = ", ".join(headers.getlist("content-encoding"))
    names = [name for part in written.split(",") if (name := part.strip().lower()) not in ("", "identity")]
    if not names:
        return None
    if len(names) == 1 and names[0] in _CODINGS:
        return _CODINGS[names[0]]
    raise ApiError(
        f"The Content-Encoding of the request must be 'gzip', 'zstd' or 'identity', but got '{written[:200]}'.",
        status=415,
        code="unsupported_content_encoding",
        headers={"Accept-Encoding": "gzip, zstd"},
    )


def decoded(body: bytes, coding: Callable[[], Decoder]) -> Iterator[bytes]:
    """Yield the content of a body in pieces of at most `PIECE_BYTES`, some of them empty.

    A body may hold several gzip members or zstd frames, one after the other (RFC 1952, RFC 8878).

    Raises:
        ApiError: 400 if it is damaged, incomplete, needs a larger window than is allowed, or has too many members.
    """
    decoder, num_members, is_complete = coding(), 0, True
    try:
        for start in range(0, len(body), PIECE_BYTES):
            data = body[start : start + PIECE_BYTES]
            while data or not (is_complete or decoder.needs_input):
                yield decoder.decompress(data, PIECE_BYTES)
                is_complete, data = decoder.eof, b""
                if decoder.eof:
                    data, decoder, num_members = decoder.unused_data, coding(), num_members + 1
                    if num_members > MAX_MEMBERS:
                        raise _invalid(f"it has more than {MAX_MEMBERS} members")
    except (zlib.error, zstd.ZstdError) as error:
        raise _invalid(str(error)) from None
    if not is_complete:
        raise _invalid("it ends early")


def _invalid(why: str) -> ApiError:
    return ApiError(
        f"We could not decode the body of your request as its Content-Encoding says: {why}.",
        code="invalid_content_encoding",
    )
