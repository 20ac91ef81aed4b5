"""`GET /v1/models` as Anthropic's clients expect it: those that send `anthropic-version`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

import msgspec
from starlette.requests import Request

from pagewood.server.http.errors import ApiError
from pagewood.server.http.exchange import exchange_of
from pagewood.server.protocols.anthropic.errors import anthropic_error
from pagewood.server.protocols.common.models import ModelEntry, Models, visible

VERSION = "anthropic-version"
"""The header that all requests of Anthropic's clients have."""
MAX_LISTED = 1000
"""Most models of one page."""


class AnthropicModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model."""

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
    has_more: bool
    """Whether more models follow, or with `before_id` come before."""
    first_id: str | None
    last_id: str | None


def is_anthropic(request: Request) -> bool:
    """Return whether a request comes from a client of Anthropic's API; then its errors have that form, too."""
    if VERSION not in request.headers:
        return False
    exchange_of(request.scope).error_form = anthropic_error
    return True


def described(entry: ModelEntry) -> AnthropicModel:
    """Return the description of a model."""
    longest = None if entry.model is None else entry.model.max_length
    return AnthropicModel(
        id=entry.name,
        display_name=entry.name,
        created_at=datetime.fromtimestamp(entry.created, UTC).isoformat().replace("+00:00", "Z"),
        max_input_tokens=longest,
        max_tokens=longest,
    )


def page(models: Models, request: Request) -> AnthropicModelList:
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
    entries = {entry.name: entry for entry in visible(models)}
    names = list(entries)
    if "after_id" in query:
        names = names[names.index(models.entry_of(query["after_id"])[0].name) + 1 :]
    elif "before_id" in query:
        names = names[: names.index(models.entry_of(query["before_id"])[0].name)]
    shown = names[-int(limit) :] if "before_id" in query else names[: int(limit)]
    return AnthropicModelList(
        data=tuple(described(entries[name]) for name in shown),
        has_more=len(shown) < len(names),
        first_id=shown[0] if shown else None,
        last_id=shown[-1] if shown else None,
    )
