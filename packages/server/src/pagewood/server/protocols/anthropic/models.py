"""`GET /v1/models` as Anthropic's clients expect it: those that send `anthropic-version`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

import msgspec
from starlette.requests import Request

from pagewood.server.http.errors import ApiError
from pagewood.server.http.exchange import exchange_of
from pagewood.server.protocols.anthropic.errors import anthropic_error
from pagewood.server.protocols.common.service import Service

VERSION = "anthropic-version"
"""The header that all requests of Anthropic's clients have."""
MAX_LISTED = 1000
"""Most models of one page."""


class AnthropicModel(msgspec.Struct, frozen=True, kw_only=True):
    """The model."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str
    """When the server started, RFC 3339."""
    max_input_tokens: int | None
    """Longest prompt plus output, in tokens; null: the engine has not started yet."""
    max_tokens: int | None
    """The same as `max_input_tokens`."""
    lifecycle: Literal["active"] = "active"
    line: None = None
    deprecated_at: None = None
    retires_at: None = None
    capabilities: None = None


class AnthropicModelList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of models."""

    data: tuple[AnthropicModel, ...]
    has_more: Literal[False] = False
    first_id: str | None
    last_id: str | None


def is_anthropic(request: Request) -> bool:
    """Return whether a request comes from a client of Anthropic's API; then its errors have that form, too."""
    if VERSION not in request.headers:
        return False
    exchange_of(request.scope).error_form = anthropic_error
    return True


def described(service: Service) -> AnthropicModel:
    """Return the description of the one model."""
    longest = None if service.status.model is None else service.status.model.max_length
    return AnthropicModel(
        id=service.model_name,
        display_name=service.model_name,
        created_at=datetime.fromtimestamp(service.started, UTC).isoformat().replace("+00:00", "Z"),
        max_input_tokens=longest,
        max_tokens=longest,
    )


def page(service: Service, request: Request) -> AnthropicModelList:
    """Return the page of models that a request asks for.

    Raises:
        ApiError: `limit` is out of its range, or `before_id` or `after_id` is no model.
    """
    query = request.query_params
    limit = query.get("limit", "20")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MAX_LISTED):
        raise ApiError(
            f"Invalid value for 'limit': expected a number in [1, {MAX_LISTED}], but got '{limit[:20]}' instead.",
            param="limit",
            code="invalid_value",
        )
    borders = [query[name] for name in ("before_id", "after_id") if name in query]
    for border in borders:  # nothing comes before or after the one model
        service.adapter_of(border)
    data = () if borders else (described(service),)
    return AnthropicModelList(data=data, first_id=data[0].id if data else None, last_id=data[-1].id if data else None)
