"""The HTTP application: the endpoints of all protocols, health, and errors as responses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from pagewood.server.dashboard.endpoints import DashboardEndpoints, page_routes
from pagewood.server.documentation.pages import OPEN_PATHS, Documentation
from pagewood.server.http.access import AccessRules
from pagewood.server.http.connections import Connections
from pagewood.server.http.errors import ApiError
from pagewood.server.http.exchange import ExchangeTracing, FrontDoor
from pagewood.server.http.limits import HttpLimits
from pagewood.server.http.operations import Operation, open_paths_of, routes_of
from pagewood.server.http.root_path import BelowRootPath
from pagewood.server.keys.gate import KeyGate
from pagewood.server.keys.gateway import GatewayHeaders
from pagewood.server.messages import wire
from pagewood.server.metrics.endpoint import MetricsEndpoint
from pagewood.server.observe.profile_endpoint import ProfileEndpoint
from pagewood.server.processes.canary import CanaryEndpoints
from pagewood.server.processes.upkeep import UpkeepEndpoints
from pagewood.server.protocols.adapters import AdapterEndpoints
from pagewood.server.protocols.anthropic.endpoints import AnthropicEndpoints
from pagewood.server.protocols.anthropic.errors import anthropic_error
from pagewood.server.protocols.common.respond import error_response, json_response
from pagewood.server.protocols.common.service import Service
from pagewood.server.protocols.models import ModelEndpoints
from pagewood.server.protocols.native.endpoints import NativeEndpoints
from pagewood.server.protocols.ollama.endpoints import OllamaEndpoints
from pagewood.server.protocols.ollama.errors import ollama_error
from pagewood.server.protocols.openai.endpoints import OpenAIEndpoints
from pagewood.server.protocols.responses.endpoints import ResponsesEndpoints, absent_routes
from pagewood.server.protocols.vectors.endpoints import VectorEndpoints
from pagewood.server.replicas.dispatcher import Dispatcher
from pagewood.server.replicas.fleet_status import FleetStatus, ServerStatus
from pagewood.server.requests.status import EngineState

DRAINING = "draining"
"""The `status` of `/ready` while the server takes no new requests."""


class Health(msgspec.Struct, frozen=True):
    """The HTTP process answers."""

    status: Literal["ok"] = "ok"


class ReadyReplica(msgspec.Struct, frozen=True, kw_only=True):
    """One of several engines."""

    replica: int
    status: str
    detail: str
    requests: int
    """Requests that the router has sent there, and that have not ended."""
    restarts: int
    engine: dict[str, int]


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the engine serves."""

    status: str
    detail: str
    """What it is doing, in words."""
    model: str
    requests: dict[str, int]
    """Live requests, and those whose end the engine has not confirmed yet."""
    engine: dict[str, int]
    """Counters of its last pulse."""
    free_pages_by_rank: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
    """Where ranks divide KV memory by request, the free pages of each."""
    incidents: dict[str, int]
    """What went wrong since the server was started: restarts, requests that were lost, sent again or refused."""
    speculation: wire.Speculation | msgspec.UnsetType = msgspec.UNSET
    seconds_since_pulse: float | None
    seconds_in_step: float
    replicas: list[ReadyReplica] | msgspec.UnsetType = msgspec.UNSET
    """Of a server with several engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontend:
    """The application, and its receiver of messages from the other processes."""

    service: Service
    limits: HttpLimits
    access: AccessRules
    connections: Connections
    gate: KeyGate = field(default_factory=KeyGate)
    gateway: GatewayHeaders | None = None
    """By default without keys, so that admin routes stay closed."""
    tracing: ExchangeTracing | None = None
    """Traces requests; None: no traces."""
    folder: Path | None = None
    """Where the engine process writes profiles; None: it takes none."""
    replace_engine: Callable[[], Awaitable[None]] | None = None
    """Replaces the engine process; None: it cannot be replaced."""
    dispatcher: Dispatcher | None = None
    """Sends requests to replicas; None: there is one engine, and the tokenizers send to it."""
    root_path: str = ""
    """Prefix of a proxy before the server, such as `/llm`; empty: none."""

    def take(self, message: wire.ToHttp) -> None:
        """Take a message of the detokenizer, or with several replicas of a tokenizer."""
        match message:
            case wire.Answers():
                if self.dispatcher is not None:
                    message = self.dispatcher.answered(message)
                if self.service.metrics is not None:
                    self.service.metrics.requests.answered(message)
                self.service.live.take(message)
            case wire.Loading() | wire.Pulse():
                self.service.status.take(message)
                if self.dispatcher is not None and isinstance(message, wire.Pulse):
                    self.dispatcher.pulsed(message)
                if self.service.live.is_interrupted and self.service.status.state is EngineState.READY:
                    self.service.live.resume()
                if self.service.metrics is not None:
                    self.service.metrics.pulsed(self.service.status)
            case wire.Snapshot():
                self.service.watchers.take(message)
            case wire.CacheChanges():
                if self.dispatcher is not None:
                    self.dispatcher.cache_changed(message)
            case _:
                assert self.dispatcher is not None, "tokenizers send to the engine if there is one"
                self.dispatcher.take(message)

    def all_operations(self) -> list[Operation]:
        """Return the operations of all protocols, and those outside of protocols."""
        return [
            *OpenAIEndpoints(self.service).operations(),
            *ModelEndpoints(self.service).operations(),
            *AdapterEndpoints(self.service).operations(),
            *ResponsesEndpoints(self.service).operations(),
            *VectorEndpoints(self.service).operations(),
            *AnthropicEndpoints(self.service).operations(),
            *OllamaEndpoints(self.service).operations(),
            *NativeEndpoints(self.service).operations(),
            *DashboardEndpoints(self.service).operations(),
            *self.operations(),
            *CanaryEndpoints(self.service).operations(),
            *UpkeepEndpoints(service=self.service, replace_engine=self.replace_engine).operations(),
            *self._observability(),
        ]

    def app(self) -> ASGIApp:
        """Return the application."""
        operations = self.all_operations()
        metrics = self.service.metrics
        routes = [*routes_of(operations), *Documentation(operations).routes(), *page_routes(), *absent_routes()]
        if metrics is not None:
            metrics.paths = {route.path for route in routes if "{" not in route.path}
        app = Starlette(
            routes=routes,
            exception_handlers={
                ApiError: _api_error,
                HTTPException: _http_error,
                ClientDisconnect: _gone,
                Exception: _unexpected_error,
            },
        )
        # A redirect would go to the host that the request names, which may be any.
        app.router.redirect_slashes = False  # not ours
        door = FrontDoor(
            app=app,
            access=self.access,
            is_crowded=lambda: self.connections.is_crowded,
            respond=error_response,
            gate=self.gate,
            gateway=self.gateway,
            open_paths=open_paths_of(operations) | OPEN_PATHS,
            error_forms={"/v1/messages": anthropic_error, "/api/": ollama_error},
            observe=None if metrics is None else metrics.answered,
            tracing=self.tracing,
        )
        is_ours = any(route.path.startswith(f"{self.root_path}/") for route in routes)
        return BelowRootPath(app=door, root_path=self.root_path, is_ours=is_ours)

    def _observability(self) -> list[Operation]:
        """Return the operations that show the state of the server."""
        service = self.service
        profiling = ProfileEndpoint(service=service, folder=self.folder).operations()
        if service.metrics is None:
            return profiling
        endpoint = MetricsEndpoint(
            metrics=service.metrics, status=service.status, live=service.live, model_name=service.model_name
        )
        return [*endpoint.operations(), *profiling]

    def operations(self) -> list[Operation]:
        """Return the operations outside of protocols."""
        tag = "Health"
        return [
            Operation(
                name="Health",
                tag=tag,
                method="GET",
                path="/health",
                aliases=("/live", "/ping"),
                endpoint=self.health,
                answer=Health,
                is_open=True,
            ),
            Operation(
                name="Ready", tag=tag, method="GET", path="/ready", endpoint=self.ready, answer=Ready, is_open=True
            ),
        ]

    async def health(self, request: Request) -> Response:
        """Liveness: this process answers."""
        return json_response(Health())

    async def ready(self, request: Request) -> Response:
        """Readiness and progress: whether the engine serves, and the counts of its last pulse."""
        status, live = self.service.status, self.service.live
        silent_s = status.seconds_since_pulse
        is_closing = live.is_closed or live.is_draining
        body = Ready(
            status=DRAINING if is_closing else status.state.value,
            detail="no new requests are taken; running ones may end" if is_closing else status.detail,
            model=self.service.model_name,
            requests={"live": live.num_live, "ending": live.num_ending},
            engine=status.counters,
            free_pages_by_rank=status.free_pages_by_rank or msgspec.UNSET,
            incidents=live.incidents.totals(),
            speculation=msgspec.UNSET if status.speculation is None else status.speculation,
            seconds_since_pulse=None if silent_s is None else round(silent_s, 3),
            seconds_in_step=round(status.step_s, 3),
            replicas=msgspec.UNSET if self.dispatcher is None else _ready_replicas(status, self.dispatcher),
        )
        is_ready = status.state is EngineState.READY and not is_closing
        headers = None if is_ready else {"Retry-After": "2"}
        return json_response(body, status=200 if is_ready else 503, headers=headers)


def _ready_replicas(status: ServerStatus, dispatcher: Dispatcher) -> list[ReadyReplica]:
    assert isinstance(status, FleetStatus)
    return [
        ReadyReplica(
            replica=number,
            status=one.state.value,
            detail=one.detail,
            requests=dispatcher.num_requests(number),
            restarts=one.incarnation,
            engine=one.counters,
        )
        for number, one in enumerate(status.replicas)
    ]


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(request.scope, error)


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer an error of the router."""
    assert isinstance(error, HTTPException)
    path = f"{request.method} {request.url.path}"
    message = {404: f"Unknown path: {path}.", 405: f"Method not allowed: {path}."}.get(error.status_code, error.detail)
    code = {404: "unknown_path", 405: "method_not_allowed"}.get(error.status_code)
    headers = dict(error.headers or {})
    return error_response(request.scope, ApiError(message, status=error.status_code, code=code, headers=headers))


async def _gone(request: Request, error: Exception) -> Response:
    """Return the answer for a client that left before its request was complete; it is never sent."""
    return Response(status_code=400)


async def _unexpected_error(request: Request, error: Exception) -> Response:
    """Answer a defect of this server. Starlette raises the error again afterwards, so that it is logged."""
    defect = ApiError("The server had an error.", status=500, type="server_error", code="internal_error")
    return error_response(request.scope, defect)
