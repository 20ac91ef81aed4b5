"""Records an engine: its inbox, outbox, clock and runner, what works beside the steps, and its plans.

The engine's thread only keeps references and copies small arrays; a sink makes records of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pagewood.engine.api import Command, Delta, Inbox, Outbox
from pagewood.engine.core.images import ImageEncoder
from pagewood.engine.core.loop import CheckedRunner, Runner, StepHandle
from pagewood.engine.core.masks.constrain import Compiler
from pagewood.engine.core.memory.adapters import AdapterSource
from pagewood.engine.core.memory.caches import PrefixCache, TieredCache
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.result import StepResult
from pagewood.engine.core.queue.state import EngineState
from pagewood.engine.core.reasons import Reason
from pagewood.engine.core.request import Request
from pagewood.engine.core.steps.grant import Grant
from pagewood.engine.core.steps.speculation import Drafting
from pagewood.engine.core.steps.step_plan import StepPlan
from pagewood.engine.core.weights import WeightSource
from pagewood.engine.decision_log.recorded_grammars import RecordedCompiler
from pagewood.engine.decision_log.recorded_tiers import RecordedCache
from pagewood.engine.decision_log.recorded_work import RecordedAdapters, RecordedImages, RecordedWeights
from pagewood.engine.decision_log.turn import Note, PlanHeard, ResultHeard, Turn


class Recorder:
    """Satisfies `core.loop.Observer`, and wraps the parts of an engine. Use it from the engine's thread.

    Invariant: all events between two calls of the inbox's `receive` are one turn.

    Args:
        sink: gets each turn when it is over; must not raise.
        close: is called when the runner is closed, after the last turn.
        clock: of the engine, read for times without influence on decisions.
    """

    def __init__(self, sink: Callable[[Turn], None], *, close: Callable[[], None], clock: Callable[[], float]) -> None:
        self._sink = sink
        self._close = close
        self._clock = clock
        self._num_begun = 0  # written by: recorder
        self.turn = Turn()
        """Not over yet."""  # written by: recorder

    def note(self, reason: Reason, request: Request | None, other: Request | None = None, *numbers: int) -> None:
        """Keep a note."""
        prefix = request.cached_prefix if request is not None and reason is Reason.ADMITTED else None
        self.turn.notes.append(Note(reason, request, other, numbers, prefix))

    def took(self, commands: Sequence[Command], answers: Sequence[Delta | None], now_s: float) -> None:
        """Keep commands."""
        self.turn.commands += zip(commands, answers, strict=True)

    def planned(self, plan: StepPlan, grants: Sequence[Grant], state: EngineState, num_free_pages: int) -> None:
        """Keep a plan."""
        self.turn.plans.append(
            PlanHeard(
                grants, plan.is_decode, plan.num_preempted, len(state.waiting), len(state.running), num_free_pages
            )
        )

    def waited(self, result: StepResult | None, *, is_interrupted: bool = False) -> None:
        """Keep a copy of a result; None: the step has failed."""
        if result is None:
            fault = "interrupt" if is_interrupted else "error"
            self.turn.results.append(ResultHeard(b"", None, (), -1, (), fault))
            return
        vectors = result.vectors
        self.turn.results.append(
            ResultHeard(
                result.tokens.astype("<i4").tobytes(),
                result.counts.astype(np.int32),
                tuple(result.excluded),
                -1 if result.prompt_logprobs is None else len(result.prompt_logprobs.tokens),
                () if vectors is None else tuple(bool(np.isfinite(vector).all()) for vector in vectors),
            )
        )

    def end_turn(self) -> None:
        """Hand the turn over, and begin another."""
        turn, self.turn = self.turn, Turn()
        self._sink(turn)

    def inbox(self, inner: Inbox) -> Inbox:
        """Return an inbox whose calls of `receive` separate the turns."""
        return _RecordedInbox(inner, self)

    def outbox(self, inner: Outbox) -> Outbox:
        """Return an outbox whose answers are kept."""
        return _RecordedOutbox(inner, self, self._clock)

    def clock(self) -> float:
        """Read the clock, and keep the reading."""
        now_s = self._clock()
        self.turn.clock.append(now_s)
        return now_s

    def runner(self, inner: Runner) -> Runner:
        """Return a runner whose failed launches are kept; closing it closes the log."""
        return _RecordedRunner(inner, self)

    def compiler(self, inner: Compiler) -> Compiler:
        """Return a compiler whose results and whose matchers' answers are kept."""
        return RecordedCompiler(inner, self)

    def adapters(self, inner: AdapterSource) -> AdapterSource:
        """Return a source of adapters whose results are kept."""
        return RecordedAdapters(inner, self)

    def images(self, inner: ImageEncoder) -> ImageEncoder:
        """Return an encoder of images whose results are kept."""
        return RecordedImages(inner, self)

    def weights(self, inner: WeightSource) -> WeightSource:
        """Return a source of weights whose results are kept, and whether each could be computed with."""
        return RecordedWeights(inner, self)

    def drafting(self, inner: Drafting) -> Drafting:
        """Return a drafting policy whose decisions are kept."""
        return _RecordedDrafting(inner, self)

    def caches(self, make: Callable[[], PrefixCache]) -> Callable[[], PrefixCache]:
        """Return a function that makes the same caches; the answers of those with lower tiers are kept."""

        def made() -> PrefixCache:
            cache = make()
            return RecordedCache(cache, self._answered) if isinstance(cache, TieredCache) else cache

        return made

    def begin(self) -> int:
        """Return the number of work that begins beside the steps."""
        self._num_begun += 1
        return self._num_begun - 1

    def close(self) -> None:
        """End the last turn, and the log."""
        self.end_turn()
        self._close()

    def _answered(self, method: str, answer: Any) -> None:
        self.turn.cache.setdefault(method, []).append(answer)


