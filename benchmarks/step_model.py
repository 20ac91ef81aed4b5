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
from statistics import mean, median
from time import perf_counter

import numpy as np

import end_to_end  # noqa: F401 - makes the support of the engine's tests importable
from pagewood.engine.model_folder.folder import model_folder, model_name
from pagewood.engine.model_folder.load import load_model
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.cpu.program.ops import CPUOps
from pagewood.engine.runner.cpu.runner import CPURunner
from pagewood.engine.runner.storage import storage_for
from pagewood.schedpolicy import StepSample
from pagewood.schedpolicy.steps.latency import pairs_of
from row_driver import DrivenSequence, RowDriver

PAGE_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """The steps that are measured: every combination of chunk, number of decodes and context."""

    chunks: tuple[int, ...] = (0, 32, 128, 512)
    """Prompt tokens of a step."""
    decodes: tuple[int, ...] = (0, 1, 4, 16, 32)
    """Requests that decode beside them."""
    contexts: tuple[int, ...] = (64, 256)
    """Tokens of each of these requests when it begins to decode."""
    num_chunks: int = 2
    """A prompt is computed in at most this many chunks, so that those at its end are measured too."""
    max_length: int = 1024
    """Of a prompt."""
    repeats: int = 5

    def chunks_of(self, chunk: int) -> int:
        """Return how many steps of this chunk are measured in a row; they are those of one prompt."""
        return min(self.num_chunks, self.max_length // chunk) if chunk else 1


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
        "samples": [sample._asdict() for sample in samples],
    }
    arguments.file.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{len(samples)} shapes of steps in {arguments.file}")


def measure(folder: Path, *, num_threads: int, shapes: Shapes = Shapes()) -> list[StepSample]:
    """Return the median time of steps of many shapes."""
    model = load_model(folder, CPUOps())
    config = model.config
    layout = config.memory_layout(page_size=PAGE_SIZE, order="HND")
    rounds = shapes.repeats + 1
    most_steps = rounds * max(map(shapes.chunks_of, shapes.chunks))
    num_tokens = max(shapes.decodes) * (max(shapes.contexts) + most_steps + PAGE_SIZE)
    num_tokens += rounds * max(shapes.chunks_of(chunk) * chunk + PAGE_SIZE for chunk in shapes.chunks)
    num_pages = num_tokens // PAGE_SIZE + 1
    samples: list[StepSample] = []
    for context, num_decode, chunk in itertools.product(shapes.contexts, shapes.decodes, shapes.chunks):
        if not num_decode + chunk or (not num_decode and context > shapes.contexts[0]):
            continue
        runner = CPURunner(
            model,
            storage_for(layout, num_pages),
            warm_up(layout),
            max_rows=max(shapes.decodes) + rounds,
            max_length=max(shapes.max_length, max(shapes.contexts) + most_steps) + PAGE_SIZE,
            num_threads=num_threads,
        )
        driver = RowDriver(runner, num_pages=num_pages, page_size=PAGE_SIZE)
        bench = _Bench(runner, driver, config.vocab_size, context=context, num_decode=num_decode)
        bench.prompt(chunk, 1)  # warms up
        prompts = [bench.prompt(chunk, shapes.chunks_of(chunk)) for _ in range(shapes.repeats)]
        runner.close()
        for alike in zip(*prompts, strict=True):
            samples.append(
                alike[0]._replace(
                    num_kv=round(mean(sample.num_kv for sample in alike)),
                    seconds=median(sample.seconds for sample in alike),
                )
            )
    return samples


class _Bench:
    """Decoding sequences, beside which prompts are computed."""

    def __init__(self, runner: CPURunner, driver: RowDriver, vocab_size: int, *, context: int, num_decode: int) -> None:
        self._runner = runner
        self._driver = driver
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(0)
        self._decoding = [self._add(context) for _ in range(num_decode)]  # contents written by: prompt
        for sequence in self._decoding:
            self._take([sequence], [(sequence, context)])

    def prompt(self, chunk: int, num_chunks: int) -> list[StepSample]:
        """Compute a new prompt in as many steps of this chunk, in which the others decode; without one for chunk 0."""
        prompts = [self._add(chunk * num_chunks)] if chunk else []
        samples: list[StepSample] = []
        for number in range(num_chunks):
            work = [(sequence, 1) for sequence in self._decoding] + [(prompt, chunk) for prompt in prompts]
            num_kv = sum(len(sequence.tokens) for sequence in self._decoding)
            seconds = self._take(self._decoding, work)
            num_pairs = pairs_of(number * chunk, chunk)
            samples.append(StepSample(chunk, len(self._decoding), num_kv, seconds, num_pairs))
        return samples

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
