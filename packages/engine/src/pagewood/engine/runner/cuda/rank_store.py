"""Where the ranks of a model on devices meet: a store of torch, at a port of node 0."""

# pyright: basic
# torch.distributed has no types.

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from pagewood.engine.core.loop import RunnerLostError

if TYPE_CHECKING:
    from pagewood.engine.runner.ranks.segment import Segment

LOCAL = "127.0.0.1"
"""The address of a host with all ranks, which only it reaches."""
_PATIENCE = timedelta(minutes=10)
_LOOK_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStore:
    """The store of a group, as a rank has it. Invariant: all ranks call `numbers` with the same names in one order."""

    store: TCPStore
    segment: Segment
    """Of the group."""
    rank: int
    """This one."""

    def numbers(self, name: str, own: int) -> list[int]:
        """Say a number, and return those of all ranks in their order, once each has said its own.

        Raises:
            RunnerLostError: the group ends before that.
        """
        self.store.set(f"{name} {self.rank}", str(own))
        keys = [f"{name} {rank}" for rank in range(self.segment.count)]
        while not self.store.check(keys):
            if self.segment.end_reason is not None:
                raise RunnerLostError(self.segment.end_reason)
            time.sleep(_LOOK_S)
        return [int(self.store.get(key)) for key in keys]


def open_store(host: str = LOCAL) -> TCPStore:
    """Return a store for the ranks of all hosts, at a free port of an address of this one."""
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, None, True, timeout=_PATIENCE, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def join_store(host: str, port: int) -> TCPStore:
    """Return the store that rank 0 has opened."""
    return TCPStore(host, port, None, False, timeout=_PATIENCE, wait_for_workers=False)
