"""The order of things: the plain and the overlapped loop are the same verbs in another order."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pagewood.engine.api import Delta, FinishReason, Inbox, Outbox, Refusal
from pagewood.engine.core.arrays import Int32
from pagewood.engine.core.batch import Batch, BatchBuilder
from pagewood.engine.core.intake import Intake
from pagewood.engine.core.kv import KVSpace
from pagewood.engine.core.plan import Grant, Planner
from pagewood.engine.core.retire import end, retire
from pagewood.engine.core.state import EngineState

_log = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.5
"""How long an idle engine waits for commands before it asks again whether to stop."""


_RECALL_WAIT_S = 0.001
"""How long an engine rests that has nothing to do but to wait for KV from another memory."""


class StepHandle(Protocol):
    """A launched step."""

    def wait(self) -> Int32:
        """[num_sampled] token ids, once they are there. Raises what the step raised."""
        ...


class Runner(Protocol):
    """Computes batches, in the order in which they were launched."""

    def launch(self, batch: Batch) -> StepHandle:
        """Hand a batch to the device; returns without waiting for it."""
        ...

    def close(self) -> None:
        """Give back what the runner holds; nothing may be in flight."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A step in flight."""

    grants: tuple[Grant, ...]
    handle: StepHandle


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What the users of an engine may ask about it."""

    model_name: str
    max_length: int
    """Longest prompt plus output of one request, tokens."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_pages: int
    page_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Where an engine stands; all of them since it was built or at this moment."""

    num_steps: int
    num_tokens: int
    """Positions computed or being computed."""
    num_preempted: int
    num_violations: int
    """How often the idle invariant was broken, and healed."""
    num_waiting: int
    num_running: int
    num_draining: int
    num_pages: int
    num_free_pages: int
    num_cached_pages: int


class Engine:
    """Takes commands, runs steps, answers. Invariant: at most one step is in flight between two calls of a step.

    Call it from one thread. `run` is the whole life of a server's engine; `step` and `step_overlapped` are for those
    who bring their own loop.
    """

    __slots__ = (
        "_builder", "_clock", "_inbox", "_intake", "_kv", "_num_preempted", "_num_steps", "_num_tokens",
        "_num_violations", "_outbox", "_overlap", "_planner", "_runner", "_state", "info",
    )  # fmt: skip

    def __init__(
        self,
        *,
        info: EngineInfo,
        state: EngineState,
        intake: Intake,
        planner: Planner,
        kv: KVSpace,
        builder: BatchBuilder,
        runner: Runner,
        inbox: Inbox,
        outbox: Outbox,
        clock: Callable[[], float],
        overlap: bool,
    ) -> None:
        self.info = info
        self._state = state
        self._intake = intake
        self._planner = planner
        self._kv = kv
        self._builder = builder
        self._runner = runner
        self._inbox = inbox
        self._outbox = outbox
        self._clock = clock
        self._overlap = overlap
        self._num_steps = 0  # written by: loop
        self._num_tokens = 0  # written by: loop
        self._num_preempted = 0  # written by: loop
        self._num_violations = 0  # written by: loop

    def run(self, stopped: Callable[[], bool]) -> None:
        """Step until `stopped()`; requests that are alive then are aborted."""
        pending: Pending | None = None
        while not stopped():
            pending = self.advance(pending)
        self._finish(pending)
        self._send([end(self._state, self._kv, r, FinishReason.ABORT) for r in list(self._state.by_id.values())])

    def advance(self, last: Pending | None) -> Pending | None:
        """Do one step of the configured loop; give back what it returns in the next call."""
        return self.step_overlapped(last) if self._overlap else self.step()

    def step(self) -> None:
        """Compute one step and take its tokens."""
        self._take_commands(None)
        pending = self._launch()
        self._finish(pending)

    def step_overlapped(self, last: Pending | None) -> Pending | None:
        """Launch one step, and take the tokens of the step before it while it computes."""
        self._take_commands(last)
        pending = self._launch()
        self._finish(last)
        return pending

    def counters(self) -> Counters:
        """Return where the engine stands, in constant time."""
        return Counters(
            num_steps=self._num_steps,
            num_tokens=self._num_tokens,
            num_preempted=self._num_preempted,
            num_violations=self._num_violations,
            num_waiting=len(self._state.waiting),
            num_running=len(self._state.running),
            num_draining=len(self._state.draining),
            num_pages=self._kv.num_pages,
            num_free_pages=self._kv.num_free,
            num_cached_pages=self._kv.num_cached,
        )

    def violation(self) -> str | None:
        """Say how the accounting of KV memory is wrong now, for tests and diagnosis: reads the whole pool."""
        return self._kv.violation([*self._state.running, *self._state.draining])

    def close(self) -> None:
        """Give back the runner's threads and memory, and write down the KV that is to outlive the process."""
        self._runner.close()
        self._kv.close()

    def _take_commands(self, last: Pending | None) -> None:
        idle = last is None and self._state.is_idle
        timeout_s = 0.0
        if idle:
            self._check_invariant()
            self._kv.poll()
            timeout_s = _IDLE_WAIT_S
        elif last is None and not self._state.running and self._kv.num_recalling:
            time.sleep(_RECALL_WAIT_S)  # an inbox in memory does not wait, and a loop that spins holds the copies up
        commands = self._inbox.receive(timeout_s=timeout_s)
        if commands:
            now_s = self._clock()
            self._send([delta for command in commands if (delta := self._intake.take(command, now_s)) is not None])

    def _launch(self) -> Pending | None:
        state = self._state
        if not len(state.waiting) and not state.running:
            return None
        plan = self._planner.plan(state, self._clock())
        self._num_preempted += plan.num_preempted
        if not plan.grants:
            return None
        batch = self._builder.build(plan.grants, step=self._num_steps)
        self._num_steps += 1
        for request, start, count, samples, _ in plan.grants:
            request.num_launched = start + count
            request.num_in_flight += 1
            request.num_unseen += samples
            self._num_tokens += count
        return Pending(grants=plan.grants, handle=self._runner.launch(batch))

    def _finish(self, pending: Pending | None) -> None:
        if pending is None:
            return
        failure: Exception | None = None
        tokens: list[int] = []
        try:
            tokens = pending.handle.wait().tolist()
        except Exception as error:  # whatever a device raises ends its requests, not the engine
            _log.exception("a step failed")
            failure = error
        for grant in pending.grants:
            grant.request.num_in_flight -= 1
            grant.request.num_unseen -= grant.samples
        self._send(self._fail(pending, failure) if failure else retire(self._state, self._kv, pending.grants, tokens))

    def _fail(self, pending: Pending, failure: Exception) -> list[Delta]:
        refusal = Refusal(message=f"the step of this request failed: {failure}", code="step_failed")
        alive = [grant.request for grant in pending.grants if grant.request.finish is None]
        deltas = [end(self._state, self._kv, request, FinishReason.ERROR, refusal=refusal) for request in alive]
        return deltas + retire(self._state, self._kv, (), ())

    def _send(self, deltas: Sequence[Delta]) -> None:
        if deltas:
            self._outbox.send(deltas)

    def _check_invariant(self) -> None:
        violation = self._kv.violation(())
        if violation is not None:
            self._num_violations += 1
            _log.error("KV accounting is wrong while idle; the cache is cleared: %s", violation)
            self._kv.heal()
