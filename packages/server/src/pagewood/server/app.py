"""The HTTP endpoints: they validate requests, submit them, and map errors to responses."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from pagewood.engine.api import SamplingParams
from pagewood.server import openai_beams, openai_chat, openai_completions, openai_fields, wire
from pagewood.server.access import AccessRules
from pagewood.server.beams import BeamResponse
from pagewood.server.bodies import Bodies
from pagewood.server.connections import Connections
from pagewood.server.errors import ApiError, unavailable
from pagewood.server.exchange import FrontDoor, exchange_of
from pagewood.server.formats import Format
from pagewood.server.limits import HttpLimits
from pagewood.server.live import LiveRequests, new_request_id
from pagewood.server.openai_fields import Extent, GenerationFields
from pagewood.server.priority import parse_priority
from pagewood.server.respond import GroupResponse, error_response, json_response
from pagewood.server.status import EngineState, EngineStatus
from pagewood.server.structured import constraint


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontend:
    """The endpoints and what they work with."""

    live: LiveRequests
    status: EngineStatus
    defaults: SamplingParams
    model_name: str
    limits: HttpLimits
    access: AccessRules
    connections: Connections
    bodies: Bodies
    started: int
    """Unix time, seconds."""

    def take(self, message: wire.ToHttp) -> None:
        """Take a message of the detokenizer."""
        match message:
            case wire.Answers():
                self.live.take(message)
            case wire.Loading() | wire.Pulse():
                self.status.take(message)

    def app(self) -> ASGIApp:
        """Return the application."""
        app = Starlette(
            routes=[
                Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/requests/{name:path}/priority", self.priority, methods=["POST"]),
                Route("/v1/models", self.models, methods=["GET"]),
                Route("/v1/models/{name:path}", self.model, methods=["GET"]),
                Route("/health", self.health, methods=["GET"]),
                Route("/ready", self.ready, methods=["GET"]),
            ],
            exception_handlers={
                ApiError: _api_error,
                HTTPException: _http_error,
                ClientDisconnect: _gone,
                Exception: _unexpected_error,
            },
        )
        # A redirect would go to whatever host the request names.
        app.router.redirect_slashes = False  # not ours
        return FrontDoor(
            app=app, access=self.access, is_crowded=lambda: self.connections.is_crowded, respond=error_response
        )

    async def chat_completions(self, request: Request) -> ASGIApp:
        """Answer a conversation."""
        chat = openai_chat.parse_chat(await self.bodies.read(request))
        model = self._model(chat.model)
        extent = openai_chat.extent(chat)
        answer_id = new_request_id("chatcmpl")
        return self._respond(
            chat,
            model,
            names=_names(request, answer_id),
            prompts=[openai_chat.prompt(chat)],
            extent=extent,
            prompt_param="messages",
            format=openai_chat.ChatFormat(
                id=answer_id,
                created=int(time.time()),
                model=self.model_name,
                logprobs=extent.logprobs is not None,
                prompt_logprobs=chat.prompt_logprobs,
            ),
        )

    async def completions(self, request: Request) -> ASGIApp:
        """Continue one or more prompts."""
        completion = openai_completions.parse_completion(await self.bodies.read(request))
        model = self._model(completion.model)
        extent = openai_completions.extent(completion)
        answer_id = new_request_id("cmpl")
        return self._respond(
            completion,
            model,
            names=_names(request, answer_id),
            prompts=openai_completions.prompts(completion, vocab_size=model.vocab_size),
            extent=extent,
            prompt_param="prompt",
            format=openai_completions.CompletionFormat(
                id=answer_id,
                created=int(time.time()),
                model=self.model_name,
                logprobs=completion.logprobs,
                prompt_logprobs=completion.prompt_logprobs,
                echo=extent.echo,
            ),
        )

    async def priority(self, request: Request) -> Response:
        """Change the priority of a request that is queued, running or streaming."""
        name: str = request.path_params["name"]
        priority = parse_priority(await self.bodies.read(request))
        if not self.live.prioritize(name, priority):
            raise ApiError(f"No request '{name}' is queued or running.", status=404, code="request_not_found")
        return json_response(msgspec.json.encode({"id": name, "object": "request", "priority": priority}))

    async def models(self, request: Request) -> Response:
        """List the one model."""
        return json_response(msgspec.json.encode({"object": "list", "data": [self._model_object()]}))

    async def model(self, request: Request) -> Response:
        """Describe the one model."""
        self._check_name(request.path_params["name"])
        return json_response(msgspec.json.encode(self._model_object()))

    async def health(self, request: Request) -> Response:
        """Liveness: this process answers."""
        return json_response(b'{"status":"ok"}')

    async def ready(self, request: Request) -> Response:
        """Readiness and progress: whether the engine serves, and the counts of its last pulse."""
        silent_s = self.status.seconds_since_pulse
        state = self.status.state
        body = {
            "status": state.value,
            "detail": self.status.detail,
            "model": self.model_name,
            "requests": {"live": self.live.num_live, "ending": self.live.num_ending},
            "engine": self.status.counters,
            **({} if self.status.speculation is None else {"speculation": self.status.speculation}),
            "seconds_since_pulse": None if silent_s is None else round(silent_s, 3),
            "seconds_in_step": round(self.status.step_s, 3),
        }
        is_ready = state is EngineState.READY
        headers = None if is_ready else {"Retry-After": "2"}
        return json_response(msgspec.json.encode(body), status=200 if is_ready else 503, headers=headers)

    def _respond(
        self,
        fields: GenerationFields,
        model: wire.Model,
        *,
        names: frozenset[str],
        prompts: Sequence[wire.Prompt],
        extent: Extent,
        prompt_param: str,
        format: Format,
    ) -> ASGIApp:
        if fields.use_beam_search:
            return BeamResponse(
                live=self.live,
                params=openai_beams.params(fields, extent, model),
                model=model,
                prompts=prompts,
                prompt_param=prompt_param,
                names=names,
                priority=fields.priority or 0,
                num_choices=extent.num_choices,
                format=format,
                is_speculating=self.status.speculation is not None,
            )
        structured = constraint(fields)
        sampling = openai_fields.sampling(
            fields,
            self.defaults,
            max_tokens=extent.max_tokens,
            vocab_size=model.vocab_size,
            logprobs=extent.logprobs,
            prompt_logprobs=extent.prompt_logprobs,
            grammar=None if structured is None else structured.grammar,
        )
        options = openai_fields.stream_options(fields)
        stop_regex = openai_fields.stop_expressions(fields)
        group = self.live.submit(
            [
                wire.Generate(
                    request_id=new_request_id("req"),
                    prompt=prompt,
                    sampling=sampling,
                    sibling_ids=tuple(new_request_id("req") for _ in range(extent.num_answers - 1)),
                    stop=tuple(fields.stop),
                    stop_regex=stop_regex,
                    bad_words=tuple(fields.bad_words),
                    echo=extent.echo,
                    is_scoring=extent.is_scoring,
                    priority=fields.priority or 0,
                    max_length=model.max_length,
                )
                for prompt in prompts
            ],
            prompt_param=prompt_param,
            grammar_param=None if structured is None else structured.param,
            names=names,
        )
        return GroupResponse(
            live=self.live,
            group=group,
            num_prompts=len(prompts),
            num_answers=extent.num_answers,
            num_choices=extent.num_choices,
            shares_prompt=extent.prompt_logprobs is not None and extent.num_answers > 1,
            format=format,
            stream=bool(fields.stream),
            options=options,
            is_speculating=self.status.speculation is not None,
        )

    def _model(self, name: str) -> wire.Model:
        """Return the loaded model.

        Raises:
            ApiError: the request names another model, or the engine is not ready.
        """
        self._check_name(name)
        model = self.status.model
        if model is None or self.status.state is not EngineState.READY:
            raise unavailable(f"The engine is not ready: {self.status.detail}.", code="not_ready")
        return model

    def _check_name(self, name: str) -> None:
        if name != self.model_name:
            raise ApiError(
                f"The model '{name}' does not exist; this server has '{self.model_name}'.",
                status=404,
                param="model",
                code="model_not_found",
            )

    def _model_object(self) -> dict[str, object]:
        model = self.status.model
        return {
            "id": self.model_name,
            "object": "model",
            "created": self.started,
            "owned_by": "pagewood",
            "root": self.model_name,  # `vllm bench serve` reads it if it gets no --model
            "parent": None,
            "max_model_len": None if model is None else model.max_length,
        }


def _names(request: Request, answer_id: str) -> frozenset[str]:
    """Return the names of a request: the id of its answers, its `x-request-id`, and `X-Client-Request-Id` if sent."""
    names = {answer_id, exchange_of(request.scope).request_id}
    own_id = request.headers.get("x-client-request-id")
    return frozenset(names | {own_id} if own_id else names)


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
    """Answer a client that left before its request was complete; nothing of the answer is sent."""
    return Response(status_code=400)


async def _unexpected_error(request: Request, error: Exception) -> Response:
    """Answer a defect of this server. Starlette raises the error again afterwards, so that it is logged."""
    defect = ApiError("The server had an error.", status=500, type="server_error", code="internal_error")
    return error_response(request.scope, defect)
