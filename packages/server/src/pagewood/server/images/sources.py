"""Takes the bytes of images out of conversations: from data URLs, and from hosts that the operator allows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import SplitResult, urlsplit

import httpx
import msgspec

from pagewood.engine.images.limits import ImageError, ImageLimits
from pagewood.engine.images.prompts import parts_of
from pagewood.engine.images.sources import data_of
from pagewood.server.http.errors import ApiError
from pagewood.server.messages import wire

_PORTS = {"http": 80, "https": 443}
_LARGE = 1 << 18
"""Characters of a data URL from which on another thread decodes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSources:
    """Where images may come from, and how large they may be."""

    limits: ImageLimits = field(default_factory=ImageLimits)
    hosts: tuple[str, ...] = ()
    """Hosts whose images are fetched: `example.com`, `*.example.com`, or with a port. Empty: nothing is fetched."""
    timeout_s: float = 10.0
    """How long fetching an image may take, seconds."""

    async def filled(self, prompt: wire.ChatPrompt) -> wire.ChatPrompt:
        """Return a conversation whose images are beside it, in place of their URLs.

        Raises:
            ApiError: there are too many, one is too large, or its URL is not allowed.
        """
        if not any(isinstance(message.get("content"), list) for message in prompt.messages):
            return prompt
        messages, sources = parts_of(prompt.messages)
        if not sources:
            return prompt
        if len(sources) > self.limits.max_images:
            raise _wrong(f"a request must have at most {self.limits.max_images} images, got {len(sources)}")
        try:
            images = await asyncio.gather(*(self._bytes(str(source)) for source in sources))
        except ImageError as error:
            raise _wrong(str(error)) from error
        return msgspec.structs.replace(prompt, messages=tuple(messages), images=tuple(images))

    async def _bytes(self, url: str) -> bytes:
        if not url[:8].lower().startswith(("http://", "https://")):
            if len(url) < _LARGE:
                return data_of(url, self.limits)
            return await asyncio.to_thread(data_of, url, self.limits)
        try:
            return await asyncio.wait_for(self._fetched(url), self.timeout_s)
        except TimeoutError:
            raise ImageError(f"an image must be there within {self.timeout_s:g} s, got nothing from its URL") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ImageError(f"an image cannot be fetched: {type(error).__name__}") from error

    async def _fetched(self, url: str) -> bytes:
        """Return what a URL has. Redirects are not followed: they could lead to hosts that are not allowed."""
        if not self._allows(url):
            allowed = ", ".join(self.hosts) or "none: the server fetches no images; send a data URL"
            raise ImageError(f"the URL of an image must be of an allowed host ({allowed}), got {url[:100]!r}")
        found = bytearray()
        # No proxy, cookie or credential of the server's own environment.
        async with (
            httpx.AsyncClient(follow_redirects=False, trust_env=False, timeout=self.timeout_s) as client,
            client.stream("GET", url, headers={"Accept": "image/*"}) as answer,
        ):
            if answer.status_code != 200:
                raise ImageError(f"an image must be answered with the status 200, got {answer.status_code}")
            async for piece in answer.aiter_raw():
                found += piece
                if len(found) > self.limits.max_bytes:
                    raise ImageError(f"an image must have at most {self.limits.max_bytes} bytes, got more")
        return bytes(found)

    def _allows(self, url: str) -> bool:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            return False
        if parts.username is not None or parts.password is not None or parts.hostname is None:
            return False
        return any(_matches(pattern, parts, port) for pattern in self.hosts)


def _matches(pattern: str, parts: SplitResult, port: int | None) -> bool:
    """Return whether a URL is of a host; without a port, the pattern has that of the scheme."""
    host, _, wanted = pattern.lower().rpartition(":") if ":" in pattern else (pattern.lower(), "", "")
    own = (parts.hostname or "").lower()
    if (port or _PORTS[parts.scheme.lower()]) != (int(wanted) if wanted else _PORTS[parts.scheme.lower()]):
        return False
    return own.endswith(host[1:]) and own != host[2:] if host.startswith("*.") else own == host


def _wrong(message: str) -> ApiError:
    return ApiError(f"{message[:1].upper()}{message[1:]}.", param="image_url", code="invalid_image")


def joined(parts: Sequence[object]) -> str | list[object]:
    """Return the content of a message: its text, or its parts if there is an image among them."""
    if any(isinstance(part, dict) and cast("dict[str, object]", part).get("type") == "image" for part in parts):
        return list(parts)
    return "".join([str(cast("dict[str, object]", part)["text"]) for part in parts])
