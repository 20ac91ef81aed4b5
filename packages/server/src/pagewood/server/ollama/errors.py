"""Errors as Ollama's clients expect them."""

from __future__ import annotations

import msgspec

from pagewood.server.errors import ApiError


def ollama_error(error: ApiError, request_id: str) -> tuple[int, bytes]:
    """Return the status and the body of an error; the body is also that of a line in a stream."""
    return error.status, msgspec.json.encode({"error": str(error)})
