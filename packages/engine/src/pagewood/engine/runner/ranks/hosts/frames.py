"""What two hosts send each other while their ranks compute, as compiled loops over a connected stream.

Each host has a segment of its own for all ranks. What ranks of this host write there is sent to the other hosts whose
ranks read it (`carried`); their copies of it are written by nobody else. So a rank reads, waits and adds as if all were
on its host. A place of an exchange is written again only when its rank has seen all others arrive at the next piece:
they have read it then, on every host. A place between stages, and bytes of results, are written again when the other
ranks have counted that they have read them, which they can only when these have been sent.

A frame is four int64 (kind, which, and two that depend on the kind), then what belongs to the kind, filled up to eight
bytes. A host without news sends an empty frame every tenth of a second.

Legend: R ranks, N lanes, M counters, W witnesses of a step.
"""

# pyright: basic
# numba has no types.

from __future__ import annotations

import socket
import time
from typing import Any

import numpy as np
from numba.core import types

from pagewood.engine.runner.cpu.compiled.exchange import LINE, PIECE
from pagewood.engine.runner.cpu.compiled.machine.kernel import inlined, kernel
from pagewood.engine.runner.cpu.compiled.machine.memory import (
    byte_values,
    fetch_add,
    integers,
    longs,
    read_shared,
    sleep_us,
)
from pagewood.engine.runner.ranks.stage_memory import RESULT_BYTES

HEADER = 32
"""Bytes before the elements of a frame."""
ALIVE, PIECE_OF_LANE, COUNT, STEP, RESULTS, END = range(6)
"""Kinds: nothing new; a lane, with the number of elements; a counter, with its value; a rank, with both digests of its
next step, and its witnesses behind; bytes of results, with their number; why the group has ended."""
MOST_TEXT = 512
"""Bytes of the reason of an end."""
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
def _put(buffer_at: Any, size: Any, kind: Any, which: Any, first: Any, second: Any) -> Any:
    """Write the head of a frame behind `size` bytes; return the bytes there are then."""
    words = longs(buffer_at + size, 4)
    words[0], words[1], words[2], words[3] = kind, which, first, second
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


@inlined
def _copy_bytes(from_at: Any, to_at: Any, num_bytes: Any) -> None:
    """Copy any number of bytes."""
    a, b = byte_values(from_at, 0), byte_values(to_at, 0)
    for i in range(_U(num_bytes)):
        b[i] = a[i]


@inlined
def _place(lanes: Any, lane: Any, number: Any) -> Any:
    """Return the address of the place of a piece, and the index of its number of elements in the line of its lane."""
    at = number % lanes[lane, 2]
    return lanes[lane, 0] + 4 * PIECE * at, 1 + at


@kernel("i8(i8, i8, i8, i8[:,::1], i8[::1], i8[::1], i8[::1], i8[:,:,::1], i8[:,:,::1], i8[::1], i8, i8)", is_long=True)
def send_ranks(
    connection: Any, first: Any, end: Any, lanes: Any, counters: Any, results: Any, steps: Any, digests: Any,
    witnesses: Any, ended: Any, buffer_at: Any, time_at: Any,
) -> Any:  # fmt: skip
    """Send what the ranks of this host write, until the group has ended or the connection is lost.

    Between two looks without news the thread sleeps for 20 us, as a rank does in a long wait, so it takes no core from
    the ranks. Pieces that are there at the same time are sent by one call.

    Args:
        connection: descriptor of the stream.
        first: the first rank of this host.
        end: behind its last one.
        lanes: see `carried.Carried`, and so are the following ones.
        counters: likewise.
        results: likewise.
        steps: likewise.
        digests: likewise.
        witnesses: likewise.
        ended: likewise.
        buffer_at: `BUFFER` bytes.
        time_at: 16 bytes.

    Returns:
        HAS_ENDED or LOST.
    """
    looks, last_ns, num_kept, num_results = 0, 0, digests.shape[1], 0
    num_words = witnesses.shape[2]
    num_pieces = np.zeros(lanes.shape[0], np.int64)
    values = np.zeros(counters.shape[0], np.int64)
    num_steps = np.zeros(end, np.int64)
    while True:
        has_ended, size = read_shared(ended, 0) != 0, 0
        for lane in range(lanes.shape[0]):
            line = longs(lanes[lane, 1], LINE)
            while read_shared(line, 0) != num_pieces[lane]:  # as many as there are places, at most
                place, size_at = _place(lanes, lane, num_pieces[lane])
                num = line[_U(size_at)]
                if size + HEADER + _padded(4 * num) > BUFFER:
                    if not _send_all(connection, buffer_at, size):
                        return LOST
                    size = 0
                size = _put(buffer_at, size, PIECE_OF_LANE, lane, num, 0)
                _copy(place, buffer_at + size, 4 * num)
                size += _padded(4 * num)
                num_pieces[lane] += 1
        while results[0] != 0 and read_shared(longs(results[1], 1), 0) != num_results:
            at = num_results % RESULT_BYTES
            num = min(read_shared(longs(results[1], 1), 0) - num_results, RESULT_BYTES - at, 4 * PIECE)
            if size + HEADER + _padded(num) > BUFFER:
                if not _send_all(connection, buffer_at, size):
                    return LOST
                size = 0
            size = _put(buffer_at, size, RESULTS, 0, num, 0)
            _copy_bytes(results[0] + at, buffer_at + size, num)
            size += _padded(num)
            num_results += num
        for i in range(counters.shape[0]):
            value = read_shared(longs(counters[i], 1), 0)
            if value != values[i]:
                if size + HEADER > BUFFER:
                    if not _send_all(connection, buffer_at, size):
                        return LOST
                    size = 0
                size = _put(buffer_at, size, COUNT, i, value, 0)
                values[i] = value
        for rank in range(first, end):
            while read_shared(steps, LINE * rank) != num_steps[rank]:
                if size + HEADER + 8 * num_words > BUFFER:
                    if not _send_all(connection, buffer_at, size):
                        return LOST
                    size = 0
                num_steps[rank] += 1
                step = num_steps[rank] % num_kept
                size = _put(buffer_at, size, STEP, rank, digests[rank, step, 0], digests[rank, step, 1])
                words = longs(buffer_at + size, num_words)
                for i in range(num_words):
                    words[i] = witnesses[rank, step, i]
                size += 8 * num_words
        now_ns = _now_ns(time_at)
        if size == 0 and now_ns - last_ns > _TICK_NS:
            size = _put(buffer_at, size, ALIVE, 0, 0, 0)
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


