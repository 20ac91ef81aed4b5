"""Checks of small random models of every family, on the whole engine, against the parts computed in plain torch."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu_checks.engine import build
from gpu_checks.host import TOLERANCE, Failed, Host, Skipped
from pagewood.engine import SamplingParams
from pagewood.engine.api import Submit, TokenLogprob
from pagewood.engine.model_folder.load import load_model
from pagewood.engine.models.decoder import Decoder
from pagewood.engine.models.parts.experts import ExpertsConfig
from pagewood.engine.models.parts.experts_beside import ExpertsBesideConfig
from pagewood.engine.models.torch_ops import TorchOps, WholeTexts
from pagewood.engine.models.torch_recurrence import WholeTextStates

_DTYPE = "float16"
_LENGTHS = (37, 5, 70, 23)
_NUM_TOKENS = 12
_MAX_LENGTH = 128
_REPORTED = SamplingParams(
    temperature=0.0, max_tokens=_NUM_TOKENS, ignore_eos=True, logprobs=0, prompt_logprobs=0, prompt_logprobs_start=1
)
WAYS: tuple[dict[str, Any], ...] = (
    {}, {"cuda_graph": False, "chunked_prefill_size": 16}, {"batch_invariant": True},
    {"speculative": "ngram", "speculative_control": "fixed"},
)  # fmt: skip
"""The options with which a model is run."""
_STAND_IN_STEP = 9  # stand-ins test the script, with one case of so many
_MOST_OTHERS = 0.08
"""Largest share of tokens of a model with experts whose log probability may differ: rounding may choose another."""
_MOST_BEHIND = 0.12
"""The same of one with recurrent layers, whose states pass the difference on to all later tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A prompt with its greedy answer, and the log probability of each token but the first."""

    tokens: list[int]
    values: list[float]
    num_prompt: int


def check_families(host: Host) -> str:
    """Random models of every family have the log probabilities of their parts in plain torch, and its best tokens."""
    if importlib.util.find_spec("transformers") is None:
        raise Skipped("the package transformers is not installed")
    from families.case import build as save
    from families.kernel_sizes import for_kernels
    from families.registry import CASES

    found: list[str] = []
    num_runs = 0
    cases = dict(list(CASES.items())[:: 1 if host.is_gpu else _STAND_IN_STEP])
    for name, case in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                save(for_kernels(case), Path(folder))
                oracle = load_model(Path(folder), TorchOps(), max_length=_MAX_LENGTH)
            except Exception as error:  # this version of transformers may lack the family
                found.append(f"{name} could not be made: {type(error).__name__}: {error}")
                continue
            for options in WAYS:
                num_runs += 1
                try:
                    problem = compare(oracle, ask(host, Path(folder), **options))
                except Exception as error:  # the remaining families still run
                    problem = f"{type(error).__name__}: {error}"
                if problem:
                    found.append(f"{name} with {options}: {problem}")
                    print(found[-1], flush=True)
    if found:
        raise Failed(f"{len(found)} of {num_runs}: " + "; ".join(one[:300] for one in found))
    return f"{len(cases)} models, {num_runs} runs"


def ask(host: Host, folder: Path, **options: Any) -> list[Answer]:
    """Answer random prompts together; the last one repeats the third, so that drafts are found."""
    config = host.config(model=str(folder), dtype=_DTYPE, max_length=_MAX_LENGTH, **options)
    engine, inbox, outbox = build(host, config)
    generator = np.random.default_rng(0)
    prompts = [generator.integers(2, 90, length) for length in _LENGTHS]
    prompts.append(np.tile(prompts[1], 8))
    tokens: list[list[int]] = [prompt.tolist() for prompt in prompts]
    reports: list[list[TokenLogprob]] = [[] for _ in prompts]
    for index, prompt in enumerate(prompts):
        inbox.put(Submit(request_id=str(index), tokens=prompt.astype("<i4").tobytes(), sampling=_REPORTED))
    num_open, pending = len(prompts), None
    while num_open or pending is not None:
        pending = engine.advance(pending)
        for delta in outbox.take():
            if delta.refusal is not None:
                raise Failed(delta.refusal.message)
            if delta.finish is not None and delta.finish.value == "error":
                raise Failed(f"request {delta.request_id} ended with an error; see the log above")
            index = int(delta.request_id)
            tokens[index] += delta.tokens
            reports[index] += [*delta.prompt_logprobs, *delta.logprobs]
            num_open -= delta.finish is not None
    engine.close()
    return [
        Answer(tokens=tokens[i], values=[one.logprob for one in reports[i]], num_prompt=len(prompt))
        for i, prompt in enumerate(prompts)
    ]


@torch.inference_mode()
def compare(oracle: Decoder, answers: Sequence[Answer]) -> str | None:
    """Return how answers differ from the oracle by more than rounding, or None."""
    off: list[str] = []
    num_tokens = 0
    for answer in answers:
        logits = logits_of(oracle, answer.tokens)
        if len(answer.values) != len(answer.tokens) - 1:
            return f"{len(answer.values)} log probabilities of {len(answer.tokens) - 1} tokens"
        limit = 2 * TOLERANCE[_DTYPE] * max(1.0, float(logits.abs().max()))
        logprobs = logits.log_softmax(-1)
        for place, value in enumerate(answer.values):
            token = answer.tokens[place + 1]
            num_tokens += 1
            expected = float(logprobs[place, token])
            below = float(logits[place].max() - logits[place, token])
            if abs(expected - value) > limit:
                off.append(f"{value:.4f} instead of {expected:.4f} at {place}")
            elif place >= answer.num_prompt - 1 and below > limit:
                off.append(f"token {token} at {place}, {below:.4f} below the best")
    kinds = (ExpertsConfig, ExpertsBesideConfig)
    has_experts = any(isinstance(layer.feed_forward, kinds) for layer in oracle.config.layers)
    most = (_MOST_OTHERS if oracle.config.states is None else _MOST_BEHIND) if has_experts else 0
    if len(off) > most * num_tokens:
        return f"{len(off)} of {num_tokens} tokens, more than {limit:.3f}: {', '.join(off[:4])}"
    return None


def logits_of(oracle: Decoder, tokens: Sequence[int]) -> torch.Tensor:
    """Return the logits at every position of a text, of a request that is as long as it."""
    positions = torch.arange(len(tokens))
    attention = WholeTexts([layer.mixer for layer in oracle.config.layers], len(tokens))
    is_short = oracle.config.is_short(len(tokens))
    rotations = [rope(positions, is_short=is_short) for rope in oracle.ropes]
    recurrence = WholeTextStates(len(tokens))
    return oracle(torch.tensor(tokens), rotations, attention, positions, recurrence=recurrence)
