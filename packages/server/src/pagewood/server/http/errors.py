"""Errors in the form that OpenAI's clients expect."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from pagewood.engine.api import FinishReason, Overflow, Refusal

MAX_MESSAGE = 2_000
"""Longest message, in characters: some repeat text from the client."""
MAX_PARAM = 200
"""Longest name of a field, in characters."""


class ErrorFields(msgspec.Struct, frozen=True):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(msgspec.Struct, frozen=True):
    """The body of an error."""

    error: ErrorFields


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
        overflow: Overflow | None = None,
    ) -> None:
        message, param = _shortened(message, MAX_MESSAGE), param and _shortened(param, MAX_PARAM)
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = headers or {}
        self.overflow = overflow
        """The lengths of a request that is too long, for protocols that word this error themselves."""
        self._error = ErrorFields(message, type, param, code)

    def body(self) -> bytes:
        """Return the JSON of the error envelope."""
        return msgspec.json.encode(ErrorEnvelope(self._error))

    def renamed(self, names: Mapping[str, str]) -> ApiError:
        """Return this error with the client's names of fields: in `param`, and where the message quotes it."""
        param = self._error.param or ""
        first, dot, rest = param.partition(".")
        if first not in names:
            return self
        name = names[first] + dot + rest
        return ApiError(
            str(self).replace(f"'{param}'", f"'{name}'"),
            status=self.status,
            type=self._error.type,
            param=name,
            code=self.code,
            headers=self.headers,
            overflow=self.overflow,
        )


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def aborted() -> ApiError:
    """Return the error of a request that another request has ended. Not 5xx: clients would send it again."""
    return ApiError("The request was aborted by POST /abort.", code="aborted")


def deadline_exceeded() -> ApiError:
    """Return the error of a request that was not complete at its deadline. Not 5xx: clients would send it again."""
    return ApiError("The request was not complete at its deadline.", param="deadline", code="deadline_exceeded")


def overloaded(limit: int, *, retry_after_s: int = 1) -> ApiError:
    """Return the error of a request that would exceed the limit of requests in the server."""
    message = f"The server already holds {limit} requests; try again later."
    return _try_again(message, code="overloaded", retry_after_s=retry_after_s)


def too_late(wait_s: float, limit_s: float, *, retry_after_s: int) -> ApiError:
    """Return the error of a request whose first token is predicted to come later than the server allows."""
    message = f"The first token would come after about {wait_s:.1f} s, and this server allows {limit_s:g} s; try later."
    return _try_again(message, code="overloaded", retry_after_s=retry_after_s)


def too_slow_reader() -> ApiError:
    """Return the error of a stream whose client has left more unread than the server keeps."""
    return ApiError("The client read the stream too slowly.", status=408, code="slow_reader")


def too_many_at_once(num_requests: int, limit: int, *, param: str, what: str) -> ApiError:
    """Return the error of a request whose prompts or answers (`what`) would not even fit into an empty server."""
    return ApiError(
        f"Invalid value for '{param}': expected at most {limit} {what}, which is the number of requests that this "
        f"server holds for a client, but got {num_requests} instead.",
        param=param,
        code="invalid_value",
    )


def unavailable(message: str, *, code: str) -> ApiError:
    """Return the error of a request that the server cannot serve now, for reasons outside the request."""
    return ApiError(message, status=503, type="server_error", code=code, headers={"Retry-After": "2"})


def deadly(lost: ApiError, num_deaths: int) -> ApiError:
    """Return the error of a request that processes do not survive; a client should not send it again."""
    message = f"{lost} The request is given up: {num_deaths} processes in a row died that held it."
    return ApiError(
        message, status=500, type="server_error", code="deadly_request", headers={"x-should-retry": "false"}
    )


def failed(finish: FinishReason, refusal: Refusal | None, *, names: Mapping[str, str | None]) -> ApiError | None:
    """Return the error that a finish reason means, or None for a normal end.

    Args:
        finish: why the request ended.
        refusal: why it was refused or failed, if that is known.
        names: the client's names of the fields that the tokenizer and the engine call `prompt` and `grammar`.
    """
    match finish:
        case FinishReason.STOP | FinishReason.LENGTH | FinishReason.CACHE_THRESHOLD:
            return None
        case FinishReason.REFUSED:
            why = refusal or Refusal(message="The engine refused the request.")
            param = None if why.param is None else names.get(why.param, why.param)
            if why.code in ("grammar_queue_full", "queue_timeout", "queue_full"):
                return _try_again(why.message, code=why.code, param=param)
            # An engine that was assembled without a compiler of grammars gives no code.
            code = "grammar_unavailable" if why.code is None and why.param == "grammar" else why.code
            message = why.message
            if code == "invalid_grammar":
                message = f"Invalid value for '{param}': {message}"
            elif why.param and param and why.param not in ("prompt", "grammar"):
                message = re.sub(rf"\b{why.param}\b", param, message)
            return ApiError(message, param=param, code=code, overflow=why.overflow)
        case FinishReason.ABORT:
            return unavailable("The request was aborted before it was complete.", code="aborted")
        case FinishReason.ERROR if refusal is not None and refusal.code == "grammar_failed":
            # The request was understood, and tokens may have been sent. Repeating it would not help, so this is no 5xx.
            return ApiError(
                refusal.message, status=422, type="grammar_error", param=names["grammar"], code=refusal.code
            )
        case FinishReason.ERROR if refusal is not None and refusal.code == "all_tokens_excluded":
            return ApiError(refusal.message, code=refusal.code)  # several fields together may be the cause
        case FinishReason.ERROR:
            message = "The engine failed on this request." if refusal is None else refusal.message
            return ApiError(message, status=500, type="server_error", code="engine_error")


def _try_again(message: str, *, code: str, param: str | None = None, retry_after_s: int = 1) -> ApiError:
    headers = {"Retry-After": str(retry_after_s)}
    return ApiError(message, status=429, type="rate_limit_error", param=param, code=code, headers=headers)
