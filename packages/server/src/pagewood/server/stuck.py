"""Ends a process in which a single operation of a library does not end, so that its parent starts another one."""

from __future__ import annotations

import faulthandler
import threading
import time

LIMIT_S = 30.0
"""Time without a Python instruction of any thread. A long prompt is encoded without the interpreter's lock."""


def end_when_stuck(limit_s: float = LIMIT_S) -> None:
    """From now on, end this process with code 1 when it could run no Python code for `limit_s` seconds.

    An operation such as a comparison of nested lists holds the interpreter's lock until it ends, and a chat template
    can make one that takes for ever. `faulthandler` waits in a thread that needs no such lock; while Python code runs,
    it is started again. It writes the functions in which the threads are, and no values, to standard error.
    """

    def start_again() -> None:
        while True:
            faulthandler.dump_traceback_later(limit_s, exit=True)
            time.sleep(limit_s / 10)

    threading.Thread(target=start_again, name="end-when-stuck", daemon=True).start()
