"""Errors of requests to a server with several models."""

from __future__ import annotations

from collections.abc import Sequence

from pagewood.server.http.errors import ApiError, unavailable


def closing() -> ApiError:
    """Return the error of a request that comes, or waits, while the server stops."""
    return unavailable("The server is shutting down.", code="shutting_down")


def no_name(what: str) -> ApiError:
    """Return the error of a request that names none of several models; `what` would."""
    return ApiError(
        f"This server has several models: choose one by {what}.", param="model", code="missing_required_parameter"
    )


def load_failed(name: str, why: str) -> ApiError:
    """Return the error of a request whose model could not be loaded. A client should not send it again by itself."""
    return ApiError(
        f"The model '{name}' cannot be loaded: {why.rstrip('.')}. Its files or the server's options must change, or "
        "more memory be free; the next request tries again.",
        status=500,
        type="server_error",
        param="model",
        code="model_load_failed",
        headers={"x-should-retry": "false"},
    )


def not_on_demand(name: str) -> ApiError:
    """Return the error of a request whose model only an admin loads."""
    return ApiError(
        f"The model '{name}' is not loaded, and is not loaded on demand: an admin loads it by POST /models/load.",
        param="model",
        code="model_not_loaded",
    )


def unknown(name: str, known: Sequence[str]) -> ApiError:
    """Return the error of a request for a model that does not exist; `known` are those that the caller may use."""
    listed = ", ".join(f"'{one}'" for one in known)
    return ApiError(
        f"The model '{name}' does not exist; this server has {listed or 'no model for this API key'}.",
        status=404,
        param="model",
        code="model_not_found",
    )


def insufficient(message: str) -> ApiError:
    """Return the error of a request whose model can never be loaded beside those that stay."""
    return ApiError(
        message,
        status=507,
        type="server_error",
        param="model",
        code="insufficient_memory",
        headers={"x-should-retry": "false"},
    )
