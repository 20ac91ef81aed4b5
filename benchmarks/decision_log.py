"""What a decision log costs the engine's thread: host time of a decode step, with and without it.

    python benchmarks/decision_log.py [--running 256] [--steps 400] [--rounds 5]

A runner without a model answers at once, so a step takes what the host needs. Rounds with and without the log take
turns; the medians of the steps are compared. The thread that writes the log is counted too, as far as it holds up the
engine's.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from pagewood.engine.api import EngineConfig, SamplingParams, Submit
from pagewood.engine.assemble import assemble
from pagewood.engine.core.loop import EngineInfo
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.result import StepResult
from pagewood.engine.links import MemoryInbox, MemoryOutbox

PAGE = 16
PROMPT = 64


class Instant:
    """A runner whose steps are done when they are launched."""

    def launch(self, batch: Batch) -> Done:
        """Return a step that yields the token 1 for each request."""
        return Done(len(batch.sampled))

    def close(self) -> None:
        """Do nothing."""


class Done:
    """A step that is done."""

    def __init__(self, num: int) -> None:
        self._num = num

    def wait(self) -> StepResult:
        """Return its result."""
        return StepResult.of_one_each(np.ones(self._num, np.int32))


def step_us(num_running: int, num_steps: int, log: Path | None) -> float:
    """Return the median time of a decode step in microseconds."""
    max_length = PROMPT + num_steps + 64
    num_pages = num_running * -(-max_length // PAGE)
    inbox, outbox = MemoryInbox(), MemoryOutbox()
    engine = assemble(
        EngineConfig(
            max_running=num_running, chunked_prefill_size=8192, max_prefills=num_running, page_size=PAGE, overlap=True,
            decision_log=None if log is None else str(log),
        ),
        info=EngineInfo(
            model_name="none", max_length=max_length, vocab_size=32_000, eos_token_ids=(), num_pages=num_pages,
            page_size=PAGE,
        ),
        make_runner=lambda kv: Instant(),
        inbox=inbox,
        outbox=outbox,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    sampling = SamplingParams(max_tokens=num_steps + 32, ignore_eos=True)
    for index in range(num_running):
        tokens = rng.integers(0, 32_000, PROMPT).astype("<i4").tobytes()
        inbox.put(Submit(request_id=f"r{index}", tokens=tokens, sampling=sampling))
    pending, times = None, list[float]()
    for _ in range(num_steps + 16):
        began_s = time.perf_counter()
        pending = engine.advance(pending)
        times.append(time.perf_counter() - began_s)
        outbox.take()
        time.sleep(0.002)  # a device would compute now, and the thread that writes can run
    engine.run(lambda: True)
    engine.close()
    return statistics.median(times[16:]) * 1e6


def main() -> None:
    """Print the medians of all rounds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    off, on, size = list[float](), list[float](), 0
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            path = Path(folder) / "log"
            path.unlink(missing_ok=True)
            off.append(step_us(options.running, options.steps, None))
            on.append(step_us(options.running, options.steps, path))
            size = path.stat().st_size
    before, after = statistics.median(off), statistics.median(on)
    print(f"{options.running} running: {before:.0f} us a step without a log, {after:.0f} us with one")
    print(f"the log costs {after - before:.0f} us a step and {size / options.steps:.0f} bytes")


if __name__ == "__main__":
    main()
