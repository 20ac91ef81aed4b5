"""Weights at run time: the routes of SGLang and of vLLM for updates, versions and pauses, with their answers.

No route takes objects of Python: tensors come as files of safetensors, which may lie in shared memory, or over a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pagewood.engine.api import Flush
from pagewood.engine.weight_commands import (
    SLEEP_TAGS,
    CheckWeights,
    JoinGroup,
    LeaveGroup,
    NameVersion,
    UpdateWeights,
    WeightCommand,
)
from pagewood.engine.weight_spans import FIRST_VERSION
from pagewood.server.http.errors import ApiError, ErrorEnvelope
from pagewood.server.http.operations import Operation
from pagewood.server.http.validation import parser
from pagewood.server.protocols.common.models import Models
from pagewood.server.protocols.common.respond import json_response
from pagewood.server.protocols.common.service import Service
from pagewood.server.protocols.weights import bodies
from pagewood.server.requests.live import new_request_id
from pagewood.server.requests.weights import num_ranks

TAG = "Weights"
_TRANSFER = "weight_transfer"
"""The name of the group of vLLM's routes."""


@dataclass(frozen=True, slots=True)
class WeightEndpoints:
    """Updates of the weights, and what trainers need around them; for admins."""

    models: Models

    def operations(self) -> Sequence[Operation]:
        """Return them with their routes."""
        operation = partial(Operation, tag=TAG, admin=True, method="POST", answer=bodies.Done)
        return [
            operation(
                name="UpdateWeightsFromDisk",
                path="/update_weights_from_disk",
                endpoint=self.from_disk,
                body=bodies.DiskUpdate,
                example={"model_path": "/checkpoints/step-50", "weight_version": "50"},
                neutral=bodies.NEUTRAL,
                statuses=(404,),
            ),
            operation(
                name="UpdateWeightsFromFiles",
                path="/update_weights_from_files",
                endpoint=self.from_files,
                body=bodies.FilesUpdate,
                example={"files": ["/dev/shm/update/00000.safetensors"]},
                statuses=(404,),
            ),
            operation(
                name="InitWeightsUpdateGroup",
                path="/init_weights_update_group",
                endpoint=self.join,
                body=bodies.Group,
                example={
                    "master_address": "127.0.0.1",
                    "master_port": 29500,
                    "rank_offset": 1,
                    "world_size": 2,
                    "backend": "gloo",
                },
            ),
            operation(
                name="DestroyWeightsUpdateGroup",
                path="/destroy_weights_update_group",
                endpoint=self.leave,
                body=bodies.GroupEnd,
                example={},
            ),
            operation(
                name="UpdateWeightsFromDistributed",
                path="/update_weights_from_distributed",
                endpoint=self.from_group,
                body=bodies.GroupUpdate,
                example={"names": ["model.norm.weight"], "dtypes": ["bfloat16"], "shapes": [[768]]},
            ),
            operation(
                name="InitWeightTransferEngine",
                path="/init_weight_transfer_engine",
                endpoint=self.join_transfer,
                body=bodies.Transfer,
                example={
                    "init_info": {
                        "master_address": "127.0.0.1",
                        "master_port": 29500,
                        "rank_offset": 1,
                        "world_size": 2,
                        "backend": "gloo",
                    }
                },
            ),
            operation(
                name="ShutdownWeightTransferEngine",
                path="/shutdown_weight_transfer_engine",
                endpoint=self.leave_transfer,
            ),
            operation(
                name="StartWeightUpdate",
                path="/start_weight_update",
                endpoint=self.start,
                body=bodies.StartUpdate,
                example={},
            ),
            operation(name="StartDraftWeightUpdate", path="/start_draft_weight_update", endpoint=self.start_draft),
            operation(
                name="UpdateWeights",
                path="/update_weights",
                endpoint=self.part,
                body=bodies.PartUpdate,
                example={
                    "update_info": {"names": ["model.norm.weight"], "dtype_names": ["bfloat16"], "shapes": [[768]]}
                },
            ),
            operation(
                name="FinishWeightUpdate",
                path="/finish_weight_update",
                endpoint=self.finish,
                body=bodies.FinishUpdate,
                example={},
            ),
            operation(
                name="UpdateWeightVersion",
                path="/update_weight_version",
                endpoint=self.name_version,
                body=bodies.VersionUpdate,
                example={"new_version": "50"},
            ),
            operation(
                name="WeightVersion",
                method="GET",
                path="/get_weight_version",
                aliases=("/weight_info", "/weight_version"),
                endpoint=self.version,
                answer=bodies.Version,
            ),
            operation(
                name="CheckWeights",
                path="/weights_checker",
                aliases=("/weight_checker",),
                endpoint=self.check,
                body=bodies.Check,
                example={"action": "checksum"},
                neutral=bodies.NEUTRAL_CHECK,
            ),
            operation(
                name="PauseGeneration",
                path="/pause_generation",
                endpoint=self.pause,
                body=bodies.PauseGeneration,
                example={"mode": "in_place"},
            ),
            operation(
                name="ContinueGeneration",
                path="/continue_generation",
                endpoint=self.go_on,
                body=bodies.ContinueGeneration,
                example={},
            ),
            operation(
                name="ResetPrefixCache",
                path="/reset_prefix_cache",
                endpoint=self.reset_cache,
                body=bodies.ResetCache,
                example={},
                answer=bodies.ResetDone,
            ),
            operation(
                name="WorldSize",
                method="GET",
                path="/get_world_size",
                endpoint=self.world_size,
                answer=bodies.WorldSize,
            ),
            operation(
                name="IsPaused", method="GET", path="/is_paused", endpoint=self.is_paused, answer=bodies.IsPaused
            ),
            operation(
                name="Sleep",
                path="/sleep",
                endpoint=self.sleep,
                query={
                    "level": {"type": "integer", "minimum": 0, "maximum": 2, "default": 1},
                    "mode": {"type": "string", "enum": ["keep", "wait", "abort"], "default": "keep"},
                    "tags": {"type": "array", "items": {"type": "string", "enum": list(SLEEP_TAGS)}},
                },
                answer=bodies.Sleeping,
            ),
            operation(
                name="WakeUp",
                path="/wake_up",
                endpoint=self.wake_up,
                query={"tags": {"type": "array", "items": {"type": "string", "enum": list(SLEEP_TAGS)}}},
                answer=bodies.Sleeping,
            ),
            operation(
                name="IsSleeping",
                method="GET",
                path="/is_sleeping",
                endpoint=self.is_sleeping,
                answer=bodies.IsSleeping,
            ),
            operation(
                name="ReleaseMemoryOccupation",
                path="/release_memory_occupation",
                endpoint=self.release_memory,
                body=bodies.Occupation,
                example={"tags": ["kv_cache", "weights"]},
            ),
            operation(
                name="ResumeMemoryOccupation",
                path="/resume_memory_occupation",
                endpoint=self.resume_memory,
                body=bodies.Occupation,
                example={"tags": ["kv_cache", "weights"]},
            ),
        ]

    async def from_disk(self, request: Request) -> Response:
        """Compute with the weights of another folder from one step on; requests go on with both.

        Steps go on while they are read. If anything is wrong with them, the old ones stay.
        """
        service = self.models.chosen(request)
        said = await self.models.reader.read(request, bodies.parse_disk)
        try:
            folder = service.weights.checked(said.model_path, param="model_path", is_folder=True)
            return await self._update(service, said, UpdateWeights(request_id=new_request_id("req"), folder=folder))
        except ApiError as error:
            return self._done(service, error)

    async def from_files(self, request: Request) -> Response:
        """Replace some tensors of the model, or some of their elements, from one step on; see the other route."""
        service = self.models.chosen(request)
        said = await self.models.reader.read(request, parser(bodies.FilesUpdate))
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
        said = await self.models.reader.read(request, parser(bodies.Group))
        return await self._join(service, said, name=said.group_name)

    async def leave(self, request: Request) -> Response:
        """Leave a group."""
        service = self.models.chosen(request)
        said = await self.models.reader.read(request, parser(bodies.GroupEnd, is_optional=True), is_declared=False)
        return await self._told(service, LeaveGroup(request_id=new_request_id("req"), name=said.group_name))

    async def from_group(self, request: Request) -> Response:
        """Replace tensors by those that a trainer sends, from one step on."""
        service = self.models.chosen(request)
        said = await self.models.reader.read(request, parser(bodies.GroupUpdate))
        received = bodies.received(said.names, said.dtypes, said.shapes)
        try:
            command = UpdateWeights(request_id=new_request_id("req"), group=said.group_name, received=received)
            return await self._update(service, said, command)
        except ApiError as error:
            return self._done(service, error)

    async def join_transfer(self, request: Request) -> Response:
        """Join the group of a trainer, as vLLM does."""
        service = self.models.chosen(request)
        said = await self.models.reader.read(request, parser(bodies.Transfer))
        return await self._join(service, said.init_info, name=_TRANSFER)

    async def leave_transfer(self, request: Request) -> Response:
        """Leave the group of a trainer, as vLLM does."""
        return await self._told(
            self.models.chosen(request), LeaveGroup(request_id=new_request_id("req"), name=_TRANSFER)
        )

    async def start(self, request: Request) -> Response:
        """Announce an update in parts, as vLLM does. Parts that were not finished are replaced tensor by tensor."""
        service = self.models.chosen(request)
        await self.models.reader.read(request, parser(bodies.StartUpdate, is_optional=True), is_declared=False)
        self._check(service)
        return self._done(service)

    async def start_draft(self, request: Request) -> Response:
        """Refuse to update the weights of a draft model, which vLLM can."""
        message = "The weights of a draft model cannot be updated: it keeps those that it began with."
        return self._done(self.models.chosen(request), ApiError(message, code="weights_fixed"))

    async def part(self, request: Request) -> Response:
        """Take tensors from the trainer; nothing is computed with them before `/finish_weight_update`."""
        service = self.models.chosen(request)
        said = await self.models.reader.read(request, parser(bodies.PartUpdate))
        info = said.info()
        received = bodies.received(info.names, info.dtype_names, info.shapes)
        return await self._told(
            service, UpdateWeights(request_id=new_request_id("req"), group=_TRANSFER, received=received, is_last=False)
        )

    async def finish(self, request: Request) -> Response:
        """Compute with all parts of an update from one step on."""
        service = self.models.chosen(request)
        said = await self.models.reader.read(request, parser(bodies.FinishUpdate, is_optional=True), is_declared=False)
        return await self._told(service, UpdateWeights(request_id=new_request_id("req"), version=said.weight_version))

    async def name_version(self, request: Request) -> Response:
        """Give the present weights another name. No request ends unless it is asked for."""
        service = self.models.chosen(request)
        said = await self.models.reader.read(request, parser(bodies.VersionUpdate))
        self._check(service)
        if said.abort_all_requests:
            await self._abort_all(service)
        await self._ask(service, NameVersion(request_id=new_request_id("req"), version=said.new_version))
        return self._done(service)

    async def version(self, request: Request) -> Response:
        """Return the version of the weights."""
        service = self.models.chosen(request)
        return json_response(bodies.Version(weight_version=self._now(service)))

    async def check(self, request: Request) -> Response:
        """Return a checksum of the weights, note what they are, or compare them with what was noted."""
        service = self.models.chosen(request)
        said = await self.models.reader.read(request, bodies.parse_check)
        try:
            self._check(service)
            if said.action == "reset_tensors":
                await service.sleep(("weights",), drops_weights=True, mode="keep")
                return self._done(service)
            answer = await service.ask(CheckWeights(request_id=new_request_id("req"), action=said.action))
        except ApiError as error:
            return self._done(service, error)
        return self._done(service, checksum=answer.computed[0] if answer.computed is not None else msgspec.UNSET)

    async def pause(self, request: Request) -> Response:
        """Stop computing, as SGLang does; no request ends unless the mode is `abort`."""
        service = self.models.chosen(request)
        said = await self.models.reader.read(
            request, parser(bodies.PauseGeneration, is_optional=True), is_declared=False
        )
        service.check_ready()
        await service.pause(retract=said.mode == "retract", abort=said.mode == "abort")
        return self._done(service)

    async def go_on(self, request: Request) -> Response:
        """Compute again after a pause."""
        service = self.models.chosen(request)
        await self.models.reader.read(request, parser(bodies.ContinueGeneration, is_optional=True), is_declared=False)
        service.check_ready()
        await service.resume()
        return self._done(service)

    async def reset_cache(self, request: Request) -> Response:
        """Drop the cached KV that no request uses, as vLLM does; with `reset_running_requests` also what they use."""
        service = self.models.chosen(request)
        said = await self.models.reader.read(request, parser(bodies.ResetCache, is_optional=True), is_declared=False)
        service.check_ready()
        was_paused = service.status.paused
        if said.reset_running_requests:
            await service.pause(retract=True)
        try:
            await service.ask(Flush(request_id=new_request_id("req")))
        finally:
            if said.reset_running_requests and was_paused == "no":
                await service.resume()
        return json_response(bodies.ResetDone(success=True))

    async def world_size(self, request: Request) -> Response:
        """Return how many processes of all engines join the group of a trainer."""
        service = self.models.chosen(request)
        num_engines = 1 if service.dispatcher is None else len(service.dispatcher.replicas)
        return json_response(bodies.WorldSize(world_size=num_engines * num_ranks(service.model(service.model_name))))

    async def is_paused(self, request: Request) -> Response:
        """Return whether the engine is paused."""
        service = self.models.chosen(request)
        return json_response(bodies.IsPaused(is_paused=service.status.paused != "no"))

    async def sleep(self, request: Request) -> Response:
        """Give memory back to the system until `/wake_up`; requests wait meanwhile, and go on afterwards.

        Level 0 only stops computing; 1 drops KV, and keeps weights in files; 2 drops the weights too, so that an update
        must bring all of them after waking. The mode may let the requests that are there end before, or at once. With
        `tags`, only these sleep.
        """
        service = self.models.chosen(request)
        level, mode = request.query_params.get("level", "1"), request.query_params.get("mode", "keep")
        if level not in ("0", "1", "2"):
            raise ApiError(
                f"'level' of the query must be 0, 1 or 2, but got '{level[:40]}'.", param="level", code="invalid_value"
            )
        if mode not in ("keep", "wait", "abort"):
            raise ApiError(
                f"'mode' of the query must be keep, wait or abort, but got '{mode[:40]}'.",
                param="mode",
                code="invalid_value",
            )
        tags = bodies.sleep_tags(request.query_params.getlist("tags")) or (
            ("scheduling",) if level == "0" else SLEEP_TAGS
        )
        drops_weights = level == "2" and "weights" in tags
        if drops_weights:
            self._check(service)  # otherwise they could not be updated
        service.check_ready()
        await service.sleep(tags, drops_weights=drops_weights, mode=mode)
        return self._sleeping(service)

    async def wake_up(self, request: Request) -> Response:
        """Take memory again that `/sleep` has given back: all, or what `tags` name; then compute again."""
        service = self.models.chosen(request)
        tags = bodies.sleep_tags(request.query_params.getlist("tags"))
        service.check_ready()
        await service.wake_up(tags)
        return self._sleeping(service)

    async def is_sleeping(self, request: Request) -> Response:
        """Return whether nothing is computed because something sleeps, or dropped weights were not updated."""
        service = self.models.chosen(request)
        return json_response(bodies.IsSleeping(is_sleeping=service.status.sleep.is_asleep))

    async def release_memory(self, request: Request) -> Response:
        """Give memory back, as SGLang does; weights are kept in files. Requests wait, and go on afterwards."""
        service = self.models.chosen(request)
        said = await self.models.reader.read(request, parser(bodies.Occupation, is_optional=True), is_declared=False)
        service.check_ready()
        tags = said.memory()
        if tags:
            await service.sleep(tags, drops_weights=False, mode="keep")
        return self._done(service)

    async def resume_memory(self, request: Request) -> Response:
        """Take memory again, as SGLang does."""
        service = self.models.chosen(request)
        said = await self.models.reader.read(request, parser(bodies.Occupation, is_optional=True), is_declared=False)
        service.check_ready()
        tags = said.memory()
        if tags:
            await service.wake_up(tags)
        return self._done(service)

    def _sleeping(self, service: Service) -> Response:
        state = service.status.sleep
        return json_response(bodies.Sleeping(status="sleeping" if state.is_asleep else "awake", tags=state.shown))

    async def _update(self, service: Service, said: bodies.Update, command: UpdateWeights) -> Response:
        kept = said.kept()
        self._check(service)
        if said.abort_all_requests:
            await self._abort_all(service)
        await self._ask(service, msgspec.structs.replace(command, version=said.weight_version, old_kv=kept))
        return self._done(service)

    async def _join(self, service: Service, said: bodies.Group | bodies.TransferInfo, *, name: str) -> Response:
        if said.rank_offset >= said.world_size:
            raise ApiError(
                f"'rank_offset' must be less than 'world_size', but got {said.rank_offset} and {said.world_size}.",
                param="rank_offset",
                code="invalid_value",
            )
        transfer = said if isinstance(said, bodies.TransferInfo) else None
        unique_id = b"" if transfer is None else transfer.unique_id()
        return await self._told(
            service,
            JoinGroup(
                request_id=new_request_id("req"),
                name=name,
                address=said.master_address or "",
                port=said.master_port or 0,
                first_rank=said.rank_offset,
                world_size=said.world_size,
                backend=said.backend,
                is_transfer=transfer is not None,
                unique_id=unique_id,
                packed_bytes=transfer.packed_buffer_size_bytes if transfer is not None and transfer.packed else 0,
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
        if isinstance(command, UpdateWeights) and command.is_last:
            service.note_updated()

    async def _abort_all(self, service: Service) -> None:
        """End all requests; the engine is as it was then, paused or not."""
        was_paused = service.status.paused
        await service.pause(abort=True, retract=was_paused == "retract")
        if was_paused == "no":
            await service.resume()

    def _check(self, service: Service) -> None:
        """Check that there are weights to be updated, and that an engine works."""
        service.check_ready()
        if service.dispatcher is not None and service.replace_engine is None:
            message = (
                "Weights cannot be updated where Ray starts the engines: one that it adds would have other weights."
            )
            raise ApiError(message, code="weights_fixed")

    def _now(self, service: Service) -> str:
        if service.dispatcher is not None:
            return service.dispatcher.weight_version or FIRST_VERSION
        return service.weights.now(service.status.incarnation)

    def _done(
        self,
        service: Service,
        error: ApiError | None = None,
        *,
        checksum: str | msgspec.UnsetType = msgspec.UNSET,
    ) -> Response:
        answer = bodies.Done(
            success=error is None,
            message="" if error is None else str(error),
            weight_version=self._now(service),
            error=msgspec.UNSET if error is None else msgspec.json.decode(error.body(), type=ErrorEnvelope).error,
            checksum=checksum,
        )
        return json_response(answer, status=200 if error is None else error.status)
