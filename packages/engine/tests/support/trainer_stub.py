"""A trainer that sends the tensors of a file to engines: `python trainer_stub.py PORT WORLD_SIZE NAME FILE [DEVICE]`.

It makes its group as the trainers for SGLang do: beside a group of its own, by `torch.distributed`'s own function,
under the address that it tells the engines. Its group has the place in the store of one for DEVICE, by default "cpu".
"""

# pyright: basic
# torch.distributed is typed in part only.

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch
from safetensors.torch import load_file
from torch import distributed
from torch.distributed import distributed_c10d

dist: Any = distributed
helpers: Any = distributed_c10d

if __name__ == "__main__":
    port, world_size, name, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    limit = timedelta(seconds=60)
    store, rank, size = next(helpers.rendezvous(f"tcp://127.0.0.1:{port}", 0, world_size, timeout=limit))
    store = dist.PrefixStore(name, store)
    device = (sys.argv[5:] or ["cpu"])[0]
    group, _ = helpers._new_process_group_helper(
        size, rank, [], dist.Backend(f"{device}:gloo"), store, group_name=name, timeout=limit
    )
    own = group._get_backend(torch.device(device))
    for _, tensor in sorted(load_file(file).items()):
        own.broadcast([tensor], dist.BroadcastOptions()).wait()
    print("sent", flush=True)
    sys.stdin.read()  # ends with the test
