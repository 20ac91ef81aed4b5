"""`GET /v1/models`: all models and adapters, in the form of OpenAI's clients, of Anthropic's or of LM Studio's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pagewood.server.http.operations import Operation, OtherForm
from pagewood.server.messages import wire
from pagewood.server.protocols.anthropic.errors import AnthropicError
from pagewood.server.protocols.anthropic.models import (
    VERSION,
    AnthropicModel,
    AnthropicModelList,
    described,
    is_anthropic,
    page,
)
from pagewood.server.protocols.common.models import ModelEntry, Models, ModelState, visible
from pagewood.server.protocols.common.respond import json_response
from pagewood.server.requests.status import EngineState

TAG = "OpenAI"


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """What a model takes and gives, as llama.cpp's server and OpenRouter describe it."""

    input_modalities: tuple[Literal["text", "image"], ...]
    output_modalities: tuple[Literal["text", "embeddings"], ...]


class ModelObject(msgspec.Struct, frozen=True, kw_only=True):
    """A model, or an adapter of one."""

    id: str
    object: Literal["model"] = "model"
    created: int
    """Unix time, seconds."""
    owned_by: Literal["pagewood"] = "pagewood"
    root: str
    """`vllm bench serve` reads it if it is started without --model."""
    parent: str | None = None
    """The model of an adapter; null: it is the model."""
    max_model_len: int | None
    """Longest prompt plus output, in tokens; null: the engine has not started yet."""
    architecture: Architecture | msgspec.UnsetType = msgspec.UNSET
    """Absent until the model has been loaded once."""
    status: ModelState | msgspec.UnsetType = msgspec.UNSET
    """What the model is doing, in a server with several models."""


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All models."""

    object: Literal["list"] = "list"
    data: tuple[ModelObject, ...]


class StudioModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model in the words of LM Studio."""

    id: str
    object: Literal["model"] = "model"
    type: Literal["llm", "vlm", "embeddings"] = "llm"
    publisher: Literal["pagewood"] = "pagewood"
    state: Literal["loaded", "not-loaded"]
    max_context_length: int | None
    """Longest prompt plus output, in tokens; null: it has not been loaded yet."""
    loaded_context_length: int | msgspec.UnsetType = msgspec.UNSET


class StudioModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All models in the words of LM Studio."""

    object: Literal["list"] = "list"
    data: tuple[StudioModel, ...]


@dataclass(frozen=True, slots=True)
class ModelEndpoints:
    """The endpoints that describe the models."""

    served: Models

    def operations(self) -> Sequence[Operation]:
        """Return them with their routes."""
        operation = partial(Operation, tag=TAG, method="GET")
        return [
            operation(
                name="Models",
                path="/v1/models",
                aliases=("/models",),
                endpoint=self.models,
                answer=ModelList,
                other_form=OtherForm(header=VERSION, answer=AnthropicModelList, error=AnthropicError),
            ),
            operation(
                name="Model",
                path="/v1/models/{name:path}",
                endpoint=self.model,
                answer=ModelObject,
                other_form=OtherForm(header=VERSION, answer=AnthropicModel, error=AnthropicError),
                statuses=(404,),
            ),
            operation(
                name="StudioModels",
                path="/api/v0/models",
                endpoint=self.studio_models,
                answer=StudioModelList,
            ),
            operation(
                name="StudioModel",
                path="/api/v0/models/{name:path}",
                endpoint=self.studio_model,
                answer=StudioModel,
                statuses=(404,),
            ),
        ]

    async def models(self, request: Request) -> Response:
        """List all models and adapters; in Anthropic's form, if the request has the header `anthropic-version`."""
        if is_anthropic(request):
            return json_response(page(self.served, request))
        found = [
            _model_object(entry, adapter)
            for entry in visible(self.served)
            for adapter in (None, *entry.adapters.by_name)
        ]
        return json_response(ModelList(data=tuple(found)))

    async def model(self, request: Request) -> Response:
        """Describe a model or an adapter; in Anthropic's form, if the request has the header `anthropic-version`."""
        is_theirs = is_anthropic(request)
        entry, adapter = self.served.entry_of(request.path_params["name"])
        if is_theirs:
            return json_response(described(entry))
        return json_response(_model_object(entry, adapter))

    async def studio_models(self, request: Request) -> Response:
        """List all models as LM Studio does."""
        return json_response(StudioModelList(data=tuple(map(_studio_model, visible(self.served)))))

    async def studio_model(self, request: Request) -> Response:
        """Describe a model as LM Studio does."""
        return json_response(_studio_model(self.served.entry_of(request.path_params["name"])[0]))


def _model_object(entry: ModelEntry, adapter: str | None) -> ModelObject:
    """Return the description of a model, or of an adapter."""
    model = entry.model
    return ModelObject(
        id=adapter or entry.name,
        created=entry.created if adapter is None else entry.adapters.by_name[adapter].created,
        root=adapter or entry.name,
        parent=None if adapter is None else entry.name,
        max_model_len=None if model is None else model.max_length,
        architecture=msgspec.UNSET if model is None else _architecture(model),
        status=entry.state or msgspec.UNSET,
    )


def _architecture(model: wire.Model) -> Architecture:
    """Return what a model takes and gives."""
    return Architecture(
        input_modalities=("text", "image") if model.takes_images else ("text",),
        output_modalities=("text",) if model.generates else ("embeddings",),
    )


def _kind(model: wire.Model | None) -> Literal["llm", "vlm", "embeddings"]:
    """Return LM Studio's word for a model."""
    if model is None or (model.generates and not model.takes_images):
        return "llm"
    return "vlm" if model.generates else "embeddings"


def _studio_model(entry: ModelEntry) -> StudioModel:
    service, model = entry.service, entry.model
    is_loaded = service is not None and service.status.state is EngineState.READY
    longest = None if model is None else model.max_length
    return StudioModel(
        id=entry.name,
        type=_kind(model),
        state="loaded" if is_loaded else "not-loaded",
        max_context_length=longest,
        loaded_context_length=longest if is_loaded and longest is not None else msgspec.UNSET,
    )
