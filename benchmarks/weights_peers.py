# pyright: basic
# (torch is untyped)
"""Measures generation with int8 and int4 weights beside OpenVINO GenAI and llama.cpp: one machine, one run, in turns.

python benchmarks/weights_peers.py --openvino /path/to/python --llama-cpp /path/to/python    # four minutes
python benchmarks/weights_peers.py --quick                                                   # shows that it works

Each peer is in an environment of its own, whose Python is given, and in a process that stays loaded; a peer without a
Python is left out, and one whose process ends gets a row that says so. llama.cpp is first started again without its
fastest layouts, whose instructions some virtual machines lack. `nox -s peers` makes the environments. The model is the
110M Llama of the end-to-end benchmark with random weights, converted by optimum-intel (symmetric, int4 in groups of 32)
and by the `gguf` package (Q8_0, Q4_0). A round asks every system once, in another order each time, for greedy answers
to random prompts; the table has the median and the extremes of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from end_to_end.machine import describe_machine
from end_to_end.model import FULL, QUICK, ModelShape, write_model
from gguf_files import write_gguf
from pagewood.engine.model_folder.folder import model_folder

HERE = Path(__file__).parent / "peers"
PROMPT, NUM_TOKENS = 32, 64
CONCURRENCY = (1, 8)


class PeerEnded(RuntimeError):
    """The process of a system has ended, or has answered wrongly; the others go on."""


@dataclass(kw_only=True)
class System:
    """An engine with one form of weights."""

    name: str
    options: dict[str, Any]
    python: str
    slower: dict[str, Any] = field(default_factory=dict[str, Any])
    """Options with which it is started once more if its process ends while it starts or warms up."""
    process: subprocess.Popen[str] | None = None
    rates: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    """Tokens per second of each round, by concurrency."""
    failure: str = ""
    """Why it is no longer asked."""

    def start(self, environment: dict[str, str], log: Path) -> None:
        """Load it; the process waits for prompts."""
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [self.python, str(HERE / "worker.py"), json.dumps(self.options)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
            )  # fmt: skip
        if not self._answer():
            lines = log.read_text().splitlines()
            raise PeerEnded(f"did not start: {self._end()}{f', {lines[-1][:200]}' if lines else ''}")

    def generate(self, prompts: list[list[int]], num_tokens: int) -> float:
        """Return tokens per second, the prompts included in the time."""
        assert self.process is not None
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"prompts": prompts, "num_tokens": num_tokens}) + "\n")
            self.process.stdin.flush()
            answer = self._answer()
        except BrokenPipeError:
            answer = {}
        if not answer:
            raise PeerEnded(f"ended while it generated: {self._end()}")
        if answer["tokens"] != num_tokens * len(prompts):
            raise PeerEnded(f"must make {num_tokens * len(prompts)} tokens, got {answer['tokens']}")
        return answer["tokens"] / answer["seconds"]

    def stop(self) -> None:
        """End the process."""
        if self.process is not None and self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()
            self.process.wait(timeout=60)
            self.process = None

    def _answer(self) -> dict[str, Any]:
        assert self.process is not None
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else {}

    def _end(self) -> str:
        """Return how the process has ended."""
        assert self.process is not None
        code = self.process.wait(timeout=60)
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


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
                begin(system, shape, environment, Path(scratch) / f"{number}.log")
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
            print(f"OpenVINO GenAI {form} is left out, its conversion failed:\n{done.stderr[-2000:]}", flush=True)
            continue
        options = {"system": "openvino", "model": str(out), "threads": arguments.threads}
        found.append(System(name=f"OpenVINO GenAI {form}", options=options, python=arguments.openvino))
    for kind in ("Q8_0", "Q4_0") if arguments.llama_cpp else ():
        file = scratch / f"{kind}.gguf"
        write_gguf(folder, file, architecture="llama", kinds=[kind], keys={"llama.vocab_size": shape.vocab_size},
                   tokenizer={"tokenizer.ggml.model": "no_vocab"})  # fmt: skip
        options = {"system": "llama.cpp", "model": str(file), "threads": arguments.threads}
        options["repacks"] = not arguments.no_repack
        slower = {} if arguments.no_repack else {"repacks": False}
        name = f"llama.cpp {kind.lower()}"
        found.append(System(name=name, options=options, python=arguments.llama_cpp, slower=slower))
    return found


def random_prompts(rng: random.Random, shape: ModelShape, count: int) -> list[list[int]]:
    """Return prompts of random tokens."""
    return [[rng.randrange(shape.vocab_size) for _ in range(PROMPT)] for _ in range(count)]


def begin(system: System, shape: ModelShape, environment: dict[str, str], log: Path) -> None:
    """Start a system and warm it up; if its process ends at that, once more with its slower options."""
    rng = random.Random(0)
    for more in ({}, system.slower) if system.slower else ({},):
        system.options |= more
        try:
            system.start(environment, log)
            for count in CONCURRENCY:
                system.generate(random_prompts(rng, shape, count), 8)
        except PeerEnded as error:
            print(f"{system.name} with {system.options}: {error}", flush=True)
            system.failure = str(error)
            system.stop()
        else:
            system.name += " (slower options: see above)" if more else ""
            system.failure = ""
            return


def measure(systems: list[System], shape: ModelShape, rounds: int) -> None:
    """Ask every system that runs in every round."""
    rng = random.Random(1)
    for _ in range(rounds):
        for count in CONCURRENCY:
            asked = random_prompts(rng, shape, count)
            for system in rng.sample(systems, len(systems)):
                if system.failure:
                    continue
                try:
                    system.rates.setdefault(count, []).append(system.generate(asked, NUM_TOKENS))
                except PeerEnded as error:
                    system.failure = str(error)


def report(systems: list[System]) -> None:
    """Print tokens per second."""
    print("| system | " + " | ".join(f"tokens/s with {count} at once (least to most)" for count in CONCURRENCY) + " |")
    print("|---|" + "--:|" * len(CONCURRENCY))
    for system in systems:
        if system.failure:
            print(f"| {system.name} | {system.failure}" + " |" * len(CONCURRENCY))
            continue
        cells = [f"{median(rates):.0f} ({min(rates):.0f} to {max(rates):.0f})" for rates in system.rates.values()]
        print(f"| {system.name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
