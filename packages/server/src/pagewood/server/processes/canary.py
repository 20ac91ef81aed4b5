"""A request of one token, or of a vector of an encoder, through every process: whether the server can answer at all."""

from __future__ import annotations

import asyncio
import time
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pagewood.engine.api import PoolingParams, RequestOptions, SamplingParams
from pagewood.server.http.errors import ApiError
from pagewood.server.http.operations import Operation
from pagewood.server.messages import wire
from pagewood.server.protocols.common.models import Models
from pagewood.server.protocols.common.respond import json_response
from pagewood.server.protocols.common.service import Service
from pagewood.server.replicas.fleet_status import ServerStatus
from pagewood.server.requests.live import LiveRequests, new_request_id
from pagewood.server.requests.status import EngineState

LIMIT_S = 10.0
"""How long the token may take."""
KEPT_S = 1.0
"""How long a result is repeated."""
NAMESPACE = "pagewood-canary"
"""Namespace of its prompt in the prefix cache."""


class CanaryResult(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a request of one token was answered."""

    status: Literal["ok", "failed"]
    detail: str
    """Why it failed; empty if it did not."""
    seconds: float
    """Seconds until the answer, or until the wait was given up."""


_NOTHING_LOADED = CanaryResult(status="ok", detail="no model is loaded", seconds=0.0)


class Canary:
    """Sends one request of one token at a time; callers share its result while it runs and shortly after.

    It goes before requests of normal priority in the queue. It does not count for the limit of requests, because a full
    server is not a broken one.

    Args:
        live: sends it.
        status: of the engine.
    """

    __slots__ = ("_live", "_result", "_result_s", "_status", "_task")

    def __init__(self, live: LiveRequests, status: ServerStatus) -> None:
        self._live = live
        self._status = status
        self._task: asyncio.Task[CanaryResult] | None = None  # written by: ask
        self._result: CanaryResult | None = None  # written by: _run
        self._result_s = 0.0  # written by: _run

    async def ask(self) -> CanaryResult:
        """Return a result that is at most `KEPT_S` old."""
        if self._result is not None and time.monotonic() - self._result_s < KEPT_S:
            return self._result
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        return await asyncio.shield(self._task)  # a client that leaves does not end it for the other callers

    async def _run(self) -> CanaryResult:
        started_s = time.monotonic()
        try:
            await self._generate()
            detail = ""
        except ApiError as error:
            detail = str(error)
            if error.code == "deadline_exceeded":
                detail = f"no token came within {LIMIT_S:g} s"
        self._result_s = time.monotonic()
        self._result = CanaryResult(
            status="failed" if detail else "ok", detail=detail, seconds=round(self._result_s - started_s, 4)
        )
        return self._result

    async def _generate(self) -> None:
        """Generate one token, or make one vector.

        Raises:
            ApiError: it failed, came too late, or the engine is not ready.
        """
        model = self._status.model
        if model is None or self._status.state is not EngineState.READY:
            raise ApiError(f"the engine is not ready: {self._status.detail}")
        message = wire.Generate(
            request_id=new_request_id("canary"),
            prompt=wire.TokenPrompt(tokens=bytes(4)),
            options=RequestOptions(
                sampling=SamplingParams(max_tokens=1, temperature=0.0),
                pooling=None if model.generates else PoolingParams(),
                namespace=NAMESPACE,
                priority=1,
            ),
            max_length=model.max_length,
        )
        group = self._live.submit([message], prompt_param="prompt", is_probe=True)
        self._live.end_at(group, time.monotonic() + LIMIT_S)
        try:
            while (await group.next())[1].finish is None:
                pass
        finally:
            self._live.close(group)


class CanaryEndpoints:
    """The endpoint of the canary."""

    __slots__ = ("_canaries", "_models")

    def __init__(self, models: Models) -> None:
        self._models = models
        self._canaries: dict[str, tuple[LiveRequests, Canary]] = {}  # written by: _of
        """By the name of the model, with the requests that each sends its own to."""

    def operations(self) -> list[Operation]:
        """Return the operation."""
        return [
            Operation(
                name="HealthGenerate",
                tag="Health",
                method="GET",
                path="/health/generate",
                aliases=("/health_generate",),
                endpoint=self.generate,
                answer=CanaryResult,
                is_open=True,
            )
        ]

    async def generate(self, request: Request) -> Response:
        """Whether the server can generate: a request of one token that passes every process, with a deadline.

        With several models, each that is loaded gets one; the answer is that of the first which fails, or of the
        slowest.
        """
        services = self._models.loaded()
        results = await asyncio.gather(*(self._of(service).ask() for service in services))
        failed = [
            msgspec.structs.replace(result, detail=f"{service.model_name}: {result.detail}")
            for service, result in zip(services, results, strict=True)
            if result.status == "failed"
        ]
        if failed:
            return json_response(failed[0] if len(services) > 1 else results[0], status=503)
        slowest = max(results, key=lambda one: one.seconds, default=_NOTHING_LOADED)
        return json_response(slowest)

    def _of(self, service: Service) -> Canary:
        live, canary = self._canaries.get(service.model_name, (None, None))
        if canary is None or live is not service.live:
            canary = Canary(service.live, service.status)
            self._canaries[service.model_name] = (service.live, canary)
        return canary
