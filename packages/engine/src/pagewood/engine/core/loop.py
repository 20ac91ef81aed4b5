"""The engine's loops, plain and overlapped: the same calls in a different order."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

from pagewood.engine.api import Delta, EngineConfig, FinishReason, Inbox, Outbox, Refusal
from pagewood.engine.core.arrays import Int32
from pagewood.engine.core.batch import Batch, BatchBuilder, num_masks
from pagewood.engine.core.constrain import fill_masks, open_masks
from pagewood.engine.core.intake import Intake
from pagewood.engine.core.kv import KVSpace, PrefixCache
from pagewood.engine.core.pacing import Pacing
from pagewood.engine.core.plan import Grant, Planner
from pagewood.engine.core.request import Request
from pagewood.engine.core.result import StepResult
from pagewood.engine.core.retire import end, release_drained, retire
from pagewood.engine.core.shared_work import SharedWork
from pagewood.engine.core.speculation import Speculation, SpeculationCounts
from pagewood.engine.core.state import EngineState
from pagewood.engine.core.tree_shape import DraftTree

_log = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.5
"""How long an idle engine waits for commands before it checks again whether to stop."""

_RECALL_WAIT_S = 0.001
"""How long the engine sleeps when it can only wait for KV from a lower tier."""


class StepHandle(Protocol):
    """A launched step."""

    def wait(self) -> StepResult:
        """Wait for the result and return it; a second call returns it again.

        Raises:
            Exception: the step failed; the engine ends its requests.
        """
        ...


@runtime_checkable
class ConstrainedHandle(StepHandle, Protocol):
    """A launched step some of whose tokens are drawn later; what a runner returns that can follow grammars."""

    def drafts(self) -> Sequence[Sequence[int] | DraftTree]:
        """Wait for the drafts of the M grants of `Batch.constrained`, and return them; called before `constrain`."""
        ...

    def constrain(self, masks: Int32) -> None:
        """Let the tokens of `Batch.constrained` be drawn; called once, before the next launch, if there are any.

        Args:
            masks: `[>= M and drafts, words of a mask]`, for each of the M grants one, and one for each of its drafts:
                bit `i % 32` of word `i // 32` is set if token i may be drawn in its place. More are not read.
        """
        ...


class Runner(Protocol):
    """Computes batches in the order in which they are launched."""

    def launch(self, batch: Batch) -> StepHandle:
        """Hand a batch to the device and return without waiting for it.

        Raises:
            Exception: the step was not launched; the engine ends its requests.
        """
        ...

    def close(self) -> None:
        """Release threads and memory; no step may be in flight."""
        ...


@dataclass(slots=True, kw_only=True)
class Pending:
    """A step in flight."""

    grants: tuple[Grant, ...]
    handle: StepHandle
    constrained: Sequence[Request] = ()
    """Requests whose draws wait for masks."""  # written by: loop
    launched_s: float = 0.0
    """When it was handed to the runner, on the engine's clock; 0 if steps are not measured."""
    num_masks: int = 0
    """How many masks they need at most."""
    is_drafting: bool = False
    """Whether any of its grants was made longer by drafts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Facts about an engine that are fixed when it is built."""

    model_name: str
    max_length: int
    """Longest prompt plus output of one request, tokens."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_pages: int
    page_size: int
    vector_size: int = 0
    """Elements of a hidden state; 0: the runner makes no vectors."""
    page_bytes: int = 0
    """Of all layers; 0: the runner has no KV memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Counts of an engine: steps, tokens, preemptions and violations since it was built, all others at this moment."""

    num_steps: int
    num_tokens: int
    """Positions computed or being computed."""
    num_preempted: int
    num_violations: int
    """How often the invariant of KV memory was found broken while idle, and repaired."""
    num_waiting: int
    num_running: int
    num_draining: int
    num_pages: int
    num_free_pages: int
    num_cached_pages: int
    speculation: SpeculationCounts | None = None
    """None: the engine does not speculate."""


class Engine:
    """Takes commands, runs steps, sends answers. Invariant: at most one step is in flight between calls of `advance`.

    Use it from one thread. A server calls `run`; a caller with a loop of its own calls `advance`.

    A step that fails ends its own requests with an error, and no others. A `KeyboardInterrupt` (or any other exception
    that is not an `Exception`) from the runner reaches the caller of `advance` after the steps in flight have been
    waited for and retired. The engine can then be used again, with `advance(None)`. If it comes from `launch`, it ends
    the requests of that step with an error; in `wait` it ends none. An exception from any other place, such as a signal
    while a step is planned, leaves the engine in an unknown state; callers hold signals back, or run it in a thread of
    its own.
    """

    __slots__ = (
        "_builder", "_clock", "_inbox", "_intake", "_kv", "_mask_work", "_num_preempted", "_num_steps",
        "_num_tokens", "_num_violations", "_outbox", "_overlap", "_pacing", "_planner", "_runner", "_speculation",
        "_state", "config", "info",
    )  # fmt: skip

    def __init__(
        self,
        *,
        config: EngineConfig,
        info: EngineInfo,
        state: EngineState,
        intake: Intake,
        planner: Planner,
        speculation: Speculation | None = None,
        kv: KVSpace,
        builder: BatchBuilder,
        runner: Runner,
        inbox: Inbox,
        outbox: Outbox,
        clock: Callable[[], float],
        pacing: Pacing | None = None,
        num_mask_helpers: int = 0,
    ) -> None:
        self.config = config
        """What it was built from, with every "auto" and None that was chosen replaced."""
        self.info = info
        self._state = state
        self._intake = intake
        self._planner = planner
        self._speculation = speculation
        self._kv = kv
        self._builder = builder
        self._runner = runner
        self._inbox = inbox
        self._outbox = outbox
        self._clock = clock
        self._overlap = config.overlap
        self._pacing = pacing
        self._mask_work = SharedWork(num_mask_helpers)
        self._num_steps = 0  # written by: loop
        self._num_tokens = 0  # written by: loop
        self._num_preempted = 0  # written by: loop
        self._num_violations = 0  # written by: loop

    def run(self, stopped: Callable[[], bool]) -> None:
        """Run steps until `stopped()` is true, then abort the remaining requests."""
        pending: Pending | None = None
        while not stopped():
            pending = self.advance(pending)
        self._finish(pending)
        self._send([end(self._state, self._kv, r, FinishReason.ABORT) for r in list(self._state.by_id.values())])

    def advance(self, last: Pending | None) -> Pending | None:
        """Do one step of the configured loop; pass its return value to the next call."""
        return self.step_overlapped(last) if self._overlap else self.step()

    def step(self) -> None:
        """Launch one step and retire it."""
        self._take_commands(None)
        pending = self._launch()
        self._finish(pending)

    def step_overlapped(self, last: Pending | None) -> Pending | None:
        """Launch one step, and retire the step before it while the new one computes."""
        try:
            self._take_commands(last)
            pending = self._launch()
        except BaseException:
            self._finish(last)
            raise
        try:
            self._finish(last, following=pending)
            self._constrain(pending)
        except BaseException:  # the caller does not get the step that was just launched
            self._finish(pending)
            raise
        return pending

    @property
    def prefix_cache(self) -> PrefixCache:
        """The prefix cache of this moment, to be read in the engine's thread; it is replaced if it is found broken."""
        return self._kv.cache

    def counters(self) -> Counters:
        """Return the counters, in constant time."""
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
            speculation=None if self._speculation is None else self._speculation.counts(),
        )

    def violation(self) -> str | None:
        """Return what is wrong with the accounting of KV memory, or None; reads the whole pool, for tests."""
        holders = [*self._state.running, *self._state.draining]
        return self._kv.violation(holders, is_recalling=bool(self._state.waiting.num_recalling))

    def close(self) -> None:
        """Release the runner's threads and memory, and store the KV that must survive the process."""
        self._intake.close()
        self._mask_work.close()
        self._runner.close()
        self._kv.close()

    def _take_commands(self, last: Pending | None) -> None:
        idle = last is None and self._state.is_resting
        timeout_s = 0.0
        if idle:
            if self._state.is_idle:
                self._check_invariant()
            self._kv.poll()
            timeout_s = _IDLE_WAIT_S
        elif last is None and not self._state.running and (self._state.waiting.num_recalling or self._state.compiling):
            time.sleep(_RECALL_WAIT_S)  # an inbox in memory does not wait, and a busy loop would slow the copies
        commands = self._inbox.receive(timeout_s=timeout_s)
        if commands:
            now_s = self._clock()
            self._send([delta for command in commands if (delta := self._intake.take(command, now_s)) is not None])
        if self._state.compiling:
            self._send(self._intake.poll())
        if self.config.max_queue_s is not None:
            self._send(self._intake.expire(self._clock()))

    def _launch(self) -> Pending | None:
        state = self._state
        if not len(state.waiting) and not state.running:
            return None
        if state.paused != "no":
            if state.paused == "retract":
                self._num_preempted += self._planner.retract(state)
            return None
        plan = self._planner.plan(state, self._clock())
        self._num_preempted += plan.num_preempted
        if not plan.grants:
            return None
        grants, speculation, is_followed = plan.grants, self._speculation, True
        if speculation is not None:
            grants = speculation.extend(grants)
            is_followed = speculation.is_followed
        is_drafting = grants is not plan.grants
        is_decode = plan.is_decode and not is_drafting
        try:
            is_constraining = state.num_constrained > 0
            batch = self._builder.build(
                grants, is_constraining=is_constraining, is_decode=is_decode, is_followed=is_followed
            )
            launched_s = 0.0 if self._pacing is None else self._clock()
            handle = self._runner.launch(batch)
        except Exception as error:
            _log.exception("a step could not be launched")
            self._send(self._fail(grants, error))
            return None
        except BaseException as error:  # the runner may not know the rows and pages of this plan
            self._send(self._fail(grants, error))
            raise
        self._num_steps += 1
        self._num_tokens += batch.num_tokens
        if is_decode:
            for grant in grants:
                request = grant.request
                request.num_launched = grant.start + 1
                request.num_in_flight += 1
                request.num_unseen += 1
        else:
            for grant in grants:
                request = grant.request
                request.num_launched = grant.start + grant.num_advanced
                request.num_in_flight += 1
                request.num_unseen += grant.num_promised
        if not is_constraining:
            return Pending(grants=grants, handle=handle, is_drafting=is_drafting, launched_s=launched_s)
        for grant in grants:
            grant.request.num_untold = 0
        promising = [grant.request for grant in grants if grant.num_promised]
        waiting: list[int] = batch.constrained.tolist()
        return Pending(
            grants=grants,
            handle=handle,
            launched_s=launched_s,
            constrained=[promising[index] for index in waiting],
            num_masks=num_masks(batch),
            is_drafting=is_drafting,
        )

    def _constrain(self, pending: Pending | None) -> None:
        """Give a step the masks that its draws wait for; the step before it has been retired."""
        if pending is None or not pending.constrained:
            return
        handle = pending.handle
        if not isinstance(handle, ConstrainedHandle):
            raise TypeError(f"handles of steps with grammars must be ConstrainedHandles, got {type(handle).__name__}")
        requests, pending.constrained = pending.constrained, ()
        masks = open_masks(pending.num_masks, self.info.vocab_size)
        try:
            fill_masks(requests, handle.drafts(), masks, work=self._mask_work)
        finally:  # otherwise the device would wait for ever
            handle.constrain(masks)

    def _constrain_between(self, pending: Pending, errors: list[BaseException]) -> None:
        """Give a step its masks while the step before it is retired; an error waits in `errors` until that is done."""
        try:
            self._constrain(pending)
        except BaseException as error:
            errors.append(error)

    def _finish(self, pending: Pending | None, *, following: Pending | None = None) -> None:
        """Wait for a step and retire it; the masks of the step that follows come before the answers of others."""
        if pending is None:
            return
        self._constrain(pending)
        result: StepResult | None = None
        failure: Exception | None = None
        interrupt: BaseException | None = None
        while result is None and failure is None:
            try:
                result = pending.handle.wait()
            except Exception as error:  # ends the requests of the step, not the engine
                _log.exception("a step failed")
                failure = error
            except BaseException as error:  # the device still uses the requests' pages: wait again, raise later
                interrupt = error
        if self._pacing is not None:
            self._pacing.ended(pending.grants, launched_s=pending.launched_s, now_s=self._clock())
        for grant in pending.grants:
            request = grant.request
            request.num_in_flight -= 1
            request.num_unseen -= grant.num_promised - request.num_foreseen
        if result is not None:
            if self._speculation is not None:
                self._speculation.settle(pending.grants, result, is_drafting=pending.is_drafting)
            errors: list[BaseException] = []
            between = None
            if following is not None and 0 < following.num_masks == len(following.constrained):  # it has no drafts
                between = partial(self._constrain_between, following, errors)
            self._send(retire(self._state, self._kv, pending.grants, result, between=between))
            interrupt = errors[0] if errors else interrupt
        elif failure is not None:
            self._send(self._fail(pending.grants, failure))
        if interrupt is not None:
            raise interrupt

    def _fail(self, grants: Sequence[Grant], failure: BaseException) -> list[Delta]:
        """End the requests of a step that failed."""
        reason = str(failure) or type(failure).__name__
        refusal = Refusal(message=f"the step of this request failed: {reason}", code="step_failed")
        alive = [grant.request for grant in grants if grant.request.finish is None]
        deltas = [end(self._state, self._kv, request, FinishReason.ERROR, refusal=refusal) for request in alive]
        release_drained(self._state, self._kv)
        return deltas

    def _send(self, deltas: Sequence[Delta]) -> None:
        if deltas:
            self._outbox.send(deltas)

    def _check_invariant(self) -> None:
        violation = self._kv.violation(())
        if violation is not None:
            self._num_violations += 1
            _log.error("KV accounting is wrong while idle; the cache is cleared: %s", violation)
            self._kv.heal()
            self._state.waiting.watch_again()
