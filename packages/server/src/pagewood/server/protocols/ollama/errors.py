"""Errors as Ollama's clients expect them."""

from __future__ import annotations

import msgspec

from pagewood.server.http.errors import ApiError


class OllamaError(msgspec.Struct, frozen=True):
    """The body of an error, and a line of a stream."""

    error: str


def ollama_error(error: ApiError, request_id: str) -> tuple[int, bytes]:
    """Return the status and the body of an error; the body is also that of a line in a stream."""
    return error.status, msgspec.json.encode(OllamaError(str(error)))
