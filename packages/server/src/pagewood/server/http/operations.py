"""One HTTP operation: its route, and its data for the documentation. Each protocol declares its own."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from pagewood.server.http.errors import ErrorEnvelope
from pagewood.server.keys.caller import Caller, checked_by
from pagewood.server.protocols.common.formats import EVENTS

_CONVERTER = re.compile(r":\w+}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherForm:
    """The answers of the same operation in another protocol, which a header of the request selects."""

    header: str
    answer: Any
    """Type of the JSON answer, as msgspec encodes it."""
    error: Any
    """Type of the body of an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path. The first paragraph of the endpoint's docstring is its summary."""

    name: str
    """Unique; names of its schemas begin with it."""
    tag: str
    """Name of the protocol."""
    method: Literal["GET", "POST", "DELETE"] = "POST"
    path: str
    """As in a route, such as `/v1/models/{name:path}`."""
    aliases: tuple[str, ...] = ()
    """Further paths with the same parameters, which other servers use for it."""
    endpoint: Callable[[Request], Awaitable[ASGIApp]]
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Any])
    """Optional parameters of the query that have an effect -> their JSON schemas."""
    body: type[BaseModel] | None = None
    body_type: str = "application/json"
    """Content type of the body."""
    example: Mapping[str, Any] | None = None
    """A body, for the documentation."""
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict[str, tuple[Any, ...]])
    """Fields of the body that are not supported -> their neutral values, which have no effect and are accepted."""
    ignored: frozenset[str] = frozenset()
    """Fields of the body that have no effect, whatever their value."""
    answer: Any
    """Type of the JSON answer, as msgspec encodes it; None: there are only errors."""
    answer_type: str = "application/json"
    """Content type of the answer."""
    event: Any = None
    """Type of the data of each event or line, if the answer can be a stream."""
    stream: str = EVENTS
    """Content type of such a stream: events, or lines of JSON."""
    last_event: str | None = "[DONE]"
    """Data of the event that ends a stream of events without an error; None: there is none."""
    other_form: OtherForm | None = None
    error: Any = ErrorEnvelope
    """Type of the body of an error."""
    statuses: tuple[int, ...] = ()
    """Statuses of errors, beyond those that every operation of its method has."""
    busy_status: int = 503
    """Status that this protocol has in place of 503."""
    admin: bool = False
    """Whether only callers with an admin key may use it."""
    is_overview: bool = False
    """Whether it shows sums over all tenants, so that a server with keys shows it to admins only."""
    is_open: bool = False
    """Whether it needs no key; its paths have no parameters."""

    @property
    def public_paths(self) -> list[str]:
        """Its paths as in OpenAPI, such as `/v1/models/{name}`, the aliases last."""
        return [_CONVERTER.sub("}", path) for path in (self.path, *self.aliases)]

    def routes(self) -> list[Route]:
        """Return its routes."""
        endpoint = self.endpoint
        if self.admin or self.is_overview:
            endpoint = checked_by(Caller.check_admin if self.admin else Caller.check_overview, endpoint)
        return [Route(path, endpoint, methods=[self.method]) for path in (self.path, *self.aliases)]


def open_paths_of(operations: Sequence[Operation]) -> frozenset[str]:
    """Return the paths that need no key."""
    return frozenset(path for one in operations if one.is_open for path in (one.path, *one.aliases))


def routes_of(operations: Sequence[Operation]) -> list[Route]:
    """Return the routes of operations."""
    return [route for operation in operations for route in operation.routes()]
