"""What two hosts send each other while their ranks compute, as compiled loops over a connected stream.

Each host has a segment of its own for all ranks. What ranks of this host write there is sent to the other hosts, whose
copies of it are written by nobody else. So a rank reads, waits and adds as if all were on its host. A place is written
again only when its rank has seen all ranks arrive at the next piece: they have read it then, on every host.

A frame is four int64 (kind, rank, and two that depend on the kind), then the elements of a piece or the text of an end,
filled up to eight bytes. A host without news sends an empty frame every tenth of a second.

Legend: R ranks, L lanes.
"""

# pyright: basic
# numba has no types.

from __future__ import annotations

import socket
import time
from typing import Any

import numpy as np
from numba.core import types

from pagewood.engine.runner.cpu.compiled.exchange import LINE, NUM_LANES, PIECE, place_of, size_at
from pagewood.engine.runner.cpu.compiled.machine.kernel import inlined, kernel
from pagewood.engine.runner.cpu.compiled.machine.memory import (
    byte_values,
    fetch_add,
    integers,
    longs,
    read_shared,
    sleep_us,
)

HEADER = 32
"""Bytes before the elements of a frame."""
ALIVE, PIECE_OF_LANE, SIGNS, STEP, END = range(5)
"""Kinds: nothing new; lane and number of elements; beats and launched steps; both digests of the next step; bytes."""
MOST_TEXT = 512
"""Bytes of the reason of an end."""
NUM_SENT = NUM_LANES + 3
"""Counts that the sender keeps for each rank: pieces of each lane, beats, launched steps, ended steps."""
BUFFER = 4 * (HEADER + 4 * PIECE)
"""Bytes of a buffer: several of the longest frames."""
CLOSED, LOST, SILENT, WRONG, HAS_ENDED, TOLD = range(6)
"""How a loop ends: by the other host, by the network, without a sign of life, by a frame that cannot be, because this
host's group has ended, because the other host's has."""
_TICK_NS = 100_000_000
_LOOK_US = 20
_IDLE_US = 500
_IDLE_LOOKS = 20_000
"""Looks without news, more than a second, after which the thread sleeps for longer between them."""
_MOST_ERRORS = 10
_READABLE = 1 << 32
"""POLLIN of a `pollfd`, behind the descriptor."""
_FLAGS = np.int32(getattr(socket, "MSG_NOSIGNAL", 0))
_U = np.uint64

if hasattr(time, "CLOCK_MONOTONIC"):
    _send: Any = types.ExternalFunction("send", types.int64(types.int32, types.int64, types.int64, types.int32))
    _receive: Any = types.ExternalFunction("recv", types.int64(types.int32, types.int64, types.int64, types.int32))
    _poll: Any = types.ExternalFunction("poll", types.int32(types.int64, types.int64, types.int32))
    _get_time: Any = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))
    _CLOCK = np.int32(time.CLOCK_MONOTONIC)
else:

    def _fail(*_: Any) -> Any:
        """Return what a system call returns that has failed."""
        return -1

    _send = _receive = _poll = _get_time = inlined(_fail)
    _CLOCK = np.int32(0)


@inlined
def _now_ns(time_at: Any) -> Any:
    """Return the time, with 16 bytes of memory for it."""
    _get_time(_CLOCK, time_at)
    found = longs(time_at, 2)
    return found[0] * 1_000_000_000 + found[1]


@inlined
def _put(buffer_at: Any, size: Any, kind: Any, rank: Any, first: Any, second: Any) -> Any:
    """Write the head of a frame behind `size` bytes; return the bytes there are then."""
    words = longs(buffer_at + size, 4)
    words[0], words[1], words[2], words[3] = kind, rank, first, second
    return size + HEADER


@inlined
def _send_all(connection: Any, buffer_at: Any, size: Any) -> Any:
    """Send all bytes; return False if the connection is lost."""
    done = 0
    while done < size:
        num = _send(np.int32(connection), buffer_at + done, size - done, _FLAGS)
        if num <= 0:
            return False
        done += num
    return True


