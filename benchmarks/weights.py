# pyright: basic
# (torch and numba are untyped)
"""Measures each form of weights: products, decode steps and prefill, beside what the machine can do at most.

Run it on a machine that does nothing else.

python benchmarks/weights.py                      # all three models, ten minutes, up to 8 GB of memory
python benchmarks/weights.py --shape 500M         # one of them, three minutes
python benchmarks/weights.py --seven-b            # 7B weights in four bits: memory, time to ready; 9 GB of disk
python benchmarks/weights.py --shape tiny --quick # shows that it works
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import torch

from end_to_end.machine import Stream, describe_machine
from end_to_end.model import ModelShape
from pagewood.engine.api import ActivationFormat, WeightFormat
from pagewood.engine.model_folder.model_digest import ModelDigest
from pagewood.engine.runner.cpu.compiled.products.dot import dot_level
from pagewood.engine.runner.cpu.compiled.products.pair_dot import pair_level
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.cpu.program.ops import CPUOps, PackedLinear, PanelLinear
from pagewood.engine.runner.cpu.program.tape import Buffer
from pagewood.engine.runner.cpu.runner import CPURunner
from pagewood.engine.runner.cpu.weights.loaded_model import LoadedModel, load_cpu_model
from pagewood.engine.runner.cpu.weights.packer import Matrix, Packer
from pagewood.engine.runner.storage import storage_for
from pagewood.engine.weights.matrix_forms import MX_GROUP, SHORT_GROUP, Float4
from row_driver import RowDriver
from stand_ins.tapes import write_down
from weight_forms import seven_b
from weight_forms.folders import SHAPES, write_folder
from weight_forms.limits import dot_limit, multiply_add_limit, pair_limit

FORMS: Mapping[str, tuple[WeightFormat, ActivationFormat]] = {
    "float32": ("float32", "auto"),
    "bfloat16": ("bfloat16", "auto"),
    "bfloat16, bfloat16 activations": ("bfloat16", "bfloat16"),
    "int8": ("int8", "auto"),
    "int8, float32 activations": ("int8", "float32"),
    "int4": ("int4", "auto"),
    "int4, float32 activations": ("int4", "float32"),
    "mxfp4": ("auto", "auto"),
    "mxfp4, float32 activations": ("auto", "float32"),
    "nvfp4": ("auto", "auto"),
}
"""Of weights and activations, by the name of the row."""
STORED = {"mxfp4": MX_GROUP, "nvfp4": SHORT_GROUP}
"""Inputs that share a scale, by the beginning of a name: forms that checkpoints have; only products are measured."""
ROWS = (1, 8, 32)
BITS = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 5}
STREAM_BYTES = 1 << 30
WALK_BYTES = 400 << 20
"""Of the weights that take turns in a measurement, so that they come from memory."""
MAX_MATRICES = 100
PROMPT, PAGE_SIZE, MIN_STEPS, NUM_STEPS = 16, 16, 3, 40
PREFILL = 2048
NUM_TURNS = 8
"""Of reading memory and of decode steps, for the shares of one request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the machine can do at most, with all threads."""

    bandwidth: float
    """Bytes per second."""
    arithmetic: float
    """float32 operations per second, of multiply-adds."""
    codes: float
    """Operations per second of sums of products of bytes."""
    pairs: float
    """The same of bfloat16 numbers."""

    def least_s(self, form: str, num_bytes: float, num_operations: float) -> float:
        """Return the seconds that no product can be faster than."""
        weights, activations = FORMS[form]
        of_floats = self.pairs if activations == "bfloat16" else self.arithmetic
        has_codes = weights in ("int8", "int4") or stored_group(form) is not None
        rate = self.codes if has_codes and activations == "auto" else of_floats
        return max(num_bytes / self.bandwidth, num_operations / rate)

    def cell(
        self, form: str, seconds: float, num_bytes: float, num_operations: float, share: float | None = None
    ) -> str:
        """Return a time, its rate, and its share of the limit, unless that is given."""
        if share is None:
            share = self.least_s(form, num_bytes, num_operations) / seconds
        return f"{1e3 * seconds:.2f} ms, {1e-9 * num_operations / seconds:.0f} G/s, {share:.0%}"


def main() -> None:
    """Measure and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads (default: all cores)")
    parser.add_argument("--shape", choices=SHAPES, action="append", help="a model (default: 110M, 500M and 1.5B)")
    parser.add_argument("--form", choices=FORMS, action="append", help="a form of weights (default: all)")
    parser.add_argument("--product", type=int, nargs=2, default=(4096, 4096), metavar=("OUT", "IN"))
    parser.add_argument("--seven-b", action="store_true", help="serve a request with 7B weights in four bits, and end")
    parser.add_argument("--quick", action="store_true", help="measure for a moment only")
    arguments = parser.parse_args()
    num_threads, duration_s = arguments.threads, 0.05 if arguments.quick else 2.0
    if arguments.seven_b:
        seven_b.measure(num_threads=num_threads, quick=arguments.quick)
        return
    stream = Stream(STREAM_BYTES, num_threads=num_threads)
    limits = Limits(
        bandwidth=max(stream.measure()),
        arithmetic=multiply_add_limit(num_threads),
        codes=dot_limit(num_threads),
        pairs=pair_limit(num_threads),
    )
    print(
        f"{describe_machine(num_threads).processor}, {num_threads} threads; at most: reading memory "
        f"{limits.bandwidth / 1e9:.1f} GB/s, multiply-adds of float32 {limits.arithmetic / 1e9:.0f} GFLOP/s, products "
        f"of bytes by {dot_level().name} {limits.codes / 1e9:.0f} GOP/s, of bfloat16 by {pair_level().name} "
        f"{limits.pairs / 1e9:.0f} GFLOP/s\n"
    )
    forms = arguments.form or FORMS
    outputs, inputs = arguments.product
    print(
        f"A product of {outputs} x {inputs}, whose weights come from memory: best time, rate, and share of the limit\n"
        "(of the bandwidth, or of the arithmetic where that takes longer).\n"
    )
    header("bytes of weights")
    for form in forms:
        num_bytes, seconds = products(form, outputs, inputs, num_threads=num_threads, duration_s=duration_s)
        row(limits, form, num_bytes, outputs * inputs, seconds)
    for name in arguments.shape or ("110M", "500M", "1.5B"):
        print(
            f"\nA decode step of the {name} model (its embedding table is not read whole, unless it is the head): the\n"
            "same, but the share of one row is that of the rate of memory that is measured in turn with it (median of\n"
            f"{NUM_TURNS}). Then a prompt of {PREFILL} tokens, and the time to load.\n"
        )
        with tempfile.TemporaryDirectory() as folder:
            os.environ["PAGEWOOD_CACHE"] = str(Path(folder) / "cache")
            write_folder(SHAPES[name], Path(folder) / "model")
            header("bytes read", f"prefill of {PREFILL}", "load")
            for form in (one for one in forms if stored_group(one) is None):
                steps(limits, stream, form, SHAPES[name], Path(folder) / "model", num_threads, duration_s)


