# pyright: basic
# (torch and numba are untyped)
"""Measures the steps of a model on this CPU, and writes a file for the scheduling simulator.

python benchmarks/step_model.py mine.json                  # the embedded model; half a minute
python benchmarks/step_model.py mine.json --model FOLDER
python -m pagewood.schedpolicy.simulate --workload poisson --rate 5 --requests 500 --step-model mine.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

from pagewood.engine.folder import model_folder, model_name
from pagewood.engine.load import load_model
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.cpu.ops import CPUOps
from pagewood.engine.runner.cpu.runner import CPURunner
from pagewood.engine.testing.driver import DrivenSequence, RowDriver
from pagewood.kvpool import MultiHeadLayout
from pagewood.kvpool.storage import KVStorage

PAGE_SIZE = 16
PREFILLS = (0, 32, 128, 512)
DECODES = (0, 1, 4, 16, 32)
CONTEXTS = (64, 256)
REPEATS = 5
MAX_LENGTH = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One shape of a step; see the simulator's file format."""

    num_prefill: int
    num_decode: int
    num_kv: int
    seconds: float


def main() -> None:
    """Measure the model of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the file to write")
    parser.add_argument("--model", help="folder of a model (default: the embedded model)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads (default: all cores)")
    arguments = parser.parse_args()
    samples = measure(model_folder(arguments.model), num_threads=arguments.threads)
    record = {
        "format": "pagewood-step-model/1",
        "name": model_name(arguments.model),
        "source": f"benchmarks/step_model.py, {datetime.now(UTC):%Y-%m-%d}, {arguments.threads} threads",
        "samples": [
            {"num_prefill": s.num_prefill, "num_decode": s.num_decode, "num_kv": s.num_kv, "seconds": s.seconds}
            for s in samples
        ],
    }
    arguments.file.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{len(samples)} shapes of steps in {arguments.file}")


def measure(folder: Path, *, num_threads: int) -> list[Sample]:
    """Return the median time of steps of many shapes."""
    model = load_model(folder, CPUOps())
    config = model.config
    layout = MultiHeadLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=PAGE_SIZE,
        order="HND",
    )
    num_pages = (max(DECODES) * (max(CONTEXTS) + REPEATS + PAGE_SIZE) + (REPEATS + 1) * max(PREFILLS)) // PAGE_SIZE + 1
    samples: list[Sample] = []
    for context, num_decode, num_prefill in itertools.product(CONTEXTS, DECODES, PREFILLS):
        if not num_decode + num_prefill or (not num_decode and context > CONTEXTS[0]):
            continue
        runner = CPURunner(
            model,
            KVStorage(layout, num_pages),
            warm_up(config.head_dim),
            max_rows=max(DECODES) + REPEATS + 1,
            max_length=MAX_LENGTH,
            num_threads=num_threads,
        )
        driver = RowDriver(runner, num_pages=num_pages, page_size=PAGE_SIZE)
        shape = _Shape(runner, driver, config.vocab_size, context=context, num_decode=num_decode)
        times = [shape.step(num_prefill) for _ in range(REPEATS + 1)][1:]
        runner.close()
        num_kv = num_decode * context
        samples.append(Sample(num_prefill=num_prefill, num_decode=num_decode, num_kv=num_kv, seconds=median(times)))
    return samples


class _Shape:
    """Decoding sequences; each step also computes a new prompt."""

    def __init__(self, runner: CPURunner, driver: RowDriver, vocab_size: int, *, context: int, num_decode: int) -> None:
        self._runner = runner
        self._driver = driver
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(0)
        self._decoding = [self._add(context) for _ in range(num_decode)]  # contents written by: step
        for sequence in self._decoding:
            self._take([sequence], [(sequence, context)])

    def step(self, num_prefill: int) -> float:
        """Compute a step; return its time in seconds."""
        prompts = [self._add(num_prefill)] if num_prefill else []
        work = [(sequence, 1) for sequence in self._decoding] + [(prompt, num_prefill) for prompt in prompts]
        return self._take(self._decoding, work)

    def _add(self, length: int) -> DrivenSequence:
        return self._driver.add(self._rng.integers(0, self._vocab_size, length).tolist())

    def _take(self, decoding: list[DrivenSequence], work: list[tuple[DrivenSequence, int]]) -> float:
        batch = self._driver.batch(work)
        start = perf_counter()
        tokens = self._runner.launch(batch).wait().tokens
        seconds = perf_counter() - start
        for sequence, token in zip(decoding, tokens, strict=False):
            sequence.tokens.append(int(token))
        return seconds


if __name__ == "__main__":
    main()
