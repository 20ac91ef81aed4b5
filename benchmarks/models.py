# pyright: basic
# (torch and transformers are typed in part only)
"""Measures one model of each kind beside `transformers`, OpenVINO GenAI and llama.cpp: one machine, one run, in turns.

python benchmarks/models.py                                   # all parts beside transformers, half an hour, 20 GB
python benchmarks/models.py --only experts --concurrency 32   # one part of them
python benchmarks/models.py --only dense --peers transformers openvino --openvino PYTHON
python benchmarks/models.py --only latent --peers llama.cpp --llama-cpp PYTHON
python benchmarks/models.py --quick                           # small models; shows that it works

dense     a Gemma 3 with windows
experts   a mixture like Qwen3's, 1.5 billion parameters, of which 0.3 are active
latent    a small DeepSeek V2, with the latents and heads of V2 Lite
context   the same behind 8,192 tokens, at one request: decoding alone
hybrid    a small Qwen3.5: three of four layers have a state of 16 matrices of 128 by 128 instead of keys and values

Weights are random, numbers float32. Every system stays loaded in a process of its own and is asked once a round, in
another order each time, for answers to random prompts. Tokens are sampled with temperature 1: greedy answers of random
weights repeat, and with them the choice of experts. `transformers` computes experts in the fastest of its ways, by
short answers; a way that takes more memory than there is ends. The share of the bandwidth bound is that of the tokens
after the first, at one request: the bytes of the weights that a token uses, and of the latents of 8,192 tokens, by the
rate at which all threads read a large array, the better of just before and just after it.

A peer needs a Python of its own. OpenVINO GenAI: `openvino-genai openvino-tokenizers nncf optimum-intel torch`; its
exporter takes Gemma 3 with transformers 5.0, the mixture with its own version, DeepSeek V2 with none. llama.cpp:
`llama-cpp-python`; it gets the weights as a GGUF file, and keeps keys and values as float16.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import median
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from end_to_end.machine import Stream, describe_machine
from pagewood.engine.assembly.available_memory import available_memory_bytes
from pagewood.engine.model_folder.folder import model_folder
from peers.systems import NUM_TOKENS, PROMPT, System, begin, measure, openvino, random_prompts, report

CONCURRENCY = (1, 8, 32)
EXPERT_WAYS = ("eager", "batched_mm", "grouped_mm")
PEERS = ("transformers", "openvino", "llama.cpp")
VOCAB_SIZE = 32_000
CONTEXT = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model with random weights."""

    model_type: str
    fields: Mapping[str, Any]
    quick: Mapping[str, Any]
    """Fields of the small model."""
    gguf: str
    """The name that llama.cpp has for it."""
    keys: Mapping[str, Any]
    """Keys of a GGUF file beside those that all models have."""
    num_chosen: int = 0
    """Experts of each layer that a token uses."""
    num_experts: int = 1
    """Experts of each layer; 1: the feed-forward is dense."""
    context: int = 0
    """Tokens of the prompt if decoding behind it is measured alone; 0: the throughput of short requests is."""

    def cache_bytes(self, *, quick: bool) -> int:
        """Return the bytes of the latents that a token behind the context reads."""
        fields = {**self.fields, **(self.quick if quick else {})}
        return self.context * fields["num_hidden_layers"] * 4 * (fields["kv_lora_rank"] + fields["qk_rope_head_dim"])

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


