"""The endpoints of Ollama's protocol."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from pagewood.engine.api import RequestOptions
from pagewood.server.http.exchange import exchange_of
from pagewood.server.http.operations import Operation
from pagewood.server.messages import wire
from pagewood.server.protocols.common.collected import respond
from pagewood.server.protocols.common.formats import LINES
from pagewood.server.protocols.common.models import ModelEntry, Models, visible
from pagewood.server.protocols.common.respond import json_response
from pagewood.server.protocols.common.service import Generation, Service, names_of
from pagewood.server.protocols.common.tools import Tools
from pagewood.server.protocols.ollama import embeddings, fields, models
from pagewood.server.protocols.ollama.errors import OllamaError
from pagewood.server.protocols.ollama.format import ChatLine, OllamaFormat, TextLine
from pagewood.server.protocols.ollama.lenient import log_ignored
from pagewood.server.requests.status import EngineState

OLLAMA_VERSION = "0.12.11"
"""The version of Ollama whose API this is: clients compare it before they use a field."""
TAG = "Ollama"
_LATEST = ":latest"
T = TypeVar("T")
AnyRequest: TypeAlias = fields.CommonFields | embeddings.OllamaEmbedRequest | embeddings.OllamaEmbeddingsRequest


@dataclass(frozen=True, slots=True)
class OllamaEndpoints:
    """Chat, generate, and descriptions of the models."""

    models: Models

    def operations(self) -> list[Operation]:
        """Return the operations."""
        operation = partial(Operation, tag=TAG, error=OllamaError)
        name, short = self.models.names[0], {"num_predict": 64}
        return [
            operation(
                name="OllamaChat",
                path="/api/chat",
                endpoint=self.chat,
                body=fields.OllamaChatRequest,
                example={
                    "model": name,
                    "messages": [{"role": "user", "content": "What is 12 + 7?"}],
                    "options": short,
                },
                ignored=fields.IGNORED,
                answer=ChatLine,
                event=ChatLine,
                stream=LINES,
            ),
            operation(
                name="OllamaGenerate",
                path="/api/generate",
                endpoint=self.generate,
                body=fields.OllamaGenerateRequest,
                example={"model": name, "prompt": "What is 12 + 7?", "options": short},
                neutral=fields.GENERATE_NEUTRAL,
                ignored=fields.IGNORED,
                answer=TextLine,
                event=TextLine,
                stream=LINES,
            ),
            operation(
                name="OllamaEmbed",
                path="/api/embed",
                endpoint=self.embed,
                body=embeddings.OllamaEmbedRequest,
                example={"model": name, "input": ["What is 12 + 7?", "The sum is 19."]},
                answer=embeddings.OllamaEmbeddings,
            ),
            operation(
                name="OllamaEmbeddings",
                path="/api/embeddings",
                endpoint=self.embeddings,
                body=embeddings.OllamaEmbeddingsRequest,
                example={"model": name, "prompt": "What is 12 + 7?"},
                answer=embeddings.OllamaEmbedding,
            ),
            operation(
                name="OllamaShow",
                path="/api/show",
                endpoint=self.show,
                body=fields.OllamaShowRequest,
                example={"model": name},
                answer=models.ShownModel,
            ),
            *(
                operation(
                    name=title,
                    method="GET",
                    path=path,
                    endpoint=endpoint,
                    answer=answer,
                )
                for title, path, endpoint, answer in (
                    ("OllamaTags", "/api/tags", self.tags, models.ListedModels),
                    ("OllamaPs", "/api/ps", self.ps, models.LoadedModels),
                    ("OllamaVersion", "/api/version", self.version, models.ApiVersion),
                )
            ),
        ]

    async def chat(self, request: Request) -> ASGIApp:
        """Answer a conversation."""
        said = await self._read(request, fields.parse_chat)
        tools = fields.tools_of(said)
        prompt = (
            await self.models.reader.conversation(lambda: fields.chat_prompt(said, tools), num_parts=len(said.messages))
            if said.messages
            else None
        )
        return await self._respond(request, said, prompt, prompt_param="messages", tools=tools)

    async def generate(self, request: Request) -> ASGIApp:
        """Answer or continue one prompt."""
        said = await self._read(request, fields.parse_generate)
        prompt = fields.generate_prompt(said) if said.prompt or said.images else None
        if isinstance(prompt, wire.ChatPrompt):
            prompt = await self.models.reader.images.filled(prompt)
        return await self._respond(request, said, prompt, prompt_param="prompt")

    async def embed(self, request: Request) -> ASGIApp:
        """Return the vectors of texts."""
        said = await self._read(request, embeddings.parse_embed)
        service, model = await self._model(request, said)
        exchange = exchange_of(request.scope)
        work = embeddings.embed(said, service.recipe, model, started_s=exchange.started_s, load_s=exchange.load_s)
        return respond(service.live, work, names=names_of(request, exchange.request_id))

    async def embeddings(self, request: Request) -> ASGIApp:
        """Return the vector of one text."""
        said = await self._read(request, embeddings.parse_embeddings)
        service, model = await self._model(request, said)
        work = embeddings.embeddings(said, service.recipe, model)
        return respond(service.live, work, names=names_of(request, exchange_of(request.scope).request_id))

    async def tags(self, request: Request) -> Response:
        """List all models."""
        return json_response(models.ListedModels(tuple(map(_listed, visible(self.models)))))

    async def show(self, request: Request) -> Response:
        """Describe a model."""
        entry, _ = self.models.entry_of(self._own_name(await self._read(request, fields.parse_show)))
        template, model = entry.template, entry.model
        kinds = {field.kind for field in template.fields} if template is not None else set[str]()
        read = {"calls": "tools", "reasoning": "thinking"}
        info: dict[str, Any] = {"general.architecture": "pagewood", "general.basename": entry.name}
        if model is not None:
            info["pagewood.context_length"] = model.max_length
        return json_response(
            models.ShownModel(
                model_info=info,
                capabilities=[
                    "completion",
                    *(word for kind, word in read.items() if kind in kinds),
                    *(["vision"] if model is not None and model.takes_images else ()),
                ],
                modified_at=_created_at(entry),
            )
        )

    async def ps(self, request: Request) -> Response:
        """List the models that are loaded."""
        found = [
            models.LoadedModel(
                **msgspec.structs.asdict(_listed(entry)),
                context_length=entry.model.max_length,
                expires_at=models.NEVER if entry.state is None else entry.state.expires_at or models.NEVER,
            )
            for entry in visible(self.models)
            if entry.service is not None and entry.model is not None and entry.service.status.state is EngineState.READY
        ]
        return json_response(models.LoadedModels(tuple(found)))

    async def version(self, request: Request) -> Response:
        """Return the version of the API."""
        return json_response(models.ApiVersion(OLLAMA_VERSION))

    async def _read(self, request: Request, parse: Callable[[bytes], T]) -> T:
        """Return the parsed body. Some clients, and `curl` in Ollama's documentation, do not declare its type."""
        return await self.models.reader.read(request, parse, is_declared=False)

    async def _respond(
        self,
        request: Request,
        said: fields.CommonFields,
        prompt: wire.Prompt | None,
        *,
        prompt_param: str,
        tools: Tools | None = None,
    ) -> ASGIApp:
        if prompt is None and said.keep_alive == 0 and self.models.let_go(self._own_name(said.model)):
            return self._ended(request, said, "unload")
        service, model = await self._model(request, said)
        if prompt is None:
            return self._ended(request, said, "load")
        constraint = fields.constraint(said)
        generation = Generation(
            prompts=[prompt],
            options=RequestOptions(
                sampling=fields.sampling(
                    said, service.defaults, grammar=None if constraint is None else constraint.grammar
                )
            ),
            text=wire.TextOptions(stop=() if said.options is None else tuple(said.options.stop or ())),
            prompt_param=prompt_param,
            grammar_param=None if constraint is None else constraint.param,
            is_chat=isinstance(prompt, wire.ChatPrompt),
            tools=tools,
            param_names={"max_tokens": "options.num_predict"},
            fills_window=True,
            stream=said.stream is not False,
        )
        names = names_of(request, exchange_of(request.scope).request_id)
        return service.generate(generation, model, names=names, format=_format(request, said))

    def _ended(self, request: Request, said: fields.CommonFields, reason: Literal["load", "unload"]) -> Response:
        """Return the answer to a request without a prompt, by which clients have a model loaded or unloaded."""
        is_stream = said.stream is not False
        line = _format(request, said).without_text(reason)
        return Response(line + b"\n", media_type=LINES if is_stream else "application/json")

    async def _model(self, request: Request, said: AnyRequest) -> tuple[Service, wire.Model]:
        """Return the loaded model and its service; log the options of the request that have no effect."""
        name = self._own_name(said.model)
        service = await self.models.serving(name, request, keep_s=said.keep_alive)
        model = service.model(name)
        log_ignored(said, more=() if said.options is None else said.options.without_effect(max_length=model.max_length))
        return service, model

    def _own_name(self, name: str) -> str:
        """Return the name of a model without the tag that Ollama gives to models without one."""
        own = name.removesuffix(_LATEST)
        return own if name not in self.models.names and own in self.models.names else name


def _format(request: Request, said: fields.CommonFields) -> OllamaFormat:
    exchange = exchange_of(request.scope)
    return OllamaFormat(
        model=said.model,
        is_chat=isinstance(said, fields.OllamaChatRequest),
        started_s=exchange.started_s,
        load_s=exchange.load_s,
        logprobs=bool(said.logprobs),
    )


def _listed(entry: ModelEntry) -> models.ListedModel:
    name = entry.name
    tagged = name if ":" in name else name + _LATEST
    return models.ListedModel(
        name=tagged,
        model=tagged,
        modified_at=_created_at(entry),
        size=0 if entry.state is None else entry.state.memory_bytes,
        digest=hashlib.sha256(name.encode()).hexdigest(),
    )


def _created_at(entry: ModelEntry) -> str:
    return datetime.fromtimestamp(entry.created, UTC).isoformat().replace("+00:00", "Z")
