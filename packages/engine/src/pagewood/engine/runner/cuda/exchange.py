"""Exchanges of tensors between the ranks of a model: by NCCL where each has a device of its own, otherwise by gloo.

They belong to no default group of torch, so a program may use torch.distributed for something else.

Legend: R ranks, T tokens.
"""

# pyright: basic
# torch.distributed has no types.

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor, distributed
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from pagewood.engine.core.loop import RunnerLostError

_PATIENCE = timedelta(minutes=10)
"""How long ranks that have their weights wait for each other, such as for kernels; a rank that is lost is noticed
sooner."""
_REASON_S = 10.0
"""How long the reason for which an exchange failed may take to be known: longer than the heartbeat of a group."""


EndReason = Callable[[float], "str | None"]
"""Waits at most some seconds for the end of the group of all ranks; returns its reason, or None if it lives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """The place of a rank among some that exchange with each other, in a group of torch.distributed of their own."""

    store: Store
    """Where they meet."""
    name: str
    """Of these ranks in the store."""
    rank: int
    """This one, from 0 on."""
    count: int
    """R."""
    host: str
    """Address of this host that the others reach; used by gloo only, NCCL finds its own."""

    def gloo(self) -> Any:
        """Return the group over sockets, when all have called this."""
        kind: Any = distributed.ProcessGroupGloo
        options = kind._Options()
        options._devices = [kind.create_device(hostname=self.host)]  # not ours
        options._timeout = _PATIENCE  # not ours
        return kind(PrefixStore(self.name, self.store), self.rank, self.count, options)

    def nccl(self) -> Any:
        """Return the group of devices; they are connected in the first exchange."""
        # `Group` finds a lost rank and says which; torch would end this process without a reason.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # not ours
        kind: Any = getattr(distributed, "ProcessGroupNCCL")  # noqa: B009  # torch for a CPU has none
        options = kind.Options()
        options._timeout = _PATIENCE  # not ours
        return kind(PrefixStore(self.name, self.store), self.rank, self.count, options)


class Exchange(Protocol):
    """What `Ops` needs of the other ranks. Invariant: all ranks call the same methods with equal shapes, in one order.

    A method returns nothing of a rank before that rank has called it.
    """

    @property
    def is_queued(self) -> bool:
        """Whether exchanges are queued on the device, so that graphs can have them; otherwise the host waits."""
        ...

    def connect(self) -> None:
        """Wait for the other ranks, and connect to them; before everything else."""
        ...

    def sum_ranks(self, x: Tensor) -> Tensor:
        """Replace `x` by its sum over ranks, which has the same bits on every rank; return it."""
        ...

    def gather_ranks(self, x: Tensor) -> Tensor:
        """Return `[R, *shape of x]`, the `x` of all ranks."""
        ...

    def abort(self) -> None:
        """End exchanges that wait for a rank that is lost; their results mean nothing. Called from any thread."""
        ...


class GlooExchange:
    """Copies to the host, through sockets, and back; the host waits. For ranks that share a device.

    Sums are added in the order of ranks, so a token's bits depend on neither its batch nor the timing of ranks.

    Args:
        place: of this rank among those that exchange.
        end_reason: waits at most some seconds for the end of the group, and returns its reason, or None if it lives.
    """

    __slots__ = ("_count", "_end_reason", "_group", "_place")

    is_queued = False

    def __init__(self, place: GroupPlace, *, end_reason: EndReason) -> None:
        self._place = place
        self._count = place.count
        self._end_reason = end_reason
        self._group: Any = None  # written by: connect

    def connect(self) -> None:
        """Connect by sockets."""
        self._group = self._place.gloo()

    def sum_ranks(self, x: Tensor) -> Tensor:
        """Add in the order of ranks; 16-bit numbers are added in float32 and rounded once."""
        return x.copy_(_added(self._gathered(x))) if x.numel() else x

    def gather_ranks(self, x: Tensor) -> Tensor:
        """Return the tensors of all ranks on the device of `x`."""
        return self._gathered(x).to(x.device) if x.numel() else x.new_empty((self._count, *x.shape))

    def abort(self) -> None:
        """Do nothing: an exchange fails when the process of a rank has ended."""

    def _gathered(self, x: Tensor) -> Tensor:
        """Return `[R, *shape of x]` on the host.

        Raises:
            RunnerLostError: a rank is lost.
        """
        own = x.detach().cpu().contiguous()
        found = torch.empty((self._count, *own.shape), dtype=own.dtype)
        with typed_errors(self._end_reason):
            self._group._allgather_base(as_bytes(found), as_bytes(own)).wait()
        return found


class NCCLExchange:
    """Queues exchanges between devices. For ranks with a device each.

    NCCL promises no order of additions: it depends on the algorithm that NCCL chooses, and so on the size of the tensor
    and on the connections between devices. A token's bits may then depend on the size of its step. All ranks get
    the same bits, because each part of a sum is computed once and copied. With `in_order` the tensors of all ranks are
    gathered instead, and every rank adds them in the order of ranks: a token's bits do not depend on its step, and R
    times as much is received.

    Args:
        place: of this rank among those that exchange.
        in_order: whether sums are added in the order of ranks.
    """

    __slots__ = ("_count", "_group", "_in_order", "_place")

    is_queued = True

    def __init__(self, place: GroupPlace, *, in_order: bool) -> None:
        self._place = place
        self._count = place.count
        self._in_order = in_order
        self._group: Any = None  # written by: connect

    def connect(self) -> None:
        """Make the group; NCCL connects devices in the first exchange."""
        self._group = self._place.nccl()

    def sum_ranks(self, x: Tensor) -> Tensor:
        """Queue the sum on the current stream; 16-bit numbers that are added in order are added in float32."""
        if not x.numel():
            return x
        if self._in_order:
            return x.copy_(_added(self.gather_ranks(x)))
        own = x.contiguous()
        self._group.allreduce([own]).wait()  # this stream waits, not the host
        return x if own is x else x.copy_(own)

    def gather_ranks(self, x: Tensor) -> Tensor:
        """Queue the exchange on the current stream."""
        found = x.new_empty((self._count, *x.shape))
        if x.numel():
            self._group._allgather_base(found.view(-1), x.contiguous().view(-1)).wait()
        return found

    def abort(self) -> None:
        """End kernels that spin on the device."""
        if self._group is not None:
            self._group.abort()


def _added(parts: Tensor) -> Tensor:
    """Return the sum of `parts` `[R, ...]` in their order."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total


def as_bytes(x: Tensor) -> Tensor:
    """Return the bytes of a tensor in one piece of memory, `[bytes] uint8`."""
    return x.view(-1).view(torch.uint8)


@contextmanager
def typed_errors(end_reason: EndReason) -> Generator[None]:
    """Turn errors of gloo, to which the end of another process leads, into `RunnerLostError`."""
    try:
        yield
    except RuntimeError as error:
        reason = end_reason(_REASON_S) or f"an exchange with other ranks failed: {error}"
        raise RunnerLostError(reason) from error
