# pyright: basic
# (an engine's internals are read)
"""Which loop is faster on this CPU: plain, overlapped or that of several steps, in alternating runs of one engine.

    python benchmarks/cpu_loops.py                      # the embedded model, 32 requests; a minute
    python benchmarks/cpu_loops.py --model FOLDER --requests 1 8 32 --pairs 10
    python benchmarks/cpu_loops.py --llama              # random weights of 125 million parameters, as in cpu_end_to_end
    python benchmarks/cpu_loops.py --quick              # only to see that the script works

Each run answers new random prompts that arrive together. Rounds run the loops one after the other, each time in another
order, and what is reported is the ratio to the plain loop of the same round: its median, the middle half, and in how
many rounds it was above 1. The last column is the CPU time of the engine's thread outside of `wait`, in which it helps
to compute the step.

Before you change a default: on a quiet machine, `--pairs 10`, twice, and only if both runs agree.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np

from pagewood.engine.api import EngineConfig, SamplingParams, Submit
from pagewood.engine.build import build_engine
from pagewood.engine.core.loop import Engine, Pending
from pagewood.engine.links import MemoryInbox, MemoryOutbox

NUM_PROMPT = 128
SETTLE_S = 0.2


@dataclass(slots=True, kw_only=True)
class Rates:
    """What the runs of one loop have measured."""

    tokens_per_s: list[float] = field(default_factory=list)
    host_us: list[float] = field(default_factory=list)
    """CPU time of the engine's thread outside of `wait`, for each step."""


def main() -> None:
    """Compare the loops."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a model (default: the embedded model)")
    parser.add_argument("--llama", action="store_true", help="a Llama of random weights")
    parser.add_argument("--requests", type=int, nargs="+", default=[32])
    parser.add_argument("--output", type=int, default=64, help="tokens of each answer (default: 64)")
    parser.add_argument("--pairs", type=int, default=6, help="rounds (default: 6)")
    parser.add_argument("--threads", type=int, help="compute threads (default: one per core)")
    parser.add_argument("--steps", type=int, default=4, help="of the loop of several steps (default: 4)")
    parser.add_argument("--switch-us", type=float, help="sys.setswitchinterval in microseconds (default: Python's)")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.requests, arguments.output, arguments.pairs = [4], 8, 2
    if arguments.switch_us is not None:
        import sys

        sys.setswitchinterval(arguments.switch_us / 1e6)
    if not arguments.llama:
        compare(arguments.model, arguments)
        return
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads or os.cpu_count() or 1)
    from end_to_end.model import FULL, write_model

    with tempfile.TemporaryDirectory() as folder:
        write_model(FULL, Path(folder), seed=0)
        compare(folder, arguments)


def compare(model: str | None, arguments: argparse.Namespace) -> None:
    """Print a table for one model."""
    inbox, outbox = MemoryInbox(), MemoryOutbox()
    engine = build_engine(
        EngineConfig(
            model=model, num_threads=arguments.threads, max_running=max(arguments.requests),
            num_continuous_decode_steps=arguments.steps,
            max_total_tokens=max(arguments.requests) * (NUM_PROMPT + arguments.output + 32) * 2,
        ),
        inbox=inbox,
        outbox=outbox,
    )  # fmt: skip
    loops: dict[str, Callable[[Pending | None], Pending | None]] = {
        "plain": lambda last: engine.step(),
        "overlapped": engine.step_overlapped,
        "several": lambda last: engine.step_several(),
    }
    wait_s = measure_waits(engine)
    print("| requests | loop | tokens/s | to plain, median | middle half | above 1 | host, us a step |")
    print("|--:|---|--:|--:|--:|--:|--:|")
    for num_requests in arguments.requests:
        rates = {name: Rates() for name in loops}
        for seed in range(-1, arguments.pairs):
            order = list(loops)
            random.Random(seed).shuffle(order)
            for name in order:
                time.sleep(SETTLE_S)
                prompts = draw(num_requests, f"{seed} {name}", engine.info.vocab_size)
                found = run(engine, inbox, outbox, loops[name], prompts, arguments.output, wait_s)
                if seed >= 0:  # the round before is for the caches and the clock of the processor
                    rates[name].tokens_per_s.append(found[0])
                    rates[name].host_us.append(found[1])
        for name, found in rates.items():
            ratios = [a / b for a, b in zip(found.tokens_per_s, rates["plain"].tokens_per_s, strict=True)]
            low, _, high = quantiles(ratios, n=4)
            print(
                f"| {num_requests} | {name} | {median(found.tokens_per_s):.0f} | {median(ratios):.3f} | "
                f"{low:.3f} to {high:.3f} | {sum(ratio > 1 for ratio in ratios)} of {len(ratios)} | "
                f"{median(found.host_us):.0f} |"
            )
    engine.close()


def run(
    engine: Engine,
    inbox: MemoryInbox,
    outbox: MemoryOutbox,
    advance: Callable[[Pending | None], Pending | None],
    prompts: list[np.ndarray],
    num_output: int,
    wait_s: dict[str, float],
) -> tuple[float, float]:
    """Answer some prompts; return tokens per second, and the host's CPU time in microseconds for each step."""
    sampling = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
    num_steps, wait_s["cpu"] = engine.counters().num_steps, 0.0
    begin, cpu = time.perf_counter(), time.thread_time()
    for index, prompt in enumerate(prompts):
        inbox.put(Submit(request_id=str(index), tokens=prompt.tobytes(), sampling=sampling))
    num_open, pending = len(prompts), None
    while num_open or pending is not None:
        pending = advance(pending)
        num_open -= sum(delta.finish is not None for delta in outbox.take())
    spent_s = time.perf_counter() - begin
    host_s = time.thread_time() - cpu - wait_s["cpu"]
    return len(prompts) * num_output / spent_s, host_s / (engine.counters().num_steps - num_steps) * 1e6


def measure_waits(engine: Engine) -> dict[str, float]:
    """Let the waits for steps add their CPU time to the dictionary that is returned."""
    wait_s: dict[str, float] = defaultdict(float)
    runner: Any = engine._runner

    class Handle:
        def __init__(self, handle: Any) -> None:
            self.handle = handle

        def wait(self) -> Any:
            begin = time.thread_time()
            try:
                return self.handle.wait()
            finally:
                wait_s["cpu"] += time.thread_time() - begin

    class Runner:
        close = runner.close

        def launch(self, batch: Any) -> Handle:
            return Handle(runner.launch(batch))

    engine._runner = Runner()
    return wait_s


def draw(num_requests: int, seed: str, vocab_size: int) -> list[np.ndarray]:
    """Random prompts, which share no prefix with those of other seeds."""
    rng = np.random.default_rng(zlib.crc32(seed.encode()))
    return [rng.integers(2, vocab_size, NUM_PROMPT, dtype=np.int32) for _ in range(num_requests)]


if __name__ == "__main__":
    main()
