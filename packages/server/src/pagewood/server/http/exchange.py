"""One HTTP request and its answer: its id, its line in the log, and the checks that come before every endpoint."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagewood.server.http.access import AccessRules
from pagewood.server.http.current import current_exchange
from pagewood.server.http.errors import ApiError
from pagewood.server.keys.caller import Caller, set_caller
from pagewood.server.keys.gate import KeyGate, OneCaller
from pagewood.server.keys.gateway import GatewayHeaders
from pagewood.server.protocols.common.formats import Usage

REQUEST_ID = "x-request-id"
NO_SNIFFING = {"x-content-type-options": "nosniff"}
"""Header of every answer: browsers must not take an answer for a page or a script because of its content."""
CLIENT_LEFT = 499
"""Status in the log for a request whose client left before it got an answer; the number is nginx's."""
_SCOPE_KEY = "pagewood.exchange"
CROWDED = "pagewood.crowded"
"""Extension of a scope whose connection is one too many in another process."""
_SANE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_HEALTH_PATHS = ("/health", "/live", "/ping", "/ready", "/health/generate", "/health_generate", "/metrics")
_ANTHROPIC = "/v1/messages"
"""Beginning of the paths whose rate-limit headers have Anthropic's names."""
_LOGGED_PATH_CHARS = 200

_log = logging.getLogger("pagewood.server.requests")

ErrorForm = Callable[[ApiError, str], tuple[int, bytes]]
"""Returns the status and the body of an error in the form of a protocol, given the id of the request."""


def openai_error(error: ApiError, request_id: str) -> tuple[int, bytes]:
    """Return the status and the body of an error as in OpenAI's API."""
    return error.status, error.body()


@dataclass(slots=True, kw_only=True)
class Exchange:
    """One HTTP request and its outcome."""

    request_id: str
    method: str
    path: str
    client: str
    started_s: float
    """When it began, on the clock of `FrontDoor`."""
    error_form: ErrorForm = openai_error  # written by: FrontDoor, anthropic.models
    """Writes errors in the form of the path's protocol."""
    status: int = CLIENT_LEFT  # written by: FrontDoor
    media_type: str = ""  # written by: FrontDoor, Entrance
    """Content type of the answer, once it has begun."""
    is_complete: bool = False  # written by: FrontDoor
    """Whether the whole answer was sent."""
    error_code: str | None = None  # written by: respond
    usage: Usage | None = None  # written by: respond, common.beams, common.collected
    caller: Caller = field(default_factory=Caller)  # written by: FrontDoor
    """The caller that sent it; a caller without a key until the key has been checked."""
    engine_ids: list[str] = field(default_factory=list[str])  # written by: LiveRequests
    """Ids of its requests in the other processes, whose logs have them; one that was sent again has several."""
    span: object = None
    """The tracer's data about it; None: it is not traced."""  # written by: FrontDoor
    load_s: float = 0.0  # written by: models.pool
    """How long it waited for the load of its model."""
    on_end: Callable[[], None] | None = None
    """Called when it is over; None: no call."""  # written by: models.pool

    def log(self, now_s: float) -> None:
        """Write the line of this request: no text of prompts or answers."""
        level = logging.WARNING if self.status >= 500 else logging.INFO
        if self.path in _HEALTH_PATHS or self.caller.is_job:  # the former are polled, the latter counted by their batch
            level = logging.DEBUG
        tokens = ""
        if self.usage is not None:
            cached = self.usage.prompt_tokens_details.cached_tokens
            tokens = f" tokens_in={self.usage.prompt_tokens} cached={cached} tokens_out={self.usage.completion_tokens}"
            drafts = self.usage.completion_tokens_details
            if drafts and drafts.accepted_prediction_tokens is not msgspec.UNSET:
                tokens += f" accepted={drafts.accepted_prediction_tokens} rejected={drafts.rejected_prediction_tokens}"
        key = f" key={self.caller.name}" if self.caller.name else ""
        tenant = f" tenant={self.caller.tenant}" if self.caller.tenant else ""
        code = f" error={self.error_code}" if self.error_code else ""
        is_cut = not self.is_complete and self.status != CLIENT_LEFT
        left = " incomplete" if is_cut else ""
        _log.log(
            level,
            "%s %s %d id=%s client=%s time=%.3fs%s%s%s%s%s",
            self.method,
            self.path,
            self.status,
            self.request_id,
            self.client,
            now_s - self.started_s,
            key,
            tenant,
            tokens,
            code,
            left,
            extra={"fields": self._fields(now_s, is_cut)},
        )

    def _fields(self, now_s: float, is_cut: bool) -> dict[str, object]:
        """Return the fields of the line, for programs that read the log."""
        found: dict[str, object] = {
            "request_id": self.request_id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "client": self.client,
            "seconds": round(now_s - self.started_s, 4),
        }
        if self.engine_ids:
            found["engine_ids"] = self.engine_ids
        if self.usage is not None:
            found["tokens_in"] = self.usage.prompt_tokens
            found["tokens_cached"] = self.usage.prompt_tokens_details.cached_tokens
            found["tokens_out"] = self.usage.completion_tokens
        if self.error_code:
            found["error"] = self.error_code
        if is_cut:
            found["incomplete"] = True
        return found


