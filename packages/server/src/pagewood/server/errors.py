"""Errors in the form that OpenAI's clients expect."""

from __future__ import annotations

import msgspec

from pagewood.engine.api import FinishReason, Refusal


class _Error(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class _Envelope(msgspec.Struct, frozen=True):
    error: _Error


class ApiError(Exception):
    """An error response: an HTTP status and the four fields of OpenAI's error object."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = headers or {}
        self._error = _Error(message, type, param, code)

    def body(self) -> bytes:
        """Return the JSON of the error envelope."""
        return msgspec.json.encode(_Envelope(self._error))


def overloaded(limit: int) -> ApiError:
    """Return the error of a request that would exceed the limit of requests in the server."""
    return ApiError(
        f"The server already holds {limit} requests; try again later.",
        status=429,
        type="rate_limit_error",
        code="overloaded",
        headers={"Retry-After": "1"},
    )


def too_many_at_once(num_requests: int, limit: int, *, param: str, what: str) -> ApiError:
    """Return the error of a request whose prompts or answers (`what`) would not even fit into an empty server."""
    return ApiError(
        f"Invalid value for '{param}': expected at most {limit} {what}, which is the number of requests that this "
        f"server holds, but got {num_requests} instead.",
        param=param,
        code="invalid_value",
    )


def unavailable(message: str, *, code: str) -> ApiError:
    """Return the error of a request that the server cannot serve now, for reasons outside the request."""
    return ApiError(message, status=503, type="server_error", code=code, headers={"Retry-After": "2"})


def failed(finish: FinishReason, refusal: Refusal | None, *, prompt_param: str) -> ApiError | None:
    """Return the error that a finish reason means, or None for a normal end.

    The tokenizer and the engine call the prompt `prompt`; the client calls it `prompt_param`.
    """
    match finish:
        case FinishReason.STOP | FinishReason.LENGTH:
            return None
        case FinishReason.REFUSED:
            why = refusal or Refusal(message="The engine refused the request.")
            param = prompt_param if why.param == "prompt" else why.param
            return ApiError(why.message, param=param, code=why.code)
        case FinishReason.ABORT:
            return unavailable("The request was aborted before it was complete.", code="aborted")
        case FinishReason.ERROR:
            message = "The engine failed on this request." if refusal is None else refusal.message
            return ApiError(message, status=500, type="server_error", code="engine_error")
