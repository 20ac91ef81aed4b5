"""The instruction that notes the time."""

# pyright: basic
# numba has no types.

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numba.core import types

from pagewood.engine.runner.cpu.compiled.instruction import instruction, one_part
from pagewood.engine.runner.cpu.compiled.machine.kernel import inlined

if hasattr(time, "clock_gettime"):
    _get_time: Any = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))
    _CLOCK = np.int32(time.CLOCK_MONOTONIC)
else:

    def _leave(clock: Any, address: Any) -> None:
        """Do nothing: there is no clock."""

    _get_time: Any = inlined(_leave)
    _CLOCK = np.int32(0)


@instruction(one_part)
@inlined
def clock(out_at: Any) -> None:
    """Write the time at which all earlier instructions are done: seconds and nanoseconds, int64 each."""
    _get_time(_CLOCK, out_at)