@inlined
def _padded(num_bytes: Any) -> Any:
    return (num_bytes + 7) // 8 * 8


@inlined
def _copy(from_at: Any, to_at: Any, num_bytes: Any) -> None:
    """Copy a multiple of four bytes."""
    a, b = integers(from_at, 0), integers(to_at, 0)
    for i in range(_U(num_bytes // 4)):
        b[i] = a[i]


@kernel("i8(i8, i8, i8, i8, i8[::1], i8[::1], i8[::1], i8[::1], i8[:,:,::1], i8[::1], i8[:,::1], i8, i8)", is_long=True)
def send_ranks(
    connection: Any, first: Any, end: Any, places_at: Any, arrivals: Any, beats: Any, launched: Any, steps: Any,
    digests: Any, ended: Any, sent: Any, buffer_at: Any, time_at: Any,
) -> Any:  # fmt: skip
    """Send what the ranks of this host write, until the group has ended or the connection is lost.

    Between two looks without news the thread sleeps for 20 us, as a rank does in a long wait, so it takes no core from
    the ranks. Pieces that are there at the same time are sent by one call.

    Args:
        connection: descriptor of the stream.
        first: the first rank of this host.
        end: behind its last one.
        places_at: as in `exchange.sum_ranks`.
        arrivals: likewise, flat.
        beats: `[R, LINE]` flat; this and the following fields are those of a segment.
        launched: likewise.
        steps: likewise.
        digests: `[R, NUM_KEPT, 2]`.
        ended: `[>= 1]`.
        sent: `[R, NUM_SENT]`, what has been sent, zeros at first.
        buffer_at: `BUFFER` bytes.
        time_at: 16 bytes.

    Returns:
        HAS_ENDED or LOST.
    """
    looks, last_ns, num_kept = 0, 0, digests.shape[1]
    while True:
        has_ended, size = read_shared(ended, 0) != 0, 0
        for rank in range(first, end):
            known = sent[rank]
            for lane in range(NUM_LANES):
                line = LINE * (rank * NUM_LANES + lane)
                while read_shared(arrivals, line) != known[lane]:  # two at most, which have places of their own
                    number = known[lane]
                    num = arrivals[_U(line + size_at(number))]
                    if size + HEADER + _padded(4 * num) > BUFFER:
                        if not _send_all(connection, buffer_at, size):
                            return LOST
                        size = 0
                    size = _put(buffer_at, size, PIECE_OF_LANE, rank, lane, num)
                    _copy(place_of(places_at, rank, lane, number), buffer_at + size, 4 * num)
                    size += _padded(4 * num)
                    known[lane] = number + 1
            num_beats, num_launched = read_shared(beats, LINE * rank), read_shared(launched, LINE * rank)
            num_steps = read_shared(steps, LINE * rank)
            while num_beats != known[NUM_LANES] or num_launched != known[NUM_LANES + 1] or num_steps != known[-1]:
                if size + 2 * HEADER > BUFFER:
                    if not _send_all(connection, buffer_at, size):
                        return LOST
                    size = 0
                if num_beats != known[NUM_LANES] or num_launched != known[NUM_LANES + 1]:
                    size = _put(buffer_at, size, SIGNS, rank, num_beats, num_launched)
                    known[NUM_LANES], known[NUM_LANES + 1] = num_beats, num_launched
                if num_steps != known[-1]:
                    known[-1] += 1
                    own = digests[rank, known[-1] % num_kept]
                    size = _put(buffer_at, size, STEP, rank, own[0], own[1])
        now_ns = _now_ns(time_at)
        if size == 0 and now_ns - last_ns > _TICK_NS:
            size = _put(buffer_at, size, ALIVE, first, 0, 0)
            last_ns = now_ns
            if not _send_all(connection, buffer_at, size):
                return LOST
        elif size != 0:
            looks, last_ns = 0, now_ns
            if not _send_all(connection, buffer_at, size):
                return LOST
        if has_ended:
            return HAS_ENDED
        looks += 1
        sleep_us(_LOOK_US if looks < _IDLE_LOOKS else _IDLE_US)


@kernel("i8(i8, i8, i8, i8, i8[::1], i8[::1], i8[::1], i8[::1], i8[:,:,::1], i8[::1], i8, i8, i8)", is_long=True)
def receive_ranks(
    connection: Any, first: Any, end: Any, places_at: Any, arrivals: Any, beats: Any, launched: Any, steps: Any,
    digests: Any, ended: Any, limit: Any, buffer_at: Any, poll_at: Any,
) -> Any:  # fmt: skip
    """Write what the ranks of another host have sent, until one of both groups has ended, or the host is lost.

    Args:
        connection: descriptor of the stream, whose receiving ends without a result after a tenth of a second.
        first: the first rank of the other host.
        end: behind its last one.
        places_at: as in `send_ranks`, and so are the following ones.
        arrivals: likewise.
        beats: likewise.
        launched: likewise.
        steps: likewise.
        digests: likewise.
        ended: likewise.
        limit: tenths of a second without a frame, after which the host is lost.
        buffer_at: `BUFFER` bytes. If the other host has told why its group has ended, the frame is at their beginning.
        poll_at: 8 bytes.

    Returns:
        CLOSED, LOST, SILENT, WRONG, HAS_ENDED or TOLD.
    """
    filled, silent, errors, num_kept = 0, 0, 0, digests.shape[1]
    while True:
        num = _receive(np.int32(connection), buffer_at + filled, BUFFER - filled, np.int32(0))
        if num == 0:
            return CLOSED
        if num < 0:  # the time is up, or something is wrong
            longs(poll_at, 1)[0] = connection | _READABLE
            if _poll(poll_at, 1, np.int32(0)) != 0:
                errors += 1
                if errors > _MOST_ERRORS:
                    return LOST
                continue
            if read_shared(ended, 0) != 0:
                return HAS_ENDED
            silent += 1
            if silent > limit:
                return SILENT
            continue
        silent, errors = 0, 0
        filled += num
        at = 0
        while filled - at >= HEADER:
            words = longs(buffer_at + at, 4)
            kind, rank, one, other = words[0], words[1], words[2], words[3]
            if rank < first or rank >= end:
                return WRONG
            size = HEADER
            if kind == PIECE_OF_LANE:
                if one < 0 or one >= NUM_LANES or other < 0 or other > PIECE:
                    return WRONG
                size += _padded(4 * other)
            elif kind == END:
                if one < 0 or one > MOST_TEXT:
                    return WRONG
                size += _padded(one)
            elif kind != ALIVE and kind != SIGNS and kind != STEP:
                return WRONG
            if filled - at < size:
                break
            if kind == PIECE_OF_LANE:
                line = LINE * (rank * NUM_LANES + one)
                number = read_shared(arrivals, line)
                _copy(buffer_at + at + HEADER, place_of(places_at, rank, one, number), 4 * other)
                arrivals[_U(line + size_at(number))] = other
                fetch_add(arrivals, line, 1)
            elif kind == SIGNS:
                beats[_U(LINE * rank)] = one
                launched[_U(LINE * rank)] = other
            elif kind == STEP:
                own = digests[rank, (read_shared(steps, LINE * rank) + 1) % num_kept]
                own[0], own[1] = one, other
                fetch_add(steps, LINE * rank, 1)
            elif kind == END:
                _copy(buffer_at + at, buffer_at, size)
                return TOLD
            at += size
        rest = byte_values(buffer_at, 0)
        for i in range(_U(filled - at)):
            rest[i] = rest[_U(at) + i]
        filled -= at
