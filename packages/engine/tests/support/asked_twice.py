"""What an engine answers to some prompts, and to the same prompts again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from answered import answers_to, request, tokens_of
from pagewood.engine.api import EngineConfig
from pagewood.engine.build import build_engine
from pagewood.engine.core.loop import Engine
from pagewood.engine.links import MemoryInbox, MemoryOutbox

SMALL: dict[str, Any] = {"max_running": 4, "chunked_prefill_size": 16, "page_size": 4, "max_total_tokens": 1024}
PROMPTS = [list(range(3, 27)), list(range(3, 19)), [7, 9, 11], list(range(50, 72))]


def small(folder: Path, **options: Any) -> EngineConfig:
    """Return the configuration of a small engine."""
    whole: dict[str, Any] = {"num_threads": 2, **SMALL, **options}
    return EngineConfig(model=str(folder), **whole)


def answered(config: EngineConfig) -> list[list[int]]:
    """Return what an engine answers, and end it."""
    inbox, outbox = MemoryInbox(), MemoryOutbox()
    return outputs(build_engine(config, inbox=inbox, outbox=outbox), inbox, outbox)


def outputs(
    engine: Engine, inbox: MemoryInbox, outbox: MemoryOutbox, *, prompts: Sequence[Sequence[int]] = PROMPTS
) -> list[list[int]]:
    """Return the tokens of all prompts, computed twice; the second time they are cached. Every other one is sampled."""
    requests = [request(i, prompt, max_tokens=8, temperature=i % 2, seed=i) for i, prompt in enumerate(prompts)]
    try:
        answers = [one for _ in range(2) for one in answers_to(engine, inbox, outbox, requests)]
    finally:
        engine.close()
    assert all(answer[-1].refusal is None for answer in answers), answers
    return [tokens_of(answer) for answer in answers]
