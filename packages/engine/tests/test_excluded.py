"""Requests whose own biases, bad words and grammar leave no token: they end with an error that says so, alone."""

# pyright: basic
# torch and numba are typed in part only.

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import pytest

from pagewood.engine.api import EngineConfig, FinishReason, Grammar, SamplingParams, Submit
from pagewood.engine.assembly.cuda.build import build_on
from pagewood.engine.build import build_engine
from pagewood.engine.core.loop import Engine
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from speculating import Answer
from stand_ins import flashinfer_torch
from stand_ins.recording_device import RecordingDevice
from tiny_models import model_folder

VOCAB_SIZE = 60
EVERY = tuple((token, -math.inf) for token in range(VOCAB_SIZE))
PROMPT = (9, 8, 7, 3, 9, 8)


def sampled(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": 12, "seed": 1, **options})


def answers(engine: Engine, inbox: MemoryInbox, outbox: MemoryOutbox, *samplings: SamplingParams) -> list[Answer]:
    """Return the answers to requests that come at the same time, and end the engine."""
    for index, sampling in enumerate(samplings):
        tokens = np.array((*PROMPT, index), "<i4").tobytes()
        inbox.put(Submit(request_id=str(index), tokens=tokens, sampling=sampling))
    found = [Answer() for _ in samplings]
    pending = None
    while pending is not None or any(answer.last is None for answer in found):
        pending = engine.advance(pending)
        for delta in outbox.take():
            found[int(delta.request_id)].add(delta)
    assert engine.violation() is None
    engine.close()
    return found


def ending(answer: Answer) -> tuple[FinishReason | None, str | None]:
    """Return why an answer has ended, and the code of its error."""
    assert answer.last is not None
    return answer.last.finish, answer.last.refusal.code if answer.last.refusal else None


def on_cpu(*samplings: SamplingParams, **config: Any) -> list[Answer]:
    sizes = {"max_total_tokens": 512, "max_length": 128, "num_threads": 1}
    options = EngineConfig(**{"model": str(model_folder("llama")), **sizes, **config})
    inbox, outbox = MemoryInbox(), MemoryOutbox()
    return answers(build_engine(options, inbox=inbox, outbox=outbox), inbox, outbox, *samplings)


def on_cuda(*samplings: SamplingParams, **config: Any) -> list[Answer]:
    """Return the answers of an engine on stand-ins for a GPU."""
    sizes: dict[str, Any] = {"max_running": 4, "max_length": 96, "max_total_tokens": 512}
    options = EngineConfig(model=str(model_folder("llama")), device="cuda", dtype="float32", **sizes, **config)
    inbox, outbox = MemoryInbox(), MemoryOutbox()
    engine = build_on(RecordingDevice(), flashinfer_torch, options, inbox=inbox, outbox=outbox)
    return answers(engine, inbox, outbox, *samplings)


@cache
def plain(temperature: float) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of two requests without changes of logits."""
    return tuple(answer.tokens for answer in on_cpu(*[sampled(temperature=temperature)] * 2))


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("device", [on_cpu, on_cuda])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "config",
    [{}, {"overlap": False}, {"speculative": "ngram", "speculative_control": "fixed"}],
    ids=["overlap", "plain", "ngram"],
)
def test_a_request_without_a_token_ends_with_its_own_error(device: Any, temperature: float, config: Any) -> None:
    """At once, or behind the third token, whose successors are bad words."""
    first, other = plain(temperature)
    words = tuple((*first[:3], token) for token in range(VOCAB_SIZE))
    for options, kept in (({"logit_bias": EVERY}, 0), ({"bad_words": words}, 3)):
        excluded, neighbour = device(
            sampled(temperature=temperature, **options), sampled(temperature=temperature), **config
        )
        assert ending(excluded) == (FinishReason.ERROR, "all_tokens_excluded")
        assert excluded.tokens == first[:kept]
        assert ending(neighbour) == (FinishReason.LENGTH, None)
        assert neighbour.tokens == other


def test_rejection_sampling_gives_the_same_reason() -> None:
    config: dict[str, Any] = {"model": None, "max_total_tokens": 2048}
    drafter = {"speculative": "draft", "speculative_verify": "rejection", "speculative_control": "fixed"}
    every = sampled(
        logit_bias=tuple((token, -math.inf) for token in range(300)),
        bad_words=tuple((token,) for token in range(300, 512)),
    )
    excluded, neighbour = on_cpu(every, sampled(), **config, **drafter)
    assert ending(excluded) == (FinishReason.ERROR, "all_tokens_excluded")
    assert neighbour.tokens == on_cpu(sampled(), sampled(), **config)[1].tokens


@pytest.mark.parametrize("overlap", [False, True])
def test_a_grammar_and_a_bias_may_leave_none(overlap: bool) -> None:
    """What a grammar forces is taken without a draw, so it must be one of two here."""
    grammar = Grammar(kind="choice", text='["a", "b"]')
    config = {"model": None, "overlap": overlap}
    free = on_cpu(*[sampled(grammar=grammar, seed=seed, temperature=5.0) for seed in range(30)], **config)
    firsts = {answer.tokens[0] for answer in free}
    assert 1 < len(firsts) < 10
    bias = tuple((token, -math.inf) for token in firsts)
    (answer,) = on_cpu(sampled(grammar=grammar, logit_bias=bias), **config)
    assert ending(answer) == (FinishReason.ERROR, "all_tokens_excluded")
