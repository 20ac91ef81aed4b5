# pyright: basic
# (torch and numba are untyped)
"""Measures products and decode steps with each form of weights, and which share of the memory's bandwidth they reach.

python benchmarks/weights.py              # two minutes, on a machine that does nothing else
python benchmarks/weights.py --quick      # shows that it works
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import get_args

import numpy as np
import torch

from end_to_end.machine import Stream, describe_machine
from end_to_end.model import FULL, write_model
from pagewood.engine.api import WeightFormat
from pagewood.engine.runner.cpu.compiled.dot import dot_level
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.cpu.loaded_model import LoadedModel, load_cpu_model
from pagewood.engine.runner.cpu.ops import CPUOps, PackedLinear, PanelLinear
from pagewood.engine.runner.cpu.packer import Packer
from pagewood.engine.runner.cpu.runner import CPURunner
from pagewood.engine.runner.cpu.tape import Buffer
from pagewood.engine.testing.driver import RowDriver
from pagewood.engine.tiers import model_fingerprint
from pagewood.kvpool import MultiHeadLayout
from pagewood.kvpool.storage import KVStorage
from stand_ins.tapes import write_down

FORMS = [form for form in get_args(WeightFormat) if form != "auto"]
ROWS = (1, 8, 32)
STREAM_BYTES = 1 << 30
WALK_BYTES = 400 << 20
"""Of the weights that take turns in a measurement, so that they come from memory."""
PROMPT, PAGE_SIZE, NUM_STEPS = 16, 16, 40


def main() -> None:
    """Measure and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads (default: all cores)")
    parser.add_argument("--shape", type=int, nargs=2, default=(4096, 4096), metavar=("OUT", "IN"), help="of a product")
    parser.add_argument("--quick", action="store_true", help="measure for a moment only")
    arguments = parser.parse_args()
    duration_s = 0.05 if arguments.quick else 2.0
    rate = max(Stream(STREAM_BYTES, num_threads=arguments.threads).measure())
    print(f"{describe_machine(arguments.threads).processor}, {arguments.threads} threads, products of codes by "
          f"{dot_level().name}; reading memory: {rate / 1e9:.1f} GB/s\n")  # fmt: skip
    outputs, inputs = arguments.shape
    print(
        f"A product of {outputs} x {inputs}, whose weights come from memory: best time, and share of the bandwidth.\n"
    )
    header("bytes of weights")
    for form in FORMS:
        row(form, products(form, outputs, inputs, num_threads=arguments.threads, duration_s=duration_s), rate)
    print("\nA decode step of a 110M model (its embedding table is not read whole): the same.\n")
    header("bytes read")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PAGEWOOD_CACHE"] = str(Path(folder) / "cache")
        write_model(FULL, Path(folder) / "model", seed=0)
        for form in FORMS:
            row(form, steps(form, Path(folder) / "model", num_threads=arguments.threads, duration_s=duration_s), rate)


def header(bytes_of: str) -> None:
    """Print the head of a table."""
    print(f"| weights | {bytes_of} | " + " | ".join(f"{count} row{'s' if count > 1 else ''}" for count in ROWS) + " |")
    print("|---|--:|" + "--:|" * len(ROWS))


def row(form: str, found: tuple[int, Sequence[float]], rate: float) -> None:
    """Print one row: bytes, and seconds for each number of rows."""
    num_bytes, seconds = found
    cells = [f"{1e3 * one:.2f} ms, {num_bytes / one / rate:.0%}" for one in seconds]
    print(f"| {form} | {num_bytes / 1e6:.1f} MB | " + " | ".join(cells) + " |", flush=True)


def best_s(call: Callable[[], object], duration_s: float) -> float:
    """Return the least time of a call, repeated for some seconds."""
    call()
    best, end = float("inf"), perf_counter() + duration_s
    while (start := perf_counter()) < end:
        call()
        best = min(best, perf_counter() - start)
    return best


def products(
    form: WeightFormat, outputs: int, inputs: int, *, num_threads: int, duration_s: float
) -> tuple[int, list[float]]:
    """Return the bytes of a matrix, and the seconds of a product for each of ROWS."""
    weight, ops = torch.randn(outputs, inputs), CPUOps(Packer(form, num_threads=num_threads))
    linears = [ops.linear(weight, None)]
    first = linears[0]
    assert isinstance(first, PackedLinear | PanelLinear)
    num_bytes = first.weight.memory.nbytes if isinstance(first, PackedLinear) else first.panels.nbytes
    linears += [ops.linear(weight, None) for _ in range(WALK_BYTES // num_bytes)]
    kernel = warm_up(64, packed=ops.variants)

    def walk(x: Buffer) -> Buffer:
        return [linear(x) for linear in linears][-1]

    def one(num_rows: int) -> float:
        x = np.random.default_rng(0).standard_normal((num_rows, inputs), dtype=np.float32)
        run = write_down(walk, x, kernel=kernel, num_threads=num_threads)
        return best_s(run, duration_s) / len(linears)

    return num_bytes, [one(num_rows) for num_rows in ROWS]


def steps(form: WeightFormat, folder: Path, *, num_threads: int, duration_s: float) -> tuple[int, list[float]]:
    """Return the bytes of weights that a step reads, and the seconds of a decode step for each of ROWS."""
    loaded = load_cpu_model(folder, form, fingerprint=model_fingerprint, num_threads=num_threads)
    shape = FULL
    num_weights = sum(one.num_weights for one in (*shape.linears(), shape.head()))
    bits = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 5}[form]
    return num_weights * bits // 8, [_step_s(loaded, count, num_threads, duration_s) for count in ROWS]


def _step_s(loaded: LoadedModel, num_rows: int, num_threads: int, duration_s: float) -> float:
    config = loaded.model.config
    layout = MultiHeadLayout(
        num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, page_size=PAGE_SIZE,
        order="HND",
    )  # fmt: skip
    num_pages = num_rows * -(-(PROMPT + NUM_STEPS + 1) // PAGE_SIZE)
    kernel = warm_up(config.head_dim, packed=loaded.variants)
    best, end = float("inf"), perf_counter() + duration_s
    while perf_counter() < end:
        runner = CPURunner(
            loaded.model, KVStorage(layout, num_pages), kernel, max_rows=num_rows, max_length=PROMPT + NUM_STEPS + 1,
            num_threads=num_threads,
        )  # fmt: skip
        best = min(best, _decode_s(runner, num_pages, num_rows, config.vocab_size))
        runner.close()
    return best


def _decode_s(runner: CPURunner, num_pages: int, num_rows: int, vocab_size: int) -> float:
    """Return the least seconds of a few decode steps behind short prompts."""
    driver, rng = RowDriver(runner, num_pages=num_pages, page_size=PAGE_SIZE), np.random.default_rng(0)
    sequences = [driver.add(rng.integers(0, vocab_size, PROMPT).tolist()) for _ in range(num_rows)]

    def step(count: int) -> float:
        batch = driver.batch([(sequence, count) for sequence in sequences])
        start = perf_counter()
        tokens = runner.launch(batch).wait().tokens
        seconds = perf_counter() - start
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.tokens.append(int(token))
        return seconds

    step(PROMPT)
    return min(step(1) for _ in range(NUM_STEPS))


if __name__ == "__main__":
    main()
