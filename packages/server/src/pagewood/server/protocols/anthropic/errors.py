"""Errors as Anthropic's clients expect them."""

from __future__ import annotations

import msgspec

from pagewood.engine.api import Overflow
from pagewood.server.http.errors import ApiError

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


class AnthropicErrorDetails(msgspec.Struct, frozen=True):
    """The fields by which Anthropic's clients react to an error."""

    error_code: str


class AnthropicErrorFields(msgspec.Struct, frozen=True):
    """Anthropic's error object."""

    type: str
    message: str
    details: AnthropicErrorDetails | msgspec.UnsetType = msgspec.UNSET


class AnthropicError(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """The body of an error, and an event of a stream."""

    error: AnthropicErrorFields
    request_id: str


def anthropic_error(error: ApiError, request_id: str) -> tuple[int, bytes]:
    """Return the status and the body of an error; the body is also that of an `error` event in a stream."""
    other = "invalid_request_error" if error.status < 500 else "api_error"
    message = str(error) if error.overflow is None else _too_long(error.overflow)
    # Tool runners of Anthropic's clients ask for a thread first, and go on without one after this code.
    has_thread = (error.param, error.code) == ("thread", "unsupported_parameter")
    details = AnthropicErrorDetails("thread_unsupported_request") if has_thread else msgspec.UNSET
    fields = AnthropicErrorFields(_TYPES.get(error.status, other), message, details)
    return OVERLOADED if error.status == 503 else error.status, msgspec.json.encode(AnthropicError(fields, request_id))


def _too_long(overflow: Overflow) -> str:
    """Return Anthropic's words about a prompt that is too long: clients read them to shorten the conversation.

    A prompt that fills the whole window is too long as well, because the answer needs a token.
    """
    maximum = min(overflow.max_length, overflow.num_prompt - 1)
    text = f"prompt is too long: {overflow.num_prompt} tokens > {maximum} maximum"
    return text if overflow.is_counted else f"{text} (it has at least {overflow.num_prompt} tokens; it was not counted)"
