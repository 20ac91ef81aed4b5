"""Memory by address, and counters that threads share.

One compiled function runs a program of many matrices. It gets their addresses as integers. Indices are not checked, so
where the size of an array is not at hand, it may be given as 0.
"""

# pyright: basic
# numba and llvmlite have no types.

from __future__ import annotations

import os
import platform
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray  # pyright: ignore[reportPrivateImportUsage]
from numba.core import types
from numba.extending import intrinsic

from pagewood.engine.runner.cpu.compiled.machine.kernel import inlined

_SPINS = 2000  # reads of a counter, tens of microseconds, before the thread yields its core
_MOMENT = 2400  # reads of a thread that waits until another one gives up the interpreter's lock: 0.1 to 0.6 ms
_YIELDS = 100  # of a thread that waits for the host, before it sleeps
_RANK_YIELDS = 1000  # of a thread that waits for another process, before it sleeps
_LOOKS = 64  # reads of a counter of another process, after which the thread looks whether the group has ended
_SLEEP_US = np.uint32(20)
_HAS_PAUSE = platform.machine().lower() in ("x86_64", "amd64")


def _pointer(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


_pointer_to: Any = intrinsic(_pointer)


@inlined
def floats(address: Any, rows: Any, columns: Any) -> Any:
    """Return the float32 matrix `[rows, columns]` that starts at an address."""
    return carray(_pointer_to(address), (rows, columns), np.float32)


@inlined
def vector(address: Any, size: Any) -> Any:
    """Return the float32 vector `[size]` that starts at an address."""
    return carray(_pointer_to(address), size, np.float32)


@inlined
def integers(address: Any, size: Any) -> Any:
    """Return the int32 vector `[size]` that starts at an address."""
    return carray(_pointer_to(address), size, np.int32)


@inlined
def integer_rows(address: Any, rows: Any, columns: Any) -> Any:
    """Return the int32 matrix `[rows, columns]` that starts at an address."""
    return carray(_pointer_to(address), (rows, columns), np.int32)


@inlined
def longs(address: Any, size: Any) -> Any:
    """Return the int64 vector `[size]` that starts at an address."""
    return carray(_pointer_to(address), size, np.int64)


@inlined
def doubles(address: Any, size: Any) -> Any:
    """Return the float64 vector `[size]` that starts at an address."""
    return carray(_pointer_to(address), size, np.float64)


@inlined
def long_rows(address: Any, rows: Any, columns: Any) -> Any:
    """Return the int64 matrix `[rows, columns]` that starts at an address."""
    return carray(_pointer_to(address), (rows, columns), np.int64)


@inlined
def codes(address: Any, size: Any) -> Any:
    """Return the int8 vector `[size]` that starts at an address."""
    return carray(_pointer_to(address), size, np.int8)


@inlined
def byte_values(address: Any, size: Any) -> Any:
    """Return the uint8 vector `[size]` that starts at an address."""
    return carray(_pointer_to(address), size, np.uint8)


@inlined
def shorts(address: Any, size: Any) -> Any:
    """Return the uint16 vector `[size]` that starts at an address."""
    return carray(_pointer_to(address), size, np.uint16)


def _at(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
    return builder.gep(data, [arguments[1]])


def _fetch_add(typing_context: Any, counters: Any, at: Any, amount: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _at(context, builder, signature, arguments)
        return builder.atomic_rmw("add", place, arguments[2], "acq_rel")

    return types.int64(counters, types.int64, types.int64), generate


def _load(typing_context: Any, counters: Any, at: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_at(context, builder, signature, arguments), "acquire", 8)

    return types.int64(counters, types.int64), generate


def _pause(typing_context: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if _HAS_PAUSE:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse2.pause", (), kind), [])
        return context.get_dummy_value()

    return types.void(), generate


def _call(typing_context: Any, address: Any, one: Any, counts: Any, scopes: Any, part: Any, following: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(64), [ir.IntType(64)] * 5)
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])

    return types.int64(*[types.int64] * 6), generate


call_part: Any = intrinsic(_call)
"""Calls the function of an `instruction.Unit` at an address."""
fetch_add: Any = intrinsic(_fetch_add)
"""Adds to one of flat int64 counters and returns its old value; a thread that reads the sum sees all earlier writes."""
_load_shared: Any = intrinsic(_load)
_relax: Any = intrinsic(_pause)

if hasattr(os, "sched_yield"):
    _offer_core: Any = types.ExternalFunction("sched_yield", types.int32())
    _sleep: Any = types.ExternalFunction("usleep", types.int32(types.uint32))
else:
    _offer_core: Any = _relax

    def _wait_a_little(duration_us: Any) -> None:
        _relax()

    _sleep: Any = inlined(_wait_a_little)


@inlined
def wait_for(counters: Any, at: Any, wanted: Any) -> None:
    """Wait until a counter is at least `wanted`; all writes before that are visible afterwards."""
    spins = 0
    while _load_shared(counters, at) < wanted:
        spins += 1
        if spins < _SPINS:
            _relax()
        else:
            _offer_core()


@inlined
def wait_a_moment(counters: Any, at: Any, wanted: Any) -> None:
    """Like `wait_for`, but not for longer than some tenths of a millisecond."""
    spins = 0
    while _load_shared(counters, at) < wanted and spins < _MOMENT:
        spins += 1
        if spins < _SPINS:
            _relax()
        else:
            _offer_core()


@inlined
def wait_for_host(counters: Any, at: Any, wanted: Any) -> None:
    """Like `wait_for`, for what another thread does outside the program; in a long wait the thread sleeps.

    So the core is free for the threads that it waits for.
    """
    waits = 0
    while _load_shared(counters, at) < wanted:
        waits += 1
        if waits < _SPINS:
            _relax()
        elif waits < _SPINS + _YIELDS:
            _offer_core()
        else:
            _sleep(_SLEEP_US)


@inlined
def wait_for_rank(counters: Any, at: Any, wanted: Any, ended: Any) -> Any:
    """Like `wait_for_host`, for what another process does; return False if `ended[0]` is other than 0 before that."""
    waits = 0
    while _load_shared(counters, at) < wanted:
        waits += 1
        if waits < _SPINS:
            _relax()
        elif waits < _SPINS + _RANK_YIELDS:
            _offer_core()
        else:
            _sleep(_SLEEP_US)
        if waits % _LOOKS == 0 and _load_shared(ended, 0) != 0:
            return False
    return True


@inlined
def sleep_us(duration_us: Any) -> None:
    """Sleep for at least a number of microseconds."""
    _sleep(np.uint32(duration_us))


@inlined
def read_shared(counters: Any, at: Any) -> Any:
    """Return a counter; all that was written before it had this value is visible afterwards."""
    return _load_shared(counters, at)
