"""A whole CPU engine with adapters, and what PEFT's model computes with the same ones."""

# pyright: basic
# torch and peft are typed in part only.

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adapter_folders import linear_names, write_adapter
from adapter_kinds import TOKENS
from families.case import Case, build
from families.registry import CASES
from pagewood.engine.api import EngineConfig, Refusal, SamplingParams, Submit
from pagewood.engine.assembly.cuda.build import build_on
from pagewood.engine.build import build_engine
from pagewood.engine.core.loop import Engine, Pending
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.weight_commands import UpdateWeights
from stand_ins import flashinfer_torch
from stand_ins.recording_device import RecordingDevice

BUILDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "cpu": (build_engine, {}),
    "cuda": (
        partial(build_on, RecordingDevice(), flashinfer_torch),
        {"device": "cuda", "dtype": "float32", "max_running": 6, "max_adapter_rank": 8},
    ),
}  # fmt: skip
"""How engines are built on each device, a CUDA device without a GPU, with their options."""
NUM_TOKENS = 12
PROMPTS = [np.random.default_rng(seed).integers(0, 97, 20 + 7 * seed).tolist() for seed in range(3)]
INVOCATION, START = PROMPTS[2][21:23], 21
NAMES = (None, "a", "b", "c")
Expected = Mapping[tuple[str | None, int], list[int]]
"""Tokens by the adapter and the prompt."""


def write_models(folder: Path, case: Case = CASES["qwen3"]) -> Mapping[str | None, Any]:
    """Write a model, and adapters in the folders a, b and c, which has an activation; return PEFT's models."""
    found: dict[str | None, Any] = {None: build(case, folder)}
    for seed, name in enumerate("abc"):
        activation = {"alora_invocation_tokens": INVOCATION} if name == "c" else {}
        fields = {"r": 4 + seed, "target_modules": linear_names(found[None]), **activation}
        found[name] = write_adapter(copy.deepcopy(found[None]), folder / name, seed=seed, **fields)
    return found


def greedy_tokens(models: Mapping[str | None, Any]) -> Mapping[tuple[str | None, int], list[int]]:
    """Return PEFT's tokens, by the adapter and the prompt."""
    found: dict[tuple[str | None, int], list[int]] = {}
    for name, model in models.items():
        for number, prompt in enumerate(PROMPTS):
            tokens = list(prompt)
            with torch.inference_mode():
                for _ in range(NUM_TOKENS):
                    tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
            found[name, number] = tokens[len(prompt) :]
    return found


def config_of(folder: Path, *, adapters: Sequence[str] = "abc", **fields: Any) -> EngineConfig:
    """Return the configuration of an engine with adapters in folders of these names."""
    fields = {"max_adapters": 2, "num_threads": 1, "max_total_tokens": 2048, "max_length": 256, **fields}
    return EngineConfig(model=str(folder), adapters=tuple((name, str(folder / name)) for name in adapters), **fields)


class Bench:
    """An engine that the test steps, by default of one thread."""

    def __init__(
        self,
        folder: Path,
        *,
        config: EngineConfig | None = None,
        build: Callable[..., Engine] = build_engine,
        **fields: Any,
    ) -> None:
        config = config or config_of(folder, **fields)
        self.folder = folder
        self.inbox, self.outbox = MemoryInbox(), MemoryOutbox()
        self.engine: Engine = build(config, inbox=self.inbox, outbox=self.outbox)
        self._pending: Pending | None = None
        self.outputs: dict[str, list[int]] = {}
        self.scores: dict[str, list[float]] = {}
        """Log probabilities of prompts."""
        self.ends: dict[str, Any] = {}

    def ask(self, request_id: str, prompt: Sequence[int], adapter: str | None, **options: Any) -> None:
        """Submit a greedy request."""
        options = {"sampling": SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True), **options}
        tokens = np.array(prompt, "<i4").tobytes()
        self.inbox.put(Submit(request_id=request_id, tokens=tokens, adapter=adapter, **options))

    def step(self) -> None:
        """Advance the engine by a step, and take what it says."""
        self._pending = self.engine.advance(self._pending)
        for delta in self.outbox.take():
            self.outputs.setdefault(delta.request_id, []).extend(delta.tokens)
            self.scores.setdefault(delta.request_id, []).extend(one.logprob for one in delta.prompt_logprobs)
            if delta.finish is not None:
                self.ends[delta.request_id] = delta

    def run_to(self, request_id: str) -> None:
        """Compute until this has ended, whatever else runs."""
        while request_id not in self.ends:
            self.step()

    def run(self, *request_ids: str) -> None:
        """Compute until all these have ended."""
        while not all(name in self.ends for name in request_ids) or self._pending is not None:
            self.step()

    def tell(self, command: Any) -> Refusal | None:
        """Carry out a command, whatever else runs; return why not."""
        self.inbox.put(command)
        self.run_to(command.request_id)
        return self.ends[command.request_id].refusal

    def update(self, name: str, folder: Path) -> Refusal | None:
        """Take the weights of a folder while requests go on; return why not. The command and the version get `name`."""
        self.inbox.put(UpdateWeights(request_id=name, folder=str(folder), version=name, old_kv="recompute"))
        self.step()
        while not self.engine._rest.has_new_weights and name not in self.ends:  # pyright: ignore[reportPrivateUsage]
            time.sleep(0.001)  # without steps, which would end what runs
        self.run_to(name)
        return self.ends[name].refusal


def check_tokens(bench: Bench, expected: Expected) -> None:
    """Compare the tokens of all prompts with all adapters and without, twice: the second time prefixes are cached."""
    for turn in range(2):
        keys = {f"{turn} {name} {number}": (name, number) for number in range(len(PROMPTS)) for name in NAMES}
        for request_id, (name, number) in keys.items():
            bench.ask(request_id, PROMPTS[number], name)
        bench.run(*keys)
        for request_id, key in keys.items():
            assert bench.outputs[request_id] == expected[key], request_id


def scores_of(reference: Any) -> list[float]:
    """Return the log probabilities of the tokens of a prompt behind the first one."""
    with torch.inference_mode():
        logits = reference(torch.tensor(TOKENS)[None]).logits[0]
    return logits.log_softmax(-1)[torch.arange(len(TOKENS) - 1), TOKENS[1:]].tolist()


def check_scores(bench: Bench, references: Mapping[str | None, Any], *, turn: int = 0, tolerance: float = 1e-4) -> None:
    """Compare the log probabilities of a prompt, computed with all adapters beside each other and without."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, ignore_eos=True)
    for name in references:
        bench.ask(f"scores {turn} {name}", TOKENS, name, sampling=sampling)
    bench.run(*(f"scores {turn} {name}" for name in references))
    base = np.array(scores_of(references[None]))
    for name, reference in references.items():
        own = scores_of(reference)
        np.testing.assert_allclose(bench.scores[f"scores {turn} {name}"][-len(own) :], own, atol=tolerance, rtol=0)
        assert name is None or np.abs(own - base).max() > 1e-2
