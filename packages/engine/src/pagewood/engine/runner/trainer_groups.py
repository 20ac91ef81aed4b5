"""Groups in which a trainer sends tensors to engines."""

# pyright: basic
# torch.distributed is typed in part only.

from __future__ import annotations

import ipaddress
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from pagewood.engine.runner.trainer_nccl import ID_KEY, NCCLCommunicator, unique_id_in
from pagewood.engine.weight_commands import JoinGroup, Received

_JOIN_S = 60.0
"""How long an engine waits for all of a group."""
_RECEIVE_S = 120.0
"""How long it waits for a tensor."""
_DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32")}


class GroupError(RuntimeError):
    """A group cannot be joined, or its rank 0 has not sent what it had to."""


class Sender(Protocol):
    """Where the tensors of a trainer come from."""

    def receive(self, tensor: Tensor, *, limit_s: float) -> None:
        """Fill a tensor with what rank 0 sends; wait for it, and raise a RuntimeError if it does not come."""
        ...

    def close(self) -> None:
        """Leave the group."""
        ...


@dataclass(slots=True, kw_only=True)
class _Joined:
    """A group that was joined."""

    sender: Sender
    packed_bytes: int
    device: torch.device | None
    """Where tensors arrive; None: on the host."""
    wanted: Sequence[Received] = ()
    """What came last."""  # written by: receive


class TrainerGroups:
    """The groups that a process is in. Used by one thread, the reader of weights.

    They are made as SGLang and the trainers that use it make them: a store at the address of rank 0, whose keys begin
    with the name of the group. Over NCCL for vLLM's routes, the store or the command has the id of a communicator.

    Args:
        device: on which tensors arrive over NCCL; None: there is no NCCL.
    """

    __slots__ = ("_device", "_groups")

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._groups: dict[str, _Joined] = {}  # contents written by: join, leave

    def join(self, command: JoinGroup, *, rank: int) -> None:
        """Join a group; wait until all are there.

        Args:
            command: says which.
            rank: of this process in its engine.

        Raises:
            ValueError: there is no such backend, or there is a group of that name.
            GroupError: not all have come.
        """
        if command.backend != "gloo" and (self._device is None or command.backend != "nccl"):
            known = "gloo for an engine on a CPU" if self._device is None else "gloo or nccl"
            raise ValueError(f"backend must be {known}, got {command.backend!r:.40}")
        if command.name in self._groups:
            if not command.is_transfer:
                raise ValueError(f"name must not be that of a group that exists, got {command.name!r}")
            self.leave(command.name)
        own = command.first_rank + rank
        if own >= command.world_size:
            raise ValueError(
                f"world_size must be more than {own}, the last rank of the engine, got {command.world_size}"
            )
        try:
            sender = self._sender(command, own)
        except (RuntimeError, ValueError, OSError) as error:
            raise GroupError(f"the group {command.name} cannot be joined: {error}") from error
        self._groups[command.name] = _Joined(
            sender=sender,
            packed_bytes=command.packed_bytes,
            device=self._device if command.backend == "nccl" else None,
        )

    def leave(self, name: str) -> None:
        """Leave a group.

        Raises:
            ValueError: there is none of that name.
        """
        self._of(name).sender.close()
        del self._groups[name]

    def receive(self, name: str, wanted: Sequence[Received]) -> dict[str, Tensor]:
        """Return tensors that rank 0 of a group sends in this order; with none, those that came last.

        Raises:
            ValueError: there is no such group, or a tensor has no dtype or shape.
            GroupError: they have not come.
        """
        group = self._of(name)
        group.wanted = wanted or group.wanted
        if not group.wanted:
            raise ValueError(f"received must name tensors in the first update from the group {name}, got none")
        found = dict[str, Tensor]()
        for pack in _packs([_Tensor.of(one) for one in group.wanted], group.packed_bytes):
            dtype = torch.uint8 if group.packed_bytes else pack[0].dtype
            size = sum(one.num_bytes for one in pack) // dtype.itemsize
            memory = torch.empty(size, dtype=dtype, device=group.device)
            try:
                group.sender.receive(memory, limit_s=_RECEIVE_S)
            except RuntimeError as error:
                raise GroupError(f"{pack[0].name} has not come from the group {name}: {error}") from error
            parts = memory.cpu().view(torch.uint8).split([one.num_bytes for one in pack])
            for one, part in zip(pack, parts, strict=True):
                found[one.name] = part.clone().view(one.dtype).view(one.shape)  # memory of its own, which is aligned
        return found

    def close(self) -> None:
        """Leave all groups."""
        for name in list(self._groups):
            self.leave(name)

    def _of(self, name: str) -> _Joined:
        group = self._groups.get(name)
        if group is None:
            raise ValueError(f"group must be the name of one that was joined, got {name!r}")
        return group

    def _sender(self, command: JoinGroup, rank: int) -> Sender:
        if command.is_transfer and command.backend == "nccl":
            assert self._device is not None
            unique_id = command.unique_id or unique_id_in(_store(command).get(ID_KEY))
            return NCCLCommunicator(unique_id, rank, command.world_size, self._device, limit_s=_JOIN_S)
        by_name = PrefixStore(f"{command.name}/", PrefixStore(command.name, _store(command)))
        make = _nccl if command.backend == "nccl" else partial(_gloo, is_local=_is_local(command.address))
        return _TorchGroup(make(by_name, rank, command.world_size))


