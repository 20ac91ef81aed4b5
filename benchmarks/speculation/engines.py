"""Engines with and without speculation, driven at a fixed number of concurrent requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal

import numpy as np

from pagewood.engine.api import EngineConfig, SamplingParams, Submit
from pagewood.engine.build import build_engine
from pagewood.engine.core.loop import Pending
from pagewood.engine.core.request import Request
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.schedpolicy.drafting.control import DraftControl

Control = Literal["adaptive", "fixed", "never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One pass over some prompts."""

    seconds: float
    first_s: float
    """Seconds from the submission of each request to its first token, added up."""
    outputs: tuple[tuple[int, ...], ...]
    num_steps: int
    num_drafted: int
    num_accepted: int

    @property
    def num_tokens(self) -> int:
        """Output tokens."""
        return sum(map(len, self.outputs))

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second, prompts included in the time."""
        return self.num_tokens / self.seconds

    @property
    def decode_tokens_per_s(self) -> float:
        """Output tokens behind the first per second of the time behind it, if there is one request at a time."""
        return (self.num_tokens - len(self.outputs)) / (self.seconds - self.first_s)


class _Resting:
    """A policy of draft lengths that never drafts; satisfies `core.steps.speculation.Drafting`."""

    max_tokens = 5
    reason = "never"
    is_far = True

    def rests(self, num_requests: int) -> bool:
        """Return True."""
        return True

    def lengths(self, requests: Sequence[Request], num_other_tokens: int) -> Sequence[int]:
        """Return none; it is not called."""
        return [0] * len(requests)

    def observe(self, report: object) -> None:
        """Do nothing."""

    def forget(self, request: Request) -> None:
        """Do nothing."""


class System:
    """An engine with a name. Its requests share its prefix cache."""

    def __init__(self, name: str, config: EngineConfig, *, is_resting: bool = False) -> None:
        """Build the engine.

        Args:
            name: of the system.
            config: of the engine.
            is_resting: whether its drafter, which it then must have, never drafts.
        """
        self.name = name
        self._inbox, self._outbox = MemoryInbox(), MemoryOutbox()
        self._engine = build_engine(config, inbox=self._inbox, outbox=self._outbox)
        speculation = self._engine._speculation  # pyright: ignore[reportPrivateUsage]
        self._drafting = None if speculation is None else speculation._drafting  # pyright: ignore[reportPrivateUsage]
        if is_resting:
            self.rest(True)

    def rest(self, is_resting: bool) -> None:
        """Let the drafter, which there must be, never draft from now on, or draft again."""
        self.draft("never" if is_resting else "adaptive")

    def draft(self, control: Control) -> None:
        """Choose the lengths of drafts from now on; there must be a drafter."""
        speculation = self._engine._speculation  # pyright: ignore[reportPrivateUsage]
        assert speculation is not None
        assert self._drafting is not None
        match control:
            case "adaptive":
                chosen = self._drafting
            case "fixed":
                chosen = DraftControl(self._drafting.max_tokens, mode="fixed")
            case "never":
                chosen = _Resting()
        speculation._drafting = chosen  # pyright: ignore[reportPrivateUsage]

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        concurrency: int,
        max_tokens: int | Sequence[int],
        temperature: float = 0.0,
        ignore_eos: bool = False,
        each: Sequence[Mapping[str, Any]] | None = None,
        **fields: Any,
    ) -> Run:
        """Answer the prompts, `concurrency` at a time; request i has seed i, and `max_tokens` may be given for each.

        `fields` are other `SamplingParams`, `each` those of each prompt.
        """
        limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
        before = self._engine.counters()
        waiting = deque(enumerate(prompts))
        outputs: list[list[int]] = [[] for _ in prompts]
        num_open, first_s = 0, 0.0
        submitted_s = [0.0] * len(prompts)
        pending: Pending | None = None
        start = perf_counter()
        while waiting or num_open or pending is not None:
            while waiting and num_open < concurrency:
                index, prompt = waiting.popleft()
                own: dict[str, Any] = {"temperature": temperature, **fields, **({} if each is None else each[index])}
                sampling = SamplingParams(max_tokens=limits[index], seed=index, ignore_eos=ignore_eos, **own)
                tokens = np.array(prompt, "<i4").tobytes()
                submitted_s[index] = perf_counter()
                self._inbox.put(Submit(request_id=str(index), tokens=tokens, sampling=sampling))
                num_open += 1
            pending = self._engine.advance(pending)
            for delta in self._outbox.take():
                if delta.refusal is not None:
                    raise RuntimeError(f"request {delta.request_id}: {delta.refusal.message}")
                if delta.first:
                    first_s += perf_counter() - submitted_s[int(delta.request_id)]
                outputs[int(delta.request_id)] += delta.tokens
                num_open -= delta.finish is not None
        seconds = perf_counter() - start
        after = self._engine.counters()
        old, new = before.speculation, after.speculation
        return Run(
            seconds=seconds,
            first_s=first_s,
            outputs=tuple(map(tuple, outputs)),
            num_steps=after.num_steps - before.num_steps,
            num_drafted=new.num_drafted - old.num_drafted if old and new else 0,
            num_accepted=new.num_accepted - old.num_accepted if old and new else 0,
        )

    def close(self) -> None:
        """End the engine."""
        self._engine.close()
