"""A library that is called like NCCL, through ctypes, and exchanges by gloo; its calls do not block, and are noted."""

# pyright: basic
# torch.distributed has no types, and ctypes few.

from __future__ import annotations

import ctypes
import itertools
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

dist: Any = distributed
DTYPES = {
    1: torch.uint8, 2: torch.int32, 4: torch.int64, 6: torch.float16, 7: torch.float32, 8: torch.float64,
    9: torch.bfloat16,
}  # fmt: skip
SUCCESS, IN_PROGRESS, INVALID = 0, 7, 4


class _Comm:
    """A communicator: its group, when all ranks have come, and what is in progress."""

    def __init__(self) -> None:
        self.group: Any = None  # written by: nccl_library
        self.working: threading.Thread | None = None
        self.state = SUCCESS

    def work(self, do: Callable[[], None]) -> int:
        """Do something beside the caller."""
        if self.state == IN_PROGRESS:
            return INVALID

        def run() -> None:
            try:
                do()
                self.state = SUCCESS
            except Exception:  # the group has ended
                self.state = INVALID

        self.state, self.working = IN_PROGRESS, threading.Thread(target=run, daemon=True)
        self.working.start()
        return IN_PROGRESS


class NCCLLibrary:
    """As `ctypes.CDLL` returns it. An id holds the place of a store, as that of NCCL holds the place of rank 0."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.broadcasts: list[tuple[int, torch.dtype]] = []
        """Sizes and types of the next broadcasts, if a test knows them: gloo ends the process if they are others."""
        self._comms: dict[int, _Comm] = {}
        self._numbers = itertools.count(1)  # of communicators, which several threads begin
        self._stores: list[Any] = []
        self.ncclGetErrorString: Any = lambda code: f"error {code.value}".encode()

    def ncclGetUniqueId(self, found: Any) -> int:
        with socket.create_server(("127.0.0.1", 0)) as one:
            port = one.getsockname()[1]
        self._stores.append(dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False))
        text = str(port).encode().ljust(128, b"\xff")
        ctypes.memmove(ctypes.addressof(found._obj), text, 128)
        return SUCCESS

    def ncclCommInitRankConfig(self, comm: Any, count: Any, unique_id: Any, rank: Any, config: Any) -> int:
        own = config._obj
        assert (own.size, own.magic, own.version, own.blocking) == (ctypes.sizeof(own), 0xCAFEBEEF, 21400, 0)
        self.calls.append(("init", count.value, rank.value))
        return self._begin(comm, count.value, unique_id, rank.value)

    def ncclCommInitRank(self, comm: Any, count: Any, unique_id: Any, rank: Any) -> int:
        self._begin(comm, count.value, unique_id, rank.value)
        return self._waited(comm._obj)

    def _begin(self, comm: Any, count: int, unique_id: Any, rank: int) -> int:
        own = _Comm()
        number = next(self._numbers)
        self._comms[number] = own
        comm._obj.value = number  # not ours
        port = int(bytes(unique_id).rstrip(b"\xff"))

        def begin() -> None:
            store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
            kind: Any = dist.ProcessGroupGloo
            options = kind._Options()
            options._devices = [kind.create_device(hostname="127.0.0.1")]  # not ours
            options._timeout = timedelta(seconds=30)  # not ours
            own.group = kind(store, rank, count, options)

        return own.work(begin)

    def ncclAllReduce(
        self, source: Any, target: Any, size: Any, dtype: Any, operation: Any, comm: Any, stream: Any
    ) -> int:
        assert source.value == target.value
        self.calls.append(("sum", size.value, dtype.value, operation.value))
        own, memory = self._comms[comm.value], _memory(target, size, dtype)
        return own.work(lambda: own.group.allreduce([memory]).wait())

    def ncclBroadcast(self, source: Any, target: Any, size: Any, dtype: Any, root: Any, comm: Any, stream: Any) -> int:
        assert source.value in (None, target.value)  # of rank 0 only
        self.calls.append(("broadcast", size.value, DTYPES[dtype.value], root.value))
        assert not self.broadcasts or self.broadcasts.pop(0) == self.calls[-1][1:3]
        own, memory = self._comms[comm.value], _memory(target, size, dtype)
        return own.work(lambda: own.group.broadcast([memory], dist.BroadcastOptions()).wait())

    def ncclCommGetAsyncError(self, comm: Any, state: Any) -> int:
        state._obj.value = self._comms[comm.value].state  # not ours
        return SUCCESS

    def ncclCommAbort(self, comm: Any) -> int:
        self.calls.append(("abort",))
        return SUCCESS

    def _waited(self, comm: Any) -> int:
        working = self._comms[comm.value].working
        assert working is not None
        working.join()
        return self._comms[comm.value].state

    def wait(self, comm: Any) -> None:
        """Wait until what was queued is done, as for a stream."""
        assert self._waited(comm) == SUCCESS


def _memory(target: Any, size: Any, dtype: Any) -> torch.Tensor:
    kind = DTYPES[dtype.value]
    block = (ctypes.c_char * (size.value * kind.itemsize)).from_address(target.value)
    return torch.frombuffer(block, dtype=kind)
