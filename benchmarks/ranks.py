# pyright: basic
# (numba is untyped)
"""Compares one process of two threads with two processes of one thread each, on the same cores.

Run it on a machine that does nothing else. Both engines are there at the same time, and take turns.

python benchmarks/ranks.py                     # 110M weights; ten minutes on two cores
python benchmarks/ranks.py --ranks 4           # the same for four processes and four threads
python benchmarks/ranks.py --quick             # a tiny model, only to test the script
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

from end_to_end.cases import Case, draw_prompts
from end_to_end.machine import describe_machine
from end_to_end.model import FULL, QUICK, write_model
from end_to_end.pagewood_system import PagewoodSystem
from pagewood.engine.api import SamplingParams
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.codec import decode, encode
from pagewood.engine.core.messages.sampling_table import SamplingArrays
from pagewood.engine.runner.cpu.compiled.exchange import EXCHANGE
from pagewood.engine.runner.cpu.compiled.layout import NUM_KINDS
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.cpu.program.tape import Tape
from pagewood.engine.runner.ranks.cores import divided_cores
from pagewood.engine.runner.ranks.segment import Segment, mapped, segment_bytes, shared_memory

_MODULE = "pagewood.engine.assembly.rank_process"
NUM_SUMS = 500
"""Reductions of one program."""
SIZES = (1024, 4096, 16_384, 32 * 1024)
"""Elements of a reduction; 1,024 are 4 kB."""
MANY_ROWS = 256


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes, and threads of the single one (default 2)")
    parser.add_argument("--pairs", type=int, default=10, help="runs of each engine in turn (default 10)")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few tokens; its numbers mean nothing")
    parser.add_argument("--exchange", nargs=2, type=int, help=argparse.SUPPRESS, metavar=("RANK", "DESCRIPTOR"))
    arguments = parser.parse_args()
    num_ranks, num_pairs = arguments.ranks, 2 if arguments.quick else arguments.pairs
    if arguments.exchange:
        rank, descriptor = arguments.exchange
        exchange(rank, descriptor, num_ranks)
        return
    print(f"{describe_machine(num_ranks)}\n")
    print("| reduction | us |\n|---|---|")
    for size, seconds in measured_exchange(num_ranks).items():
        print(f"| {4 * size / 1000:.1f} kB | {seconds * 1e6:.1f} |")
    cases = [
        Case(
            name=f"concurrency {num}",
            num_requests=num,
            num_shared=0,
            num_own=16,
            num_output=8 if arguments.quick else 64,
        )
        for num in (1, 8, 32)
    ]
    many = Case(name="many rows", num_requests=MANY_ROWS, num_shared=0, num_own=4, num_output=16)
    with tempfile.TemporaryDirectory() as folder:
        model = QUICK if arguments.quick else FULL
        write_model(model, Path(folder), seed=0)
        PagewoodSystem(Path(folder), cases, num_threads=1).close()  # compiles, and reads the files
        systems, ready_s = [], []
        for num in (1, num_ranks):
            began_s = perf_counter()
            all_cases = [*cases, many]
            systems.append(PagewoodSystem(Path(folder), all_cases, num_threads=num_ranks, num_ranks=num))
            ready_s.append(perf_counter() - began_s)
        print(f"\nstart to ready: {ready_s[0]:.2f} s in one process, {ready_s[1]:.2f} s in {num_ranks}")
        compare(systems, cases, num_pairs, model.vocab_size)
        show_codec(systems[1], many, model.vocab_size)
        show_memory()
        for system in systems:
            system.close()


def compare(systems: list[PagewoodSystem], cases: list[Case], num_pairs: int, vocab_size: int) -> None:
    """Print the tokens per second of both engines, and the median of their ratios."""
    print("\n| requests | one process, tokens/s | ranks | ratio |\n|---|---|---|---|")
    for case in cases:
        speeds: list[list[float]] = [[], []]
        for pair in range(num_pairs + 1):
            for index in (0, 1) if pair % 2 else (1, 0):
                prompts = draw_prompts(case, vocab_size=vocab_size, seed=pair)
                run = systems[index].run(case, prompts)
                if pair:  # the first one provides memory
                    speeds[index].append(run.tokens_per_s)
        ratio = median(ranks / one for one, ranks in zip(*speeds, strict=True))
        print(f"| {case.num_requests} | {median(speeds[0]):.1f} | {median(speeds[1]):.1f} | {ratio:.3f} |")


def show_codec(system: PagewoodSystem, case: Case, vocab_size: int) -> None:
    """Print what a batch of many rows costs as bytes, beside its step."""
    began_s, steps = perf_counter(), system.num_steps
    system.run(case, draw_prompts(case, vocab_size=vocab_size, seed=0))
    step_s = (perf_counter() - began_s) / (system.num_steps - steps)
    rows, ones, empty = np.arange(MANY_ROWS, dtype=np.int32), np.ones(MANY_ROWS, np.int32), np.empty(0, np.int32)
    batch = Batch(
        page_rows=rows[:16], page_columns=rows[:16], page_ids=rows[:16], token_rows=empty, token_positions=empty,
        token_ids=empty, rows=rows, starts=rows, counts=ones, sampled=rows, num_promised=ones,
        sampling=SamplingArrays.of([SamplingParams()] * MANY_ROWS, range(MANY_ROWS)),
    )  # fmt: skip
    own, other = os.pipe()
    sent = encode(batch)
    times = {"encode": lambda: encode(batch), "decode": lambda: decode(sent)}
    times["send and receive"] = lambda: os.read(own, os.write(other, sent[: 32 * 1024]))
    parts = {name: _median_s(function) for name, function in times.items()}
    shown = ", ".join(f"{name} {seconds * 1e6:.0f} us ({seconds / step_s:.2%})" for name, seconds in parts.items())
    print(f"\na step of up to {MANY_ROWS} rows takes {step_s * 1e3:.1f} ms; {len(sent)} bytes: {shown}")


def show_memory() -> None:
    """Print the memory of this process, which has both engines, and of each rank's."""
    for task in Path("/proc/self/task").glob("*/children"):
        for pid in task.read_text().split():
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if _MODULE in words:
                print(f"rank {words[words.index(_MODULE) + 1]}: {_memory(pid)}")
    print(f"this process, with both engines: {_memory('self')}")


