# pyright: basic
# (torch and transformers are typed in part only)
"""Measures one model of each kind beside `transformers` and OpenVINO GenAI: one machine, one run, in turns.

python benchmarks/models.py                                   # all three, a quarter of an hour, 20 GB of memory
python benchmarks/models.py --only experts --openvino PYTHON  # one of them, with a peer
python benchmarks/models.py --quick                           # small models; shows that it works

dense     a Gemma 3 with windows
experts   a mixture like Qwen3's, 1.5 billion parameters, of which 0.3 are active
latent    a small DeepSeek V2 Lite

Weights are random, numbers float32. Every system stays loaded in a process of its own and is asked once a round, in
another order each time, for greedy answers to random prompts. `transformers` computes experts in the fastest of its
ways, by short answers. The share of the bandwidth bound is that of the tokens after the first, at one request: the
bytes of the weights that a token uses, by the rate at which all threads read a large array.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from end_to_end.machine import Stream, describe_machine
from pagewood.engine.model_folder.folder import model_folder
from peers.systems import NUM_TOKENS, PROMPT, System, begin, measure, openvino, random_prompts, report

CONCURRENCY = (1, 8, 32)
EXPERT_WAYS = ("eager", "batched_mm", "grouped_mm")
VOCAB_SIZE = 32_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model with random weights."""

    model_type: str
    fields: Mapping[str, Any]
    quick: Mapping[str, Any]
    """Fields of the small model."""
    num_chosen: int = 0
    """Experts of each layer that a token uses."""
    num_experts: int = 1
    """Experts of each layer; 1: the feed-forward is dense."""

    def write(self, folder: Path, *, quick: bool) -> tuple[int, int]:
        """Save the model; return its number of parameters, and how many of them a token uses."""
        torch.manual_seed(0)
        own = {**self.fields, **(self.quick if quick else {}), "vocab_size": VOCAB_SIZE, "tie_word_embeddings": True}
        config = AutoConfig.for_model(self.model_type, **own)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(folder)
        counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
        experts = sum(count for name, count in counts.items() if ".experts." in name)
        total = sum(counts.values())
        return total, total - experts + experts * self.num_chosen // self.num_experts


SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "dense": Shape(
            model_type="gemma3_text",
            fields={
                "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 18, "num_attention_heads": 4,
                "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512, "max_position_embeddings": 8192,
            },
            quick={"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32},
        ),
        "experts": Shape(
            model_type="qwen3_moe",
            fields={
                "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 16,
                "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 8192, "num_experts": 64,
                "num_experts_per_tok": 8, "moe_intermediate_size": 448, "norm_topk_prob": True,
                "decoder_sparse_step": 1, "mlp_only_layers": [],
            },
            quick={"hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32},
            num_chosen=8,
            num_experts=64,
        ),
        "latent": Shape(
            model_type="deepseek_v2",
            fields={
                "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 16,
                "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64,
                "qk_nope_head_dim": 128, "v_head_dim": 128, "max_position_embeddings": 8192, "n_routed_experts": 16,
                "num_experts_per_tok": 4, "n_shared_experts": 2, "moe_intermediate_size": 512, "topk_method": "greedy",
                "n_group": None, "topk_group": None, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0,
            },
            quick={"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
                   "num_key_value_heads": 4},
            num_chosen=4,
            num_experts=16,
        ),
    }
)  # fmt: skip