@kernel(
    "i8(i8, i8, i8, i8[:,::1], i8[::1], i8[::1], i8[::1], i8[:,:,::1], i8[:,:,::1], i8[::1], i8, i8, i8)", is_long=True
)
def receive_ranks(
    connection: Any, first: Any, end: Any, lanes: Any, counters: Any, results: Any, steps: Any, digests: Any,
    witnesses: Any, ended: Any, limit: Any, buffer_at: Any, poll_at: Any,
) -> Any:  # fmt: skip
    """Write what the ranks of another host have sent, until one of both groups has ended, or the host is lost.

    Args:
        connection: descriptor of the stream, whose receiving ends without a result after a tenth of a second.
        first: the first rank of the other host.
        end: behind its last one.
        lanes: as in `send_ranks`, and so are the following ones.
        counters: likewise.
        results: likewise.
        steps: likewise.
        digests: likewise.
        witnesses: likewise.
        ended: likewise.
        limit: tenths of a second without a frame, after which the host is lost.
        buffer_at: `BUFFER` bytes. If the other host has told why its group has ended, the frame is at their beginning.
        poll_at: 8 bytes.

    Returns:
        CLOSED, LOST, SILENT, WRONG, HAS_ENDED or TOLD.
    """
    filled, silent, errors, num_kept, num_words = 0, 0, 0, digests.shape[1], witnesses.shape[2]
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
            kind, which, one, other = words[0], words[1], words[2], words[3]
            size = HEADER
            if kind == PIECE_OF_LANE:
                if which < 0 or which >= lanes.shape[0] or one < 0 or one > PIECE:
                    return WRONG
                size += _padded(4 * one)
            elif kind == COUNT:
                if which < 0 or which >= counters.shape[0]:
                    return WRONG
            elif kind == STEP:
                if which < first or which >= end:
                    return WRONG
                size += 8 * num_words
            elif kind == RESULTS:
                if results[0] == 0 or one < 0 or one > 4 * PIECE:
                    return WRONG
                size += _padded(one)
            elif kind == END:
                if one < 0 or one > MOST_TEXT:
                    return WRONG
                size += _padded(one)
            elif kind != ALIVE:
                return WRONG
            if filled - at < size:
                break
            if kind == PIECE_OF_LANE:
                line = longs(lanes[which, 1], LINE)
                place, size_at = _place(lanes, which, read_shared(line, 0))
                _copy(buffer_at + at + HEADER, place, 4 * one)
                line[_U(size_at)] = one
                fetch_add(line, 0, 1)
            elif kind == COUNT:
                longs(counters[which], 1)[0] = one
            elif kind == STEP:
                step = (read_shared(steps, LINE * which) + 1) % num_kept
                digests[which, step, 0], digests[which, step, 1] = one, other
                found = longs(buffer_at + at + HEADER, num_words)
                for i in range(num_words):
                    witnesses[which, step, i] = found[i]
                fetch_add(steps, LINE * which, 1)
            elif kind == RESULTS:
                written = longs(results[1], 1)
                begin = read_shared(written, 0) % RESULT_BYTES
                if begin + one > RESULT_BYTES:
                    return WRONG
                _copy_bytes(buffer_at + at + HEADER, results[0] + begin, one)
                fetch_add(written, 0, one)
            elif kind == END:
                _copy(buffer_at + at, buffer_at, size)
                return TOLD
            at += size
        rest = byte_values(buffer_at, 0)
        for i in range(_U(filled - at)):
            rest[i] = rest[_U(at) + i]
        filled -= at
