# pyright: basic
# (torch and transformers are typed in part only)
"""Measures the time to the first token of a second turn, of a hybrid model: with a cached state, and without a cache.

python benchmarks/second_turn.py           # a few minutes, 4 GB
python benchmarks/second_turn.py --transformers   # and how long `transformers` computes the whole second turn
python benchmarks/second_turn.py --quick   # a small model; shows that it works

The model is the hybrid shape of `models.py`, with random weights. A first turn has a random prompt, and an answer of 64
tokens; the second one adds 32 tokens. An engine with a cache and one without are asked for it in turns. Both answers
must be the same.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

import torch

from end_to_end.machine import describe_machine
from models import SHAPES, VOCAB_SIZE
from pagewood.engine import LLM, SamplingParams
from pagewood.engine.model_folder.folder import model_folder

ANSWER, ADDED = 64, 32


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads (default: all cores)")
    parser.add_argument("--rounds", type=int, default=7, help="(default: %(default)s)")
    parser.add_argument("--prompt", type=int, nargs="+", default=[512, 2048], help="tokens (default: 512 2048)")
    parser.add_argument("--transformers", action="store_true", help="measure it, too, without anything cached")
    parser.add_argument("--quick", action="store_true", help="a small model, one round")
    arguments = parser.parse_args()
    processor = describe_machine(arguments.threads).processor
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        total, _ = SHAPES["hybrid"].write(folder, quick=arguments.quick)
        shutil.copy(model_folder(None) / "tokenizer.json", folder)  # any: prompts are token ids
        print(f"{processor}, {arguments.threads} threads, {total / 1e6:.0f}M parameters", flush=True)
        peer = _transformers(folder, arguments.threads) if arguments.transformers else None
        has_peer = peer is not None
        options = {"num_threads": arguments.threads, "max_running": 2, "max_total_tokens": 16_384}
        with LLM(folder, **options) as cached, LLM(folder, **options, prefix_cache=False) as plain:
            print("| prompt | cached tokens | first token, hit | miss | times |" + " transformers |" * has_peer)
            print("|---:|---:|---:|---:|---:|" + "---:|" * has_peer)
            for length in arguments.prompt:
                _measure(cached, plain, peer, length, 1 if arguments.quick else arguments.rounds)


def _transformers(folder: Path, threads: int) -> Any:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _measure(cached: LLM, plain: LLM, peer: Any, length: int, rounds: int) -> None:
    rng, hits, misses, peers, num_cached = Random(length), list[float](), list[float](), list[float](), 0
    answer = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True)
    first = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    for _ in range(rounds):
        prompt = [rng.randrange(1, VOCAB_SIZE) for _ in range(length)]
        turn = cached.generate([prompt], answer)[0]
        second = [*prompt, *turn.tokens, *(rng.randrange(1, VOCAB_SIZE) for _ in range(ADDED))]
        began = perf_counter()
        hit = cached.generate([second], first)[0]
        hits.append(perf_counter() - began)
        began = perf_counter()
        miss = plain.generate([second], first)[0]
        misses.append(perf_counter() - began)
        if hit.tokens != miss.tokens:
            raise RuntimeError(f"a hit must give the token of a miss, got {hit.tokens} and {miss.tokens}")
        if peer is not None:
            began = perf_counter()
            with torch.inference_mode():
                peer(torch.tensor([second]), logits_to_keep=1)
            peers.append(perf_counter() - began)
        num_cached = hit.num_cached_tokens
    hit_ms, miss_ms = 1e3 * median(hits), 1e3 * median(misses)
    beside = f" {1e3 * median(peers):.0f} ms |" if peers else ""
    row = f"| {length} | {num_cached} | {hit_ms:.0f} ms | {miss_ms:.0f} ms | {miss_ms / hit_ms:.1f} |{beside}"
    print(row, flush=True)


if __name__ == "__main__":
    main()