def _memory(pid: str) -> str:
    sizes = dict(line.split()[:2] for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return ", ".join(f"{name} {int(sizes[name]) / 1000:.0f} MB" for name in ("Rss:", "Pss:", "Anonymous:"))


def _median_s(function: Callable[[], object]) -> float:
    times = []
    for _ in range(200):
        began_s = perf_counter()
        function()
        times.append(perf_counter() - began_s)
    return median(times)


def measured_exchange(num_ranks: int) -> dict[int, float]:
    """Return the seconds of one reduction by its elements, as an instruction among others of its kind."""
    warm_up(16, others=[EXCHANGE])
    descriptor = shared_memory(segment_bytes(num_ranks))
    others = [
        subprocess.Popen(
            [sys.executable, __file__, "--ranks", str(num_ranks), "--exchange", str(rank), str(descriptor)],
            pass_fds=(descriptor,),
        )
        for rank in range(1, num_ranks)
    ]
    found = exchange(0, descriptor, num_ranks)
    for other in others:
        other.wait()
    os.close(descriptor)
    return found


def exchange(rank: int, descriptor: int, num_ranks: int) -> dict[int, float]:
    """Run programs of reductions only, on the cores of a rank."""
    if cores := divided_cores(num_ranks)[rank]:
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores)
    own = Segment.in_memory(mapped(descriptor), num_ranks).exchange(rank)
    kernel, found = warm_up(16, others=[EXCHANGE]), {}
    for size in SIZES:
        tape = Tape()
        scope = tape.scope()
        x = tape.buffer(scope.tokens, size)
        for _ in range(NUM_SUMS):
            own.sum_ranks(x)
        program = tape.program(kernel, (1,) * NUM_KINDS, inputs=[x], outputs=[x])
        times = []
        for _ in range(20):
            program.inputs[0][:] = 0
            counts = np.zeros(len(program.capacity), np.int64)
            counts[0] = 1
            run = program.start(counts, program.scopes.copy())
            began_s = perf_counter()
            run.work()
            times.append((perf_counter() - began_s) / NUM_SUMS)
        found[size] = median(times)
    if cores:
        os.sched_setaffinity(0, before)
    return found


if __name__ == "__main__":
    main()