def main() -> None:
    """Measure each shape and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=SHAPES, help="a shape; may be repeated (default: all)")
    parser.add_argument("--openvino", metavar="PYTHON", help="with openvino-genai and optimum-intel")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads (default: all cores)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="small models, one round")
    arguments = parser.parse_args()
    print(f"{describe_machine(arguments.threads).processor}, {arguments.threads} threads, prompts of {PROMPT} tokens, "
          f"answers of {NUM_TOKENS}", flush=True)  # fmt: skip
    for name in arguments.only or SHAPES:
        with tempfile.TemporaryDirectory() as scratch:
            _measure(name, SHAPES[name], Path(scratch), arguments)


def _measure(name: str, shape: Shape, scratch: Path, arguments: argparse.Namespace) -> None:
    folder = scratch / "model"
    total, active = shape.write(folder, quick=arguments.quick)
    shutil.copy(model_folder(None) / "tokenizer.json", folder)  # any: prompts are token ids
    print(
        f"\n## {name}: {shape.model_type}, {total / 1e6:.0f}M parameters, {active / 1e6:.0f}M for a token\n", flush=True
    )
    environment = os.environ | {"PAGEWOOD_CACHE": str(scratch / "cache"), "HF_HUB_OFFLINE": "1"}
    systems = _systems(shape, folder, scratch, arguments, environment)
    stream = Stream(1 << (26 if arguments.quick else 30), num_threads=arguments.threads)
    bytes_per_s = max(stream.measure())
    del stream
    try:
        for number, system in enumerate(systems):
            begin(system, VOCAB_SIZE, environment, scratch / f"{number}.log", concurrency=CONCURRENCY)
        systems = _fastest_ways(systems)
        measure(systems, VOCAB_SIZE, 1 if arguments.quick else arguments.rounds, concurrency=CONCURRENCY)
        report(systems, concurrency=CONCURRENCY)
        bound = bytes_per_s / (4 * active)
        print(f"\nBound at one request: {bytes_per_s / 1e9:.1f} GB/s, {bound:.1f} tokens/s. Shares of it:\n")
        for system in systems:
            if not system.failure:
                rate = _decode_rate(system, 1 if arguments.quick else arguments.rounds)
                print(f"- {system.name}: {rate:.1f} tokens/s, {rate / bound:.2f}", flush=True)
    finally:
        for system in systems:
            system.stop()


def _fastest_ways(systems: Sequence[System]) -> list[System]:
    """Return the systems with the fastest of the ways of `transformers` only, by short answers; the others end."""
    ways = [one for one in systems if one.options["system"] == "transformers" and not one.failure]
    rng = Random(3)
    prompts = [random_prompts(rng, VOCAB_SIZE, count) for count in CONCURRENCY]
    seconds = {one.name: sum(8 * len(some) / one.generate(some, 8) for some in prompts) for one in ways}
    slower = sorted(ways, key=lambda one: seconds[one.name])[1:]
    for one in slower:
        one.stop()
    if slower:
        print("Seconds for short answers: " + ", ".join(f"{name} {time:.1f}" for name, time in seconds.items()) + "\n")
    return [one for one in systems if one not in slower]


def _decode_rate(system: System, rounds: int) -> float:
    """Return the tokens per second after the first one, at one request: the difference of long and short answers."""
    rng, rates = Random(2), list[float]()
    for _ in range(rounds):
        prompts = random_prompts(rng, VOCAB_SIZE, 1)
        first_s = 1 / system.generate(prompts, 1)
        all_s = (1 + NUM_TOKENS) / system.generate(prompts, 1 + NUM_TOKENS)
        rates.append(NUM_TOKENS / max(all_s - first_s, 1e-9))
    return median(rates)


def _systems(
    shape: Shape, folder: Path, scratch: Path, arguments: argparse.Namespace, environment: dict[str, str]
) -> list[System]:
    shared = {"model": str(folder), "form": "float32", "threads": arguments.threads}
    systems = [System(name="pagewood", options={"system": "pagewood", **shared}, python=sys.executable)]
    for way in EXPERT_WAYS if shape.num_chosen else ("",):
        options = {"system": "transformers", "experts": way, **shared}
        systems.append(System(name=f"transformers {way}".strip(), options=options, python=sys.executable))
    if arguments.openvino:
        out = scratch / "openvino"
        peer = openvino(arguments.openvino, folder, out, "float32", arguments.threads, environment)
        systems += [] if peer is None else [peer]
    return systems


if __name__ == "__main__":
    main()