LATENT = Shape(
    model_type="deepseek_v2",
    fields={
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 16,
        "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": 512, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128, "v_head_dim": 128, "max_position_embeddings": 16384, "n_routed_experts": 16,
        "num_experts_per_tok": 4, "n_shared_experts": 2, "moe_intermediate_size": 512, "topk_method": "greedy",
        "n_group": None, "topk_group": None, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0,
    },
    quick={"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
           "num_key_value_heads": 4},
    gguf="deepseek2",
    keys={
        "attention.head_count_kv": 1, "attention.key_length": 576, "attention.value_length": 512,
        "attention.kv_lora_rank": 512, "attention.q_lora_rank": 512,
        "attention.key_length_mla": 192, "attention.value_length_mla": 128,
        "rope.dimension_count": 64, "expert_gating_func": 1,
    },
    num_chosen=4,
    num_experts=16,
)  # fmt: skip
HYBRID = Shape(
    model_type="qwen3_5_text",
    fields={
        "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 8192, "linear_num_key_heads": 16,
        "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    },
    quick={"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "linear_num_key_heads": 2,
           "linear_num_value_heads": 2},
    gguf="qwen35",
    keys={},
)  # fmt: skip
SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "dense": Shape(
            model_type="gemma3_text",
            fields={
                "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 18, "num_attention_heads": 4,
                "num_key_value_heads": 1, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 512,
                "max_position_embeddings": 8192,
            },
            quick={"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32},
            gguf="gemma3",
            keys={"attention.sliding_window": 512, "rope.freq_base": 1e6},
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
            gguf="qwen3moe",
            keys={},
            num_chosen=8,
            num_experts=64,
        ),
        "latent": LATENT,
        "hybrid": HYBRID,
        "context": replace(LATENT, context=CONTEXT),
    }
)  # fmt: skip


