"""Routes for admins that load and unload models, with the names and answers of llama.cpp's router."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from pagewood.server.http.field_limits import Id
from pagewood.server.http.operations import Operation
from pagewood.server.http.validation import parser
from pagewood.server.protocols.common.models import Models
from pagewood.server.protocols.common.respond import json_response

TAG = "Models"


class Pool(Models, Protocol):
    """Models that can be loaded and unloaded."""

    async def load(self, name: str) -> None:
        """Load a model, and return when it is loaded."""
        ...

    async def unload(self, name: str) -> None:
        """Unload a model, and return when it is unloaded."""
        ...


class ModelRequest(BaseModel):
    """A model that is to be loaded or unloaded."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: Id


class Done(msgspec.Struct, frozen=True):
    """It was done."""

    success: Literal[True] = True


@dataclass(frozen=True, slots=True)
class PoolEndpoints:
    """The endpoints."""

    pool: Pool

    def operations(self) -> list[Operation]:
        """Return the operations."""
        return [
            Operation(
                name=name,
                tag=TAG,
                path=path,
                endpoint=endpoint,
                body=ModelRequest,
                example={"model": self.pool.names[0]},
                answer=Done,
                admin=True,
                statuses=(404, 507),
            )
            for name, path, endpoint in (
                ("LoadModel", "/models/load", self.load),
                ("UnloadModel", "/models/unload", self.unload),
            )
        ]

    async def load(self, request: Request) -> Response:
        """Load a model; the answer comes when it is loaded. It takes its turn."""
        said = await self.pool.reader.read(request, parser(ModelRequest))
        await self.pool.load(said.model)
        return json_response(Done())

    async def unload(self, request: Request) -> Response:
        """Unload a model when its running requests have ended; the answer comes then. Later requests load it again."""
        said = await self.pool.reader.read(request, parser(ModelRequest))
        await self.pool.unload(said.model)
        return json_response(Done())
