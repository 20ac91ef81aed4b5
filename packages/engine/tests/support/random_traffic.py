"""Random requests with common prefixes, which come and go while others run."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from pagewood.engine.api import Abort, EngineConfig, FinishReason, SamplingParams, Submit
from pagewood.engine.build import build_engine
from pagewood.engine.core.loop import Engine, Pending
from pagewood.engine.links import MemoryInbox, MemoryOutbox

Build = Callable[..., Engine]
"""Builds an engine of a configuration and of the keywords `inbox` and `outbox`."""


def traffic(
    config: EngineConfig, seed: int, *, build: Build = build_engine
) -> tuple[dict[str, list[int]], dict[str, FinishReason], int]:
    """Return tokens and ends of random requests, some of which are aborted, and how many were preempted."""
    rng, inbox, outbox = random.Random(seed), MemoryInbox(), MemoryOutbox()
    engine = build(config, inbox=inbox, outbox=outbox)
    arrivals: list[tuple[int, Submit, int | None]] = []
    shared = [rng.randrange(3, 90) for _ in range(20)]
    for index in range(24):
        prompt = shared[: rng.choice((0, 0, 8, 20))] + [rng.randrange(3, 90) for _ in range(rng.randint(1, 40))]
        sampling = SamplingParams(
            max_tokens=rng.randint(1, 20), temperature=float(index % 2), seed=index, ignore_eos=True,
            logprobs=2 if index % 5 == 0 else None,
        )  # fmt: skip
        submit = Submit(request_id=str(index), tokens=np.array(prompt, "<i4").tobytes(), sampling=sampling)
        step = rng.randrange(30)
        arrivals.append((step, submit, step + rng.randint(1, 25) if rng.random() < 0.2 else None))
    tokens: dict[str, list[int]] = {submit.request_id: [] for _, submit, _ in arrivals}
    ends: dict[str, FinishReason] = {}
    pending: Pending | None = None
    step = 0
    try:
        while len(ends) < len(arrivals) or pending is not None:
            for at, submit, abort_at in arrivals:
                if at == step:
                    inbox.put(submit)
                if abort_at == step:
                    inbox.put(Abort(request_id=submit.request_id))
            pending = engine.advance(pending)
            for delta in outbox.take():
                tokens[delta.request_id] += delta.tokens
                if delta.finish is not None:
                    ends[delta.request_id] = delta.finish
            step += 1
        num_preempted = engine.counters().num_preempted
        assert engine.violation() is None
    finally:
        engine.close()
    return tokens, ends, num_preempted


def check_alike(whole: EngineConfig, small: EngineConfig, seed: int, *, build: Build = build_engine) -> int:
    """Check that two engines give the same tokens; return how many requests were preempted in the second one."""
    expected, others, _ = traffic(whole, seed, build=build)
    found, ends, num_preempted = traffic(small, seed, build=build)
    for name, tokens in found.items():
        both = min(len(tokens), len(expected[name]))
        assert tokens[:both] == expected[name][:both]
        if FinishReason.ABORT not in (ends[name], others[name]):
            assert tokens == expected[name]
    return num_preempted
