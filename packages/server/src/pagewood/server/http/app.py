"""The HTTP application: the endpoints of all protocols, and errors as responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from pagewood.server.dashboard.endpoints import DashboardEndpoints, page_routes
from pagewood.server.documentation.pages import OPEN_PATHS, Documentation
from pagewood.server.http.access import AccessRules
from pagewood.server.http.connections import Connections, Site
from pagewood.server.http.errors import ApiError
from pagewood.server.http.exchange import ExchangeTracing, FrontDoor, openai_error
from pagewood.server.http.limits import HttpLimits
from pagewood.server.http.operations import Operation, open_paths_of, routes_of
from pagewood.server.http.readiness import ReadinessEndpoints
from pagewood.server.http.root_path import BelowRootPath
from pagewood.server.jobs.worker import JobWorker
from pagewood.server.keys.caller import Caller
from pagewood.server.keys.gate import KeyGate, OneCaller
from pagewood.server.keys.gateway import GatewayHeaders
from pagewood.server.metrics.endpoint import MetricsEndpoint
from pagewood.server.metrics.metrics import Metrics
from pagewood.server.observe.profile_endpoint import ProfileEndpoint
from pagewood.server.processes.canary import CanaryEndpoints
from pagewood.server.processes.upkeep import UpkeepEndpoints
from pagewood.server.protocols.adapters import AdapterEndpoints
from pagewood.server.protocols.anthropic.endpoints import AnthropicEndpoints
from pagewood.server.protocols.anthropic.errors import anthropic_error
from pagewood.server.protocols.batches.endpoints import BatchEndpoints
from pagewood.server.protocols.common.models import Models
from pagewood.server.protocols.common.respond import error_response
from pagewood.server.protocols.models import ModelEndpoints
from pagewood.server.protocols.native.endpoints import NativeEndpoints
from pagewood.server.protocols.ollama.endpoints import OllamaEndpoints
from pagewood.server.protocols.ollama.errors import ollama_error
from pagewood.server.protocols.openai.endpoints import OpenAIEndpoints
from pagewood.server.protocols.responses.endpoints import ResponsesEndpoints, absent_routes
from pagewood.server.protocols.responses.store import ResponseStore
from pagewood.server.protocols.vectors.endpoints import VectorEndpoints
from pagewood.server.protocols.weights.endpoints import WeightEndpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontend:
    """The application."""

    models: Models
    limits: HttpLimits
    access: AccessRules
    connections: Connections
    gate: KeyGate = field(default_factory=KeyGate)
    """By default without keys, so that admin routes stay closed."""
    gateway: GatewayHeaders | None = None
    """Reads what a gateway says of each request; None: its headers are ignored."""
    tracing: ExchangeTracing | None = None
    """Traces requests; None: no traces."""
    metrics: Metrics | None = None
    """None: nothing is measured."""
    jobs: JobWorker | None = None
    """Runs batches; None: the server keeps no files and batches."""
    more: Sequence[Operation] = ()
    """Operations beyond those of every server."""
    root_path: str = ""
    """Prefix of a proxy before the server, such as `/llm`; empty: none."""
    keeps_responses: bool = True
    """Whether responses are kept, so that clients can read and continue them."""

    def all_operations(self) -> list[Operation]:
        """Return the operations of all protocols, and those outside of protocols."""
        models = self.models
        return [
            *OpenAIEndpoints(models).operations(),
            *ModelEndpoints(models).operations(),
            *AdapterEndpoints(models).operations(),
            *WeightEndpoints(models).operations(),
            *ResponsesEndpoints(models, ResponseStore() if self.keeps_responses else None).operations(),
            *VectorEndpoints(models).operations(),
            *BatchEndpoints(models=models, jobs=self.jobs).operations(),
            *AnthropicEndpoints(models).operations(),
            *OllamaEndpoints(models).operations(),
            *NativeEndpoints(models).operations(),
            *DashboardEndpoints(models).operations(),
            *ReadinessEndpoints(models).operations(),
            *CanaryEndpoints(models).operations(),
            *UpkeepEndpoints(models=models).operations(),
            *ProfileEndpoint(models=models).operations(),
            *(() if self.metrics is None else MetricsEndpoint(metrics=self.metrics, models=models).operations()),
            *self.more,
        ]

    def site(self) -> Site:
        """Return the application with its limits and connections."""
        return Site(app=self.app(), limits=self.limits, connections=self.connections)

    def app(self) -> ASGIApp:
        """Return the application."""
        operations = self.all_operations()
        metrics = self.metrics
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
            error_forms={"/v1/messages": anthropic_error, "/api/v0/": openai_error, "/api/": ollama_error},
            observe=None if metrics is None else metrics.answered,
            tracing=self.tracing,
        )
        if self.jobs is not None:
            self.jobs.app_for = lambda caller: _inner(door, caller)
        is_ours = any(route.path.startswith(f"{self.root_path}/") for route in routes)
        return BelowRootPath(app=door, root_path=self.root_path, is_ours=is_ours)


def _inner(door: FrontDoor, caller: Caller) -> ASGIApp:
    """Return the application for requests that this server sends itself for a caller."""
    return replace(door, gate=OneCaller(caller), is_crowded=lambda: False, gateway=None, observe=None, tracing=None)


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
