"""Request bodies: read with limits on their size, their speed and the memory that all of them take together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from starlette.requests import Request

from pagewood.server.http.access import check_json
from pagewood.server.http.content_coding import Decoder, coding_of, decoded
from pagewood.server.http.errors import ApiError
from pagewood.server.http.limits import HttpLimits


class Bodies:
    """The bodies that are being received. Invariant: `num_buffered_bytes` is what all of them hold."""

    __slots__ = ("_limits", "num_buffered_bytes")

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self.num_buffered_bytes = 0  # written by: read, _decode

    async def read(self, request: Request, *, is_declared: bool = True) -> bytes:
        """Return the JSON body of a request, decoded if it is compressed.

        Args:
            request: its body has not been read.
            is_declared: whether it must be declared as JSON. If not, it still must be if a web page may have sent it:
                browsers name the origin of every POST.

        Raises:
            ApiError: 415 if it is not declared as JSON or has another coding than gzip and zstd, 413 if it is too long,
                sent or decoded (before any of it is read, if its length is declared), 400 if it cannot be decoded,
                408 if it comes too slowly, 503 if the bodies of other requests take all the memory.
            ClientDisconnect: the client left before the body was complete.
        """
        if is_declared or "origin" in request.headers:
            check_json(request.headers)
        coding = coding_of(request.headers)
        limits = self._limits
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limits.max_body_bytes:
            raise _too_large(limits.max_body_bytes)
        start_s = asyncio.get_running_loop().time()
        parts: list[bytes] = []
        num_bytes = 0
        try:
            async with asyncio.timeout_at(start_s + limits.body_timeout_s) as timeout:
                async for part in request.stream():
                    num_bytes += len(part)
                    self.num_buffered_bytes += len(part)
                    self._check(num_bytes)
                    parts.append(part)
                    timeout.reschedule(start_s + limits.body_timeout_s + num_bytes / limits.min_body_rate)
            body = b"".join(parts)
            return body if coding is None else await self._decode(body, coding)
        except TimeoutError:
            raise _too_slow(num_bytes) from None
        finally:
            self.num_buffered_bytes -= num_bytes

    async def stream(self, request: Request, *, max_bytes: int) -> AsyncGenerator[bytes]:
        """Yield the body of a request as it comes, without keeping it.

        Args:
            request: its body has not been read.
            max_bytes: longest body.

        Raises:
            ApiError: 413 if it is longer, 415 if it is compressed, 408 if it comes too slowly.
            ClientDisconnect: the client left before the body was complete.
        """
        if coding_of(request.headers) is not None:
            raise ApiError(
                "The body of an upload must not be compressed.", status=415, code="unsupported_content_encoding"
            )
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > max_bytes:
            raise _too_large(max_bytes)
        limits, loop = self._limits, asyncio.get_running_loop()
        start_s, num_bytes = loop.time(), 0
        parts = request.stream()
        while True:
            end_s = start_s + limits.body_timeout_s + num_bytes / limits.min_body_rate
            try:
                part = await asyncio.wait_for(anext(parts, None), end_s - loop.time())
            except TimeoutError:
                raise _too_slow(num_bytes) from None
            if part is None:
                return
            num_bytes += len(part)
            if num_bytes > max_bytes:
                raise _too_large(max_bytes)
            yield part

    async def _decode(self, body: bytes, coding: Callable[[], Decoder]) -> bytes:
        """Return the content of a body; decoding stops when it is too long."""
        parts: list[bytes] = []
        num_bytes = 0
        try:
            for part in decoded(body, coding):
                num_bytes += len(part)
                self.num_buffered_bytes += len(part)
                self._check(num_bytes)
                parts.append(part)
                await asyncio.sleep(0)
            return b"".join(parts)
        finally:
            self.num_buffered_bytes -= num_bytes

    def _check(self, num_bytes: int) -> None:
        """Check the length of a body so far, and that of all bodies.

        Raises:
            ApiError: 413 or 503.
        """
        if num_bytes > self._limits.max_body_bytes:
            raise _too_large(self._limits.max_body_bytes)
        if self.num_buffered_bytes > self._limits.max_buffered_bytes:
            raise _crowded_out()


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(f"The body of your request is longer than {max_bytes} bytes.", status=413, code="request_too_large")


def _too_slow(num_bytes: int) -> ApiError:
    return ApiError(
        f"The body of your request came too slowly: {num_bytes} bytes so far.",
        status=408,
        code="request_timeout",
        headers={"Connection": "close"},
    )


def _crowded_out() -> ApiError:
    return ApiError(
        "The server is receiving too many long requests; try again later.",
        status=503,
        type="server_error",
        code="overloaded",
        headers={"Retry-After": "1"},
    )