class _RecordedInbox:
    def __init__(self, inner: Inbox, recorder: Recorder) -> None:
        self._inner = inner
        self._recorder = recorder

    def receive(self, *, timeout_s: float | None) -> Sequence[Command]:
        self._recorder.end_turn()
        return self._inner.receive(timeout_s=timeout_s)


class _RecordedOutbox:
    def __init__(self, inner: Outbox, recorder: Recorder, clock: Callable[[], float]) -> None:
        self._inner = inner
        self._recorder = recorder
        self._clock = clock

    def send(self, deltas: Sequence[Delta]) -> None:
        self._recorder.turn.answers.append((self._clock(), deltas))
        self._inner.send(deltas)


class _RecordedRunner:
    def __init__(self, inner: Runner, recorder: Recorder) -> None:
        self._inner = inner
        self._recorder = recorder

    def launch(self, batch: Batch) -> StepHandle:
        launches = self._recorder.turn.launches
        try:
            handle = self._inner.launch(batch)
        except Exception:
            launches.append("error")
            raise
        except BaseException:
            launches.append("interrupt")
            raise
        launches.append("")
        return handle

    def check(self) -> None:
        if isinstance(self._inner, CheckedRunner):
            self._inner.check()

    def close(self) -> None:
        self._inner.close()
        self._recorder.close()


class _RecordedDrafting:
    def __init__(self, inner: Drafting, recorder: Recorder) -> None:
        self._inner = inner
        self._recorder = recorder
        self.max_tokens = inner.max_tokens
        self.observe, self.forget = inner.observe, inner.forget

    @property
    def reason(self) -> str:
        return self._inner.reason

    @property
    def is_far(self) -> bool:
        return self._inner.is_far

    def rests(self, num_requests: int) -> bool:
        rests = self._inner.rests(num_requests)
        self._recorder.turn.drafts.append(None if rests else [])
        return rests

    def lengths(self, requests: Sequence[Request], num_other_tokens: int) -> Sequence[int]:
        lengths = list(self._inner.lengths(requests, num_other_tokens))
        self._recorder.turn.drafts[-1] = lengths
        return lengths