def header(bytes_of: str, *more: str) -> None:
    """Print the head of a table."""
    names = [f"{count} row{'s' if count > 1 else ''}" for count in ROWS]
    print(f"| weights | {bytes_of} | {' | '.join([*names, *more])} |")
    print("|---|--:|" + "--:|" * (len(names) + len(more)), flush=True)


def row(
    limits: Limits,
    form: str,
    num_bytes: float,
    num_weights: int,
    seconds: Sequence[float],
    *more: str,
    share: float | None = None,
) -> None:
    """Print one row: bytes, and seconds for each number of rows; `share` is that of one row, if it is known better."""
    cells = [
        limits.cell(form, one, num_bytes, 2 * count * num_weights, share if count == 1 else None)
        for count, one in zip(ROWS, seconds, strict=True)
    ]
    print(f"| {form} | {num_bytes / 1e6:.1f} MB | {' | '.join([*cells, *more])} |", flush=True)


def best_s(call: Callable[[], object], duration_s: float) -> float:
    """Return the least time of a call, repeated for some seconds."""
    call()
    best, end = float("inf"), perf_counter() + duration_s
    while (start := perf_counter()) < end:
        call()
        best = min(best, perf_counter() - start)
    return best


def stored_group(form: str) -> int | None:
    """Return the inputs that share a scale, or None if the weights are rounded here."""
    return STORED.get(form.partition(",")[0])


