"""Routes for admins that replace the engine process, or drain the server, while no request is lost."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import partial

import msgspec
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from pagewood.server.http.errors import ApiError
from pagewood.server.http.operations import Operation
from pagewood.server.http.validation import parser
from pagewood.server.protocols.common.models import Models
from pagewood.server.protocols.common.respond import json_response
from pagewood.server.replicas.dispatcher import Dispatcher

POLL_S = 0.02


class DrainRequest(BaseModel):
    """The body of `/drain`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    is_draining: bool = True
    """False: take new requests again."""
    wait_s: float = Field(default=0.0, ge=0, le=86400)
    """How long the answer waits for the end of the requests that the server has."""
    replica: int | None = Field(default=None, ge=0)
    """Which of several engines gets no more requests; those that it has go on in others. None: the whole server."""


class Drained(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/drain`."""

    is_draining: bool
    """Whether new requests are refused, or none goes to the replica."""
    num_live: int
    """Requests that have not ended, there."""


class Replaced(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/restart_engine`: the new process works."""

    incarnation: int
    """Which engine process of the server it is, counted from 0."""
    seconds: float
    """How long it took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpkeepEndpoints:
    """Endpoints for admins."""

    models: Models

    def operations(self) -> list[Operation]:
        """Return the operations."""
        operation = partial(Operation, tag="Health", admin=True)
        return [
            operation(
                name="RestartEngine",
                path="/restart_engine",
                endpoint=self.restart,
                answer=Replaced,
            ),
            operation(
                name="Drain",
                path="/drain",
                endpoint=self.drain,
                body=DrainRequest,
                example={"wait_s": 30.0},
                answer=Drained,
            ),
        ]

    async def restart(self, request: Request) -> Response:
        """Replace the engine process by a new one; running requests move to it and go on where they were."""
        service = self.models.chosen(request)
        if service.replace_engine is None:
            raise ApiError("This server has no engine process.", status=501, code="not_available")
        began_s = time.monotonic()
        await service.replace_engine()
        incarnation = service.status.incarnation
        return json_response(Replaced(incarnation=incarnation, seconds=round(time.monotonic() - began_s, 3)))

    async def drain(self, request: Request) -> Response:
        """Take no new requests, and let those end that the server has; or take new ones again.

        With the number of a replica, its requests move to the others, and it gets no more.
        """
        said = await self.models.reader.read(request, parser(DrainRequest, is_optional=True))
        if said.replica is not None:
            return await _drain_replica(self.models.chosen(request).dispatcher, said.replica, said)
        held = self.models.held
        held.set_draining(said.is_draining)
        end_s = time.monotonic() + said.wait_s
        while held.num_live and held.is_draining and time.monotonic() < end_s:
            await asyncio.sleep(POLL_S)
        return json_response(Drained(is_draining=held.is_draining, num_live=held.num_live))


async def _drain_replica(dispatcher: Dispatcher | None, number: int, said: DrainRequest) -> Response:
    num_replicas = 0 if dispatcher is None else len(dispatcher.replicas)
    if dispatcher is None or number >= num_replicas:
        has = f"the replicas 0 to {num_replicas - 1}" if num_replicas else "one engine"
        raise ApiError(
            f"Invalid value for 'replica': this server has {has}, but got {number} instead.",
            param="replica",
            code="invalid_value",
        )
    dispatcher.drain(number, is_draining=said.is_draining)
    replica, end_s = dispatcher.replicas[number], time.monotonic() + said.wait_s
    while dispatcher.num_requests(number) and replica.is_draining and time.monotonic() < end_s:
        await asyncio.sleep(POLL_S)
    return json_response(Drained(is_draining=replica.is_draining, num_live=dispatcher.num_requests(number)))
