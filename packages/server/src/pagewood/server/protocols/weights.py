"""Weights at run time: the routes of SGLang and of vLLM for updates, versions and pauses, with their answers.

No route takes objects of Python: tensors come as files of safetensors, which may lie in shared memory, or over a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from pagewood.engine.api import Pause, Resume
from pagewood.engine.weight_commands import (
    MAX_VERSION,
    JoinGroup,
    LeaveGroup,
    NameVersion,
    OldKV,
    Received,
    UpdateWeights,
    WeightCommand,
)
from pagewood.server.http.errors import ApiError, ErrorEnvelope, ErrorFields
from pagewood.server.http.operations import Operation
from pagewood.server.http.validation import parse, parser
from pagewood.server.protocols.common.models import Models
from pagewood.server.protocols.common.respond import json_response
from pagewood.server.protocols.common.service import Service
from pagewood.server.requests.live import new_request_id

TAG = "Weights"
_Path = Annotated[str, Field(min_length=1, max_length=4096)]
_Version = Annotated[str, Field(min_length=1, max_length=MAX_VERSION)]
_Name = Annotated[str, Field(min_length=1, max_length=512)]
GroupName = Annotated[str, Field(min_length=1, max_length=128)]
_TRANSFER = "weight_transfer"
"""The name of the group of vLLM's routes."""
_NEUTRAL = {"load_format": ("auto", "safetensors"), "is_async": (False,), "torch_empty_cache": (False,)}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Update(_Strict):
    """What updates have in common."""

    weight_version: _Version | None = None
    """Name of the version; without it, the number of updates."""
    abort_all_requests: bool = False
    """Whether all requests end first."""
    flush_cache: bool = True
    """Whether no later request gets KV of the old weights; `old_kv` says more."""
    old_kv: OldKV | None = None
    """What becomes of the KV of the old weights: `drop`, `keep`, or `recompute` that of running requests."""

    def kept(self) -> OldKV:
        """Return what becomes of the KV of the old weights."""
        if self.old_kv is not None and not self.flush_cache and self.old_kv != "keep":
            raise ApiError(
                f"'old_kv' must be keep without 'flush_cache', but got '{self.old_kv}'.",
                param="old_kv",
                code="invalid_value",
            )
        return self.old_kv or ("drop" if self.flush_cache else "keep")


class DiskUpdate(_Update):
    """A folder with a whole model, in SGLang's words."""

    model_path: _Path
    """Below a folder that the operator allows; its configuration must be that of the served model."""
    keep_pause: bool = False
    """Accepted for compatibility: a server that is paused stays so."""


class FilesUpdate(_Update):
    """Files with some tensors of the model, or with pairs of indices and values."""

    files: Annotated[list[_Path], Field(min_length=1, max_length=4096)]
    """Files of safetensors below a folder that the operator allows, such as /dev/shm. They may be removed after the
    answer."""


class Group(_Strict):
    """A group of processes in which a trainer, its rank 0, sends tensors, in SGLang's words."""

    master_address: Annotated[str, Field(min_length=1, max_length=253)]
    master_port: Annotated[int, Field(ge=1, le=65535)]
    rank_offset: Annotated[int, Field(ge=1)]
    """Rank of the engine, or of the first of its ranks."""
    world_size: Annotated[int, Field(ge=2)]
    group_name: GroupName = "weight_update_group"
    backend: Literal["gloo", "nccl"] = "nccl"
    """An engine on a CPU has gloo only."""


class GroupEnd(_Strict):
    """A group to leave."""

    group_name: GroupName = "weight_update_group"


class GroupUpdate(_Update):
    """Tensors that the rank 0 of a group sends in this order, in SGLang's words."""

    names: Annotated[list[_Name], Field(min_length=1, max_length=100_000)]
    dtypes: list[_Name]
    """As torch names them."""
    shapes: list[list[Annotated[int, Field(ge=0)]]]
    group_name: GroupName = "weight_update_group"


class TransferInfo(_Strict):
    """How a trainer sends tensors, in vLLM's words."""

    master_address: Annotated[str, Field(min_length=1, max_length=253)]
    master_port: Annotated[int, Field(ge=1, le=65535)]
    rank_offset: Annotated[int, Field(ge=1)]
    world_size: Annotated[int, Field(ge=2)]
    backend: Literal["gloo"] = "gloo"
    packed: Literal[False] = False


class Transfer(_Strict):
    """The body of `/init_weight_transfer_engine`."""

    init_info: TransferInfo


class StartUpdate(_Strict):
    """The body of `/start_weight_update`."""


class UpdateInfo(_Strict):
    """Tensors that come next."""

    names: list[_Name]
    dtype_names: list[_Name]
    shapes: list[list[Annotated[int, Field(ge=0)]]]


