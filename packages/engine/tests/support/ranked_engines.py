"""Engines whose model is computed by several processes, and what tests ask of them."""

from __future__ import annotations

import os
import time
from typing import Any

from pagewood.engine.api import SamplingParams
from pagewood.engine.core.loop import Engine
from pagewood.engine.offline.llm import LLM
from pagewood.engine.runner.ranks.group import Group
from pagewood.engine.runner.ranks.ranked_runner import RankedRunner

PROMPTS = ["Hello, my name is", "The capital of France is", "1 2 3 4 5 6", "Once upon a time, there was a king who"]


def mixed_sampling(num: int, max_tokens: int = 30) -> list[SamplingParams]:
    """Return parameters of greedy requests, and of others that draw; at temperature 1 the embedded model is sure."""
    return [
        SamplingParams(
            max_tokens=max_tokens, temperature=2.0 * (i % 2), seed=i, top_p=0.9 if i % 3 else 1.0, ignore_eos=True
        )
        for i in range(num)
    ]


def engine_of(llm: LLM) -> Engine:
    return llm._engine._engine  # pyright: ignore[reportPrivateUsage]


def group_of(llm: LLM) -> Group:
    runner = engine_of(llm).runner
    assert isinstance(runner, RankedRunner)
    group = runner._group  # pyright: ignore[reportPrivateUsage]
    assert isinstance(group, Group)
    return group


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def one_process(**options: Any) -> LLM:
    whole: dict[str, Any] = {"num_threads": 1, "max_running": 8, **options}
    return LLM(**whole)


def generate_for(llm: LLM, duration_s: float) -> None:
    ends_s = time.monotonic() + duration_s
    while time.monotonic() < ends_s:
        llm.generate(PROMPTS * 2, mixed_sampling(2 * len(PROMPTS), 100))
