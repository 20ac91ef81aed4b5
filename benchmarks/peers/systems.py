# pyright: basic
"""Engines in processes of their own, asked in turns."""

from __future__ import annotations

import json
import random
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
PROMPT, NUM_TOKENS = 32, 64


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
        return num_tokens * len(prompts) / self._made(prompts, num_tokens)["seconds"]

    def decode(self, prompt: list[int], num_tokens: int) -> float:
        """Return the tokens per second after the first."""
        made = self._made([prompt], num_tokens)
        return made["later_tokens"] / made["later_seconds"]

    def stop(self) -> None:
        """End the process."""
        if self.process is not None and self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()
            self.process.wait(timeout=60)
            self.process = None

    def _made(self, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
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
        return answer

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


def openvino(
    python: str, folder: Path, out: Path, form: str, threads: int, environment: dict[str, str]
) -> System | None:
    """Convert a folder for OpenVINO GenAI; None, and a line that says why, if that fails."""
    name = f"OpenVINO GenAI {form}"
    command = [python, str(HERE / "convert_openvino.py"), str(folder), str(out), form]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{name} is left out, its conversion failed: {done.stderr.strip().splitlines()[-1][:300]}", flush=True)
        return None
    options = {"system": "openvino", "model": str(out), "threads": threads}
    if form == "float32":
        options["precision"] = "f32"  # otherwise it computes float32 weights in bfloat16, where the processor has it
    return System(name=name, options=options, python=python)


def random_prompts(rng: random.Random, vocab_size: int, count: int) -> list[list[int]]:
    """Return prompts of random tokens."""
    return [[rng.randrange(vocab_size) for _ in range(PROMPT)] for _ in range(count)]


def begin(
    system: System, vocab_size: int, environment: dict[str, str], log: Path, *, concurrency: Sequence[int]
) -> None:
    """Start a system and warm it up; if its process ends at that, once more with its slower options."""
    rng = random.Random(0)
    for more in ({}, system.slower) if system.slower else ({},):
        system.options |= more
        try:
            system.start(environment, log)
            for count in concurrency:
                system.generate(random_prompts(rng, vocab_size, count), 8)
        except PeerEnded as error:
            print(f"{system.name} with {system.options}: {error}", flush=True)
            system.failure = str(error)
            system.stop()
        else:
            system.name += " (slower options: see above)" if more else ""
            system.failure = ""
            return


def measure(systems: Sequence[System], vocab_size: int, rounds: int, *, concurrency: Sequence[int]) -> None:
    """Ask every system that runs in every round."""
    rng = random.Random(1)
    for _ in range(rounds):
        for count in concurrency:
            asked = random_prompts(rng, vocab_size, count)
            for system in rng.sample(systems, len(systems)):
                if system.failure:
                    continue
                try:
                    system.rates.setdefault(count, []).append(system.generate(asked, NUM_TOKENS))
                except PeerEnded as error:
                    system.failure = str(error)


def report(systems: Sequence[System], *, concurrency: Sequence[int]) -> None:
    """Print tokens per second."""
    print("| system | " + " | ".join(f"tokens/s with {count} at once (least to most)" for count in concurrency) + " |")
    print("|---|" + "--:|" * len(concurrency))
    for system in systems:
        if system.failure:
            print(f"| {system.name} | {system.failure}" + " |" * len(concurrency))
            continue
        cells = [f"{median(rates):.0f} ({min(rates):.0f} to {max(rates):.0f})" for rates in system.rates.values()]
        print(f"| {system.name} | " + " | ".join(cells) + " |")
