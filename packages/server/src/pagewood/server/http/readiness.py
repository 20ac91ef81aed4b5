"""Whether the server answers, and whether it serves: `/health` and `/ready`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pagewood.engine.weight_spans import FIRST_VERSION
from pagewood.server.http.operations import Operation
from pagewood.server.messages import wire
from pagewood.server.protocols.common.models import Models, ModelState
from pagewood.server.protocols.common.respond import json_response
from pagewood.server.protocols.common.service import Service
from pagewood.server.replicas.dispatcher import Dispatcher
from pagewood.server.replicas.fleet_status import FleetStatus, ServerStatus
from pagewood.server.requests.status import EngineState

DRAINING = "draining"
"""The `status` of `/ready` while the server takes no new requests."""


class Health(msgspec.Struct, frozen=True):
    """The HTTP process answers."""

    status: Literal["ok"] = "ok"


class ReadyReplica(msgspec.Struct, frozen=True, kw_only=True):
    """One of several engines."""

    replica: int
    role: str
    """both, or what it does of them: prefill, decode."""
    status: str
    detail: str
    requests: int
    """Requests that the router has sent there, and that have not ended; on one that computes prompts, those prompts."""
    is_draining: bool
    """Whether it gets no further requests."""
    weight_version: str
    """The version of its weights; while its status is `outdated`, it gets no requests with them."""
    restarts: int
    engine: dict[str, int]


class ReadyModel(msgspec.Struct, frozen=True, kw_only=True):
    """One of several models."""

    model: str
    state: ModelState
    engine: dict[str, int]
    """Counters of its engine's last pulse; empty: it is not loaded."""


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the engine serves."""

    status: str
    detail: str
    """What it is doing, in words."""
    model: str
    requests: dict[str, int]
    """Live requests, and those whose end the engine has not confirmed yet."""
    engine: dict[str, int]
    """Counters of its last pulse."""
    free_pages_by_rank: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
    """Where ranks divide KV memory by request, the free pages of each."""
    incidents: dict[str, int]
    """What went wrong since the server was started: restarts, requests that were lost, sent again or refused."""
    speculation: wire.Speculation | msgspec.UnsetType = msgspec.UNSET
    seconds_since_pulse: float | None
    seconds_in_step: float
    replicas: list[ReadyReplica] | msgspec.UnsetType = msgspec.UNSET
    """The engines of a server with several."""
    models: list[ReadyModel] | msgspec.UnsetType = msgspec.UNSET
    """The models of a server with several; the fields about one engine are empty then."""


@dataclass(frozen=True, slots=True)
class ReadinessEndpoints:
    """The endpoints."""

    models: Models

    def operations(self) -> list[Operation]:
        """Return the operations."""
        tag = "Health"
        return [
            Operation(
                name="Health",
                tag=tag,
                method="GET",
                path="/health",
                aliases=("/live", "/ping"),
                endpoint=self.health,
                answer=Health,
                is_open=True,
            ),
            Operation(
                name="Ready", tag=tag, method="GET", path="/ready", endpoint=self.ready, answer=Ready, is_open=True
            ),
        ]

    async def health(self, request: Request) -> Response:
        """Liveness: this process answers."""
        return json_response(Health())

    async def ready(self, request: Request) -> Response:
        """Readiness and progress: whether the engine serves, and the counts of its last pulse.

        A server with several models is ready when it takes requests, also while no model is loaded.
        """
        held, entries = self.models.held, self.models.listed()
        is_closing = held.is_closed or held.is_draining
        body = _of_one(entries[0].service) if entries[0].state is None else self._of_several()
        is_ready = body.status == EngineState.READY.value and not is_closing
        if is_closing:
            detail = "no new requests are taken; running ones may end"
            body = msgspec.structs.replace(body, status=DRAINING, detail=detail)
        headers = None if is_ready else {"Retry-After": "2"}
        return json_response(body, status=200 if is_ready else 503, headers=headers)

    def _of_several(self) -> Ready:
        held, found = self.models.held, list[ReadyModel]()
        incidents = Counter[str]()
        for entry in self.models.listed():
            assert entry.state is not None
            counts = {} if entry.service is None else entry.service.status.counters
            found.append(ReadyModel(model=entry.name, state=entry.state, engine=counts))
            incidents.update(entry.incidents.totals())
        num_loaded = sum(one.state.value == "loaded" for one in found)
        return Ready(
            status=EngineState.READY.value,
            detail=f"{num_loaded} of {len(found)} models are loaded",
            model="",
            requests={"live": held.num_live, "ending": held.num_ending},
            engine={},
            incidents=dict(incidents),
            seconds_since_pulse=None,
            seconds_in_step=0.0,
            models=found,
        )


def _of_one(service: Service | None) -> Ready:
    assert service is not None
    status, live = service.status, service.live
    silent_s = status.seconds_since_pulse
    return Ready(
        status=status.state.value,
        detail=status.detail,
        model=service.model_name,
        requests={"live": live.num_live, "ending": live.num_ending},
        engine=status.counters,
        free_pages_by_rank=status.free_pages_by_rank or msgspec.UNSET,
        incidents=live.incidents.totals(),
        speculation=msgspec.UNSET if status.speculation is None else status.speculation,
        seconds_since_pulse=None if silent_s is None else round(silent_s, 3),
        seconds_in_step=round(status.step_s, 3),
        replicas=msgspec.UNSET if service.dispatcher is None else _ready_replicas(status, service.dispatcher),
    )


def _ready_replicas(status: ServerStatus, dispatcher: Dispatcher) -> list[ReadyReplica]:
    assert isinstance(status, FleetStatus)
    return [
        ReadyReplica(
            replica=number,
            role=dispatcher.replicas[number].role.value,
            status=one.state.value,
            detail=one.detail,
            requests=dispatcher.num_requests(number),
            is_draining=dispatcher.replicas[number].is_draining,
            weight_version=one.weight_version or FIRST_VERSION,
            restarts=one.incarnation,
            engine=one.counters,
        )
        for number, one in enumerate(status.replicas)
    ]
