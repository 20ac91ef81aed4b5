# pyright: basic
# (parts of the engine are replaced by ones that measure)
"""What scheduling costs: host time of a decode step by part, and the idle share of a device, for three loops.

    python benchmarks/scheduler_overhead.py host               # microseconds by part; a minute
    python benchmarks/scheduler_overhead.py waiting            # 10 against 10,000 waiting requests; a minute
    python benchmarks/scheduler_overhead.py shortage           # waiting for memory; two minutes
    python benchmarks/scheduler_overhead.py idle               # idle share, page 16; two minutes
    python benchmarks/scheduler_overhead.py idle --page-size 1
    python benchmarks/scheduler_overhead.py idle --with grammar          # or drafts
    python benchmarks/scheduler_overhead.py host --with log              # a decision log
    python benchmarks/scheduler_overhead.py idle --batch 256 --step-ms 10 --seconds 3
    python benchmarks/scheduler_overhead.py host --quick       # only to see that the script works

The device is simulated (`pagewood.engine.testing.SimulatedDevice`): it takes as long as it is told, on a thread of its
own, and makes up tokens. Host times are CPU times of the engine's thread, medians over steps, so they hardly depend on
what else the machine does; idle shares do, so measure them on a quiet machine.

Loops: plain launches a step when the one before has been retired; overlapped launches it before that; several launches
four decode steps after one decision. Shortage: a place is free and requests wait, but running requests may need all
memory, so each step looks ahead how much they will hold. With grammar: every eighth request follows one. With drafts:
four draft tokens for each request in every step, half of which are accepted.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args

import numpy as np

from pagewood.engine.api import EngineConfig, Grammar, SamplingParams, Submit
from pagewood.engine.core import loop as loop_module
from pagewood.engine.core.loop import Pending
from pagewood.engine.grammar import GrammarCompiler, open_backend
from pagewood.engine.model_folder.folder import model_folder
from pagewood.engine.testing import SimulatedEngine, simulated_engine

LOOPS: dict[str, dict[str, Any]] = {
    "plain": {"overlap": False},
    "overlapped": {"overlap": True},
    "several": {"num_continuous_decode_steps": 4},
}
Extra = Literal["nothing", "grammar", "drafts", "log"]
PARTS = ("plan", "build", "retire", "rest")
NUM_PROMPT = 100
SHORT_OUTPUT = 4_000
"""Tokens, fewer than are looked ahead, so that running requests are expected to need all memory."""
VOCAB_SIZE = 512
"""That of the embedded model, whose tokens the grammars are made of."""
EVERY_GRAMMAR = 8


def main() -> None:
    """Measure the part of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("host", "waiting", "shortage", "idle"))
    parser.add_argument("--batch", type=int, nargs="+", help="running requests (default: 1 64 256, host also 1024)")
    parser.add_argument("--page-size", type=int, nargs="+", help="(default: 16; host 1 and 16)")
    parser.add_argument("--loop", choices=LOOPS, nargs="+", default=list(LOOPS))
    parser.add_argument("--with", dest="extra", choices=get_args(Extra), default="nothing")
    parser.add_argument("--step-ms", type=float, nargs="+", default=[2.0, 5.0, 10.0, 30.0], help="of the device")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each idle share (default: 1)")
    parser.add_argument("--steps", type=int, default=300, help="for each host time (default: 300)")
    parser.add_argument("--quick", action="store_true", help="few steps, small batches")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.batch, arguments.steps, arguments.seconds = arguments.batch or [1, 8], 12, 0.05
        arguments.step_ms = [2.0]
    gc.freeze()
    gc.set_threshold(20_000)  # as in the server's engine process
    parts = {"host": print_host, "waiting": print_waiting, "shortage": print_shortage, "idle": print_idle}
    parts[arguments.part](arguments)


def print_host(arguments: argparse.Namespace) -> None:
    """Print host times by part."""
    print("| loop | page | running | " + " | ".join(f"{part}, us" for part in PARTS) + " | all, us |")
    print("|---|--:|--:|" + "--:|" * (len(PARTS) + 1))
    for name in arguments.loop:
        for page_size in arguments.page_size or (16, 1):
            for batch in arguments.batch or (1, 64, 256, 1024):
                times = host_times(name, batch, page_size=page_size, extra=arguments.extra, num_steps=arguments.steps)
                numbers = [*(times[part] for part in PARTS), sum(times.values())]
                print(f"| {name} | {page_size} | {batch} | " + " | ".join(f"{one:.0f}" for one in numbers) + " |")


