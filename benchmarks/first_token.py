"""Measures the time to the first token in a closed loop in one process, for ways to divide prompts among steps.

python benchmarks/first_token.py                         # all variants, both loads: about ten minutes on two cores
python benchmarks/first_token.py --variant default --variant "2 prompts" --load own-8
python benchmarks/first_token.py --variant default --openvino PYTHON    # beside OpenVINO GenAI, whose Python is given
python benchmarks/first_token.py --variant default --openvino PYTHON --checkpoint bfloat16     # both by their defaults
python benchmarks/first_token.py --quick                 # a tiny model, only to test the script

Every client sends its next request when its answer has ended. All begin together, so they run in lockstep at first. The
model has 110M random weights, as in cpu_end_to_end.py. Variants take turns, so that a slow minute of the machine hits
all of them; a variant that has a first token sooner must keep 97% of the default's tokens per second.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from pagewood.engine.api import ActivationFormat, EngineConfig, SamplingParams, Submit, WeightFormat
from pagewood.engine.model_folder.folder import model_folder
from peers.closed_loop import Load, Times, run

PEERS = Path(__file__).parent / "peers"
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "together": {"joint_prefill_tokens": 1 << 20},
    "1 prompt": {"max_prefills": 1},
    "2 prompts": {"max_prefills": 2},
    "chunk 128": {"chunked_prefill_size": 128},
    "chunk 256": {"chunked_prefill_size": 256},
    "step 50 ms": {"target_step_s": 0.05},
    "step 70 ms": {"target_step_s": 0.07},
    "step 100 ms": {"target_step_s": 0.1},
    "step 200 ms": {"target_step_s": 0.2},
    "shortest": {"schedule_policy": "shortest"},
    "shortest, 128": {"schedule_policy": "shortest", "chunked_prefill_size": 128},
    "stall-free": {"schedule_preset": "stall-free"},
    "prefill-first": {"schedule_preset": "prefill-first"},
    "prefill-first, 128": {"schedule_preset": "prefill-first", "chunked_prefill_size": 128},
}
"""Fields of the configuration, by the name of the variant."""


LOADS = {
    "own-8": Load(num_clients=8, num_shared=0, num_own=128),
    "own-32": Load(num_clients=32, num_shared=0, num_own=128),
    "shared-8": Load(num_clients=8, num_shared=1024, num_own=32),
    "shared-32": Load(num_clients=32, num_shared=1024, num_own=32),
}
QUICK = {"own-4": Load(num_clients=4, num_shared=0, num_own=16, num_output=8)}
PRECISIONS = {"OpenVINO": "", "OpenVINO, fp32": "f32"}
"""Of a peer's arithmetic, by the name of its row; empty: its own choice."""


class Pagewood:
    """An engine of ours, stepped by the caller."""

    def __init__(self, config: EngineConfig) -> None:
        from pagewood.engine.build import build_engine
        from pagewood.engine.links import MemoryInbox, MemoryOutbox

        self._inbox, self._outbox = MemoryInbox(), MemoryOutbox()
        self._engine = build_engine(config, inbox=self._inbox, outbox=self._outbox)
        self._pending: Any = None
        self.vocab_size = self._engine.info.vocab_size

    def send(self, name: str, tokens: list[int], num_output: int) -> None:
        """Add a request."""
        sampling = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
        self._inbox.put(Submit(request_id=name, tokens=np.array(tokens, "<i4").tobytes(), sampling=sampling))

    def step(self) -> list[tuple[str, int, bool]]:
        """Do one step."""
        self._pending = self._engine.advance(self._pending)
        news = self._outbox.take()
        for delta in news:
            if delta.refusal is not None:
                raise RuntimeError(f"request {delta.request_id}: {delta.refusal.message}")
        return [(delta.request_id, len(delta.tokens), delta.finish is not None) for delta in news]

    def run(self, load: Load, seed: int) -> dict[str, Any]:
        """Run a load; what is in flight at its end is awaited."""
        found = asdict(run(self, load, seed=seed))
        while self._pending is not None:
            self.step()
        return found

    def close(self) -> None:
        """End it."""
        self._engine.close()


