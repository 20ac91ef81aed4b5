"""What an engine for a model with recurrent layers answers to prompts that are more than its memory has room for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from answered import answers_to, request
from node_threads import following
from pagewood.engine.api import Delta, EngineConfig
from pagewood.engine.build import build_engine
from pagewood.engine.core.loop import Engine
from pagewood.engine.links import MemoryInbox, MemoryOutbox

PROMPTS = [list(range(3, 40)), [7, 9, 11], list(range(50, 72)), list(range(3, 40)), [*range(3, 30), 60, 61, 62]]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request was answered. Two are equal if they have the same tokens, nearly the same log probabilities, and
    the same hits."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """The log probabilities of its tokens."""
    num_cached: int
    """Tokens of the prompt that were cached."""

    @classmethod
    def of(cls, deltas: Sequence[Delta]) -> Answer:
        """Return what the parts of an answer say."""
        assert all(one.refusal is None for one in deltas), deltas
        return cls(
            tokens=tuple(token for one in deltas for token in one.tokens),
            logprobs=tuple(token.logprob for one in deltas for token in one.logprobs),
            num_cached=deltas[-1].num_cached_tokens,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Answer) and self.num_cached == other.num_cached and self.says(other)

    def says(self, other: Answer) -> bool:
        """Return whether tokens and log probabilities are the same."""
        return self.tokens == other.tokens and np.allclose(self.logprobs, other.logprobs, rtol=0, atol=1e-3)


def say_the_same(left: Sequence[Answer], right: Sequence[Answer]) -> bool:
    """Return whether answers are the same, whatever was cached: steps of stages have other requests."""
    return all(one.says(other) for one, other in zip(left, right, strict=True))


def found(folder: Path, *, build: Callable[..., Engine] = build_engine, **options: Any) -> list[Answer]:
    """Return what an engine answers to all prompts at the same time, and then again; every other one is sampled.

    With chunks, and with so little memory for pages and states that requests are preempted, and states evicted.
    """
    whole: dict[str, Any] = {
        "model": str(folder), "max_running": 3, "chunked_prefill_size": 16, "page_size": 4, "max_total_tokens": 96,
        "state_places": 7, "schedule_conservativeness": 0.01,
        "num_threads": options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1),
    }  # fmt: skip
    config = EngineConfig(**{**whole, **options})
    inbox, outbox = MemoryInbox(), MemoryOutbox()
    requests = [
        request(index, prompt, max_tokens=24, temperature=float(index % 2), seed=index, logprobs=0)
        for index, prompt in enumerate(PROMPTS)
    ]
    with following(config) as errors:
        engine = build(config, inbox=inbox, outbox=outbox)
        try:
            answers = [Answer.of(one) for _ in range(2) for one in answers_to(engine, inbox, outbox, requests)]
            assert engine.counters().num_preempted > 0
        finally:
            engine.close()
    assert not errors
    return answers
