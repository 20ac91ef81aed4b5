"""Commands that change the weights of an engine while it runs. Standard library and msgspec only."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

OldKV: TypeAlias = Literal["drop", "keep", "recompute"]
"""What becomes of the KV that earlier weights have computed, see `UpdateWeights.old_kv`."""
MAX_VERSION = 128
"""Longest name of a version, in characters."""
UNIQUE_ID_BYTES = 128
"""Size of `ncclUniqueId`."""


class Received(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that the rank 0 of a group sends."""

    name: str
    dtype: str
    """As torch names it, as in "bfloat16"."""
    shape: tuple[int, ...]


class UpdateWeights(msgspec.Struct, frozen=True, kw_only=True, tag="update_weights"):
    """Compute with other weights, from one step on. Steps go on with the old ones while the new ones are read.

    Tensors have the names that they have in the files of the model, or in memory in `transformers`. What is not named
    stays as it is, unless `folder` names the whole model. `NAME.sparse_indices` and `NAME.sparse_values` replace some
    elements of the tensor NAME, counted in the order of its rows.

    The answer is a `Delta` that ends with `stop` and has the version, or with a refusal that says which tensor is
    wrong; the old weights then stay, as if nothing had been asked for. It is refused while another update is read.

    An update may come in parts: those with `is_last` False are only kept, and all of them count with the last one,
    which may be empty. A folder begins anew. Several engines change together by `waits` and `FinishUpdate`.

    Raises:
        ValueError: there is no place or there are two, `version` is too long, or `old_kv` is unknown.
    """

    request_id: str
    folder: str | None = None
    """Folder of the whole model, on the engine's machine."""
    files: tuple[str, ...] = ()
    """Files of safetensors, on the engine's machine; they may be removed after the answer."""
    group: str | None = None
    """Name of the group, see `JoinGroup`, whose rank 0 sends the tensors of `received`, one after the other."""
    received: tuple[Received, ...] = ()
    """Empty: those of the update before from this group."""
    is_last: bool = True
    """Whether steps have the new weights behind it; otherwise it is a part of an update."""
    waits: bool = False
    """Whether the new weights are only made ready, until `FinishUpdate` or `DropUpdate`; nothing else of weights, and
    no sleep, can be asked for meanwhile."""
    is_whole: bool = False
    """Whether it must have all tensors of the model, whatever updates there were before."""
    version: str | None = None
    """Name of the version, with every token that is computed from then on; None: the number of updates so far."""
    old_kv: OldKV = "drop"
    """drop: no further request gets cached KV of other weights, and what runs goes on behind what it has computed;
    keep: cached KV is used as if the weights were the same; recompute: what runs also computes its KV again."""

    def __post_init__(self) -> None:
        """Check the fields."""
        num_places = (self.folder is not None) + bool(self.files) + (self.group is not None)
        if num_places > 1 or (not num_places and not self.is_last):
            raise ValueError(
                f"one of folder, files and group must be given, not both or none, got {self.folder!r}, "
                f"{self.files!r:.200} and {self.group!r}"
            )
        if self.group is None and self.received:
            raise ValueError(f"received must be given with group, got {self.group!r} and {len(self.received)} tensors")
        if self.version is not None and not 0 < len(self.version) <= MAX_VERSION:
            raise ValueError(f"version must have 1 to {MAX_VERSION} characters, got {self.version!r:.200}")
        if self.old_kv not in ("drop", "keep", "recompute"):
            raise ValueError(f"old_kv must be drop, keep or recompute, got {self.old_kv!r}")


class FinishUpdate(msgspec.Struct, frozen=True, kw_only=True, tag="finish_update"):
    """Compute with the weights of an update that waits. It may be asked for again.

    The answer is a `Delta` that ends with `stop` and has the version, or with a refusal; the old weights then stay.
    """

    request_id: str
    update: str
    """The id of the update."""


class DropUpdate(msgspec.Struct, frozen=True, kw_only=True, tag="drop_update"):
    """Forget an update that waits or is being read, and the parts of one. The answer is a `Delta`, as before."""

    request_id: str


