"""Engines that share a cache, each of which works when a test says so."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from pagewood.engine.api import Delta, EngineConfig, RequestOptions, SamplingParams, Submit, TokenLogprob
from pagewood.engine.build import build_engine
from pagewood.engine.core.loop import Engine, Pending
from pagewood.engine.links import MemoryInbox, MemoryOutbox

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


class Side:
    """An engine, of the embedded model by default."""

    def __init__(self, **options: Any) -> None:
        self.inbox, self.outbox = MemoryInbox(), MemoryOutbox()
        self.place: str = options.get("remote_cache") or ""
        chosen: dict[str, Any] = {"max_total_tokens": 1024, "chunked_prefill_size": 32, "num_threads": 1, **options}
        config = EngineConfig(**chosen)
        self.engine: Engine = build_engine(config, inbox=self.inbox, outbox=self.outbox)
        self.pending: Pending | None = None
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprob]] = {}
        self.ends: dict[str, Delta] = {}

    @property
    def num_computed(self) -> int:
        return self.engine.counters().num_tokens

    def submit(self, name: str, prompt: list[int], sampling: SamplingParams = GREEDY, **options: Any) -> None:
        tokens = np.array(prompt, "<i4").tobytes()
        self.inbox.put(Submit.of(RequestOptions(sampling=sampling, **options), request_id=name, tokens=tokens))

    def step(self) -> None:
        self.pending = self.engine.advance(self.pending)
        for delta in self.outbox.take():
            self.tokens.setdefault(delta.request_id, []).extend(delta.tokens)
            self.logprobs.setdefault(delta.request_id, []).extend(delta.logprobs)
            if delta.finish is not None:
                self.ends[delta.request_id] = delta

    def until(self, holds: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < deadline_s, f"ended: {self.ends}"
            self.step()

    def answer(self, name: str, prompt: list[int], sampling: SamplingParams = GREEDY, **options: Any) -> list[int]:
        """Answer one prompt to its end."""
        self.submit(name, prompt, sampling, **options)
        self.until(lambda: name in self.ends)
        while self.pending is not None:
            self.step()
        assert self.engine.violation() is None
        return self.tokens[name]
