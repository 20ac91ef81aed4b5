"""`GET /v1/models`: the model and its adapters, in the form of OpenAI's clients or of Anthropic's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pagewood.server.http.operations import Operation, OtherForm
from pagewood.server.protocols.anthropic.errors import AnthropicError
from pagewood.server.protocols.anthropic.models import (
    VERSION,
    AnthropicModel,
    AnthropicModelList,
    described,
    is_anthropic,
    page,
)
from pagewood.server.protocols.common.respond import json_response
from pagewood.server.protocols.common.service import Service

TAG = "OpenAI"


class ModelObject(msgspec.Struct, frozen=True, kw_only=True):
    """The model, or an adapter of it."""

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


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All models."""

    object: Literal["list"] = "list"
    data: tuple[ModelObject, ...]


@dataclass(frozen=True, slots=True)
class ModelEndpoints:
    """The endpoints that describe the model."""

    service: Service

    def operations(self) -> Sequence[Operation]:
        """Return them with their routes."""
        return [
            Operation(
                name="Models",
                tag=TAG,
                method="GET",
                path="/v1/models",
                endpoint=self.models,
                answer=ModelList,
                other_form=OtherForm(header=VERSION, answer=AnthropicModelList, error=AnthropicError),
            ),
            Operation(
                name="Model",
                tag=TAG,
                method="GET",
                path="/v1/models/{name:path}",
                endpoint=self.model,
                answer=ModelObject,
                other_form=OtherForm(header=VERSION, answer=AnthropicModel, error=AnthropicError),
                statuses=(404,),
            ),
        ]

    async def models(self, request: Request) -> Response:
        """List the model and its adapters; in Anthropic's form, if the request has the header `anthropic-version`."""
        if is_anthropic(request):
            return json_response(page(self.service, request))
        adapters = map(self._model_object, self.service.adapters.by_name)
        return json_response(ModelList(data=(self._model_object(None), *adapters)))

    async def model(self, request: Request) -> Response:
        """Describe the model or an adapter; in Anthropic's form, if the request has the header `anthropic-version`."""
        is_theirs = is_anthropic(request)
        adapter = self.service.adapter_of(request.path_params["name"])
        if is_theirs:
            return json_response(described(self.service))
        return json_response(self._model_object(adapter))

    def _model_object(self, adapter: str | None) -> ModelObject:
        """Return the description of the model, or of an adapter."""
        service = self.service
        model = service.status.model
        return ModelObject(
            id=adapter or service.model_name,
            created=service.started if adapter is None else service.adapters.by_name[adapter].created,
            root=adapter or service.model_name,
            parent=None if adapter is None else service.model_name,
            max_model_len=None if model is None else model.max_length,
        )
