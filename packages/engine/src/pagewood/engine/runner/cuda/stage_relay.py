"""Hidden states between the stages of a model on devices: by NCCL where each rank has a device, otherwise by gloo.

Legend: T tokens of a step.
"""

# pyright: basic
# torch.distributed has no types.

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from pagewood.engine.models.stage import NO_HEAD, HeadNeeds
from pagewood.engine.runner.cuda.exchange import EndReason, GroupPlace, as_bytes, typed_errors

_MOST_ON_THEIR_WAY = 8
"""Tensors that a rank may have sent before it waits for the oldest one to be taken."""


class Channel(Protocol):
    """From a rank to the same rank of the next stage. Invariant: tensors arrive in the order in which they are sent."""

    def connect(self) -> None:
        """Wait for the other rank, and connect to it; before everything else."""
        ...

    def send(self, x: Tensor) -> None:
        """Send `x`, which may be written afterwards."""
        ...

    def receive(self, x: Tensor) -> None:
        """Fill `x`."""
        ...

    def abort(self) -> None:
        """End what waits for a rank that is lost. Called from any thread."""
        ...


class GlooChannel:
    """Copies to the host, through a socket, and back. The host waits for what it receives, not for what it sends.

    Args:
        place: of this rank among the two; the first one sends.
        end_reason: of the group.
    """

    __slots__ = ("_end_reason", "_group", "_place", "_sent")

    def __init__(self, place: GroupPlace, *, end_reason: EndReason) -> None:
        self._place = place
        self._end_reason = end_reason
        self._group: Any = None  # written by: connect
        self._sent: deque[tuple[Any, Tensor]] = deque()
        """What is on its way, and its memory."""  # contents written by: send

    def connect(self) -> None:
        """Connect by a socket."""
        self._group = self._place.gloo()

    def send(self, x: Tensor) -> None:
        """Send a copy."""
        own = torch.empty(x.shape, dtype=x.dtype).copy_(x)
        with typed_errors(self._end_reason):
            self._sent.append((self._group.send([as_bytes(own)], 1, 0), own))
            while len(self._sent) > _MOST_ON_THEIR_WAY:
                self._sent.popleft()[0].wait()

    def receive(self, x: Tensor) -> None:
        """Wait for the other rank."""
        found = torch.empty(x.shape, dtype=x.dtype)
        with typed_errors(self._end_reason):
            self._group.recv([as_bytes(found)], 0, 0).wait()
        x.copy_(found)

    def abort(self) -> None:
        """Do nothing: an exchange fails when the process of a rank has ended."""


class NCCLChannel:
    """Queues sends and receives on the device; no host waits.

    A rank sends on a stream of NCCL beside its own, so it computes the next step while the last one is taken. Only one
    tensor is on its way: the next send waits for the last one on the device.

    Args:
        place: of this rank among the two; the first one sends.
    """

    __slots__ = ("_group", "_place", "_sent")

    def __init__(self, place: GroupPlace) -> None:
        self._place = place
        self._group: Any = None  # written by: connect
        self._sent: tuple[Any, Tensor] | None = None
        """What was sent last, and its memory."""  # written by: send

    def connect(self) -> None:
        """Make the group; NCCL connects the devices when the first tensor is sent."""
        self._group = self._place.nccl()

    def send(self, x: Tensor) -> None:
        """Queue a copy and its sending."""
        own = x.clone()
        if self._sent is not None:
            self._sent[0].wait()  # this stream waits, not the host
        self._sent = self._group.send([own], 1, 0), own

    def receive(self, x: Tensor) -> None:
        """Let the current stream wait for the other rank."""
        self._group.recv([x], 0, 0).wait()

    def abort(self) -> None:
        """End kernels that spin on the device."""
        if self._group is not None:
            self._group.abort()


