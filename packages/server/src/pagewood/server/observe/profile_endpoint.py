"""`POST /profile`: the work of the engine for some seconds, as a trace for Perfetto."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from pagewood.server.http.errors import ApiError
from pagewood.server.http.operations import Operation
from pagewood.server.http.validation import parser
from pagewood.server.messages import wire
from pagewood.server.processes.engine_profiles import profile_file
from pagewood.server.protocols.common.models import Models
from pagewood.server.requests.live import new_request_id

MAX_SECONDS = 60
DEFAULT_SECONDS = 1.0


class ProfileRequest(BaseModel):
    """The body of `/profile`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    seconds: float | None = Field(default=None, gt=0, le=MAX_SECONDS)
    """How long to record; None: 1, or at most 60 with `steps`."""
    steps: int | None = Field(default=None, ge=1)
    """End when this many steps of the engine have begun, but not later than after `seconds`."""


class Trace(msgspec.Struct, frozen=True):
    """A trace in Chrome's format, which https://ui.perfetto.dev opens; times in microseconds."""

    traceEvents: list[dict[str, Any]]
    otherData: dict[str, Any]
    """Seconds recorded, spans that were dropped, and the total time of spans by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileEndpoint:
    """Takes profiles of the engine process."""

    models: Models

    def operations(self) -> list[Operation]:
        """Return its operation."""
        return [
            Operation(
                name="Profile",
                tag="Health",
                path="/profile",
                endpoint=self.profile,
                body=ProfileRequest,
                example={"seconds": 1.0},
                answer=Trace,
                admin=True,
            )
        ]

    async def profile(self, request: Request) -> Response:
        """Record the work of the engine and its devices for some seconds or steps; steps are slower meanwhile."""
        said = await self.models.reader.read(request, parser(ProfileRequest, is_optional=True))
        service = self.models.chosen(request)
        service.check_ready()
        if service.folder is None:
            raise ApiError("This server takes no profiles.", code="profiling_unavailable")
        seconds = said.seconds or (DEFAULT_SECONDS if said.steps is None else MAX_SECONDS)
        message = wire.Profile(request_id=new_request_id("profile"), seconds=seconds, steps=said.steps)
        file = profile_file(service.folder, message.request_id)
        try:
            await service.ask(message)
            trace = await asyncio.to_thread(file.read_bytes)
        finally:
            await asyncio.to_thread(file.unlink, missing_ok=True)
        headers = {"content-disposition": f'attachment; filename="{file.name}"'}
        return Response(trace, media_type="application/json", headers=headers)