def print_waiting(arguments: argparse.Namespace) -> None:
    """Print host times beside few and many waiting requests, alternately."""
    counts = (10, 100) if arguments.quick else (10, 10_000)
    [batch] = arguments.batch[-1:] if arguments.batch else [256]
    print("| preemption | order | " + " | ".join(f"{count:,} waiting, us" for count in counts) + " | ratio |")
    print("|---|---|--:|--:|--:|")
    for threshold in (None, 0):  # with a threshold, each step asks whether the first waiting request is worth a row
        for order in ("fcfs", "lpm"):
            found: dict[int, list[float]] = {count: [] for count in counts}
            for _ in range(3):
                for count in counts:
                    times = host_times(
                        "overlapped",
                        batch,
                        num_waiting=count,
                        order=order,
                        threshold=threshold,
                        num_steps=arguments.steps // 3,
                    )
                    found[count].append(sum(times.values()))
            few, many = (median(found[count]) for count in counts)
            print(f"| {'off' if threshold is None else 'on'} | {order} | {few:.0f} | {many:.0f} | {many / few:.2f} |")


def print_shortage(arguments: argparse.Namespace) -> None:
    """Print the time of planning without waiting requests, and with one or ten that wait for memory, alternately."""
    counts = (0, 1, 10)
    print("| running | " + " | ".join(f"{count} waiting: plan, us" for count in counts) + " |")
    print("|--:|" + "--:|" * len(counts))
    for batch in arguments.batch or (1, 32, 256, 1024):
        found: dict[int, list[float]] = {count: [] for count in counts}
        for _ in range(3):
            for count in counts:
                times = host_times(
                    "overlapped", batch, num_waiting=count, is_short=count > 0, num_steps=arguments.steps // 3
                )
                found[count].append(times["plan"])
        print(f"| {batch} | " + " | ".join(f"{median(found[count]):.0f}" for count in counts) + " |")


def print_idle(arguments: argparse.Namespace) -> None:
    """Print the idle share of the device."""
    print("| page | running | device, ms | " + " | ".join(f"{name}, idle" for name in arguments.loop) + " |")
    print("|--:|--:|--:|" + "--:|" * len(arguments.loop))
    for page_size in arguments.page_size or (16,):
        for batch in arguments.batch or (1, 64, 256):
            for step_ms in arguments.step_ms:
                shares = [
                    idle_share(
                        name, batch, step_ms / 1e3, page_size=page_size, extra=arguments.extra,
                        seconds=arguments.seconds,
                    )
                    for name in arguments.loop
                ]  # fmt: skip
                print(f"| {page_size} | {batch} | {step_ms:g} | " + " | ".join(f"{one:.1%}" for one in shares) + " |")


def idle_share(name: str, batch: int, step_s: float, *, page_size: int, extra: Extra, seconds: float) -> float:
    """Return the part of the time in which the device did not compute while requests decoded."""
    is_slow = [False]
    with decoding_engine(
        name, batch, page_size=page_size, extra=extra, step_s=lambda _: step_s if is_slow[0] else 0.0
    ) as simulated:
        is_slow[0] = True
        pending = advance(simulated, None, num_steps=4)
        drain(simulated, pending)
        simulated.device.forget_times()
        drain(simulated, advance(simulated, None, num_steps=max(8, int(seconds / step_s))))
        return simulated.device.times().idle_share


def host_times(
    name: str,
    batch: int,
    *,
    page_size: int = 16,
    extra: Extra = "nothing",
    num_waiting: int = 0,
    order: str = "fcfs",
    threshold: int | None = None,
    is_short: bool = False,
    num_steps: int,
) -> dict[str, float]:
    """Return microseconds of a decode step by part, medians over steps."""
    with decoding_engine(
        name,
        batch,
        page_size=page_size,
        extra=extra,
        num_waiting=num_waiting,
        order=order,
        threshold=threshold,
        is_short=is_short,
    ) as simulated:
        watch = Stopwatch(simulated)
        try:
            return watch.run(num_steps)
        finally:
            watch.stop()


