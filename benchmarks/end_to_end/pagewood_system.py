"""Pagewood's engine, run in this thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

import numpy as np

from end_to_end.cases import Case, Prompts
from end_to_end.run import Run
from pagewood.engine.api import EngineConfig, SamplingParams, Submit, WeightFormat
from pagewood.engine.build import build_engine
from pagewood.engine.core.loop import Pending
from pagewood.engine.links import MemoryInbox, MemoryOutbox

Advance = Callable[[Pending | None], Pending | None]
"""Runs one step; gets what the previous call returned."""


class PagewoodSystem:
    """An engine, run by either of its loops; all runs share its prefix cache."""

    name = "pagewood"

    def __init__(
        self,
        folder: Path,
        cases: Sequence[Case],
        *,
        num_threads: int,
        weights: WeightFormat = "auto",
        num_ranks: int = 1,
    ) -> None:
        self._inbox, self._outbox = MemoryInbox(), MemoryOutbox()
        self._engine = build_engine(
            EngineConfig(
                model=str(folder),
                num_threads=num_threads,
                tensor_parallel_size=num_ranks,
                weights=weights,
                max_total_tokens=max(64 + case.num_requests * (case.length + 16) for case in cases),
                max_running=max(case.num_requests for case in cases),
            ),
            inbox=self._inbox,
            outbox=self._outbox,
        )

    def run(self, case: Case, prompts: Prompts) -> Run:
        """Answer the prompts with the overlapped loop."""
        return self._run(case, prompts, self._engine.step_overlapped)

    def run_plain(self, case: Case, prompts: Prompts) -> Run:
        """Answer the prompts with the plain loop."""
        return self._run(case, prompts, lambda last: self._engine.step())

    @property
    def num_steps(self) -> int:
        """How many steps it has computed."""
        return self._engine.counters().num_steps

    def close(self) -> None:
        self._engine.close()

    def _run(self, case: Case, prompts: Prompts, advance: Advance) -> Run:
        sampling = SamplingParams(max_tokens=case.num_output, temperature=0.0, ignore_eos=True)
        tokens: list[list[int]] = [[] for _ in prompts]
        times: list[list[float]] = [[] for _ in prompts]
        start = perf_counter()
        for index, prompt in enumerate(prompts):
            self._inbox.put(Submit(request_id=str(index), tokens=np.array(prompt, "<i4").tobytes(), sampling=sampling))
        self._answer(advance, tokens, times)
        return Run(submitted_s=start, tokens=tuple(map(tuple, tokens)), times_s=tuple(map(tuple, times)))

    def _answer(self, advance: Advance, tokens: list[list[int]], times: list[list[float]]) -> None:
        pending: Pending | None = None
        num_open = len(tokens)
        while num_open or pending is not None:
            pending = advance(pending)
            now = perf_counter()
            for delta in self._outbox.take():
                if delta.refusal is not None:
                    raise RuntimeError(f"request {delta.request_id}: {delta.refusal.message}")
                index = int(delta.request_id)
                tokens[index] += delta.tokens
                times[index] += [now] * len(delta.tokens)
                num_open -= delta.finish is not None
