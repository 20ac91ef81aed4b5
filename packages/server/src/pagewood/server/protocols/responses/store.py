"""Answers that are kept, so that clients can continue or read them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from pagewood.server.protocols.responses.objects import ListedItem

MAX_RESPONSES = 1024
MAX_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A response, and the conversation that led to it."""

    body: bytes
    """JSON of the response."""
    input: bytes
    """JSON of all items before it, including those of earlier responses."""
    tenant: str = ""
    """The tenant that it belongs to."""

    @property
    def num_bytes(self) -> int:
        """Size in the store."""
        return len(self.body) + len(self.input)

    def input_items(self) -> list[ListedItem]:
        """Return the items before it."""
        return msgspec.json.decode(self.input, type=list[ListedItem])

    def conversation(self) -> list[dict[str, Any]]:
        """Return the items before it and its own items, as a client would send them."""
        response = cast("dict[str, Any]", msgspec.json.decode(self.body))
        return msgspec.json.decode(self.input) + response["output"]


class ResponseStore:
    """The latest responses, by id, in memory.

    Invariant: holds at most `max_responses` of at most `max_bytes` together; the one that was used least recently goes
    first. Each holds its whole conversation, so none needs another one. Safe to use from all threads, because long
    answers are written outside the event loop's thread.

    Args:
        max_responses: most responses.
        max_bytes: most bytes of all responses together. A larger one is not kept.
    """

    __slots__ = ("_lock", "_max_bytes", "_max_responses", "_num_bytes", "_responses")

    def __init__(self, *, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._lock = threading.RLock()
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()  # written by: put, get, delete
        self._num_bytes = 0  # written by: put, delete

    @property
    def num_bytes(self) -> int:
        """Bytes of all responses."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._responses)

    def put(self, id: str, response: StoredResponse) -> None:
        """Keep a response whose id is new."""
        if response.num_bytes > self._max_bytes:
            return
        with self._lock:
            self._responses[id] = response
            self._num_bytes += response.num_bytes
            while len(self._responses) > self._max_responses or self._num_bytes > self._max_bytes:
                self.delete(next(iter(self._responses)))

    def get(self, id: str) -> StoredResponse | None:
        """Return a response and count this as its latest use; None: it is not here."""
        with self._lock:
            if id in self._responses:
                self._responses.move_to_end(id)
            return self._responses.get(id)

    def delete(self, id: str) -> bool:
        """Delete a response; return whether it was here."""
        with self._lock:
            found = self._responses.pop(id, None)
            if found is not None:
                self._num_bytes -= found.num_bytes
            return found is not None
