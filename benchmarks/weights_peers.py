# pyright: basic
# (torch is untyped)
"""Measures generation with int8 and int4 weights beside OpenVINO GenAI and llama.cpp: one machine, one run, in turns.

python benchmarks/weights_peers.py --openvino /path/to/python --llama-cpp /path/to/python    # four minutes
python benchmarks/weights_peers.py --quick                                                   # shows that it works

Each peer is in an environment of its own, whose Python is given, and in a process that stays loaded; a peer without a
Python is left out. `nox -s peers` makes the environments. The model is the 110M Llama of the end-to-end benchmark with
random weights, converted by optimum-intel (symmetric, int4 in groups of 32) and by the `gguf` package (Q8_0, Q4_0). A
round asks every system once, in another order each time, for greedy answers to random prompts; the table has the median
and the extremes of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from end_to_end.machine import describe_machine
from end_to_end.model import FULL, QUICK, ModelShape, write_model
from gguf_files import write_gguf
from pagewood.engine.folder import model_folder

HERE = Path(__file__).parent / "peers"
PROMPT, NUM_TOKENS = 32, 64
CONCURRENCY = (1, 8)


@dataclass(kw_only=True)
class System:
    """An engine with one form of weights."""

    name: str
    options: dict[str, Any]
    python: str
    process: subprocess.Popen[str] | None = None
    rates: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    """Tokens per second of each round, by concurrency."""

    def start(self, environment: dict[str, str], log: Path) -> None:
        """Load it; the process waits for prompts."""
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [self.python, str(HERE / "worker.py"), json.dumps(self.options)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
            )  # fmt: skip
        if not self._answer():
            raise RuntimeError(f"{self.name} did not start:\n{log.read_text()[-2000:]}")

    def generate(self, prompts: list[list[int]], num_tokens: int) -> float:
        """Return tokens per second, the prompts included in the time."""
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "num_tokens": num_tokens}) + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        if answer.get("tokens") != num_tokens * len(prompts):
            raise RuntimeError(f"{self.name} must make {num_tokens * len(prompts)} tokens, got {answer}")
        return answer["tokens"] / answer["seconds"]

    def stop(self) -> None:
        """End the process."""
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
            self.process.wait(timeout=60)

    def _answer(self) -> dict[str, Any]:
        assert self.process is not None
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else {}


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--openvino", metavar="PYTHON", help="with openvino-genai and optimum-intel[nncf]")
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="with llama-cpp-python")
    parser.add_argument(
        "--no-repack",
        action="store_true",
        help="keep llama.cpp from laying weights out anew, for machines on which its AMX instructions are illegal",
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads (default: all cores)")
    parser.add_argument("--rounds", type=int, default=7, help="(default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a small model, one round")
    arguments = parser.parse_args()
    shape, rounds = (QUICK, 1) if arguments.quick else (FULL, arguments.rounds)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        count = write_model(shape, folder, seed=0)
        print(f"{describe_machine(arguments.threads).processor}, {arguments.threads} threads, {count / 1e6:.0f}M "
              f"parameters, prompts of {PROMPT} tokens, answers of {NUM_TOKENS}\n", flush=True)  # fmt: skip
        environment = os.environ | {"PAGEWOOD_CACHE": str(Path(scratch) / "cache"), "HF_HUB_OFFLINE": "1"}
        found = peers(folder, Path(scratch), shape, arguments, environment)
        shutil.copy(model_folder(None) / "tokenizer.json", folder)  # any: prompts are token ids
        systems = [*ours(folder, arguments), *found]
        try:
            for number, system in enumerate(systems):
                system.start(environment, Path(scratch) / f"{number}.log")
            measure(systems, shape, rounds)
        finally:
            for system in systems:
                system.stop()
    report(systems)


def ours(folder: Path, arguments: argparse.Namespace) -> list[System]:
    """Return this engine with each form."""
    return [
        System(
            name=f"pagewood {form}",
            options={"system": "pagewood", "model": str(folder), "form": form, "threads": arguments.threads},
            python=sys.executable,
        )
        for form in ("float32", "int8", "int4")
    ]


def peers(
    folder: Path, scratch: Path, shape: ModelShape, arguments: argparse.Namespace, environment: dict[str, str]
) -> list[System]:
    """Convert the model for the peers that are there."""
    found: list[System] = []
    for form in ("int8", "int4") if arguments.openvino else ():
        out = scratch / f"openvino-{form}"
        command = [arguments.openvino, str(HERE / "convert_openvino.py"), str(folder), str(out), form]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the conversion for OpenVINO failed:\n{done.stderr[-2000:]}")
        options = {"system": "openvino", "model": str(out), "threads": arguments.threads}
        found.append(System(name=f"OpenVINO GenAI {form}", options=options, python=arguments.openvino))
    for kind in ("Q8_0", "Q4_0") if arguments.llama_cpp else ():
        file = scratch / f"{kind}.gguf"
        write_gguf(folder, file, architecture="llama", kinds=[kind], keys={"llama.vocab_size": shape.vocab_size},
                   tokenizer={"tokenizer.ggml.model": "no_vocab"})  # fmt: skip
        options = {"system": "llama.cpp", "model": str(file), "threads": arguments.threads}
        options["repacks"] = not arguments.no_repack
        found.append(System(name=f"llama.cpp {kind.lower()}", options=options, python=arguments.llama_cpp))
    return found


def measure(systems: list[System], shape: ModelShape, rounds: int) -> None:
    """Ask every system in every round; the first answers warm up."""
    rng = random.Random(0)

    def prompts(count: int) -> list[list[int]]:
        return [[rng.randrange(shape.vocab_size) for _ in range(PROMPT)] for _ in range(count)]

    for system in systems:
        for count in CONCURRENCY:
            system.generate(prompts(count), 8)
    for _ in range(rounds):
        for count in CONCURRENCY:
            asked = prompts(count)
            for system in rng.sample(systems, len(systems)):
                system.rates.setdefault(count, []).append(system.generate(asked, NUM_TOKENS))


def report(systems: list[System]) -> None:
    """Print tokens per second."""
    print("| system | " + " | ".join(f"tokens/s with {count} at once (least to most)" for count in CONCURRENCY) + " |")
    print("|---|" + "--:|" * len(CONCURRENCY))
    for system in systems:
        cells = [f"{median(rates):.0f} ({min(rates):.0f} to {max(rates):.0f})" for rates in system.rates.values()]
        print(f"| {system.name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
