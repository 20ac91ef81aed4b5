"""Measures weights that change while requests decode on a CPU: each way in, and throughput with regular updates.

python benchmarks/weight_updates.py            # a model of 110M parameters, 32 requests: about four minutes
python benchmarks/weight_updates.py --quick    # a tiny model and few steps, only to test the script

Every request decodes through all of it; a token that is lost, repeated or late in its order ends the script with an
error. It prints, for whole updates of all tensors in float32:

1. of each way: the seconds from the command to its answer (median, least, most), how many steps went on meanwhile,
   and the longest of these steps over the median step without an update: what requests feel of the exchange;
2. the seconds to sleep and to wake up at levels 1 and 2 (with the update that brings the weights again) while requests
   are there, and the memory of the process awake and asleep;
3. tokens per second of turns with an update every so many steps over those of turns without, in pairs (median, least,
   most), which take turns in changing order.
"""

# pyright: basic
# transformers and safetensors are typed in part only.

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from adapters import LARGE, TINY, write_model
from pagewood.engine.api import Abort, EngineConfig, FinishReason, SamplingParams, Submit
from pagewood.engine.build import build_engine
from pagewood.engine.core.loop import Engine, Pending
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.offline.weight_files import TensorFolder
from pagewood.engine.weight_commands import (
    JoinGroup,
    LeaveGroup,
    Received,
    UpdateWeights,
    WakeUp,
    WeightCommand,
    sleep_at,
)

STUB = Path(__file__).parents[1] / "packages" / "engine" / "tests" / "support" / "trainer_stub.py"
NUM_REQUESTS, PROMPT_LENGTH, MAX_LENGTH = 32, 64, 1024
MOST_STEPS = MAX_LENGTH - PROMPT_LENGTH - 100


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="updates by each way, and pairs of turns")
    parser.add_argument("--steps", type=int, default=200, help="steps of a turn")
    parser.add_argument("--every", type=int, default=50, help="steps between two updates of a turn")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps, options.every = 2, 8, 4
    with tempfile.TemporaryDirectory() as place:
        model, other = Path(place) / "model", Path(place) / "other"
        for seed, folder in enumerate((model, other)):
            write_model(folder, TINY if options.quick else LARGE, seed=seed)
        bench = Bench(model)
        tensors = load_file(other / "model.safetensors")
        num_bytes = sum(one.nbytes for one in tensors.values())
        print(f"{len(tensors)} tensors, {num_bytes / 1e6:.0f} MB, {NUM_REQUESTS} requests")
        ways: Mapping[str, Callable[[], Seen]] = {
            "a folder": lambda: bench.update(UpdateWeights(request_id="folder", folder=str(other))),
            "files in shared memory": lambda: by_files(bench, tensors, is_written_before=True),
            "tensors, as LLM.update_weights": lambda: by_files(bench, tensors, is_written_before=False),
            "a group over gloo": lambda: by_group(bench, other / "model.safetensors", tensors),
        }
        bench.begin()
        for name, way in ways.items():
            found = [way() for _ in range(options.rounds)]
            shares = [one.longest_s / one.usual_s for one in found]
            print(
                f"{name:32} {_three([one.total_s for one in found])} s, {median(one.num_steps for one in found):.0f} "
                f"steps meanwhile, the longest {_three(shares)} times the usual",
                flush=True,
            )
        for level in (1, 2):
            naps = [bench.nap(level, model) for _ in range(options.rounds)]
            print(
                f"level {level}: to sleep {_three([one.sleep_s for one in naps])} s, to wake "
                f"{_three([one.wake_s for one in naps])} s; resident "
                f"{median(one.awake_bytes for one in naps) / 1e6:.0f} MB awake, "
                f"{median(one.asleep_bytes for one in naps) / 1e6:.0f} MB asleep",
                flush=True,
            )
        bench.end()
        quotients = list[float]()
        for number in range(options.rounds):
            rates: dict[bool, float] = {}
            for changes in (True, False) if number % 2 == 0 else (False, True):
                rates[changes] = bench.rate(options.steps, [other, model] if changes else [], every=options.every)
            quotients.append(rates[True] / rates[False])
        print(f"throughput with an update every {options.every} steps: {_three(quotients)} of that without")
        print(f"tokens: {bench.num_tokens}, lost: none")
        bench.engine.close()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _three(found: list[float]) -> str:
    return f"{median(found):.3f} ({min(found):.3f} to {max(found):.3f})"