class Peer:
    """OpenVINO GenAI in a process of its own, which computes nothing while it is not asked."""

    def __init__(self, python: str, options: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [python, str(PEERS / "first_token_worker.py"), json.dumps(options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self._answer()

    def run(self, load: Load, seed: int) -> dict[str, Any]:
        """Run a load."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"load": asdict(load), "seed": seed}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer has ended with exit code {self._process.wait()}")
        return json.loads(line)


def row(times: Times) -> str:
    """Return the columns of the table."""
    first = np.percentile(times.first_s, (50, 90, 99)) * 1e3
    between = np.percentile(times.between_s, (50, 99)) * 1e3
    cells = [*(f"{one:8.0f}" for one in first), *(f"{one:8.1f}" for one in between)]
    return " ".join([*cells, f"{times.num_tokens / times.seconds:8.1f}"])


def compare(
    folder: Path, converted: Path | None, load: Load, names: Sequence[str], arguments: argparse.Namespace
) -> None:
    """Run the variants and the peer in turns over one load, and print a line for each."""
    ours: dict[str, Pagewood] = {}
    for name in names:
        config = EngineConfig(
            model=str(folder),
            num_threads=arguments.threads,
            weights=arguments.weights,
            activations=arguments.activations,
            max_running=load.num_clients,
            max_total_tokens=64 + load.num_clients * (load.length + 16),
            **VARIANTS[name],
        )
        ours[name] = Pagewood(config)
    systems: dict[str, Pagewood | Peer] = {**ours}
    if converted is not None:
        options: dict[str, Any] = {
            "model": str(converted), "threads": arguments.threads, "max_running": load.num_clients,
            "vocab_size": ours[names[0]].vocab_size,
        }  # fmt: skip
        for name, precision in PRECISIONS.items():
            systems[name] = Peer(arguments.openvino, options | {"precision": precision})
    times = {name: Times() for name in systems}
    for number in range(arguments.rounds + 1):  # prompts of different rounds have nothing in common
        order = list(systems)
        random.Random(number).shuffle(order)
        for name in order:
            found = systems[name].run(load, number)
            if number:
                times[name].add(found)
    for name, one in times.items():
        print(f"{name:20} {row(one)}", flush=True)
    for system in systems.values():
        system.close()


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model; its numbers mean nothing")
    parser.add_argument("--variant", action="append", choices=list(VARIANTS), help="may be repeated (default: all)")
    parser.add_argument(
        "--load", action="append", choices=list(LOADS), help="may be repeated (default: own-8, shared-8)"
    )
    parser.add_argument("--threads", type=int, default=2, help="compute threads (default 2)")
    parser.add_argument(
        "--checkpoint",
        choices=("float32", "bfloat16"),
        default="float32",
        help="type of the weights in the model's folder",
    )
    parser.add_argument("--weights", choices=get_args(WeightFormat), default="auto", help="of ours (default auto)")
    parser.add_argument(
        "--activations",
        choices=get_args(ActivationFormat),
        default="auto",
        help="of ours; where the processor has bfloat16, OpenVINO chooses it, and auto for such weights (default auto)",
    )
    parser.add_argument("--openvino", metavar="PYTHON", help="with openvino-genai and optimum-intel[nncf]: beside it")
    parser.add_argument("--each", type=int, default=2, help="requests of each client in a round (default 2)")
    parser.add_argument("--rounds", type=int, default=2, help="rounds after the warm-up (default 2)")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # read when torch is imported

    from end_to_end import model

    loads = QUICK if arguments.quick else {name: LOADS[name] for name in arguments.load or ("own-8", "shared-8")}
    with tempfile.TemporaryDirectory() as scratch:
        folder, converted = Path(scratch) / "model", None
        shape = model.QUICK if arguments.quick else model.FULL
        model.write_model(shape, folder, seed=0, dtype=arguments.checkpoint)
        if arguments.openvino:
            converted = convert(arguments.openvino, folder, Path(scratch) / "openvino")
        for name, load in loads.items():
            load = replace(load, num_each=arguments.each)
            print(f"\n{name}: {load}")
            print(f"{'':20} {'TTFT p50':>8} {'p90':>8} {'p99 ms':>8} {'ITL p50':>8} {'p99 ms':>8} {'tokens/s':>8}")
            compare(folder, converted, load, arguments.variant or list(VARIANTS), arguments)


def convert(python: str, folder: Path, out: Path) -> Path:
    """Convert the model for OpenVINO, and return its folder."""
    command = [python, str(PEERS / "convert_openvino.py"), str(folder), str(out), "float32"]
    subprocess.run(command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, check=True)
    shutil.copy(model_folder(None) / "tokenizer.json", out)  # any: prompts are token ids
    return out


if __name__ == "__main__":
    main()