class StageRelay:
    """`models.stage.Relay` of tensors. Invariant: two neighbours pass the same values of the same steps in one order.

    Graphs have no values of others in them: they read and write memory of this object, which is filled before a graph
    is queued, and sent afterwards.

    Args:
        incoming: from the stage before; None: this is the first one.
        outgoing: to the next stage; None: this is the last one.
        dtype: of all values.
        needs: of a head behind the last stage.
    """

    __slots__ = ("_dtype", "_in_graph", "_incoming", "_num_received", "_num_sent", "_outgoing", "_received", "_sent",
                 "_sums", "needs")  # fmt: skip

    def __init__(
        self,
        incoming: Channel | None,
        outgoing: Channel | None,
        *,
        dtype: torch.dtype,
        needs: HeadNeeds = NO_HEAD,
    ) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._dtype = dtype
        self._in_graph = False  # written by: in_graph
        self._received: list[Tensor] = []
        """Memory of each value that a graph reads, `[largest T of a graph, size]`."""  # contents written by: _place
        self._sent: list[Tensor] = []
        """Likewise of each value that it writes."""  # contents written by: _place
        self._num_received = 0  # written by: in_graph, receive
        self._num_sent = 0  # written by: in_graph, send
        self._sums: Tensor | None = None
        """[2] int64, sums of the bits of what was sent and of what was received since `take_sums`."""
        # written by: _witness, take_sums
        self.needs = needs
        """What a drafting head behind the last stage reads of the model."""

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage."""
        return self._outgoing is None

    def connect(self) -> None:
        """Connect to both neighbours, the earlier one first, as it does."""
        for one in (self._incoming, self._outgoing):
            if one is not None:
                one.connect()

    def abort(self) -> None:
        """End what waits for other ranks."""
        for one in (self._incoming, self._outgoing):
            if one is not None:
                one.abort()

    def receive(self, tokens: Tensor, size: int) -> Tensor:
        """Return what the stage before has sent, `[T, size]`."""
        if self._in_graph:
            self._num_received += 1
            return self._place(self._received, self._num_received, len(tokens), size, tokens.device)
        x = torch.empty(len(tokens), size, dtype=self._dtype, device=tokens.device)
        self._take(x)
        return x

    def send(self, x: Tensor) -> None:
        """Send `x` `[T, size]` to the next stage."""
        if self._in_graph:
            self._num_sent += 1
            self._place(self._sent, self._num_sent, x.shape[0], x.shape[1], x.device).copy_(x)
        else:
            self._give(x)

    def receive_numbers(self, tokens: Tensor, size: int) -> Tensor:
        """Return the `[T, size] int32` that the stage before has sent as such; outside of graphs."""
        return self.receive(tokens, size * 4 // self._dtype.itemsize).view(torch.int32)

    def send_numbers(self, x: Tensor) -> None:
        """Send `x` `[T, size] int32` to the next stage, with the bits of other values."""
        self.send(x.view(self._dtype))

    @contextmanager
    def in_graph(self) -> Generator[None]:
        """Return a context in which values are those in the memory of graphs; the largest graph is the first one."""
        self._in_graph, self._num_received, self._num_sent = True, 0, 0
        try:
            yield
        finally:
            self._in_graph = False

    def fill_graph(self, num_tokens: int) -> None:
        """Receive what a graph of this many tokens reads."""
        for memory in self._received:
            self._take(memory[:num_tokens])

    def send_graph(self, num_tokens: int) -> None:
        """Send what it has written."""
        for memory in self._sent:
            self._give(memory[:num_tokens])

    def take_sums(self, device: torch.device) -> Tensor:
        """Return `[2] int64`, sums of the bits of what was sent and of what was received since the last call."""
        found, self._sums = self._sums, None
        return torch.zeros(2, dtype=torch.int64, device=device) if found is None else found

    def _take(self, x: Tensor) -> None:
        assert self._incoming is not None
        self._incoming.receive(x)
        self._witness(1, x)

    def _give(self, x: Tensor) -> None:
        assert self._outgoing is not None
        self._witness(0, x)
        self._outgoing.send(x)

    def _witness(self, place: int, x: Tensor) -> None:
        if self._sums is None:
            self._sums = self.take_sums(x.device)
        words = x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.itemsize])
        self._sums[place] += words.sum(dtype=torch.int64)

    def _place(self, memory: list[Tensor], number: int, num_tokens: int, size: int, device: torch.device) -> Tensor:
        """Return the memory of the value of a number, from 1 on, for a graph; the first graph allocates it."""
        if number > len(memory):
            memory.append(torch.zeros(num_tokens, size, dtype=self._dtype, device=device))
        return memory[number - 1][:num_tokens]
