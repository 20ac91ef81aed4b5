"""A communicator of NCCL that a trainer begins as vLLM's does: by an id in its store, without a group of torch.

NCCL is the library that torch has loaded, called by its C interface. No call blocks: a trainer that is gone is an error
after a time.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import ctypes
import pickletools
import time
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from pagewood.engine.weight_commands import UNIQUE_ID_BYTES

ID_KEY = "broadcast_from/0/0"
"""Where the trainer's store has the id."""
_SUCCESS, _IN_PROGRESS = 0, 7
_SUM = 0
_DTYPES = MappingProxyType({
    torch.uint8: 1, torch.int32: 2, torch.int64: 4, torch.float16: 6, torch.float32: 7, torch.float64: 8,
    torch.bfloat16: 9,
})  # fmt: skip


class UniqueId(ctypes.Structure):
    """`ncclUniqueId`, which is passed by value."""

    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


class Config(ctypes.Structure):
    """`ncclConfig_t` of NCCL 2.14, the first with calls that do not block; later versions read it by its version."""

    _fields_ = (
        ("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint), ("blocking", ctypes.c_int),
    )  # fmt: skip


def unique_id_in(pickled: bytes) -> bytes:
    """Return the id in the object that a trainer has put into its store. Nothing is unpickled: only bytes are read.

    Raises:
        ValueError: there is no id in it.
    """
    found = [one for _, one, _ in pickletools.genops(pickled) if isinstance(one, bytes) and len(one) == UNIQUE_ID_BYTES]
    if len(found) != 1:
        raise ValueError(f"{ID_KEY} of the store must hold an id of {UNIQUE_ID_BYTES} bytes, got {len(found)} of them")
    return found[0]


def load_library() -> Any:
    """Return NCCL as torch has loaded it.

    Raises:
        OSError: it has not.
    """
    return ctypes.CDLL("libnccl.so.2")


class NCCLCommunicator:
    """One rank of several. Used by one thread. Invariant: after an error nothing is sent or received any more.

    Args:
        unique_id: of the communicator, from rank 0.
        rank: of this process, above 0.
        count: ranks.
        device: of this process.
        limit_s: how long to wait for the others.

    Raises:
        RuntimeError: they have not come, or NCCL has failed.
        OSError: there is no NCCL.
    """

    __slots__ = ("_comm", "_device", "_library", "_stream")

    def __init__(self, unique_id: bytes, rank: int, count: int, device: torch.device, *, limit_s: float) -> None:
        self._library = load_library()
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._comm: ctypes.c_void_p | None = ctypes.c_void_p()  # written by: close
        own, config = UniqueId.from_buffer_copy(unique_id), Config(ctypes.sizeof(Config), 0xCAFEBEEF, 21400, 0)
        begin = self._library.ncclCommInitRankConfig
        self._call(limit_s, begin, ctypes.byref(self._comm), ctypes.c_int(count), own, ctypes.c_int(rank),
                   ctypes.byref(config))  # fmt: skip
        one = torch.zeros(1, device=device)  # as all ranks of such a communicator do first
        self._run(limit_s, self._library.ncclAllReduce, one, ctypes.c_void_p(one.data_ptr()), ctypes.c_int(_SUM))

    def receive(self, tensor: Tensor, *, limit_s: float) -> None:
        """Fill a tensor on the device with what rank 0 sends; wait for it.

        Raises:
            RuntimeError: it has not come, or NCCL has failed.
        """
        if tensor.numel():
            self._run(limit_s, self._library.ncclBroadcast, tensor, ctypes.c_void_p(), ctypes.c_int(0))

    def close(self) -> None:
        """Leave the communicator, whatever the others do."""
        comm, self._comm = self._comm, None
        if comm:
            with self._computing():
                self._library.ncclCommAbort(comm)

    def _run(self, limit_s: float, function: Any, tensor: Tensor, source: ctypes.c_void_p, last: ctypes.c_int) -> None:
        """Queue a collective from `source` to `tensor`, and wait for it; `last` is the operation, or the root."""
        stream = ctypes.c_void_p(0)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))  # where the tensor was allocated
            tensor.record_stream(self._stream)
            stream = ctypes.c_void_p(self._stream.cuda_stream)
        self._call(
            limit_s, function, source, ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.numel()),
            ctypes.c_int(_DTYPES[tensor.dtype]), last, self._comm, stream,
        )  # fmt: skip

    def _call(self, limit_s: float, function: Any, *arguments: Any) -> None:
        """Call a function of NCCL; wait until it is done, and what it has queued."""
        if self._comm is None:
            raise RuntimeError("the communicator has failed before")
        ends_s = time.monotonic() + limit_s
        with self._computing():
            code = function(*arguments)
            state = ctypes.c_int(code)
            while code in (_SUCCESS, _IN_PROGRESS) and time.monotonic() < ends_s:
                code = self._library.ncclCommGetAsyncError(self._comm, ctypes.byref(state)) or state.value
                if code == _SUCCESS and (self._stream is None or self._stream.query()):
                    return
                time.sleep(0.001)
        self.close()
        if code in (_SUCCESS, _IN_PROGRESS):
            raise RuntimeError(f"NCCL has waited for {limit_s:.0f} s")
        self._library.ncclGetErrorString.restype = ctypes.c_char_p  # not ours
        raise RuntimeError(f"NCCL: {self._library.ncclGetErrorString(ctypes.c_int(code)).decode()} ({code})")

    def _computing(self) -> Any:
        """Return a context in which the device is the current one of the thread, as NCCL needs it."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
