"""Measures the time to the first token in a closed loop in one process, for ways to divide prompts among steps.

python benchmarks/first_token.py                         # all variants, both loads: about ten minutes on two cores
python benchmarks/first_token.py --variant default --variant "2 prompts" --load own-8
python benchmarks/first_token.py --quick                 # a tiny model, only to test the script

Every client sends its next request when its answer has ended. All begin together, so they run in lockstep at first. The
model has 110M random weights, as in cpu_end_to_end.py. Variants take turns, so that a slow minute of the machine hits
all of them; a variant that has a first token sooner must keep 97% of the default's tokens per second.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from pagewood.engine.api import EngineConfig, SamplingParams, Submit

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "1 prompt": {"max_prefills": 1},
    "2 prompts": {"max_prefills": 2},
    "chunk 128": {"chunked_prefill_size": 128},
    "chunk 256": {"chunked_prefill_size": 256},
    "step 100 ms": {"target_step_s": 0.1},
    "step 200 ms": {"target_step_s": 0.2},
    "shortest": {"schedule_policy": "shortest"},
    "shortest, 128": {"schedule_policy": "shortest", "chunked_prefill_size": 128},
    "stall-free": {"schedule_preset": "stall-free"},
    "prefill-first": {"schedule_preset": "prefill-first"},
    "prefill-first, 128": {"schedule_preset": "prefill-first", "chunked_prefill_size": 128},
}
"""Fields of the configuration, by the name of the variant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Clients that send one request after the other; a prompt is the shared prefix and tokens of its own."""

    num_clients: int
    num_shared: int
    num_own: int
    num_output: int = 64

    @property
    def length(self) -> int:
        """Tokens of one request at its end."""
        return self.num_shared + self.num_own + self.num_output


LOADS = {
    "own-8": Load(num_clients=8, num_shared=0, num_own=128),
    "own-32": Load(num_clients=32, num_shared=0, num_own=128),
    "shared-8": Load(num_clients=8, num_shared=1024, num_own=32),
    "shared-32": Load(num_clients=32, num_shared=1024, num_own=32),
}
QUICK = {"own-4": Load(num_clients=4, num_shared=0, num_own=16, num_output=8)}


@dataclass(slots=True)
class Times:
    """What the clients have seen, over all rounds of a variant."""

    first_s: list[float] = field(default_factory=list[float])
    between_s: list[float] = field(default_factory=list[float])
    num_tokens: int = 0
    seconds: float = 0.0

    def row(self) -> str:
        """Return the columns of the table."""
        first = np.percentile(self.first_s, (50, 90, 99)) * 1e3
        between = np.percentile(self.between_s, (50, 99)) * 1e3
        cells = [*(f"{one:8.0f}" for one in first), *(f"{one:8.1f}" for one in between)]
        return " ".join([*cells, f"{self.num_tokens / self.seconds:8.1f}"])


def run(engine: Any, inbox: Any, outbox: Any, load: Load, *, num_each: int, seed: int, times: Times | None) -> None:
    """Let every client send `num_each` requests, and add what it sees to `times` (None: a warm-up)."""
    shared_rng, rng = random.Random("shared"), random.Random(seed)
    vocab_size: int = engine.info.vocab_size
    shared = [shared_rng.randrange(vocab_size) for _ in range(load.num_shared)]
    sampling = SamplingParams(max_tokens=load.num_output, temperature=0.0, ignore_eos=True)
    sent_s: dict[str, float] = {}
    last_s: dict[str, float] = {}
    num_sent = [0] * load.num_clients

    def send(client: int) -> None:
        name = f"{client} {num_sent[client]}"
        num_sent[client] += 1
        tokens = np.array(shared + [rng.randrange(vocab_size) for _ in range(load.num_own)], "<i4").tobytes()
        sent_s[name] = perf_counter()
        inbox.put(Submit(request_id=name, tokens=tokens, sampling=sampling))

    start_s = perf_counter()
    for client in range(load.num_clients):
        send(client)
    pending, num_open, num_tokens = None, load.num_clients, 0
    while num_open or pending is not None:
        pending = engine.advance(pending)
        now_s = perf_counter()
        for delta in outbox.take():
            name = delta.request_id
            if delta.refusal is not None:
                raise RuntimeError(f"request {name}: {delta.refusal.message}")
            num_tokens += len(delta.tokens)
            if times is not None and delta.tokens:
                if name in last_s:
                    times.between_s.append(now_s - last_s[name])
                else:
                    times.first_s.append(now_s - sent_s[name])
                last_s[name] = now_s
            if delta.finish is not None:
                client = int(name.split()[0])
                num_open -= 1
                if num_sent[client] < num_each:
                    send(client)
                    num_open += 1
    if times is not None:
        times.num_tokens += num_tokens
        times.seconds += perf_counter() - start_s


def compare(folder: Path, load: Load, names: Sequence[str], *, num_threads: int, num_each: int, rounds: int) -> None:
    """Run the variants in turns over one load, and print a line for each."""
    from pagewood.engine.build import build_engine
    from pagewood.engine.links import MemoryInbox, MemoryOutbox

    engines: dict[str, tuple[Any, MemoryInbox, MemoryOutbox]] = {}
    for name in names:
        inbox, outbox = MemoryInbox(), MemoryOutbox()
        config = EngineConfig(
            model=str(folder),
            num_threads=num_threads,
            max_running=load.num_clients,
            max_total_tokens=64 + load.num_clients * (load.length + 16),
            **VARIANTS[name],
        )
        engines[name] = build_engine(config, inbox=inbox, outbox=outbox), inbox, outbox
    times = {name: Times() for name in names}
    for seed in range(-1, rounds):
        for name, parts in engines.items():
            run(*parts, load, num_each=num_each, seed=seed, times=None if seed < 0 else times[name])
    for name, one in times.items():
        print(f"{name:20} {one.row()}", flush=True)
    for engine, _, _ in engines.values():
        engine.close()


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model; its numbers mean nothing")
    parser.add_argument("--variant", action="append", choices=list(VARIANTS), help="may be repeated (default: all)")
    parser.add_argument(
        "--load", action="append", choices=list(LOADS), help="may be repeated (default: own-8, shared-8)"
    )
    parser.add_argument("--threads", type=int, default=2, help="compute threads (default 2)")
    parser.add_argument("--each", type=int, default=2, help="requests of each client in a round (default 2)")
    parser.add_argument("--rounds", type=int, default=2, help="rounds after the warm-up (default 2)")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # read when torch is imported

    from end_to_end import model

    loads = QUICK if arguments.quick else {name: LOADS[name] for name in arguments.load or ("own-8", "shared-8")}
    with tempfile.TemporaryDirectory() as folder:
        model.write_model(model.QUICK if arguments.quick else model.FULL, Path(folder), seed=0)
        for name, load in loads.items():
            print(f"\n{name}: {load}")
            print(f"{'':20} {'TTFT p50':>8} {'p90':>8} {'p99 ms':>8} {'ITL p50':>8} {'p99 ms':>8} {'tokens/s':>8}")
            compare(
                Path(folder), load, arguments.variant or list(VARIANTS), num_threads=arguments.threads,
                num_each=arguments.each, rounds=arguments.rounds,
            )  # fmt: skip


if __name__ == "__main__":
    main()
