"""How long an idle engine takes to wake up: from a command in its inbox to its answer, with links inside one process.

    python packages/engine/benchmarks/bench_wake_up.py --number 200

The engine is idle for 20 ms before each command. A `Flush` shows the wake-up alone; a request for one token adds a step
of the echo model, which computes in microseconds. It also prints the CPU time of the process in a second of idleness.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from pagewood.engine.api import Command, Delta, EngineConfig, Flush, SamplingParams, Submit
from pagewood.engine.assemble import assemble
from pagewood.engine.core.loop import EngineInfo
from pagewood.engine.links import ThreadInbox
from pagewood.engine.testing import EchoRunner

IDLE_S = 0.02


class StampedOutbox:
    """Notes when the last answer of a command was sent."""

    def __init__(self) -> None:
        self.sent_s = 0.0
        self.ended = threading.Event()

    def send(self, deltas: Sequence[Delta]) -> None:
        """Note the time of an end."""
        if any(delta.finish is not None for delta in deltas):
            self.sent_s = time.perf_counter()
            self.ended.set()


def delays_us(inbox: ThreadInbox, outbox: StampedOutbox, make: Callable[[int], Command], number: int) -> list[float]:
    """Return the time from each command to its answer, sorted."""
    found: list[float] = []
    for index in range(number):
        time.sleep(IDLE_S)
        outbox.ended.clear()
        put_s = time.perf_counter()
        inbox.put(make(index))
        assert outbox.ended.wait(10)
        found.append((outbox.sent_s - put_s) * 1e6)
    return sorted(found)


def main() -> None:
    """Measure, and print percentiles."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=200)
    number = parser.parse_args().number
    inbox, outbox = ThreadInbox(), StampedOutbox()
    engine = assemble(
        EngineConfig(page_size=4, max_running=4),
        info=EngineInfo(model_name="echo", max_length=64, vocab_size=50, eos_token_ids=(), num_pages=64, page_size=4),
        make_runner=lambda kv: EchoRunner(num_rows=4, max_length=64, num_pages=64, page_size=4, vocab_size=50),
        inbox=inbox,
        outbox=outbox,
    )
    stopping = threading.Event()
    thread = threading.Thread(target=engine.run, args=(stopping.is_set,))
    thread.start()
    tokens, sampling = np.arange(8, dtype="<i4").tobytes(), SamplingParams(max_tokens=1, temperature=0.0)
    cases: dict[str, Callable[[int], Command]] = {
        "flush": lambda index: Flush(request_id=f"flush {index}"),
        "one token": lambda index: Submit(request_id=f"submit {index}", tokens=tokens, sampling=sampling),
    }
    for name, make in cases.items():
        delays_us(inbox, outbox, make, 10)
        found = delays_us(inbox, outbox, make, number)
        print(
            f"{name:10} median {statistics.median(found):7.0f} us   p99 {found[int(0.99 * (number - 1))]:7.0f} us   "
            f"largest {found[-1]:7.0f} us"
        )
    before_s = time.process_time()
    time.sleep(1.0)
    print(f"idle       {(time.process_time() - before_s) * 1e3:.2f} ms of CPU in a second")
    stopping.set()
    inbox.wake()
    thread.join()
    engine.close()


if __name__ == "__main__":
    main()
