"""The fields of requests about weights at run time, and their answers."""

from __future__ import annotations

from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from pagewood.engine.weight_commands import MAX_VERSION, SLEEP_TAGS, UNIQUE_ID_BYTES, OldKV, Received, SleepTag
from pagewood.server.http.errors import ApiError, ErrorFields
from pagewood.server.http.validation import parse

_Path = Annotated[str, Field(min_length=1, max_length=4096)]
_Version = Annotated[str, Field(min_length=1, max_length=MAX_VERSION)]
_Name = Annotated[str, Field(min_length=1, max_length=512)]
GroupName = Annotated[str, Field(min_length=1, max_length=128)]
NEUTRAL = {"load_format": ("auto", "safetensors"), "is_async": (False,), "torch_empty_cache": (False,)}
"""Fields of SGLang that are not supported -> their neutral values, which have no effect and are accepted."""
NEUTRAL_CHECK = {"allow_quant_error": (False,), "selector": ("all",)}
"""The same of checks."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Update(_Strict):
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


class DiskUpdate(Update):
    """A folder with a whole model, in SGLang's words."""

    model_path: _Path
    """Below a folder that the operator allows; its configuration must be that of the served model."""
    keep_pause: bool = False
    """Accepted for compatibility: a server that is paused stays so."""


class FilesUpdate(Update):
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


class GroupUpdate(Update):
    """Tensors that the rank 0 of a group sends in this order, in SGLang's words."""

    names: Annotated[list[_Name], Field(min_length=1, max_length=100_000)]
    dtypes: list[_Name]
    """As torch names them."""
    shapes: list[list[Annotated[int, Field(ge=0)]]]
    group_name: GroupName = "weight_update_group"


class TransferInfo(_Strict):
    """How a trainer sends tensors, in vLLM's words: where its store is, or the id of its communicator."""

    master_address: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    master_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    nccl_unique_id_b64: Annotated[str, Field(max_length=256)] | None = None
    """The bytes of an `ncclUniqueId` in base64, in the place of a store."""
    rank_offset: Annotated[int, Field(ge=1)]
    world_size: Annotated[int, Field(ge=2)]
    backend: Literal["gloo", "nccl"] = "nccl"
    """vLLM's clients mean NCCL. An engine on a CPU has gloo only, in a group as for `/init_weights_update_group`."""
    packed: bool = False
    """Whether tensors come together, as bytes."""
    packed_buffer_size_bytes: Annotated[int, Field(ge=1)] = 1 << 30
    """As soon as there are more, they are sent."""
    packed_num_buffers: int = 2
    """Number of the trainer's buffers; it changes nothing here."""

    def unique_id(self) -> bytes:
        """Return the id of the communicator; empty: the store has it.

        Raises:
            ApiError: there is neither an id nor a store, or there are both, or the id is wrong.
        """
        place = (self.master_address is not None) + (self.master_port is not None)
        if self.nccl_unique_id_b64 is None and place == 2:
            return b""
        try:
            found = b64decode(self.nccl_unique_id_b64 or "", validate=True)
        except (Base64Error, ValueError):
            found = b""
        if place or self.backend != "nccl" or len(found) != UNIQUE_ID_BYTES:
            raise ApiError(
                "'init_info' must have either 'master_address' and 'master_port', or for nccl 'nccl_unique_id_b64', "
                f"the base64 of {UNIQUE_ID_BYTES} bytes.",
                param="init_info",
                code="invalid_value",
            )
        return found


class Transfer(_Strict):
    """The body of `/init_weight_transfer_engine`."""

    init_info: TransferInfo


class StartUpdate(_Strict):
    """The body of `/start_weight_update`."""


class UpdateInfo(_Strict):
    """Tensors that come next; without any, those of the time before."""

    names: list[_Name] = []
    dtype_names: list[_Name] = []
    shapes: list[list[Annotated[int, Field(ge=0)]]] = []


