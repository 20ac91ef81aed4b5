"""One HTTP operation: its route, and what the documentation says about it. Each protocol declares its own."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from pagewood.server.errors import ErrorEnvelope

_CONVERTER = re.compile(r":\w+}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What one method of one path does. The first paragraph of the endpoint's docstring is its summary."""

    name: str
    """Unique; names of its schemas begin with it."""
    tag: str
    """Of the protocol."""
    method: Literal["GET", "POST"]
    path: str
    """As in a route, such as `/v1/models/{name:path}`."""
    endpoint: Callable[[Request], Awaitable[ASGIApp]]
    body: type[BaseModel] | None = None
    example: Mapping[str, Any] | None = None
    """A body, for the documentation."""
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict[str, tuple[Any, ...]])
    """Fields of the body that are not supported -> the values that ask for nothing, which are accepted."""
    ignored: frozenset[str] = frozenset()
    """Fields of the body that have no effect, whatever their value."""
    answer: Any
    """Type of the JSON answer, as msgspec encodes it."""
    event: Any = None
    """Type of the data of each event, if the answer can be a stream."""
    last_event: str | None = "[DONE]"
    """Data of the event that ends a stream without an error; None: there is none."""
    error: Any = ErrorEnvelope
    """Type of the body of an error."""
    statuses: tuple[int, ...] = ()
    """Of errors, beyond those that every operation of its method has."""

    @property
    def public_path(self) -> str:
        """Its path as in OpenAPI, such as `/v1/models/{name}`."""
        return _CONVERTER.sub("}", self.path)

    def route(self) -> Route:
        """Return its route."""
        return Route(self.path, self.endpoint, methods=[self.method])


def routes_of(operations: Sequence[Operation]) -> list[Route]:
    """Return the routes of operations."""
    return [operation.route() for operation in operations]
