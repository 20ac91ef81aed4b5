"""The connection of two hosts, which carries what the ranks of each write to the other."""

# pyright: basic
# numba's kernels have no types.

from __future__ import annotations

import ctypes
import socket
import struct
import threading
from contextlib import suppress

import numpy as np

from pagewood.engine.runner.ranks.early_beats import BEAT_S
from pagewood.engine.runner.ranks.hosts.carried import Carried
from pagewood.engine.runner.ranks.hosts.frames import (
    BUFFER,
    CLOSED,
    END,
    HAS_ENDED,
    HEADER,
    LOST,
    MOST_TEXT,
    SILENT,
    TOLD,
    WRONG,
    receive_ranks,
    send_ranks,
)
from pagewood.engine.runner.ranks.segment import Segment
from pagewood.engine.runner.ranks.stage_memory import StageMemory

_PR_SET_TIMERSLACK = 29
LAST_WORDS_S = 1.0
"""How long it may take to tell another host why a group has ended."""
_FRAME = struct.Struct("<4q")
_HOW = {
    CLOSED: "has closed its connection",
    LOST: "cannot be reached",
    WRONG: "has sent what no rank sends",
}


def compile_frames() -> None:
    """Load or compile the loops, which no host should wait for later."""
    for one in (send_ranks, receive_ranks):
        one.compile()


class Relay:
    """Keeps the parts of a segment equal that belong to the ranks of two hosts. Invariant: it ends with its group.

    If the other host is lost, or tells that its group has ended, the group ends here too.

    Args:
        segment: of this host.
        stages: what stages share there; None: the model has one.
        own: ranks of this host.
        theirs: ranks of the other one.
        name: of the other one, for errors.
        connection: to it, which this object closes.
        heartbeat_s: how long it may be silent.
    """

    __slots__ = (
        "_connection", "_limit", "_name", "_received", "_receiver", "_segment", "_sender", "_sent", "_stages",
    )  # fmt: skip

    def __init__(
        self,
        segment: Segment,
        stages: StageMemory | None,
        own: range,
        theirs: range,
        name: str,
        connection: socket.socket,
        *,
        heartbeat_s: float,
    ) -> None:
        self._segment = segment
        self._stages = stages
        """Kept because the loops have addresses in it."""
        self._sent = Carried.between(segment, stages, own, theirs)
        self._received = Carried.between(segment, stages, theirs, own)
        self._name = name
        self._connection = connection
        self._limit = max(2, round(heartbeat_s / BEAT_S))
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tick = struct.pack("ll", 0, round(BEAT_S * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
        compile_frames()
        self._sender = threading.Thread(target=self._send, name="relay-sender", daemon=True)
        self._receiver = threading.Thread(target=self._receive, name="relay-receiver", daemon=True)
        self._sender.start()
        self._receiver.start()

    def wait_until_told(self) -> None:
        """Wait until the other host has been told why the group has ended, or cannot be told."""
        self._sender.join(LAST_WORDS_S)

    def close(self) -> None:
        """Tell the other host why the group has ended, which it must have, and close the connection."""
        self.wait_until_told()
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # ends what waits for it
        for thread in (self._sender, self._receiver):
            thread.join()
        self._connection.close()

    def _send(self) -> None:
        with suppress(AttributeError, OSError):  # a sleep of 20 us takes 70 otherwise
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000)
        one = self._sent
        buffer, time = np.zeros(BUFFER // 8, np.int64), np.zeros(2, np.int64)
        how = send_ranks(
            self._connection.fileno(), one.writers.start, one.writers.stop, one.lanes, one.counters, one.results,
            one.steps, one.digests, one.witnesses, one.ended, buffer.ctypes.data, time.ctypes.data,
        )  # fmt: skip
        if how != HAS_ENDED:
            return  # the receiver knows too
        text = (self._segment.end_reason or "").encode()[:MOST_TEXT]
        head = _FRAME.pack(END, 0, len(text), int(one.ended[0]) - 1)
        with suppress(OSError):
            self._connection.sendall(head + text + bytes(-len(text) % 8))

    def _receive(self) -> None:
        one, segment = self._received, self._segment
        buffer, polled = np.zeros(BUFFER // 8, np.int64), np.zeros(1, np.int64)
        how = receive_ranks(
            self._connection.fileno(), one.writers.start, one.writers.stop, one.lanes, one.counters, one.results,
            one.steps, one.digests, one.witnesses, one.ended, self._limit, buffer.ctypes.data, polled.ctypes.data,
        )  # fmt: skip
        if how == HAS_ENDED:
            return
        rank, reason = one.writers.start, f"{self._name} {_HOW.get(how)}"
        if how == TOLD:
            _, _, length, rank = (int(word) for word in buffer[:4])
            rank = min(max(rank, 0), segment.count - 1)
            reason = buffer.view(np.uint8)[HEADER : HEADER + length].tobytes().decode(errors="replace")
        elif how == SILENT:
            reason = f"{self._name} has given no sign of life for {self._limit * BEAT_S:.1f} s"
        segment.end(rank, reason)
