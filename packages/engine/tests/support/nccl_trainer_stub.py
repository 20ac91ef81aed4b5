"""A trainer that sends a file's tensors as vLLM 0.33's do: `nccl_trainer_stub.py PORT WORLD_SIZE FILE PACKED_BYTES`.

It restates their protocol: the id of a communicator, pickled, in a store that it serves; a sum of one number; then the
tensors in the order of their names, each alone, or joined as bytes until there are more than PACKED_BYTES. NCCL has a
stand-in. All are sent twice.
"""

# pyright: basic
# torch.distributed is typed in part only.

from __future__ import annotations

import ctypes
import pickle
import sys
from datetime import timedelta
from typing import Any

import torch
from safetensors.torch import load_file
from torch import distributed

from stand_ins.nccl_library import DTYPES, NCCLLibrary

dist: Any = distributed


class ncclUniqueId(ctypes.Structure):
    """Known in this process only."""

    _fields_ = (("internal", ctypes.c_byte * 128),)


if __name__ == "__main__":
    port, world_size, file, packed_bytes = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=True, timeout=timedelta(seconds=60), use_libuv=False)
    library, own, comm = NCCLLibrary(), ncclUniqueId(), ctypes.c_void_p()
    library.ncclGetUniqueId(ctypes.byref(own))
    store.set("broadcast_from/0/0", pickle.dumps(own))
    library.ncclCommInitRank(ctypes.byref(comm), ctypes.c_int(world_size), own, ctypes.c_int(0))
    codes = {dtype: code for code, dtype in DTYPES.items()}

    def queue(function: object, tensor: torch.Tensor, last: int) -> None:
        where = ctypes.c_void_p(tensor.data_ptr())
        size, dtype = ctypes.c_size_t(tensor.numel()), ctypes.c_int(codes[tensor.dtype])
        function(where, where, size, dtype, ctypes.c_int(last), comm, ctypes.c_void_p(0))  # pyright: ignore[reportCallIssue]
        library.wait(comm)

    queue(library.ncclAllReduce, torch.zeros(1), 0)
    for _ in range(2):
        left = [tensor for _, tensor in sorted(load_file(file).items())]
        while left:
            tensor = left.pop(0)
            if packed_bytes:
                parts = [tensor.reshape(-1).view(torch.uint8)]
                while left and sum(map(len, parts)) <= packed_bytes:
                    parts.append(left.pop(0).reshape(-1).view(torch.uint8))
                tensor = torch.cat(parts)
            queue(library.ncclBroadcast, tensor.contiguous(), 0)
    print("sent", flush=True)
    sys.stdin.read()  # ends with the test
