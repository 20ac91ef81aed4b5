"""Streams of chunks for chat completions and completions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

import msgspec

from pagewood.server.http.errors import ApiError
from pagewood.server.messages import wire
from pagewood.server.protocols.common.fields import StreamOptions
from pagewood.server.protocols.common.formats import Usage, event
from pagewood.server.protocols.common.timings import Timings, timings_of

ChunkUsage = Usage | msgspec.UnsetType | None
"""The `usage` of a chunk: counts, no such field (UNSET), or null."""


class Chunks(Protocol):
    """The chunks of one HTTP request; every method returns the JSON of one chunk."""

    def begin(self, index: int, usage: ChunkUsage) -> bytes | None:
        """Return the chunk that comes before the text of choice `index`, or None if there is none."""
        ...

    def text(self, index: int, text: str, logprobs: wire.Logprobs | None, usage: ChunkUsage) -> bytes:
        """Return the chunk with the next text of choice `index`, and the log probabilities of its tokens."""
        ...

    def part(self, index: int, part: wire.Part, usage: ChunkUsage) -> bytes | None:
        """Return the chunk with the next reasoning of choice `index`, or with the next piece of one of its calls.

        None: it is not shown.
        """
        ...

    def end(self, index: int, reason: str, usage: ChunkUsage, timings: Timings | msgspec.UnsetType) -> bytes:
        """Return the chunk that ends choice `index`; `timings` are UNSET if not requested."""
        ...

    def usage(self, usage: Usage) -> bytes:
        """Return the chunk without choices that ends the stream."""
        ...


_HOLE = "\0text\0"
_encode = msgspec.json.Encoder().encode


class ChunkStream:
    """The server-sent events of one HTTP request.

    Nearly all chunks of a choice differ in their text only, so the rest of them is encoded once.

    Args:
        chunks: writes them.
        options: whether and when the client wants the usage.
        usage: returns the tokens of the request so far.
    """

    __slots__ = ("_calling", "_chunks", "_frames", "_num_open", "_options", "_usage")

    def __init__(self, chunks: Chunks, options: StreamOptions, usage: Callable[[], Usage]) -> None:
        self._chunks = chunks
        self._options = options
        self._usage = usage
        self._frames: dict[int, tuple[bytes, bytes] | None] = {}
        """Choices that have begun -> the bytes before and after the text in their events; None: they vary."""
        # written by: take
        self._calling: set[int] = set()
        """Choices that have called functions."""  # written by: _parts
        self._num_open = Counter[int]()
        """Choice -> number of its incomplete calls."""  # written by: _parts

    def take(self, index: int, answer: wire.Answer) -> bytes:
        """Return the events of one message."""
        frame = self._frames.get(index)
        if frame is not None and answer.finish is None and answer.logprobs is None:
            text = answer.text if answer.parts is None else _only_text(answer.parts)
            if text is not None:
                return b"%b%b%b" % (frame[0], _encode(text), frame[1])
        usage = self._chunk_usage()
        found: list[bytes | None] = []
        if index not in self._frames:
            self._frames[index] = self._frame(index, usage)
            found.append(self._chunks.begin(index, usage))
        if answer.parts is not None:
            found += self._parts(index, answer.parts, answer.logprobs, usage)
        elif answer.text or answer.finish is None or answer.logprobs is not None:
            # A step without text (half a character) is a chunk, too: clients count chunks.
            found.append(self._chunks.text(index, answer.text, answer.logprobs, usage))
        if answer.finish is not None:
            reason = answer.finish.value
            has_called = reason == "stop" and index in self._calling and not self._num_open[index]
            found.append(self._chunks.end(index, "tool_calls" if has_called else reason, usage, timings_of(answer)))
        return b"".join([event(chunk) for chunk in found if chunk is not None])

    def end(self) -> bytes:
        """Return the usage, if it is wanted, and the last event."""
        last = event(self._chunks.usage(self._usage())) if self._options.include_usage else b""
        return last + event(b"[DONE]")

    def fail(self, error: ApiError) -> bytes:
        """Return the event with an error."""
        return event(error.body())

    def _parts(
        self, index: int, parts: tuple[wire.Part, ...], logprobs: wire.Logprobs | None, usage: ChunkUsage
    ) -> list[bytes | None]:
        """Return the chunks of the parts of a message; the first one with text has the log probabilities of all."""
        found: list[bytes | None] = []
        for part in parts:
            if part.kind == "content":
                found.append(self._chunks.text(index, part.text, logprobs, usage))
                logprobs = None
            elif part.kind == "call_end":
                self._num_open[index] -= 1
                continue
            else:
                if part.kind == "tool_call":
                    self._calling.add(index)
                    self._num_open[index] += 1
                found.append(self._chunks.part(index, part, usage))
        if logprobs is not None:
            found.append(self._chunks.text(index, "", logprobs, usage))
        return found

    def _frame(self, index: int, usage: ChunkUsage) -> tuple[bytes, bytes] | None:
        if self._options.continuous_usage_stats:
            return None
        before, after = event(self._chunks.text(index, _HOLE, None, usage)).split(_encode(_HOLE))
        return before, after

    def _chunk_usage(self) -> ChunkUsage:
        """Return the `usage` of the next chunk: counts so far, null if only the last chunk has counts, or nothing."""
        if self._options.continuous_usage_stats:
            return self._usage()
        return None if self._options.include_usage else msgspec.UNSET


def _only_text(parts: tuple[wire.Part, ...]) -> str | None:
    """Return the text of a message that consists of one piece of content; None: it does not."""
    return parts[0].text if len(parts) == 1 and parts[0].kind == "content" else None
