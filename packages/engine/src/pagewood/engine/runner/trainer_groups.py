"""Groups of `torch.distributed` in which a trainer sends tensors to engines."""

# pyright: basic
# torch.distributed is typed in part only.

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from pagewood.engine.weight_commands import JoinGroup, Received

_JOIN_S = 60.0
"""How long an engine waits for all of a group."""
_RECEIVE_S = 120.0
"""How long it waits for a tensor."""
_DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32")}


class GroupError(RuntimeError):
    """A group cannot be joined, or its rank 0 has not sent what it had to."""


class TrainerGroups:
    """The groups that a process is in. Used by one thread, the reader of weights.

    They are made as SGLang and the trainers that use it make them: a store at the address of rank 0, whose keys begin
    with the name of the group.

    Args:
        device: on which tensors arrive over NCCL; None: there is no NCCL.
    """

    __slots__ = ("_device", "_groups")

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._groups: dict[str, dist.ProcessGroup] = {}  # contents written by: join, leave

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
            raise ValueError(f"name must not be that of a group that exists, got {command.name!r}")
        own = command.first_rank + rank
        if own >= command.world_size:
            raise ValueError(
                f"world_size must be more than {own}, the last rank of the engine, got {command.world_size}"
            )
        try:
            store = TCPStore(
                command.address, command.port, command.world_size, is_master=False, timeout=timedelta(seconds=_JOIN_S)
            )
            own_store = PrefixStore(command.name, store)
            by_name = PrefixStore(f"{command.name}/", own_store)
            make = _nccl if command.backend == "nccl" else partial(_gloo, is_local=_is_local(command.address))
            self._groups[command.name] = make(by_name, own, command.world_size)
        except (RuntimeError, ValueError) as error:
            raise GroupError(f"the group {command.name} cannot be joined: {error}") from error

    def leave(self, name: str) -> None:
        """Leave a group.

        Raises:
            ValueError: there is none of that name.
        """
        self._of(name)
        del self._groups[name]

    def receive(self, name: str, wanted: Sequence[Received]) -> dict[str, Tensor]:
        """Return tensors that rank 0 of a group sends in this order.

        Raises:
            ValueError: there is no such group, or a tensor has no dtype or shape.
            GroupError: they have not come.
        """
        group, found = self._of(name), dict[str, Tensor]()
        device = None if isinstance(group, dist.ProcessGroupGloo) else self._device  # None: the host
        for one in wanted:
            dtype = _DTYPES.get(one.dtype.removeprefix("torch."))
            if dtype is None or any(size < 0 for size in one.shape):
                raise ValueError(f"{one.name} must have a dtype of {', '.join(_DTYPES)}, got {one.dtype} {one.shape}")
            tensor = torch.empty(one.shape, dtype=dtype, device=device)
            try:
                group.broadcast([tensor], dist.BroadcastOptions()).wait(timedelta(seconds=_RECEIVE_S))
            except RuntimeError as error:
                raise GroupError(f"{one.name} has not come from the group {name}: {error}") from error
            found[one.name] = tensor.cpu()
        return found

    def close(self) -> None:
        """Leave all groups."""
        self._groups.clear()

    def _of(self, name: str) -> dist.ProcessGroup:
        group = self._groups.get(name)
        if group is None:
            raise ValueError(f"group must be the name of one that was joined, got {name!r}")
        return group


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
