"""Random requests with common prefixes, which come and go while others run; some ask for inner rows."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pagewood.engine.api import Abort, EngineConfig, FinishReason, Rows, SamplingParams, Submit
from pagewood.engine.build import build_engine
from pagewood.engine.core.loop import Engine, Pending
from pagewood.engine.links import MemoryInbox, MemoryOutbox

Build = Callable[..., Engine]
"""Builds an engine of a configuration and of the keywords `inbox` and `outbox`."""
ASKED = ("routed_experts_from", "hidden_states_from")


@dataclass(slots=True)
class Answer:
    """What an engine has answered to a request."""

    request: Submit
    tokens: list[int] = field(default_factory=list[int])  # contents written by: traffic
    parts: list[tuple[Rows | None, ...]] = field(default_factory=list[tuple[Rows | None, ...]])
    """The experts and the hidden states of each of its deltas."""  # contents written by: traffic
    finish: FinishReason | None = None  # written by: traffic

    @property
    def rows(self) -> list[tuple[int, Rows | None]]:
        """The first position of its experts and of its hidden states, and the rows from there on."""
        num_prompt, sampling = len(self.request.tokens) // 4, self.request.sampling
        firsts = [num_prompt - 1 if one == -1 else one or 0 for one in (getattr(sampling, name) for name in ASKED)]
        return list(zip(firsts, map(Rows.joined, zip(*self.parts, strict=True)), strict=True))


def traffic(config: EngineConfig, seed: int, *, build: Build = build_engine) -> tuple[dict[str, Answer], int]:
    """Return the answers to random requests, some of which are aborted, and how many were preempted."""
    rng, inbox, outbox = random.Random(seed), MemoryInbox(), MemoryOutbox()
    engine = build(config, inbox=inbox, outbox=outbox)
    kinds = [(place, name) for place, name in enumerate(ASKED) if place or engine.info.expert_shape is not None]
    arrivals: list[tuple[int, Submit, int | None]] = []
    shared = [rng.randrange(3, 90) for _ in range(20)]
    for index in range(24):
        prompt = shared[: rng.choice((0, 0, 8, 20))] + [rng.randrange(3, 90) for _ in range(rng.randint(1, 40))]
        asked: dict[str, Any] = {
            name: (-1, 0, len(prompt) // 2)[index // 4 % 3] for place, name in kinds if index % 4 in (place, 2)
        }
        sampling = SamplingParams(
            max_tokens=rng.randint(1, 20), temperature=float(index % 2), seed=index, ignore_eos=True,
            logprobs=2 if index % 5 == 0 else None, **asked,
        )  # fmt: skip
        submit = Submit(request_id=str(index), tokens=np.array(prompt, "<i4").tobytes(), sampling=sampling)
        step = rng.randrange(30)
        arrivals.append((step, submit, step + rng.randint(1, 25) if rng.random() < 0.2 else None))
    answers = {submit.request_id: Answer(submit) for _, submit, _ in arrivals}
    pending: Pending | None = None
    step = 0
    try:
        while pending is not None or any(one.finish is None for one in answers.values()):
            for at, submit, abort_at in arrivals:
                if at == step:
                    inbox.put(submit)
                if abort_at == step:
                    inbox.put(Abort(request_id=submit.request_id))
            pending = engine.advance(pending)
            for delta in outbox.take():
                own = answers[delta.request_id]
                own.tokens += delta.tokens
                own.parts.append((delta.experts, delta.states))
                own.finish = delta.finish or own.finish
            step += 1
        num_preempted = engine.counters().num_preempted
        assert engine.violation() is None
    finally:
        engine.close()
    return answers, num_preempted


def check_alike(whole: EngineConfig, small: EngineConfig, seed: int, *, build: Build = build_engine) -> int:
    """Check that two engines give the same tokens and inner rows, hidden states but for the order of additions; return
    how many requests were preempted in the second one.
    """
    expected, _ = traffic(whole, seed, build=build)
    found, num_preempted = traffic(small, seed, build=build)
    num_rows = 0
    for request_id, own in found.items():
        other = expected[request_id]
        both = min(len(own.tokens), len(other.tokens))
        assert own.tokens[:both] == other.tokens[:both]
        if FinishReason.ABORT not in (own.finish, other.finish):
            assert own.tokens == other.tokens
        known = len(own.request.tokens) // 4 + both - 1
        for name, (first, mine), (_, theirs) in zip(ASKED, own.rows, other.rows, strict=True):
            if getattr(own.request.sampling, name) is None:
                assert mine is theirs is None
            elif both:
                assert mine is not None
                assert theirs is not None
                num, kind = known - first, "<i4" if name == ASKED[0] else "<f4"
                pair = [np.frombuffer(one.data, kind).reshape(one.shape)[:num] for one in (mine, theirs)]
                assert len(pair[0]) == len(pair[1]) == num
                np.testing.assert_allclose(*pair, atol=0.0 if kind == "<i4" else 1e-4, rtol=0)
                num_rows += num
    assert num_rows > 0
    return num_preempted