def main() -> None:
    """Measure each shape and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=SHAPES, help="a part; may be repeated (default: all)")
    parser.add_argument(
        "--peers", nargs="*", choices=PEERS, default=["transformers"], help="systems beside ours (default: %(default)s)"
    )
    parser.add_argument("--openvino", metavar="PYTHON", help="with openvino-genai and optimum-intel")
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="with llama-cpp-python")
    parser.add_argument("--ways", nargs="+", choices=EXPERT_WAYS, default=EXPERT_WAYS,
                        help="of `transformers` to compute experts; the fastest is measured")  # fmt: skip
    parser.add_argument("--concurrency", nargs="+", type=int, default=CONCURRENCY, help="(default: 1 8 32)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads (default: all cores)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="small models, one round")
    arguments = parser.parse_args()
    for name, python in (("openvino", arguments.openvino), ("llama.cpp", arguments.llama_cpp)):
        if name in arguments.peers and not python:
            parser.error(f"--peers {name} needs --{name.replace('.', '-')} PYTHON")
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
    concurrency = (1,) if shape.context else tuple(arguments.concurrency)
    rounds = 1 if arguments.quick else arguments.rounds
    systems = _systems(shape, folder, scratch, arguments, environment)
    try:
        for number, system in enumerate(systems):
            begin(system, VOCAB_SIZE, environment, scratch / f"{number}.log", concurrency=concurrency)
        if not shape.context:
            measure(systems, VOCAB_SIZE, rounds, concurrency=concurrency)
            report(systems, concurrency=concurrency)
        read = 4 * active + (shape.cache_bytes(quick=arguments.quick) if shape.context else 0)
        _report_shares(systems, read, shape.context or PROMPT, rounds, arguments)
    finally:
        for system in systems:
            system.stop()


def _report_shares(systems: list[System], read: int, length: int, rounds: int, arguments: argparse.Namespace) -> None:
    """Print the share of the bandwidth bound of each system that runs, by the rate of memory around each answer."""
    stream = Stream(1 << (26 if arguments.quick else 28), num_threads=arguments.threads)
    prompt = [Random(2).randrange(VOCAB_SIZE) for _ in range(length)]
    rates: dict[str, list[float]] = {system.name: [] for system in systems if not system.failure}
    shares: dict[str, list[float]] = {name: [] for name in rates}
    bytes_per_s = [max(stream.measure())]
    for _ in range(rounds):
        for system in systems:
            if system.failure:
                continue
            rates[system.name].append(system.decode(prompt, NUM_TOKENS))
            bytes_per_s.append(max(stream.measure()))
            shares[system.name].append(rates[system.name][-1] * read / max(bytes_per_s[-2:]))
    print(f"\nBound at one request: {read / 1e6:.0f} MB; memory gave {min(bytes_per_s) / 1e9:.1f} to "
          f"{max(bytes_per_s) / 1e9:.1f} GB/s. Shares of it, least to most:\n")  # fmt: skip
    for system in systems:
        if system.failure:
            print(f"- {system.name}: {system.failure}", flush=True)
            continue
        own, of = rates[system.name], shares[system.name]
        print(f"- {system.name}: {median(own):.1f} tokens/s ({min(own):.1f} to {max(own):.1f}), "
              f"{median(of):.2f} ({min(of):.2f} to {max(of):.2f})", flush=True)  # fmt: skip


def _systems(
    shape: Shape, folder: Path, scratch: Path, arguments: argparse.Namespace, environment: dict[str, str]
) -> list[System]:
    shared = {"model": str(folder), "form": "float32", "threads": arguments.threads, "temperature": 1.0}
    systems = [System(name="pagewood", options={"system": "pagewood", **shared}, python=sys.executable)]
    if "transformers" in arguments.peers:
        options = {"system": "transformers", **shared}
        options |= _fastest_way(options, arguments, scratch, environment) if shape.num_chosen else {}
        name = f"transformers {options.get('experts', '')}".strip()
        systems.append(System(name=name, options=options, python=sys.executable))
    if "openvino" in arguments.peers:
        out = scratch / "openvino"
        peer = openvino(arguments.openvino, folder, out, "float32", arguments.threads, environment)
        if peer is not None:
            shutil.copy(folder / "tokenizer.json", out)
            peer.options["temperature"] = 1.0
            systems.append(peer)
    if "llama.cpp" in arguments.peers:
        file = scratch / "model.gguf"
        _write_gguf(shape, folder, file)
        most = 1 if shape.context else max(arguments.concurrency)
        length = max(512, 2 * shape.context)
        options = {**shared, "system": "llama.cpp", "model": str(file), "repacks": True, "most": most, "length": length}
        python = arguments.llama_cpp
        systems.append(System(name="llama.cpp", options=options, python=python, slower={"repacks": False}))
    return systems


def _fastest_way(
    options: Mapping[str, Any], arguments: argparse.Namespace, scratch: Path, environment: dict[str, str]
) -> dict[str, Any]:
    """Return the option that lets `transformers` compute experts in the fastest of its ways; one process at a time."""
    if len(arguments.ways) == 1:
        return {"experts": arguments.ways[0]}
    rng = Random(3)
    prompts = [random_prompts(rng, VOCAB_SIZE, count) for count in arguments.concurrency]
    seconds: dict[str, float] = {}
    for way in arguments.ways:
        limit = {"most_bytes": available_memory_bytes() * 4 // 5}
        system = System(name=f"transformers {way}", options={**options, "experts": way, **limit}, python=sys.executable)
        begin(system, VOCAB_SIZE, environment, scratch / "way.log", concurrency=arguments.concurrency)
        if not system.failure:
            seconds[way] = sum(8 * len(some) / system.generate(some, 8) for some in prompts)
            system.stop()
    print("Seconds for short answers: " + ", ".join(f"{way} {time:.1f}" for way, time in seconds.items()) + "\n")
    return {"experts": min(seconds, key=lambda way: seconds[way])}


def _write_gguf(shape: Shape, folder: Path, file: Path) -> None:
    from gguf_files import write_gguf

    config = json.loads((folder / "config.json").read_text())
    own = {"attention.value_length": config["head_dim"], **shape.keys}
    keys = {f"{shape.gguf}.{key}": value for key, value in own.items()}
    keys[f"{shape.gguf}.vocab_size"] = VOCAB_SIZE
    write_gguf(folder, file, architecture=shape.gguf, keys=keys, tokenizer={"tokenizer.ggml.model": "no_vocab"})


if __name__ == "__main__":
    main()
