"""Measures what features of sampling cost: penalties, filters, reports and grammars, against the same steps without.

python benchmarks/sampling.py                       # prints the tables; about half an hour on two cores
python benchmarks/sampling.py --only structured     # one structured request in 32; 3 minutes
python benchmarks/sampling.py --only 256 compile    # 256 requests, and grammars on the host; 5 minutes
python benchmarks/sampling.py --quick               # few steps, only to test the script

Engines of one process take turns; each round gives one ratio of the time of their steps. All requests of one engine
have the feature of the row; the rows of grammars say how many have one. Texts have 256 to 320 tokens, or 64 to 192 in
the tables of `structured` and `256`. A further table says what grammars cost on the host alone: to compile them, and
for each row and step. The last table counts the steps that forced tokens save: answers of the embedded model to
requests with a JSON schema.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Sequence
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
MANY = (
    "none",
    "none again",
    "frequency and presence",
    "repetition",
    "300 biases",
    "temperature",
    "temperature, typical_p",
    "logprobs, 5 others",
    "all changes",
)
"""The features at 256 requests."""
PARTS = ("features", "256", "grammars", "structured", "compile", "forced")
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
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="tables to print (default all)")
    options = parser.parse_args()
    small = replace(QUICK, hidden_size=64, num_layers=1, tied=True)
    cases: list[tuple[str, ModelShape]] = [
        ("110M model", QUICK if options.quick else FULL),
        ("one layer, vocabulary 32,000", replace(small, vocab_size=32_000)),
        ("one layer, vocabulary 128,256", replace(small, vocab_size=128_256)),
    ]
    for name, shape in cases[:1] if options.quick else cases:
        if not {"features", "grammars", "structured", "256"}.intersection(options.only):
            break
        print(
            f"\n## {name}\n\n| requests | feature | time of a step | against none |\n|---:|---|---:|---:|", flush=True
        )
        with tempfile.TemporaryDirectory() as folder:
            write_model(shape, Path(folder), seed=0)
            write_tokenizer(Path(folder), shape.vocab_size)
            is_large = shape is FULL
            if "features" in options.only:
                for batch in (2,) if options.quick else (1, 64):
                    _compare(_features(folder, LARGE if is_large else tuple(FEATURES), batch, options), batch, options)
            if "256" in options.only and not is_large and not options.quick:
                _compare(_features(folder, MANY, 256, options), 256, options, num_prompt=64, num_output=16)
            if "grammars" in options.only:
                for num in (2,) if options.quick else (32,) if is_large else (32, 256):
                    _compare(_grammars(folder, num, num, options), num, options)
            if "structured" in options.only:
                num = 2 if options.quick else 32
                num_output = 24 if is_large else 128
                _compare(_grammars(folder, num, 0, options), num, options, num_prompt=64, num_output=num_output)
    if "compile" in options.only:
        _measure_grammars(8_000 if options.quick else 128_256, num_rows=2 if options.quick else 32)
    if "forced" in options.only:
        _count_steps(options)


Systems = dict[str, tuple[System, dict[str, Any], int]]
"""By the name of a row: an engine, the fields of some requests, and how many have them."""


def _features(folder: str, names: Sequence[str], batch: int, options: argparse.Namespace) -> Systems:
    return {name: (System(name, _config(folder, batch, options)), FEATURES[name], batch) for name in names}


def _grammars(folder: str, num: int, most: int, options: argparse.Namespace) -> Systems:
    """Return engines with requests of which one has a grammar, and, if `most` is not 0, with as many that have one."""
    rows: dict[str, tuple[Grammar, int]] = {"no grammars": (FREE, 0), "no grammars again": (FREE, 0)}
    for name, grammar in (("free", FREE), ("bounded", BOUNDED), ("JSON strings", STRINGS)):
        rows[f"one with a grammar, {name}"] = (grammar, 1)
        if most:
            rows[f"all with one, {name}"] = (grammar, most)
    return {
        name: (System(name, _config(folder, num, options)), {"grammar": grammar}, count)
        for name, (grammar, count) in rows.items()
    }


def _config(folder: str, batch: int, options: argparse.Namespace) -> EngineConfig:
    return EngineConfig(model=folder, num_threads=options.threads, max_running=batch)


def _compare(
    systems: Systems,
    batch: int,
    options: argparse.Namespace,
    *,
    num_prompt: int = NUM_PROMPT,
    num_output: int = 64,
) -> None:
    """Print a row for each system; its first requests, as many as the number says, have its fields."""
    if options.quick:
        num_output = 4
    first = next(iter(systems))
    prompts = [[(7 * i + 13 * j) % 900 + 1 for j in range(num_prompt)] for i in range(batch)]
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