def _store(command: JoinGroup) -> TCPStore:
    """Return the store of the trainer."""
    return TCPStore(
        command.address, command.port, command.world_size, is_master=False, timeout=timedelta(seconds=_JOIN_S)
    )


class _TorchGroup:
    """`Sender` of a group of torch."""

    __slots__ = ("_group",)

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def receive(self, tensor: Tensor, *, limit_s: float) -> None:
        self._group.broadcast([tensor], dist.BroadcastOptions()).wait(timedelta(seconds=limit_s))

    def close(self) -> None:
        """Do nothing: it is left when nothing refers to it."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor that comes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, one: Received) -> _Tensor:
        """Return what a command names; errors as in `receive`."""
        dtype = _DTYPES.get(one.dtype.removeprefix("torch."))
        if dtype is None or any(size < 0 for size in one.shape):
            raise ValueError(f"{one.name} must have a dtype of {', '.join(_DTYPES)}, got {one.dtype} {one.shape}")
        return cls(one.name, dtype, one.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of its numbers."""
        return math.prod(self.shape) * self.dtype.itemsize


def _packs(tensors: Sequence[_Tensor], most_bytes: int) -> Iterator[list[_Tensor]]:
    """Return which tensors come together: as many as exceed a number of bytes, or are left; 0: each alone."""
    pack, num_bytes = list[_Tensor](), 0
    for one in tensors:
        pack.append(one)
        num_bytes += one.num_bytes
        if num_bytes > most_bytes or not most_bytes:
            yield pack
            pack, num_bytes = [], 0
    if pack:
        yield pack


def _gloo(store: PrefixStore, rank: int, world_size: int, *, is_local: bool) -> dist.ProcessGroup:
    kind: Any = dist.ProcessGroupGloo
    options = kind._Options()
    device = kind.create_device(hostname="127.0.0.1") if is_local else kind.create_default_device()
    options._devices = [device]  # not ours
    options._timeout = timedelta(seconds=_RECEIVE_S)  # not ours
    return kind(PrefixStore("cpu/", store), rank, world_size, options)


def _nccl(store: PrefixStore, rank: int, world_size: int) -> dist.ProcessGroup:
    kind: Any = getattr(dist, "ProcessGroupNCCL")  # noqa: B009  # torch for a CPU has none
    options = kind.Options()
    options._timeout = timedelta(seconds=_RECEIVE_S)  # not ours
    return kind(PrefixStore("cuda/", store), rank, world_size, options)


def _is_local(address: str) -> bool:
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
