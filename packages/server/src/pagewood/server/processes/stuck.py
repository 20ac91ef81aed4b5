"""Ends a process that is stuck in a single operation of a library, so that its parent starts another one."""

from __future__ import annotations

import faulthandler
import signal
import threading
import time

LIMIT_S = 30.0
"""Processor time without a Python instruction of any thread. Long prompts are encoded without its lock."""


def end_when_stuck(limit_s: float = LIMIT_S) -> None:
    """From now on, end this process by SIGPROF when it used the processor for `limit_s` without running Python code.

    An operation such as a comparison of nested lists holds the interpreter's lock until it ends, and a chat template
    can make one that takes for ever. The timer needs no such lock; while Python code runs, it is started again.
    `faulthandler` writes the functions in which the threads are, and no values, to standard error.

    The timer counts the processor time of the process. A suspended machine, a paused container or a waiting process
    uses none, so the process is not ended.
    """
    faulthandler.register(signal.SIGPROF, all_threads=True, chain=True)  # then the default, which ends it

    def start_again() -> None:
        while True:
            signal.setitimer(signal.ITIMER_PROF, limit_s)
            time.sleep(limit_s / 10)

    threading.Thread(target=start_again, name="end-when-stuck", daemon=True).start()
