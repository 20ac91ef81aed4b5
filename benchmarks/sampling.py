"""Measures what features of sampling cost: penalties, filters, reports and grammars, against the same steps without.

python benchmarks/sampling.py               # prints the tables; about half an hour on two cores
python benchmarks/sampling.py --quick       # few steps, only to test the script

Engines of one process take turns; each round gives one ratio of the time of their steps. All requests of one engine
have the feature of the row; the rows of grammars say how many have one. Texts have 256 to 320 tokens. A further table
says what grammars cost on the host alone: to compile them, and for each row and step. The last table counts the steps
that forced tokens save: answers of the embedded model to requests with a JSON schema.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from end_to_end.model import FULL, QUICK, ModelShape, write_model
from pagewood.engine.api import EngineConfig, Grammar
from pagewood.engine.grammar import mask_words, open_backend
from speculation.engines import System
from vocabulary import write_tokenizer

BIAS = tuple((token, 0.5) for token in range(10, 310))
FEATURES: dict[str, dict[str, Any]] = {
    "none": {},
    "none again": {},
    "frequency and presence": {"frequency_penalty": 0.5, "presence_penalty": 0.5},
    "repetition": {"repetition_penalty": 1.1},
    "300 biases": {"logit_bias": BIAS},
    "min_tokens": {"min_tokens": 4},
    "8 bad words": {"bad_words": tuple((token, token + 1) for token in range(8))},
    "temperature": {"temperature": 0.8},
    "temperature, typical_p": {"temperature": 0.8, "typical_p": 0.9},
    "logprobs, 0 others": {"logprobs": 0},
    "logprobs, 5 others": {"logprobs": 5},
    "logprobs of the processed, 5 others": {"logprobs": 5, "logprobs_kind": "processed", "frequency_penalty": 0.5},
    "all changes": {"frequency_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": BIAS, "min_tokens": 4},
}
LARGE = (
    "none",
    "none again",
    "temperature",
    "logprobs, 5 others",
    "logprobs of the processed, 5 others",
    "all changes",
)
"""The features of the 110M model: an engine for each takes memory."""
NUM_PROMPT = 256
NUM_STEPS = 60
FREE = Grammar(kind="regex", text="[a-z0-9 ]+")
"""Forces nothing, so that each request takes as many steps as without it."""
BOUNDED = Grammar(kind="regex", text="[a-z0-9 ]{1,2000}")
"""The same, but the library computes every mask anew, because each length of the text is a state of its own."""
STRINGS = Grammar(kind="json_schema", text='{"type": "array", "items": {"type": "string"}, "minItems": 300}')
_TEXT = {"type": "string", "maxLength": 12}
SCHEMAS: dict[str, dict[str, Any]] = {
    "long names": {
        "type": "object",
        "properties": {
            "temperature_celsius": {"type": "integer", "minimum": -50, "maximum": 60},
            "description_of_the_sky": {"enum": ["clear", "cloudy", "overcast"]},
            "is_it_raining_now": {"type": "boolean"},
        },
        "required": ["temperature_celsius", "description_of_the_sky", "is_it_raining_now"],
        "additionalProperties": False,
    },
    "short names": {
        "type": "object",
        "properties": {"a": _TEXT, "b": _TEXT},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "nested": {
        "type": "object",
        "properties": {
            f"field_{index}": {
                "type": "array",
                "items": {"type": "object", "properties": {"name": _TEXT, "value": {"type": "number"}}},
            }
            for index in range(20)
        },
    },
    "list of numbers": {"type": "array", "items": {"type": "integer", "maximum": 99}, "minItems": 3, "maxItems": 8},
}


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
        ("one layer, vocabulary 32,000", replace(small, vocab_size=32_000), (1, 64, 256)),
        ("one layer, vocabulary 128,256", replace(small, vocab_size=128_256), (1, 64, 256)),
    ]
    for name, shape, batches in cases[:1] if options.quick else cases:
        print(
            f"\n## {name}\n\n| requests | feature | time of a step | against none |\n|---:|---|---:|---:|", flush=True
        )
        with tempfile.TemporaryDirectory() as folder:
            write_model(shape, Path(folder), seed=0)
            write_tokenizer(Path(folder), shape.vocab_size)
            features = LARGE if shape is FULL else tuple(FEATURES)
            for batch in (2,) if options.quick else batches:
                systems = {
                    feature: (System(feature, _config(folder, batch, options)), FEATURES[feature], batch)
                    for feature in features
                }
                _compare(systems, batch, options)
            for num in (2,) if options.quick else (32, 256) if shape is not FULL else (32,):
                rows: dict[str, tuple[Grammar, int]] = {"no grammars": (FREE, 0), "no grammars again": (FREE, 0)}
                for name, grammar in (("free", FREE), ("bounded", BOUNDED), ("JSON strings", STRINGS)):
                    rows |= {f"one with a grammar, {name}": (grammar, 1), f"all with one, {name}": (grammar, num)}
                systems = {
                    name: (System(name, _config(folder, num, options)), {"grammar": grammar}, count)
                    for name, (grammar, count) in rows.items()
                }
                _compare(systems, num, options)
    _measure_grammars(8_000 if options.quick else 128_256, num_rows=2 if options.quick else 32)
    _count_steps(options)


def _config(folder: str, batch: int, options: argparse.Namespace) -> EngineConfig:
    return EngineConfig(model=folder, num_threads=options.threads, max_running=batch)


def _compare(systems: dict[str, tuple[System, dict[str, Any], int]], batch: int, options: argparse.Namespace) -> None:
    """Print a row for each system; its first requests, as many as the number says, have its fields."""
    num_output = 4 if options.quick else 64
    first = next(iter(systems))
    prompts = [[(7 * i + 13 * j) % 900 + 1 for j in range(NUM_PROMPT)] for i in range(batch)]
    times: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(1 if options.quick else 1 + options.repeat):
        for name, (system, fields, count) in systems.items():
            each = [fields if index < count else {} for index in range(batch)]
            run = system.run(prompts, concurrency=batch, max_tokens=num_output, ignore_eos=True, each=each)
            times[name].append(run.seconds / run.num_steps)
    for name in systems:
        pairs = list(zip(times[name], times[first], strict=True))[-options.repeat :]  # prompts are cached by then
        ratios = sorted(mine / plain for mine, plain in pairs)
        shown = f"{median(mine for mine, _ in pairs) * 1e3:.2f} ms"
        spread = f"{median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        print(f"| {batch} | {name} | {shown} | {spread} |", flush=True)
    for system, _, _ in systems.values():
        system.close()


def _measure_grammars(vocab_size: int, *, num_rows: int) -> None:
    """Print what grammars cost on the host, without a model: texts are drawn evenly from the allowed tokens."""
    print(f"\n## Grammars on the host, vocabulary {vocab_size:,}, {num_rows} rows\n")
    print("| grammar | compile | first mask | mask, median | mask, 95% | advance | forced tokens |")
    print("|---|---:|---:|---:|---:|---:|---:|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), vocab_size)
        backend = open_backend("llguidance", Path(folder), vocab_size=vocab_size, eos_token_ids=(0,))
    grammars = {"free": FREE, "bounded": BOUNDED, "JSON strings": STRINGS}
    grammars |= {name: Grammar(kind="json_schema", text=json.dumps(schema)) for name, schema in SCHEMAS.items()}
    rng, row = np.random.default_rng(0), np.empty(mask_words(vocab_size), np.int32)
    for name, grammar in grammars.items():
        began = perf_counter()
        prototype = backend.compile(grammar)
        compiled_s = perf_counter() - began
        times: dict[str, list[float]] = {"mask": [], "advance": [], "forced": []}

        def timed(kind: str, call: Callable[..., Any], *arguments: Any, times: dict[str, list[float]] = times) -> None:
            began = perf_counter()
            call(*arguments)
            times[kind].append(perf_counter() - began)

        for _ in range(num_rows):
            matcher = prototype.matcher(frozenset([0]))
            for _ in range(NUM_STEPS):
                timed("mask", matcher.fill, row)
                allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:vocab_size])
                timed("advance", matcher.advance, [int(rng.choice(allowed))])
                if matcher.is_finished or matcher.error is not None:
                    break
                timed("forced", matcher.forced)
        masks = np.array(times["mask"]) * 1e6
        others = " | ".join(f"{median(times[kind] or [0.0]) * 1e6:.1f} us" for kind in ("advance", "forced"))
        shown = f"{compiled_s * 1e3:.1f} ms | {masks[0]:.0f} us | {np.median(masks):.1f} us"
        print(f"| {name} | {shown} | {np.percentile(masks, 95):.1f} us | {others} |", flush=True)


def _count_steps(options: argparse.Namespace) -> None:
    """Print how many steps answers by a JSON schema take, one request at a time."""
    print("\n## Forced tokens, embedded model, one request at a time\n")
    print("| schema | answers | tokens | steps | tokens a step | time, against the same tokens without a grammar |")
    print("|---|---:|---:|---:|---:|---:|", flush=True)
    system = System("embedded", EngineConfig(num_threads=options.threads, max_running=1))
    num = 2 if options.quick else 20
    for name, schema in SCHEMAS.items():
        grammar = Grammar(kind="json_schema", text=json.dumps(schema))
        prompts = [[(5 * i + j) % 200 + 1 for j in range(8)] for i in range(num)]
        options_of: dict[str, Any] = {"concurrency": 1, "temperature": 0.9}
        system.run(prompts, max_tokens=100, grammar=grammar, **options_of)
        run = system.run(prompts, max_tokens=100, grammar=grammar, **options_of)
        plain = system.run(prompts, max_tokens=list(map(len, run.outputs)), ignore_eos=True, **options_of)
        ratio = run.seconds / run.num_tokens / (plain.seconds / plain.num_tokens)
        counts = f"{run.num_tokens} | {run.num_steps} | {run.num_tokens / run.num_steps:.2f}"
        print(f"| {name} | {num} | {counts} | {ratio:.2f} |", flush=True)
    system.close()


if __name__ == "__main__":
    main()