class Seen:
    """What requests saw of an update."""

    __slots__ = ("longest_s", "num_steps", "total_s", "usual_s")

    def __init__(self, *, total_s: float, usual_s: float, steps_s: list[float]) -> None:
        self.total_s = total_s
        self.usual_s = usual_s
        self.longest_s = max(steps_s)
        self.num_steps = len(steps_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nap:
    """What it took to sleep and to wake up."""

    sleep_s: float
    wake_s: float
    """To the end of the first step, with the update before it if the weights were dropped."""
    awake_bytes: int
    asleep_bytes: int
    """Resident memory of the process."""


class Bench:
    """An engine whose requests decode."""

    def __init__(self, folder: Path) -> None:
        self.inbox, self.outbox = MemoryInbox(), MemoryOutbox()
        config = EngineConfig(
            model=str(folder),
            weights="float32",
            max_running=NUM_REQUESTS,
            max_total_tokens=NUM_REQUESTS * MAX_LENGTH,
            max_length=MAX_LENGTH,
        )
        self.engine: Engine = build_engine(config, inbox=self.inbox, outbox=self.outbox)
        self.num_tokens = self._num_turns = 0
        self._counts: dict[str, int] = {}
        self._pending: Pending | None = None
        self._done: list[str] = []
        """Commands that were carried out."""

    def begin(self) -> None:
        """Submit requests, and compute until all decode."""
        self._num_turns += 1
        rng = np.random.default_rng(self._num_turns)
        for number in range(NUM_REQUESTS):
            tokens = rng.integers(0, 500, PROMPT_LENGTH).astype("<i4").tobytes()
            sampling = SamplingParams(max_tokens=MAX_LENGTH - PROMPT_LENGTH, temperature=0.0, ignore_eos=True)
            name = f"{self._num_turns} {number}"
            self._counts[name] = 0
            self.inbox.put(Submit(request_id=name, tokens=tokens, sampling=sampling))
        while not all(self._counts.values()):
            self.step()

    def end(self) -> None:
        """End the requests."""
        for name in self._counts:
            self.inbox.put(Abort(request_id=name))
        self._counts.clear()
        self.step()
        while self._pending is not None:
            self.step()

    def step(self) -> float:
        """Compute a step; return its seconds.

        Raises:
            RuntimeError: a request has lost or repeated a token, has ended, or a command was refused.
        """
        began_s = time.perf_counter()
        self._pending = self.engine.advance(self._pending)
        took_s = time.perf_counter() - began_s
        for delta in self.outbox.take():
            if delta.refusal is not None:
                raise RuntimeError(f"{delta.request_id} was refused: {delta.refusal.message}")
            if delta.request_id not in self._counts:
                if delta.finish is FinishReason.STOP:  # others are requests that were aborted at the end of a turn
                    self._done.append(delta.request_id)
                continue
            self._counts[delta.request_id] += len(delta.tokens)
            self.num_tokens += len(delta.tokens)
            if delta.finish is not None or delta.num_output_tokens != self._counts[delta.request_id]:
                raise RuntimeError(f"request {delta.request_id} must have all its tokens and go on, got {delta}")
        if self._counts and max(self._counts.values()) >= MOST_STEPS:
            self.end()
            self.begin()
        return took_s

    def update(self, command: WeightCommand) -> Seen:
        """Carry out a command while requests decode."""
        if max(self._counts.values()) > MOST_STEPS // 2:  # not meanwhile: prompts take time of their own
            self.end()
            self.begin()
        usual_s = median(self.step() for _ in range(20))
        began_s = time.perf_counter()
        self.inbox.put(command)
        steps_s = list[float]()
        while command.request_id not in self._done:
            steps_s.append(self.step())
        self._done.clear()
        return Seen(total_s=time.perf_counter() - began_s, usual_s=usual_s, steps_s=steps_s)

    def nap(self, level: int, folder: Path) -> Nap:
        """Sleep and wake up while requests are there; weights that were dropped come from `folder`."""
        began_s, awake_bytes = time.perf_counter(), _resident_bytes()
        self._carry_out(sleep_at(level, "sleep"))
        slept_s, asleep_bytes = time.perf_counter(), _resident_bytes()
        self._carry_out(WakeUp(request_id="wake"))
        if level == 2:
            self._carry_out(UpdateWeights(request_id="again", folder=str(folder)))
        self.step()
        return Nap(
            sleep_s=slept_s - began_s,
            wake_s=time.perf_counter() - slept_s,
            awake_bytes=awake_bytes,
            asleep_bytes=asleep_bytes,
        )

    def _carry_out(self, command: WeightCommand) -> None:
        self.inbox.put(command)
        while command.request_id not in self._done:
            self.step()
        self._done.clear()

    def rate(self, num_steps: int, folders: list[Path], *, every: int) -> float:
        """Return the tokens per second of a turn in which the weights of `folders` take turns."""
        self.begin()
        before, began_s, num_asked = self.num_tokens, time.perf_counter(), 0
        for number in range(num_steps):
            if folders and number % every == 0 and len(self._done) == num_asked:
                folder = folders[num_asked % len(folders)]
                self.inbox.put(UpdateWeights(request_id=f"turn {num_asked}", folder=str(folder)))
                num_asked += 1
            self.step()
        rate = (self.num_tokens - before) / (time.perf_counter() - began_s)
        while len(self._done) < num_asked:
            self.step()
        self._done.clear()
        self.end()
        return rate


def by_files(bench: Bench, tensors: Mapping[str, Tensor], *, is_written_before: bool) -> Seen:
    """Update from files in shared memory; writing them counts unless a trainer has done it before."""
    began_s = time.perf_counter()
    with closing(TensorFolder()) as folder:
        for name, tensor in tensors.items():
            folder.add(name, tensor)
        files = folder.files()
        wrote_s = time.perf_counter() - began_s
        seen = bench.update(UpdateWeights(request_id="files", files=files))
    if not is_written_before:
        seen.total_s += wrote_s
    return seen


def by_group(bench: Bench, file: Path, tensors: Mapping[str, Tensor]) -> Seen:
    """Update from a process that sends the tensors; joining it does not count."""
    wanted = [Received(name, str(one.dtype).removeprefix("torch."), tuple(one.shape)) for name, one in tensors.items()]
    with trainer(file) as port:
        join = JoinGroup(request_id="join", name="trainer", address="127.0.0.1", port=port, first_rank=1, world_size=2)
        bench.update(join)
        received = tuple(sorted(wanted, key=lambda one: one.name))
        seen = bench.update(UpdateWeights(request_id="group", group="trainer", received=received))
        bench.update(LeaveGroup(request_id="leave", name="trainer"))
    return seen


@contextmanager
def trainer(file: Path) -> Generator[int]:
    """A process that sends the tensors of a file, in the order of their names; yields its port."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, str(STUB), str(port), "2", "trainer", str(file)], stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield port
    finally:
        process.communicate(timeout=90)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
