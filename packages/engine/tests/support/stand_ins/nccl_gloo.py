"""A group of processes that is called like NCCL's, and computes on a CPU by gloo."""

# pyright: basic
# torch.distributed has no types.

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from torch import distributed


class NCCLGroup:
    """Satisfies what `NCCLExchange` needs of torch.distributed.ProcessGroupNCCL."""

    Options = SimpleNamespace

    def __init__(self, store: Any, rank: int, count: int, options: Any) -> None:
        kind: Any = distributed.ProcessGroupGloo
        own = kind._Options()
        own._devices = [kind.create_device(hostname="127.0.0.1")]  # not ours
        assert isinstance(options._timeout, timedelta)
        own._timeout = options._timeout  # not ours
        group = kind(store, rank, count, own)
        self.allreduce = group.allreduce
        self._allgather_base = group._allgather_base
        self.send, self.recv = group.send, group.recv
        self.broadcast = group.broadcast

    def abort(self) -> None:
        """Do nothing: gloo's exchanges fail by themselves."""