class PartUpdate(_Strict):
    """The body of `/update_weights`."""

    update_info: UpdateInfo | Annotated[list[UpdateInfo], Field(min_length=1, max_length=4096)]
    """A list has one for each process that gets tensors; all of them get all tensors."""

    def info(self) -> UpdateInfo:
        """Return what all processes get.

        Raises:
            ApiError: they do not get the same.
        """
        if isinstance(self.update_info, UpdateInfo):
            return self.update_info
        first, *others = self.update_info
        if any(one != first for one in others):
            raise ApiError(
                "'update_info' must be the same for all processes, because each gets all tensors.",
                param="update_info",
                code="invalid_value",
            )
        return first


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


class ResetCache(_Strict):
    """The body of `/reset_prefix_cache`."""

    reset_running_requests: bool = False
    """Whether running requests give their KV back too, and compute it again."""


class ResetDone(msgspec.Struct, frozen=True, kw_only=True):
    """The cache is empty but for what requests use."""

    success: bool


class WorldSize(msgspec.Struct, frozen=True, kw_only=True):
    """The processes of the engine that join a group of a trainer."""

    world_size: int


class Occupation(_Strict):
    """Memory to give back or to take again, in SGLang's words."""

    tags: list[Literal["weights", "kv_cache", "cuda_graph"]] | None = None
    """None: all of it. An engine on a CPU has no graphs."""

    def memory(self) -> tuple[SleepTag, ...]:
        """Return what of it there is."""
        named = ("weights", "kv_cache") if self.tags is None else self.tags
        return tuple(tag for tag in SLEEP_TAGS if tag in named)


class Check(_Strict):
    """What is done with the weights, in SGLang's words."""

    action: Literal["checksum", "snapshot", "compare", "reset_tensors"] = "checksum"
    """reset_tensors: they are forgotten, so that nothing is computed before an update has brought all of them."""


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """Whether it was done."""

    success: bool
    message: str
    weight_version: str
    """The version that computes now."""
    error: ErrorFields | msgspec.UnsetType = msgspec.UNSET
    """If it was not done: the error as on other routes."""
    checksum: str | msgspec.UnsetType = msgspec.UNSET
    """SHA-256 of names, dtypes, shapes and numbers of all tensors, where it was asked for."""


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """The version that computes now; `default`: the weights of the model's folder."""

    weight_version: str


class IsPaused(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the engine is paused."""

    is_paused: bool


class IsSleeping(msgspec.Struct, frozen=True, kw_only=True):
    """Whether something sleeps."""

    is_sleeping: bool


class Sleeping(msgspec.Struct, frozen=True, kw_only=True):
    """What sleeps now."""

    status: Literal["sleeping", "awake"]
    tags: tuple[SleepTag, ...]


def sleep_tags(names: Sequence[str]) -> tuple[SleepTag, ...]:
    """Return the tags of a query.

    Raises:
        ApiError: one is unknown.
    """
    unknown = [name for name in names if name not in SLEEP_TAGS]
    if unknown:
        raise ApiError(
            f"'tags' of the query must be some of {', '.join(SLEEP_TAGS)}, but got '{unknown[0][:40]}'.",
            param="tags",
            code="invalid_value",
        )
    return tuple(tag for tag in SLEEP_TAGS if tag in names)


def received(names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> tuple[Received, ...]:
    """Return the tensors of three lists.

    Raises:
        ApiError: the lists have different lengths.
    """
    if not len(names) == len(dtypes) == len(shapes):
        raise ApiError(
            "Names, dtypes and shapes must be lists of the same length, but there are "
            f"{len(names)}, {len(dtypes)} and {len(shapes)}.",
            param="names",
            code="invalid_value",
        )
    return tuple(Received(*one) for one in zip(names, dtypes, map(tuple, shapes), strict=True))


def parse_disk(body: bytes) -> DiskUpdate:
    """Return the update that `body` holds.

    Raises:
        ApiError: a field is wrong, missing, unknown or not supported.
    """
    return parse(DiskUpdate, body, neutral=NEUTRAL, ignored=frozenset())


def parse_check(body: bytes) -> Check:
    """Return the check that `body` holds; see `parse_disk`."""
    return parse(Check, body or b"{}", neutral=NEUTRAL_CHECK, ignored=frozenset())
