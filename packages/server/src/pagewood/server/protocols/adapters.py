"""Adapters at run time: the routes of vLLM and of SGLang, with their answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import msgspec
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from pagewood.engine.api import LoadAdapter, UnloadAdapter
from pagewood.server.http.errors import ApiError, ErrorEnvelope, ErrorFields
from pagewood.server.http.field_limits import Name
from pagewood.server.http.operations import Operation
from pagewood.server.http.validation import parser
from pagewood.server.protocols.common.models import Models
from pagewood.server.protocols.common.respond import json_response
from pagewood.server.requests.adapters import check_name
from pagewood.server.requests.live import new_request_id

TAG = "Adapters"
_Folder = Annotated[str, Field(min_length=1, max_length=4096)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class LoadRequest(_Strict):
    """An adapter to load, in vLLM's words."""

    lora_name: Name
    lora_path: _Folder
    """A folder of PEFT below one that the operator allows."""
    load_inplace: bool = False
    """Whether it may replace an adapter of that name."""


class UnloadRequest(_Strict):
    """An adapter to unload."""

    lora_name: Name


class PinnedLoadRequest(_Strict):
    """An adapter to load, in SGLang's words."""

    lora_name: Name
    lora_path: _Folder
    """A folder of PEFT below one that the operator allows."""
    pinned: bool = False
    """Whether it keeps its slot while no request uses it."""


class LoadedAdapters(msgspec.Struct, frozen=True, kw_only=True):
    """Whether it was done, and which adapters there are now."""

    success: bool
    error_message: str = ""
    loaded_adapters: dict[str, str]
    """Folders by name."""
    error: ErrorFields | msgspec.UnsetType = msgspec.UNSET
    """If it was not done: the error as on other routes."""


@dataclass(frozen=True, slots=True)
class AdapterEndpoints:
    """Loading and unloading adapters, for admins."""

    models: Models

    def operations(self) -> Sequence[Operation]:
        """Return them with their routes."""
        example = {"lora_name": "sql", "lora_path": "/adapters/sql"}
        operation = partial(Operation, tag=TAG, method="POST", admin=True)
        return [
            operation(
                name="LoadLoraAdapter",
                path="/v1/load_lora_adapter",
                endpoint=self.load,
                body=LoadRequest,
                example=example,
                answer=str,
                answer_type="text/plain; charset=utf-8",
                statuses=(404,),
            ),
            operation(
                name="UnloadLoraAdapter",
                path="/v1/unload_lora_adapter",
                endpoint=self.unload,
                body=UnloadRequest,
                example={"lora_name": "sql"},
                answer=str,
                answer_type="text/plain; charset=utf-8",
                statuses=(404,),
            ),
            operation(
                name="LoadAdapter",
                path="/load_lora_adapter",
                endpoint=self.load_pinned,
                body=PinnedLoadRequest,
                example=example,
                answer=LoadedAdapters,
                statuses=(404,),
            ),
            operation(
                name="UnloadAdapter",
                path="/unload_lora_adapter",
                endpoint=self.unload_listed,
                body=UnloadRequest,
                example={"lora_name": "sql"},
                answer=LoadedAdapters,
                statuses=(404,),
            ),
        ]

    async def load(self, request: Request) -> Response:
        """Load an adapter, as vLLM does. Running requests go on meanwhile, and end with the adapter that they have."""
        said = await self.models.reader.read(request, parser(LoadRequest))
        await self._load(request, said.lora_name, said.lora_path, replaces=said.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{said.lora_name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        """Unload an adapter, as vLLM does; running requests end with it."""
        said = await self.models.reader.read(request, parser(UnloadRequest))
        await self._unload(request, said.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{said.lora_name}' removed successfully.")

    async def load_pinned(self, request: Request) -> Response:
        """Load an adapter, as SGLang does."""
        said = await self.models.reader.read(request, parser(PinnedLoadRequest))
        try:
            await self._load(request, said.lora_name, said.lora_path, is_pinned=said.pinned)
        except ApiError as error:
            return self._listed(request, error)
        return self._listed(request)

    async def unload_listed(self, request: Request) -> Response:
        """Unload an adapter, as SGLang does."""
        said = await self.models.reader.read(request, parser(UnloadRequest))
        try:
            await self._unload(request, said.lora_name)
        except ApiError as error:
            return self._listed(request, error)
        return self._listed(request)

    async def _load(
        self, request: Request, name: str, folder: str, *, replaces: bool = False, is_pinned: bool = False
    ) -> None:
        service = self.models.chosen(request)
        service.check_ready()
        check_name(name, model_name=service.model_name, param="lora_name")
        found = service.adapters.checked_folder(folder, param="lora_path")
        message = LoadAdapter(
            request_id=new_request_id("req"), name=name, folder=found, replaces=replaces, is_pinned=is_pinned
        )
        await service.ask(message, param_names={"name": "lora_name", "is_pinned": "pinned"})
        service.adapters.note(name, found)

    async def _unload(self, request: Request, name: str) -> None:
        service = self.models.chosen(request)
        service.check_ready()
        if name not in service.adapters.by_name:
            raise ApiError(
                f"The adapter '{name}' does not exist.", status=404, param="lora_name", code="adapter_not_found"
            )
        await service.ask(UnloadAdapter(request_id=new_request_id("req"), name=name))
        service.adapters.forget(name)

    def _listed(self, request: Request, error: ApiError | None = None) -> Response:
        answer = LoadedAdapters(
            success=error is None,
            error_message="" if error is None else str(error),
            loaded_adapters={one.name: one.folder for one in self.models.chosen(request).adapters.by_name.values()},
            error=msgspec.UNSET if error is None else msgspec.json.decode(error.body(), type=ErrorEnvelope).error,
        )
        return json_response(answer, status=200 if error is None else error.status)
