"""Engines of one thread whose weights are updated, and what tests compare of them: tokens and log probabilities."""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

import copy
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from families.case import Case, build, randomise
from families.registry import CASES
from pagewood.engine.api import Command, Delta, EngineConfig, Refusal, Rows, SamplingParams, Submit, TokenLogprob
from pagewood.engine.build import build_engine
from pagewood.engine.core.loop import Engine, Pending
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.weight_commands import UpdateWeights

PROMPTS = [np.random.default_rng(seed).integers(1, 97, 18 + 7 * seed).tolist() for seed in range(2)]
Scores = list[tuple[int, float]]
"""Tokens and their log probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A model with its weights, and the same with other weights, as folders and in the memory of `transformers`."""

    old: Path
    new: Path
    model: Any
    """With the new ones."""


def make_pair(kind: str | Case, folder: Path, *, dtype: torch.dtype = torch.float32) -> Pair:
    """Write two models of a kind."""
    case = CASES[kind] if isinstance(kind, str) else kind
    old, new = folder / "old", folder / "new"
    reference = build(case, old)
    if dtype != torch.float32:
        reference.to(dtype).save_pretrained(old)
    other = copy.deepcopy(reference).float()
    torch.manual_seed(11)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    randomise(other, norms_from_zero=case.norms_from_zero, query_norm=case.query_norm)
    other.save_pretrained(new)
    for name in ("config.json",):  # `build` may have changed it
        (new / name).write_bytes((old / name).read_bytes())
    return Pair(old=old, new=new, model=other)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a folder with one file."""
    return load_file(folder / "model.safetensors")


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors to a file; return its name."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return str(path)


@dataclass(slots=True)
class _Known:
    """What an engine has answered to a request."""

    scores: Scores = field(default_factory=list[tuple[int, float]])  # written by: weight_bench
    prompt_scores: Scores = field(default_factory=list[tuple[int, float]])  # written by: weight_bench
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])  # contents written by: weight_bench
    versions: list[str] = field(default_factory=list[str])  # written by: weight_bench
    tokens: list[int] = field(default_factory=list[int])  # contents written by: weight_bench
    parts: list[tuple[Rows | None, ...]] = field(default_factory=list[tuple[Rows | None, ...]])
    """The experts and the hidden states of each of its deltas."""  # contents written by: weight_bench
    end: Delta | None = None  # written by: weight_bench

    @property
    def kept(self) -> list[bytes | None]:
        """What filters have left for each of its tokens."""
        return [one.kept for one in self.logprobs]

    @property
    def rows(self) -> list[Rows | None]:
        """Its experts and its hidden states."""
        return [Rows.joined(parts) for parts in zip(*self.parts, strict=True)]


def bench_config(folder: Path, **options: Any) -> EngineConfig:
    """Return the configuration of a small engine."""
    fields = {"num_threads": 1, "max_total_tokens": 2048, "max_length": 256, "page_size": 4, **options}
    return EngineConfig(model=str(folder), **fields)


class WeightBench:
    """An engine, stepped by the test; use it as a context manager."""

    def __init__(self, folder: Path, *, config: Any = None, build: Any = build_engine, **options: Any) -> None:
        self.inbox, self.outbox = MemoryInbox(), MemoryOutbox()
        config = config or bench_config(folder, **options)
        self.engine: Engine = build(config, inbox=self.inbox, outbox=self.outbox)
        self.known: dict[str, _Known] = {}
        self.pending: Pending | None = None
        self._num = 0

    def __enter__(self) -> WeightBench:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.engine.close()

    def submit(self, prompt: Sequence[int], *, num_tokens: int = 12, **sampling: Any) -> str:
        """Submit a greedy request whose tokens are scored; return its id."""
        self._num += 1
        own = {"max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True, "logprobs": 0, **sampling}
        tokens = np.array(prompt, "<i4").tobytes()
        self.inbox.put(Submit(request_id=str(self._num), tokens=tokens, sampling=SamplingParams(**own)))
        return str(self._num)

    def step(self) -> None:
        """Do one step."""
        self.pending = self.engine.advance(self.pending)
        for delta in self.outbox.take():
            known = self.known.setdefault(delta.request_id, _Known())
            known.scores += [(one.token, one.logprob) for one in delta.logprobs]
            known.logprobs += delta.logprobs
            known.prompt_scores += [(one.token, one.logprob) for one in delta.prompt_logprobs]
            known.tokens += delta.tokens
            known.parts.append((delta.experts, delta.states))
            known.versions += [delta.weights] * len(delta.tokens)
            if delta.finish is not None:
                known.end = delta

    def run_until(self, *names: str) -> list[_Known]:
        """Compute until these have ended, and return what they were answered."""
        while any(self.known.get(name, _Known()).end is None for name in names):
            self.step()
        return [self.known[name] for name in names]

    def run(self, *names: str) -> list[_Known]:
        """Compute until these have ended and nothing is in flight, and return what they were answered."""
        self.run_until(*names)
        while self.pending is not None:
            self.step()
        return [self.known[name] for name in names]

    def tell(self, command: Command) -> Delta:
        """Carry out a command and return its answer."""
        self.inbox.put(command)
        [known] = self.run_until(command.request_id)
        assert known.end is not None
        return known.end

    def update(self, **fields: Any) -> Refusal | None:
        """Update the weights; return why they stay, or None."""
        self._num += 1
        self.inbox.put(UpdateWeights(request_id=f"update {self._num}", **fields))
        self.step()
        rest = self.engine._rest  # pyright: ignore[reportPrivateUsage]
        while not rest.has_new_weights and f"update {self._num}" not in self.known:  # steps would end what runs
            time.sleep(0.001)
        [known] = self.run_until(f"update {self._num}")
        assert known.end is not None
        return known.end.refusal

    def scores(self) -> list[Scores]:
        """Return what the engine answers to the prompts now."""
        return [one.scores for one in self.run(*[self.submit(prompt) for prompt in PROMPTS])]


def close(found: list[Scores], expected: list[Scores]) -> bool:
    """Whether tokens are the same, and log probabilities but for rounding, which depends on the batch on CUDA."""
    pairs = [pair for one in zip(found, expected, strict=True) for pair in zip(*one, strict=True)]
    return all(own[0] == other[0] and abs(own[1] - other[1]) < 1e-4 for own, other in pairs)


def fresh_scores(folder: Path, **options: Any) -> list[Scores]:
    """Return what a new engine answers to the prompts."""
    with WeightBench(folder, **options) as bench:
        return bench.scores()


@contextmanager
def trainer(file: Path, *, world_size: int, device: str = "cpu") -> Generator[int]:
    """Run a process that sends the tensors of a file, in the order of their names, for a device; yield its port."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    stub = Path(__file__).parent / "trainer_stub.py"
    arguments = [sys.executable, str(stub), str(port), str(world_size), "trainer", str(file), device]
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE)
    try:
        yield port
    finally:
        process.communicate(timeout=30)
