"""Measures what changes of logits cost: penalties, biases and tokens that must wait, against the same steps without.

python benchmarks/sampling.py               # prints the tables; about five minutes on two cores
python benchmarks/sampling.py --quick       # few steps, only to test the script

Two engines of one process take turns; each round gives one ratio of the time of their steps. All requests of one engine
have the feature of the row, and texts of 256 to 320 tokens.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from end_to_end.model import FULL, QUICK, ModelShape, write_model
from pagewood.engine.api import EngineConfig
from speculation.engines import System

BIAS = tuple((token, 0.5) for token in range(10, 310))
FEATURES: dict[str, dict[str, Any]] = {
    "none": {},
    "frequency and presence": {"frequency_penalty": 0.5, "presence_penalty": 0.5},
    "repetition": {"repetition_penalty": 1.1},
    "300 biases": {"logit_bias": BIAS},
    "min_tokens": {"min_tokens": 4},
    "all": {"frequency_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": BIAS, "min_tokens": 4},
}
NUM_PROMPT = 256


def main() -> None:
    """Run all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps; the numbers mean nothing")
    parser.add_argument("--repeat", type=int, default=5, help="rounds (default 5)")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument("--threads", type=int, default=min(2, cores), help="threads of every engine (default 2)")
    options = parser.parse_args()
    small = replace(QUICK, hidden_size=64, num_layers=1, tied=True)
    cases: list[tuple[str, ModelShape, tuple[int, ...]]] = [
        ("110M model", QUICK if options.quick else FULL, (1, 64)),
        ("one layer, vocabulary 32,000", replace(small, vocab_size=32_000), (1, 64)),
        ("one layer, vocabulary 128,256", replace(small, vocab_size=128_256), (1, 64)),
    ]
    for name, shape, batches in cases[:1] if options.quick else cases:
        print(
            f"\n## {name}\n\n| requests | feature | time of a step | against none |\n|---:|---|---:|---:|", flush=True
        )
        with tempfile.TemporaryDirectory() as folder:
            write_model(shape, Path(folder), seed=0)
            for batch in (2,) if options.quick else batches:
                _compare(folder, batch, options)


def _compare(folder: str, batch: int, options: argparse.Namespace) -> None:
    num_output = 4 if options.quick else 64
    systems = {
        name: System(name, EngineConfig(model=folder, num_threads=options.threads, max_running=batch))
        for name in FEATURES
    }
    prompts = [[(7 * i + 13 * j) % 900 + 1 for j in range(NUM_PROMPT)] for i in range(batch)]
    times: dict[str, list[float]] = {name: [] for name in FEATURES}
    for _ in range(1 if options.quick else 1 + options.repeat):
        for name, fields in FEATURES.items():
            run = systems[name].run(prompts, concurrency=batch, max_tokens=num_output, ignore_eos=True, **fields)
            times[name].append(run.seconds / run.num_steps)
    for name in FEATURES:
        pairs = list(zip(times[name], times["none"], strict=True))[-options.repeat :]  # prompts are cached by then
        ratios = sorted(mine / plain for mine, plain in pairs)
        shown = f"{median(mine for mine, _ in pairs) * 1e3:.2f} ms"
        spread = f"{median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        print(f"| {batch} | {name} | {shown} | {spread} |", flush=True)
    for system in systems.values():
        system.close()


if __name__ == "__main__":
    main()
