"""Measures adapters on a CPU: what rows with adapters cost in a step, and what loading costs those that run.

python benchmarks/adapters.py                  # a model of 110M parameters, 32 requests, adapters of rank 16
python benchmarks/adapters.py --quick          # a tiny model and few steps, only to test the script

Turns come in pairs, one behind the other in changing order, so that other work on the machine meets both. It prints
the quotient of each pair (median, least, most), for turns in which all requests decode:

1. requests with 1, 8 and 32 adapters, over an engine without adapters;
2. what requests without an adapter pay: an engine with adapters that none uses, and one request with an adapter among
   31 without, each over an engine without adapters; one without among 31 with adapters of their own, over 32 with;
3. the time between tokens (median and p99) while 100 adapters are loaded, over the same without loads.
"""

# pyright: basic
# transformers and safetensors are typed in part only.

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias, cast

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

from pagewood.engine.api import Abort, EngineConfig, LoadAdapter, SamplingParams, Submit, UnloadAdapter
from pagewood.engine.build import build_engine
from pagewood.engine.core.loop import Engine
from pagewood.engine.links import MemoryInbox, MemoryOutbox

LARGE = {
    "vocab_size": 32_000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
    "num_attention_heads": 12, "num_key_value_heads": 12,
}  # fmt: skip
TINY = {
    "vocab_size": 500, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip
_Kind: TypeAlias = "tuple[Bench, Sequence[str | None]]"
NUM_REQUESTS = 32
PROMPT_LENGTH = 64
MOST_STEPS = 900


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the adapters")
    parser.add_argument("--rounds", type=int, default=7, help="pairs of each kind")
    parser.add_argument("--steps", type=int, default=60, help="steps of a turn")
    parser.add_argument("--long-steps", type=int, default=400, help="steps of a turn for the third figure, at least")
    parser.add_argument("--loads", type=int, default=100, help="adapters that are loaded while requests run")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    shape = TINY if options.quick else LARGE
    if options.quick:
        options.rounds, options.steps, options.long_steps, options.loads = 2, 4, 20, 4
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_model(folder / "model", shape)
        names = [f"a{number}" for number in range(NUM_REQUESTS)]
        for number, name in enumerate(names):
            write_adapter(folder / name, shape, options.rank, dtype=getattr(torch, options.dtype), seed=number)
        plain, adapted = Bench(folder, ()), Bench(folder, names)
        none: list[str | None] = [None] * NUM_REQUESTS
        alone, all_used = (plain, none), (adapted, names)
        pairs: dict[str, tuple[_Kind, _Kind]] = {
            **{
                f"{num} adapters": ((adapted, [names[i % num] for i in range(NUM_REQUESTS)]), alone)
                for num in (1, 8, 32)
            },
            "none used": ((adapted, none), alone),
            "1 with, 31 without": ((adapted, [*none[1:], names[0]]), alone),
            "1 without, 31 with": ((adapted, [*names[1:], None]), all_used),
        }
        for kind, pair in pairs.items():
            found = [_pair(pair, number, options.steps) for number in range(options.rounds)]
            _show(f"{kind}: a step", [median(own) / median(other) for own, other in found])
        found = [
            _pair(
                ((adapted, names), (adapted, names)), number, options.long_steps, loads=options.loads,
                folder=folder / names[0],
            )
            for number in range(options.rounds)
        ]  # fmt: skip
        for name, share in (("median", 0.5), ("p99", 0.99)):
            quotients = [float(np.quantile(own, share) / np.quantile(other, share)) for own, other in found]
            _show(f"{options.loads} loads: {name} between tokens", quotients)
        plain.engine.close()
        adapted.engine.close()


def _pair(
    kinds: tuple[_Kind, _Kind], number: int, num_steps: int, *, loads: int = 0, folder: Path | None = None
) -> tuple[list[float], list[float]]:
    """Return the seconds of the steps of two turns; every other pair begins with the second. The first has the loads.

    Both have the same number of steps.
    """
    own, other = kinds
    if number % 2 == 0:
        first = own[0].decode(own[1], num_steps, loads=loads, folder=folder)
        return first, other[0].decode(other[1], len(first))
    second = other[0].decode(other[1], num_steps)
    return own[0].decode(own[1], num_steps, loads=loads, folder=folder), second


def _show(kind: str, quotients: Sequence[float]) -> None:
    print(f"{kind:40} {median(quotients):.3f} ({min(quotients):.3f} to {max(quotients):.3f})", flush=True)


class Bench:
    """An engine, and the requests of a turn."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.inbox, self.outbox, self.num_turns = MemoryInbox(), MemoryOutbox(), 0
        config = EngineConfig(
            model=str(folder / "model"),
            adapters=tuple((name, str(folder / name)) for name in names),
            max_adapters=len(names),
            max_running=NUM_REQUESTS,
            max_total_tokens=2 * NUM_REQUESTS * 1024,
            max_length=1024,
            prefix_cache=False,
            overlap=False,
        )
        self.engine: Engine = build_engine(config, inbox=self.inbox, outbox=self.outbox)

    def decode(
        self, adapters: Sequence[str | None], num_steps: int, *, loads: int = 0, folder: Path | None = None
    ) -> list[float]:
        """Return the seconds of steps in which one request for each of `adapters` decodes.

        Args:
            adapters: of the requests.
            num_steps: at most; more if adapters are still being loaded.
            loads: how many adapters are loaded meanwhile, one after the other.
            folder: of these.
        """
        self.num_turns += 1
        rng = np.random.default_rng(self.num_turns)
        for number, adapter in enumerate(adapters):
            tokens = rng.integers(0, 500, PROMPT_LENGTH).astype("<i4").tobytes()
            sampling = SamplingParams(max_tokens=1024 - PROMPT_LENGTH, temperature=0.0, ignore_eos=True)
            name = f"{self.num_turns} {number}"
            self.inbox.put(Submit(request_id=name, tokens=tokens, sampling=sampling, adapter=adapter))
        while len(self.engine._state.running) < len(adapters) or any(  # pyright: ignore[reportPrivateUsage]
            not request.num_generated
            for request in self.engine._state.running  # pyright: ignore[reportPrivateUsage]
        ):
            self.engine.step()
        times: list[float] = []
        num_asked = num_loaded = 0
        while len(times) < num_steps or (num_loaded < loads and len(times) < MOST_STEPS):
            if num_asked == num_loaded < loads:
                name = f"load {self.num_turns} {num_asked}"
                self.inbox.put(LoadAdapter(request_id=name, name=name.replace(" ", "-"), folder=str(folder)))
                num_asked += 1
            began_s = time.perf_counter()
            self.engine.step()
            times.append(time.perf_counter() - began_s)
            ended = [delta for delta in self.outbox.take() if delta.request_id.startswith("load")]
            if any(delta.refusal is not None for delta in ended):
                raise RuntimeError(f"an adapter was not loaded: {ended[0].refusal}")
            num_loaded += len(ended)
        for number in range(num_loaded):
            self.inbox.put(UnloadAdapter(request_id=f"unload {number}", name=f"load-{self.num_turns}-{number}"))
        for number in range(len(adapters)):
            self.inbox.put(Abort(request_id=f"{self.num_turns} {number}"))
        self.engine.step()
        self.outbox.take()
        return times


def write_model(folder: Path, shape: dict[str, int], *, seed: int = 0) -> None:
    """Write a model with random weights."""
    torch.manual_seed(seed)
    config: Any = transformers.LlamaConfig(**cast("dict[str, Any]", shape))
    transformers.LlamaForCausalLM(config).save_pretrained(str(folder))


def write_adapter(folder: Path, shape: dict[str, int], rank: int, *, dtype: torch.dtype, seed: int) -> None:
    """Write an adapter of all projections with random numbers."""
    folder.mkdir()
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    sizes = {f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
    sizes |= {"mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner), "mlp.down_proj": (inner, hidden)}
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": [one.split(".")[1] for one in sizes],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    torch.manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(shape["num_hidden_layers"]):
        for name, (inputs, outputs) in sizes.items():
            place = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{place}.lora_A.weight"] = (0.02 * torch.randn(rank, inputs)).to(dtype)
            tensors[f"{place}.lora_B.weight"] = (0.02 * torch.randn(outputs, rank)).to(dtype)
    save_file(tensors, folder / "adapter_model.safetensors")


if __name__ == "__main__":
    main()