class JoinGroup(msgspec.Struct, frozen=True, kw_only=True, tag="join_group"):
    """Join a group of processes whose rank 0, the trainer, then sends tensors.

    It is one of `torch.distributed`; over NCCL with `is_transfer` it is a communicator as vLLM's trainers begin it.

    The answer is a `Delta` that ends with `stop`, or with a refusal. Steps go on meanwhile.

    Raises:
        ValueError: a number is out of its range.
    """

    request_id: str
    name: str
    address: str
    """Host of rank 0, or its address."""
    port: int
    first_rank: int
    """Rank of this engine, or of its rank 0: its others follow."""
    world_size: int
    backend: str = "gloo"
    is_transfer: bool = False
    """Whether it is of vLLM's routes; it then takes the place of the one before."""
    unique_id: bytes = b""
    """The id of an NCCL communicator, as the trainer says it; empty: its store has it."""
    packed_bytes: int = 0
    """Tensors come together, as bytes, until there are more of these; 0: each comes alone."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.unique_id and (
            len(self.unique_id) != UNIQUE_ID_BYTES or not self.is_transfer or self.backend != "nccl"
        ):
            raise ValueError(
                f"unique_id must have {UNIQUE_ID_BYTES} bytes, of NCCL by vLLM's routes, got {len(self.unique_id)} "
                f"bytes with {self.backend!r:.40}"
            )
        if self.packed_bytes < 0:
            raise ValueError(f"packed_bytes must be >= 0, got {self.packed_bytes}")
        if not 0 < self.first_rank < self.world_size:
            raise ValueError(f"first_rank must be in [1, {self.world_size}), got {self.first_rank}")
        if not self.unique_id and not 0 < self.port < 65536:
            raise ValueError(f"port must be in [1, 65536), got {self.port}")


class LeaveGroup(msgspec.Struct, frozen=True, kw_only=True, tag="leave_group"):
    """Leave a group; its name is free then. The answer is a `Delta` that ends with `stop`, or with a refusal."""

    request_id: str
    name: str


SleepTag: TypeAlias = Literal["weights", "kv_cache", "scheduling"]
"""What sleeps: the memory of weights, the memory of KV, or only the steps, which rest in any case."""
SLEEP_TAGS: tuple[SleepTag, ...] = ("weights", "kv_cache", "scheduling")


class Sleep(msgspec.Struct, frozen=True, kw_only=True, tag="sleep"):
    """Launch no steps before `WakeUp`, and give memory back to the operating system meanwhile.

    No request ends. For `kv_cache`, those that run give their KV back and compute it again afterwards; cached prefixes
    are forgotten, but for what lower tiers keep. Weights are written to a file in the cache folder, unless they are in
    files, or are dropped.

    The answer is a `Delta` that ends with `stop` when the memory is free, or with a refusal; the engine is then awake
    as before. It is refused while an update is read.

    Raises:
        ValueError: a tag is unknown, `tags` is empty, or weights are to be dropped and "weights" is not among the tags.
    """

    request_id: str
    tags: tuple[SleepTag, ...] = SLEEP_TAGS
    drops_weights: bool = False
    """Whether weights are forgotten: after waking, no step is launched before an update has replaced all of them."""

    def __post_init__(self) -> None:
        """Check the tags."""
        if not self.tags:
            raise ValueError(f"tags must name some of {', '.join(SLEEP_TAGS)}, got none")
        _check_tags(self.tags)
        if self.drops_weights and "weights" not in self.tags:
            raise ValueError(f"drops_weights must be False unless weights sleep, got True with {self.tags}")


class WakeUp(msgspec.Struct, frozen=True, kw_only=True, tag="wake_up"):
    """Take memory again that has been given back by `Sleep`, with the weights that were there.

    Steps go on when neither weights nor KV sleep, whatever else `Sleep` has named. The answer is a `Delta` that ends
    with `stop`, or with a refusal; what slept then sleeps on.

    Raises:
        ValueError: a tag is unknown.
    """

    request_id: str
    tags: tuple[SleepTag, ...] = ()
    """What wakes up; empty: everything."""

    def __post_init__(self) -> None:
        """Check the tags."""
        _check_tags(self.tags)


def _check_tags(tags: tuple[SleepTag, ...]) -> None:
    unknown = set(tags) - set(SLEEP_TAGS)
    if unknown:
        raise ValueError(f"tags must be some of {', '.join(SLEEP_TAGS)}, got {min(unknown)!r:.100}")


def sleep_at(level: int, request_id: str) -> Sleep:
    """Return the command for a level: 0 lets steps rest, 1 gives memory back too, 2 also drops the weights.

    Raises:
        ValueError: the level is another one.
    """
    if level not in (0, 1, 2):
        raise ValueError(f"level must be 0, 1 or 2, got {level!r:.100}")
    return Sleep(request_id=request_id, tags=SLEEP_TAGS if level else ("scheduling",), drops_weights=level == 2)


class CheckWeights(msgspec.Struct, frozen=True, kw_only=True, tag="check_weights"):
    """Compute a checksum of the weights, and note or compare what they are.

    `snapshot` notes the tensors and what lies in memory of them; `compare` is refused with the names of tensors that
    are others by now, or if memory differs though no tensor does. The answer is a `Delta` that ends with `stop` and has
    the checksum in the place of the version, or with a refusal. Steps go on meanwhile.
    """

    request_id: str
    action: Literal["checksum", "snapshot", "compare"] = "checksum"


WeightCommand: TypeAlias = UpdateWeights | DropUpdate | JoinGroup | LeaveGroup | Sleep | WakeUp | CheckWeights
"""Commands for the source of weights, which carries them out one after the other."""


class NameVersion(msgspec.Struct, frozen=True, kw_only=True, tag="name_version"):
    """Give the present weights another name; nothing else changes. The answer is a `Delta` that ends with `stop`."""

    request_id: str
    version: str

    def __post_init__(self) -> None:
        """Check the name."""
        if not 0 < len(self.version) <= MAX_VERSION:
            raise ValueError(f"version must have 1 to {MAX_VERSION} characters, got {self.version!r:.200}")
