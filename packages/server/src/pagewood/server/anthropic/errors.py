"""Errors as Anthropic's clients expect them."""

from __future__ import annotations

import msgspec

from pagewood.server.errors import ApiError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Other statuses below 500 are invalid requests, and others from 500 on are errors of the server."""
OVERLOADED = 529
"""Anthropic's status where other protocols have 503."""


class AnthropicErrorFields(msgspec.Struct, frozen=True):
    """Anthropic's error object."""

    type: str
    message: str


class AnthropicError(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """The body of an error, and an event of a stream."""

    error: AnthropicErrorFields
    request_id: str


def anthropic_error(error: ApiError, request_id: str) -> tuple[int, bytes]:
    """Return the status and the body of an error; the body is also that of an `error` event in a stream."""
    other = "invalid_request_error" if error.status < 500 else "api_error"
    envelope = AnthropicError(AnthropicErrorFields(_TYPES.get(error.status, other), str(error)), request_id)
    return OVERLOADED if error.status == 503 else error.status, msgspec.json.encode(envelope)