def matrix(form: str, outputs: int, inputs: int) -> Matrix:
    """Return random weights: numbers, or the form of a checkpoint."""
    group = stored_group(form)
    if group is None:
        return torch.randn(outputs, inputs)
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (outputs, inputs // 2), dtype=np.uint8)
    low, high = (118, 126) if group == MX_GROUP else (40, 80)
    scales = rng.integers(low, high, (outputs, inputs // group), dtype=np.uint8)
    return Float4(codes, scales, None if group == MX_GROUP else np.full(outputs, 0.01, np.float32))


def products(form: str, outputs: int, inputs: int, *, num_threads: int, duration_s: float) -> tuple[int, list[float]]:
    """Return the bytes of a matrix, and the seconds of a product for each of ROWS."""
    weights, activations = FORMS[form]
    packer = Packer(weights, activations=activations, num_threads=num_threads)
    weight, ops = matrix(form, outputs, inputs), CPUOps(packer)
    linears = [ops.linear(weight, None)]
    first = linears[0]
    assert isinstance(first, PackedLinear | PanelLinear)
    num_bytes = first.weight.memory.nbytes if isinstance(first, PackedLinear) else first.panels.nbytes
    linears += [ops.linear(weight, None) for _ in range(min(MAX_MATRICES, WALK_BYTES // num_bytes))]
    kernel = warm_up(64, packed=ops.variants)

    def walk(x: Buffer) -> Buffer:
        return [linear(x) for linear in linears][-1]

    def one(num_rows: int) -> float:
        x = np.random.default_rng(0).standard_normal((num_rows, inputs), dtype=np.float32)
        run = write_down(walk, x, kernel=kernel, num_threads=num_threads)
        return best_s(run, duration_s) / len(linears)

    return num_bytes, [one(num_rows) for num_rows in ROWS]


def steps(
    limits: Limits,
    stream: Stream,
    form: str,
    shape: ModelShape,
    folder: Path,
    num_threads: int,
    duration_s: float,
) -> None:
    """Print the row of a model."""
    start = perf_counter()
    weights, activations = FORMS[form]
    loaded = load_cpu_model(
        folder, weights, activations=activations, digest=ModelDigest(folder), num_threads=num_threads
    )
    load_s = perf_counter() - start
    in_layers = sum(one.num_weights for one in shape.linears())
    num_weights = in_layers + shape.head().num_weights
    num_bytes = num_weights * BITS[weights] / 8
    turns: list[tuple[float, float]] = []
    for _ in range(NUM_TURNS):
        before = stream.measure()
        one_s = _step_s(loaded, 1, num_threads, duration_s / NUM_TURNS)
        turns.append((one_s, num_bytes / max(*before, *stream.measure()) / one_s))
    share = median(share for _, share in turns)
    seconds = [min(turns)[0], *(_step_s(loaded, count, num_threads, duration_s) for count in ROWS[1:])]
    prefill_s = _prefill_s(loaded, num_threads, duration_s)
    cell = limits.cell(form, prefill_s, num_bytes, 2 * (PREFILL * in_layers + shape.head().num_weights))
    row(limits, form, num_bytes, num_weights, seconds, cell, f"{load_s:.1f} s", share=share)


def _runner(loaded: LoadedModel, num_rows: int, length: int, num_threads: int) -> tuple[CPURunner, RowDriver]:
    config = loaded.model.config
    layout = config.memory_layout(page_size=PAGE_SIZE, order="HND")
    num_pages = num_rows * -(-(length + 1) // PAGE_SIZE)
    kernel = warm_up(layout, packed=loaded.variants)
    runner = CPURunner(
        loaded.model, storage_for(layout, num_pages), kernel, max_rows=num_rows, max_length=length + 1,
        num_threads=num_threads,
    )  # fmt: skip
    return runner, RowDriver(runner, num_pages=num_pages, page_size=PAGE_SIZE)


def _step_s(loaded: LoadedModel, num_rows: int, num_threads: int, duration_s: float) -> float:
    """Return the least seconds of decode steps behind short prompts."""
    vocab_size, rng = loaded.model.config.vocab_size, np.random.default_rng(0)
    best, end = float("inf"), perf_counter() + duration_s
    while best == float("inf") or perf_counter() < end:
        runner, driver = _runner(loaded, num_rows, PROMPT + NUM_STEPS, num_threads)
        sequences = [driver.add(rng.integers(0, vocab_size, PROMPT).tolist()) for _ in range(num_rows)]
        for number in range(NUM_STEPS):
            batch = driver.batch([(sequence, 1 if number else PROMPT) for sequence in sequences])
            start = perf_counter()
            tokens = runner.launch(batch).wait().tokens
            best = min(best, perf_counter() - start) if number else best
            for sequence, token in zip(sequences, tokens, strict=True):
                sequence.tokens.append(int(token))
            if number > MIN_STEPS and perf_counter() > end:
                break
        runner.close()
    return best


def _prefill_s(loaded: LoadedModel, num_threads: int, duration_s: float) -> float:
    """Return the least seconds of a step with a prompt of PREFILL tokens."""
    best, end, rng = float("inf"), perf_counter() + duration_s, np.random.default_rng(0)
    while best == float("inf") or perf_counter() < end:
        runner, driver = _runner(loaded, 1, PREFILL, num_threads)
        sequence = driver.add(rng.integers(0, loaded.model.config.vocab_size, PREFILL).tolist())
        batch = driver.batch([(sequence, PREFILL)])
        start = perf_counter()
        runner.launch(batch).wait()
        best = min(best, perf_counter() - start)
        runner.close()
    return best


if __name__ == "__main__":
    main()