class ExchangeTracing(Protocol):
    """Traces HTTP requests."""

    def open(self, headers: Mapping[str, str]) -> object:
        """Return the tracer's data about a request that begins."""
        ...

    def close(self, exchange: Exchange, now_s: float) -> None:
        """Note that a request is over."""
        ...


def exchange_of(scope: Scope) -> Exchange:
    """Return the exchange that an ASGI scope belongs to."""
    return scope[_SCOPE_KEY]


def begin_exchange(scope: Scope, exchange: Exchange) -> None:
    """Note the exchange that an ASGI scope belongs to."""
    scope[_SCOPE_KEY] = exchange


def new_id() -> str:
    """Return a new id, for a request without one."""
    return uuid.uuid4().hex


def error_headers(request_id: str, error: ApiError) -> dict[str, str]:
    """Return the headers of an error response that does not pass through `FrontDoor`."""
    return {"content-type": "application/json", REQUEST_ID: request_id, **NO_SNIFFING, **error.headers}


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontDoor:
    """An ASGI application around another one.

    Every response gets an `x-request-id`: the client's own, if it is short and plain, or a new one. Every request gets
    one line in the log. Requests for a host, from an origin or without a key that is not allowed go no further.
    """

    app: ASGIApp
    access: AccessRules
    is_crowded: Callable[[], bool]
    """Whether too many connections are open."""
    respond: Callable[[Scope, ApiError], Response]
    """Makes the response to a refused request."""
    gate: KeyGate | OneCaller = field(default_factory=KeyGate)
    """Finds the caller of each request."""
    gateway: GatewayHeaders | None = None
    """Reads what a gateway says of each request; None: its headers are ignored."""
    open_paths: frozenset[str] = frozenset(_HEALTH_PATHS)
    """Paths that need no key."""
    error_forms: Mapping[str, ErrorForm] = field(default_factory=dict[str, Any])
    """Beginning of a path -> the form of errors there; elsewhere they have OpenAI's form."""
    clock: Callable[[], float] = time.monotonic
    observe: Callable[[Exchange], None] | None = None
    """Called with every request that is over; None: no call."""
    tracing: ExchangeTracing | None = None
    """Traces requests; None: no traces."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        own_id = headers.get(REQUEST_ID, "")
        exchange = Exchange(
            request_id=own_id if _SANE_ID.fullmatch(own_id) else new_id(),
            method=scope["method"],
            path=_loggable(scope),
            client=":".join(map(str, scope.get("client") or ("-",))),
            started_s=self.clock(),
            error_form=self._error_form(scope["path"]),
        )
        begin_exchange(scope, exchange)
        if self.tracing is not None:
            exchange.span = self.tracing.open(headers)
        origin = headers.get("origin", "")
        added = {REQUEST_ID: exchange.request_id, **NO_SNIFFING, **self._cors_headers(origin)}

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                sent = MutableHeaders(scope=message)
                sent.update(added)
                if (quota := exchange.caller.quota) is not None:
                    sent.update(quota.headers(is_anthropic=scope["path"].startswith(_ANTHROPIC)))
                exchange.status, exchange.media_type = message["status"], sent.get("content-type", "")
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                exchange.is_complete = True

        token = current_exchange.set(exchange)
        try:
            app = self._refusal(scope, headers, exchange) or self.app
            await app(scope, receive, send_noted)
        finally:
            if exchange.usage is not None and exchange.caller.quota is not None:
                exchange.caller.quota.charge(exchange.usage.total_tokens)
            if exchange.on_end is not None:
                exchange.on_end()
            exchange.log(self.clock())
            if self.tracing is not None:
                self.tracing.close(exchange, self.clock())
            if self.observe is not None:
                self.observe(exchange)
            current_exchange.reset(token)

    def _error_form(self, path: str) -> ErrorForm:
        found = (form for beginning, form in self.error_forms.items() if path.startswith(beginning))
        return next(found, openai_error)

    def _refusal(self, scope: Scope, headers: Headers, exchange: Exchange) -> Response | None:
        """Return the answer that refuses a request; None: it may continue, and its caller is known."""
        try:
            self.access.check_host(headers, http_version=scope.get("http_version", "1.1"))
            self.access.check_origin(headers, method=scope["method"], scheme=scope.get("scheme", "http"))
            is_crowded = self.is_crowded() or CROWDED in scope.get("extensions", {})
            if is_crowded and scope["path"] not in _HEALTH_PATHS:
                raise too_many_connections()
            if (preflight := self._preflight(scope, headers)) is not None:  # browsers send no key with it
                return preflight
            exchange.caller = self.gate.caller(headers, is_open=scope["path"] in self.open_paths)
            if self.gateway is not None:
                terms = self.gateway.read(headers, arrived_s=exchange.started_s)
                exchange.caller = replace(exchange.caller, terms=terms)
            set_caller(exchange.caller)
        except ApiError as error:
            return self.respond(scope, error)
        return None

    def _preflight(self, scope: Scope, headers: Headers) -> Response | None:
        """Return the answer to a browser that asks whether an allowed origin may send a request."""
        wanted = headers.get("access-control-request-method")
        if scope["method"] != "OPTIONS" or wanted is None or not self._cors_headers(headers.get("origin", "")):
            return None
        allowed = {
            "access-control-allow-methods": "GET, POST, DELETE",
            "access-control-allow-headers": headers.get("access-control-request-headers", "content-type"),
            "access-control-max-age": "600",
        }
        if "access-control-request-private-network" in headers:
            allowed["access-control-allow-private-network"] = "true"
        return Response(status_code=204, headers=allowed)

    def _cors_headers(self, origin: str) -> dict[str, str]:
        if not origin or not self.access.allows_origin(origin):
            return {}
        return {
            "access-control-allow-origin": origin,
            "access-control-expose-headers": f"{REQUEST_ID}, retry-after",
            "vary": "Origin",
        }


def too_many_connections() -> ApiError:
    """Return the error of a request over a connection beyond the limit."""
    return ApiError(
        "The server has too many open connections; try again later.",
        status=503,
        type="server_error",
        code="too_many_connections",
        headers={"Retry-After": "1", "Connection": "close"},
    )


def _loggable(scope: Scope) -> str:
    """Return the path as it was sent, without its query and without characters that could forge lines of the log."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    path = raw.partition(b"?")[0].decode("ascii", "backslashreplace")[:_LOGGED_PATH_CHARS]
    return "".join(char if char.isprintable() and char != " " else "?" for char in path)