class PartUpdate(_Strict):
    """The body of `/update_weights`."""

    update_info: UpdateInfo


class FinishUpdate(_Strict):
    """The body of `/finish_weight_update`."""

    weight_version: _Version | None = None


class VersionUpdate(_Strict):
    """Another name of the present weights."""

    new_version: _Version
    abort_all_requests: bool = False
    """Whether all requests end first."""


class PauseGeneration(_Strict):
    """A pause, in SGLang's words."""

    mode: Literal["abort", "retract", "in_place"] = "in_place"
    """in_place: running requests keep their memory; retract: they give it back; abort: all requests end, and what there
    is of native answers is sent."""


class ContinueGeneration(_Strict):
    """The end of a pause."""


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """Whether it was done."""

    success: bool
    message: str
    weight_version: str
    """The version that computes now."""
    error: ErrorFields | msgspec.UnsetType = msgspec.UNSET
    """If it was not done: the error as on other routes."""


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """The version that computes now; `default`: the weights of the model's folder."""

    weight_version: str


class IsPaused(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the engine is paused."""

    is_paused: bool


def _received(names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> tuple[Received, ...]:
    """Return the tensors of three lists.

    Raises:
        ApiError: the lists have different lengths, or nothing in them.
    """
    if not len(names) == len(dtypes) == len(shapes) > 0:
        raise ApiError(
            "Names, dtypes and shapes must be lists of the same length, with something in them, but there are "
            f"{len(names)}, {len(dtypes)} and {len(shapes)}.",
            param="names",
            code="invalid_value",
        )
    return tuple(Received(*one) for one in zip(names, dtypes, map(tuple, shapes), strict=True))


def _parse_disk(body: bytes) -> DiskUpdate:
    return parse(DiskUpdate, body, neutral=_NEUTRAL, ignored=frozenset())


@dataclass(frozen=True, slots=True)
class WeightEndpoints:
    """Updates of the weights, and what trainers need around them; for admins."""

    models: Models

    def operations(self) -> Sequence[Operation]:
        """Return them with their routes."""
        return [
            Operation(
                name="UpdateWeightsFromDisk",
                tag=TAG,
                method="POST",
                path="/update_weights_from_disk",
                endpoint=self.from_disk,
                admin=True,
                body=DiskUpdate,
                example={"model_path": "/checkpoints/step-50", "weight_version": "50"},
                neutral=_NEUTRAL,
                answer=Done,
                statuses=(404,),
            ),
            Operation(
                name="UpdateWeightsFromFiles",
                tag=TAG,
                method="POST",
                path="/update_weights_from_files",
                endpoint=self.from_files,
                admin=True,
                body=FilesUpdate,
                example={"files": ["/dev/shm/update/00000.safetensors"]},
                answer=Done,
                statuses=(404,),
            ),
            Operation(
                name="InitWeightsUpdateGroup",
                tag=TAG,
                method="POST",
                path="/init_weights_update_group",
                endpoint=self.join,
                admin=True,
                body=Group,
                example={
                    "master_address": "127.0.0.1",
                    "master_port": 29500,
                    "rank_offset": 1,
                    "world_size": 2,
                    "backend": "gloo",
                },
                answer=Done,
            ),
            Operation(
                name="DestroyWeightsUpdateGroup",
                tag=TAG,
                method="POST",
                path="/destroy_weights_update_group",
                endpoint=self.leave,
                admin=True,
                body=GroupEnd,
                example={},
                answer=Done,
            ),
            Operation(
                name="UpdateWeightsFromDistributed",
                tag=TAG,
                method="POST",
                path="/update_weights_from_distributed",
                endpoint=self.from_group,
                admin=True,
                body=GroupUpdate,
                example={"names": ["model.norm.weight"], "dtypes": ["bfloat16"], "shapes": [[768]]},
                answer=Done,
            ),
            Operation(
                name="InitWeightTransferEngine",
                tag=TAG,
                method="POST",
                path="/init_weight_transfer_engine",
                endpoint=self.join_transfer,
                admin=True,
                body=Transfer,
                example={
                    "init_info": {
                        "master_address": "127.0.0.1",
                        "master_port": 29500,
                        "rank_offset": 1,
                        "world_size": 2,
                    }
                },
                answer=Done,
            ),
            Operation(
                name="StartWeightUpdate",
                tag=TAG,
                method="POST",
                path="/start_weight_update",
                endpoint=self.start,
                admin=True,
                body=StartUpdate,
                example={},
                answer=Done,
            ),
            Operation(
                name="UpdateWeights",
                tag=TAG,
                method="POST",
                path="/update_weights",
                endpoint=self.part,
                admin=True,
                body=PartUpdate,
                example={
                    "update_info": {"names": ["model.norm.weight"], "dtype_names": ["bfloat16"], "shapes": [[768]]}
                },
                answer=Done,
            ),
            Operation(
                name="FinishWeightUpdate",
                tag=TAG,
                method="POST",
                path="/finish_weight_update",
                endpoint=self.finish,
                admin=True,
                body=FinishUpdate,
                example={},
                answer=Done,
            ),
            Operation(
                name="UpdateWeightVersion",
                tag=TAG,
                method="POST",
                path="/update_weight_version",
                endpoint=self.name_version,
                admin=True,
                body=VersionUpdate,
                example={"new_version": "50"},
                answer=Done,
            ),
            Operation(
                name="WeightVersion",
                tag=TAG,
                method="GET",
                path="/get_weight_version",
                aliases=("/weight_info", "/weight_version"),
                endpoint=self.version,
                admin=True,
                answer=Version,
            ),
            Operation(
                name="PauseGeneration",
                tag=TAG,
                method="POST",
                path="/pause_generation",
                endpoint=self.pause,
                admin=True,
                body=PauseGeneration,
                example={"mode": "in_place"},
                answer=Done,
            ),
            Operation(
                name="ContinueGeneration",
                tag=TAG,
                method="POST",
                path="/continue_generation",
                endpoint=self.go_on,
                admin=True,
                body=ContinueGeneration,
                example={},
                answer=Done,
            ),
            Operation(
                name="IsPaused",
                tag=TAG,
                method="GET",
                path="/is_paused",
                endpoint=self.is_paused,
                admin=True,
                answer=IsPaused,
            ),
        ]

    async def from_disk(self, request: Request) -> Response:
        """Compute with the weights of another folder from one step on; requests go on with both.

        Steps go on while they are read. If anything is wrong with them, the old ones stay.
        """
        service = self.models.chosen(request)
        said = await self.models.reader.read(request, _parse_disk)
        try:
            folder = service.weights.checked(said.model_path, param="model_path", is_folder=True)
            return await self._update(service, said, UpdateWeights(request_id=new_request_id("req"), folder=folder))
        except ApiError as error:
            return self._done(service, error)

    async def from_files(self, request: Request) -> Response:
        """Replace some tensors of the model, or some of their elements, from one step on; see the other route."""
        service = self.models.chosen(request)
        said = await self.models.reader.read(request, parser(FilesUpdate))
        try:
            files = [service.weights.checked(one, param="files", is_folder=False) for one in said.files]
            return await self._update(
                service, said, UpdateWeights(request_id=new_request_id("req"), files=tuple(files))
            )
        except ApiError as error:
            return self._done(service, error)

    async def join(self, request: Request) -> Response:
        """Join a group in which a trainer sends tensors; waits until all are there. Steps go on meanwhile."""
        service = self.models.chosen(request)
        said = await self.models.reader.read(request, parser(Group))
        return await self._join(service, said, name=said.group_name)

    async def leave(self, request: Request) -> Response:
        """Leave a group."""
        service = self.models.chosen(request)
        said = await self.models.reader.read(request, parser(GroupEnd, is_optional=True))
        return await self._told(service, LeaveGroup(request_id=new_request_id("req"), name=said.group_name))

    async def from_group(self, request: Request) -> Response:
        """Replace tensors by those that a trainer sends, from one step on."""
        service = self.models.chosen(request)
        said = await self.models.reader.read(request, parser(GroupUpdate))
        received = _received(said.names, said.dtypes, said.shapes)
        try:
            command = UpdateWeights(request_id=new_request_id("req"), group=said.group_name, received=received)
            return await self._update(service, said, command)
        except ApiError as error:
            return self._done(service, error)

    async def join_transfer(self, request: Request) -> Response:
        """Join the group of a trainer, as vLLM does."""
        service = self.models.chosen(request)
        said = await self.models.reader.read(request, parser(Transfer))
        return await self._join(service, said.init_info, name=_TRANSFER)

    async def start(self, request: Request) -> Response:
        """Announce an update in parts, as vLLM does. Parts that were not finished are replaced tensor by tensor."""
        service = self.models.chosen(request)
        await self.models.reader.read(request, parser(StartUpdate, is_optional=True))
        self._check(service)
        return self._done(service)

    async def part(self, request: Request) -> Response:
        """Take tensors from the trainer; nothing is computed with them before `/finish_weight_update`."""
        service = self.models.chosen(request)
        said = await self.models.reader.read(request, parser(PartUpdate))
        received = _received(said.update_info.names, said.update_info.dtype_names, said.update_info.shapes)
        return await self._told(
            service, UpdateWeights(request_id=new_request_id("req"), group=_TRANSFER, received=received, is_last=False)
        )

    async def finish(self, request: Request) -> Response:
        """Compute with all parts of an update from one step on."""
        service = self.models.chosen(request)
        said = await self.models.reader.read(request, parser(FinishUpdate, is_optional=True))
        return await self._told(service, UpdateWeights(request_id=new_request_id("req"), version=said.weight_version))

    async def name_version(self, request: Request) -> Response:
        """Give the present weights another name. No request ends unless it is asked for."""
        service = self.models.chosen(request)
        said = await self.models.reader.read(request, parser(VersionUpdate))
        self._check(service)
        if said.abort_all_requests:
            await self._abort_all(service)
        await self._ask(service, NameVersion(request_id=new_request_id("req"), version=said.new_version))
        return self._done(service)

    async def version(self, request: Request) -> Response:
        """Return the version of the weights."""
        service = self.models.chosen(request)
        return json_response(Version(weight_version=self._now(service)))

    async def pause(self, request: Request) -> Response:
        """Stop computing, as SGLang does; no request ends unless the mode is `abort`."""
        service = self.models.chosen(request)
        said = await self.models.reader.read(request, parser(PauseGeneration, is_optional=True))
        self._check_ready(service)
        await service.ask(
            Pause(request_id=new_request_id("req"), retract=said.mode == "retract", abort=said.mode == "abort")
        )
        service.status.paused = "retract" if said.mode == "retract" else "in_place"
        return self._done(service)

    async def go_on(self, request: Request) -> Response:
        """Compute again after a pause."""
        service = self.models.chosen(request)
        await self.models.reader.read(request, parser(ContinueGeneration, is_optional=True))
        self._check_ready(service)
        await service.ask(Resume(request_id=new_request_id("req")))
        service.status.paused = "no"
        return self._done(service)

    async def is_paused(self, request: Request) -> Response:
        """Return whether the engine is paused."""
        service = self.models.chosen(request)
        return json_response(IsPaused(is_paused=service.status.paused != "no"))

    async def _update(self, service: Service, said: _Update, command: UpdateWeights) -> Response:
        kept = said.kept()
        self._check(service)
        if said.abort_all_requests:
            await self._abort_all(service)
        await self._ask(service, msgspec.structs.replace(command, version=said.weight_version, old_kv=kept))
        return self._done(service)

    async def _join(self, service: Service, said: Group | TransferInfo, *, name: str) -> Response:
        if said.rank_offset >= said.world_size:
            raise ApiError(
                f"'rank_offset' must be less than 'world_size', but got {said.rank_offset} and {said.world_size}.",
                param="rank_offset",
                code="invalid_value",
            )
        return await self._told(
            service,
            JoinGroup(
                request_id=new_request_id("req"),
                name=name,
                address=said.master_address,
                port=said.master_port,
                first_rank=said.rank_offset,
                world_size=said.world_size,
                backend=said.backend,
            ),
        )

    async def _told(self, service: Service, command: WeightCommand) -> Response:
        """Carry out a command, and say whether it was done."""
        try:
            self._check(service)
            await self._ask(service, command)
        except ApiError as error:
            return self._done(service, error)
        return self._done(service)

    async def _ask(self, service: Service, command: WeightCommand | NameVersion) -> None:
        incarnation = service.status.incarnation
        answer = await service.ask(command)
        if answer.computed is not None:
            service.weights.note(answer.computed[0], incarnation=incarnation)

    async def _abort_all(self, service: Service) -> None:
        """End all requests; the engine is as it was then, paused or not."""
        was_paused = service.status.paused
        await service.ask(Pause(request_id=new_request_id("req"), abort=True, retract=was_paused == "retract"))
        if was_paused == "no":
            await service.ask(Resume(request_id=new_request_id("req")))

    def _check(self, service: Service) -> None:
        """Check that there is one engine, and that it works."""
        self._check_ready(service)
        if service.dispatcher is not None:
            raise ApiError("Weights cannot be updated with --replicas above 1.", code="weights_fixed")

    def _check_ready(self, service: Service) -> None:
        service.model(service.model_name)

    def _now(self, service: Service) -> str:
        return service.weights.now(service.status.incarnation)

    def _done(self, service: Service, error: ApiError | None = None) -> Response:
        answer = Done(
            success=error is None,
            message="" if error is None else str(error),
            weight_version=self._now(service),
            error=msgspec.UNSET if error is None else msgspec.json.decode(error.body(), type=ErrorEnvelope).error,
        )
        return json_response(answer, status=200 if error is None else error.status)
