"""Reads the bodies of requests: checks them, and parses or converts long ones in another thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.requests import Request

from pagewood.server.http.bodies import Bodies
from pagewood.server.images.sources import ImageSources
from pagewood.server.messages import wire

T = TypeVar("T")
MAX_PARSED_AT_ONCE_BYTES = 256 * 1024
"""Longest body that is parsed on the event loop: shorter ones mostly take less time than a change of threads."""
MAX_CONVERTED_AT_ONCE = 512
"""Most parts of a conversation that become a prompt on the event loop; one takes about 10 microseconds."""


def _one_thread() -> ThreadPoolExecutor:
    """Return an executor with one thread, started with its first work, so that long bodies are parsed one by one."""
    return ThreadPoolExecutor(1, "http-parser")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Reads bodies, for the endpoints of all protocols and models."""

    bodies: Bodies
    parsing: ThreadPoolExecutor = field(default_factory=_one_thread)
    """Parses long bodies."""
    images: ImageSources = field(default_factory=ImageSources)
    """Where the images of conversations come from."""

    async def body(self, request: Request, *, is_declared: bool = True) -> bytes:
        """Return the JSON body of a request.

        Args:
            request: its body has not been read.
            is_declared: whether it must be declared as JSON even if no web page can have sent it.

        Raises:
            ApiError: it is not JSON, too long or too slow.
            ClientDisconnect: the client left before it was complete.
        """
        return await self.bodies.read(request, is_declared=is_declared)

    async def read(self, request: Request, parse: Callable[[bytes], T], *, is_declared: bool = True) -> T:
        """Return the parsed JSON body of a request; see `body`. A long body is parsed in another thread.

        Args:
            request: its body has not been read.
            parse: checks a body.
            is_declared: as in `body`.

        Raises:
            ApiError: as in `body`, or of `parse`.
            ClientDisconnect: as in `body`.
        """
        body = await self.body(request, is_declared=is_declared)
        if len(body) <= MAX_PARSED_AT_ONCE_BYTES:
            return parse(body)
        return await asyncio.get_running_loop().run_in_executor(self.parsing, parse, body)

    async def conversation(self, make: Callable[[], wire.ChatPrompt], *, num_parts: int) -> wire.ChatPrompt:
        """Return what `convert` does, with the images of a conversation beside it.

        Raises:
            ApiError: an image cannot be had.
        """
        return await self.images.filled(await self.convert(make, num_parts=num_parts))

    async def convert(self, make: Callable[[], T], *, num_parts: int) -> T:
        """Return the result of `make` for the parts of a conversation; many parts go to the thread of long bodies."""
        if num_parts <= MAX_CONVERTED_AT_ONCE:
            return make()
        return await asyncio.get_running_loop().run_in_executor(self.parsing, make)