class Stopwatch:
    """Adds up the CPU time of the engine's thread in the parts of a step."""

    def __init__(self, simulated: SimulatedEngine) -> None:
        self._simulated = simulated
        self._spent: dict[str, float] = defaultdict(float)
        self._retire = loop_module.retire
        engine: Any = simulated.engine
        engine._planner = Measured(engine._planner, self._measure, {"plan": "plan", "plan_again": "plan"})
        engine._builder = Measured(engine._builder, self._measure, {"build": "build"})
        engine._runner = MeasuredRunner(engine._runner, self._measure)
        loop_module.retire = self._measure("retire", loop_module.retire)

    def stop(self) -> None:
        """Leave the module as it was."""
        loop_module.retire = self._retire

    def run(self, num_steps: int) -> dict[str, float]:
        """Return the medians, in microseconds; what the device's side of a launch and a wait takes does not count."""
        found: dict[str, list[float]] = defaultdict(list)
        pending: Pending | None = None
        engine, num_done = self._simulated.engine, 0
        for step in range(num_steps + 10):
            self._spent.clear()
            before, begin = engine.counters().num_steps, time.thread_time()
            pending = engine.advance(pending)
            self._simulated.outbox.take()
            spent = time.thread_time() - begin
            num_done = engine.counters().num_steps - before
            if step < 10 or not num_done:
                continue
            spent -= sum(self._spent.values())
            for part in PARTS[:-1]:
                found[part].append(self._spent[part] / num_done * 1e6)
            found["rest"].append(spent / num_done * 1e6)
        drain(self._simulated, pending)
        return {part: median(found[part]) for part in PARTS}

    def _measure(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        spent = self._spent

        def measured(*arguments: Any, **options: Any) -> Any:
            begin = time.thread_time()
            try:
                return function(*arguments, **options)
            finally:
                spent[part] += time.thread_time() - begin

        return measured


class Measured:
    """An object some of whose methods are measured."""

    def __init__(self, target: Any, measure: Callable[..., Any], parts: dict[str, str]) -> None:
        self._target = target
        for name, part in parts.items():
            setattr(self, name, measure(part, getattr(target, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


class MeasuredRunner:
    """A runner whose launches and waits are measured as those of the device."""

    def __init__(self, runner: Any, measure: Callable[..., Any]) -> None:
        self._measure = measure
        self._launch = measure("device", runner.launch)
        self.close = runner.close

    def launch(self, batch: Any) -> Measured:
        """Launch a step."""
        return Measured(self._launch(batch), self._measure, {"wait": "device"})


@contextmanager
def decoding_engine(
    name: str,
    batch: int,
    *,
    page_size: int,
    extra: Extra = "nothing",
    num_waiting: int = 0,
    order: str = "fcfs",
    threshold: int | None = None,
    is_short: bool = False,
    step_s: float | Callable[[Any], float] = 0.0,
) -> Iterator[SimulatedEngine]:
    """An engine in which `batch` requests decode; others wait because no row is left, or no memory if it is short."""
    folder = TemporaryDirectory()
    num_output = SHORT_OUTPUT if is_short else 8_000
    max_length = NUM_PROMPT + num_output
    config = EngineConfig(
        page_size=page_size, max_running=batch + 8 * is_short, chunked_prefill_size=8192, max_prefills=256,
        preemption_threshold=threshold, schedule_policy=order, speculative="ngram" if extra == "drafts" else "off",
        speculative_num_tokens=4, speculative_control="fixed",
        decision_log=str(Path(folder.name) / "log") if extra == "log" else None, **LOOPS[name],
    )  # fmt: skip
    simulated = simulated_engine(
        config, step_s=step_s, max_length=max_length, vocab_size=VOCAB_SIZE,
        num_pages=batch * -(-max_length // page_size), acceptance=0.5, compiler=compiler(),
    )  # fmt: skip
    rng = np.random.default_rng(0)

    def submit(index: int) -> None:
        grammar = Grammar(kind="regex", text="[a-z ]{100000}") if extra == "grammar" else None
        simulated.inbox.put(
            Submit(
                request_id=str(index),
                tokens=rng.integers(2, VOCAB_SIZE, NUM_PROMPT, dtype=np.int32).tobytes(),
                sampling=SamplingParams(
                    max_tokens=num_output, ignore_eos=True, grammar=None if index % EVERY_GRAMMAR else grammar
                ),
            )
        )

    for index in range(batch):
        submit(index)
    pending: Pending | None = None
    deadline = time.monotonic() + 60
    while simulated.engine.counters().num_running < batch:
        pending = simulated.engine.advance(pending)
        assert time.monotonic() < deadline, simulated.engine.counters()
    pending = advance(simulated, pending, num_steps=8)
    if num_waiting:
        for index in range(num_waiting):
            submit(batch + index)
        pending = advance(simulated, pending, num_steps=2)
        assert simulated.engine.counters().num_waiting == num_waiting
    drain(simulated, pending)
    yield simulated
    simulated.engine.run(stopped=lambda: True)
    simulated.close()
    folder.cleanup()


def compiler() -> GrammarCompiler:
    """Compile grammars over the vocabulary of the embedded model."""
    folder = model_folder(None)
    return GrammarCompiler(
        partial(open_backend, "llguidance", folder, vocab_size=VOCAB_SIZE, eos_token_ids=(1,)), deadline_s=60.0
    )


def advance(simulated: SimulatedEngine, pending: Pending | None, *, num_steps: int) -> Pending | None:
    """Do at least this many steps."""
    engine = simulated.engine
    end = engine.counters().num_steps + num_steps
    while engine.counters().num_steps < end:
        pending = engine.advance(pending)
        simulated.outbox.take()
    return pending


def drain(simulated: SimulatedEngine, pending: Pending | None) -> None:
    """Retire the step in flight and launch none."""
    simulated.engine._finish(pending)
    simulated.outbox.take()


if __name__ == "__main__":
    main()
