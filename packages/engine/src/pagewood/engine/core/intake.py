"""Turn commands into requests, or answer them at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from math import inf
from time import monotonic

import numpy as np

from pagewood.engine.api import (
    Abort,
    Command,
    Delta,
    FinishReason,
    Flush,
    LoadAdapter,
    PassOn,
    Pause,
    PauseRequest,
    Refusal,
    Refuse,
    Resume,
    ResumeRequest,
    Retain,
    SamplingParams,
    SetPriority,
    Submit,
    UnloadAdapter,
)
from pagewood.engine.core.images import ImageEncoder
from pagewood.engine.core.inner_rows import InnerRows
from pagewood.engine.core.masks.constrain import Compiler
from pagewood.engine.core.memory.divided_kv import AnyKV
from pagewood.engine.core.pooling import Pool
from pagewood.engine.core.queue.deadlines import Deadlines
from pagewood.engine.core.queue.pausing import pause, pause_compiled, resume
from pagewood.engine.core.queue.publishing import Publishing
from pagewood.engine.core.queue.quota_queue import Quotas
from pagewood.engine.core.queue.renewal import encode
from pagewood.engine.core.queue.state import EngineState
from pagewood.engine.core.reasons import Notes, Reason
from pagewood.engine.core.request import Request
from pagewood.engine.core.requirements import Requirements, no_adapter
from pagewood.engine.core.rest import Rest
from pagewood.engine.core.retire import broken_grammar, end, refuse
from pagewood.engine.core.timeline import Timeline
from pagewood.engine.core.vector_tail import VectorTail
from pagewood.engine.seeds import arrival_seed
from pagewood.engine.weight_commands import (
    NameVersion,
    Sleep,
    WakeUp,
)

_NO_SAMPLING = SamplingParams()
"""The parameters of requests for a vector, which draw no tokens."""
_NO_ADAPTERS = Refusal(message="this engine has no adapters, because max_adapters is 0", param="name")


class Intake:
    """Turns commands into requests. Invariant: each request that it queues fits into memory when it runs alone.

    Args:
        state: where requests are queued.
        kv: releases the pages of aborted requests.
        requirements: refuses what this engine cannot compute.
        rest: carries out pauses, sleep and updates of the weights.
        max_length: longest prompt plus output of one request.
        eos_token_ids: tokens that end a request unless it ignores them.
        seed: with the arrival number, gives a seed to each request without one.
        compiler: compiles grammars; None: there are none.
        vector_tail: what follows the pooling of states; None: nothing.
        low_priority_first: whether the priorities of clients are lowest first.
        max_queue_s: after which a request that has never run is refused; None: never.
        max_live: requests, waiting or running, at which further ones are refused; None: no limit.
        quotas: limits of tenants; None: no limits.
        deadlines: refuses requests that cannot end by their deadline; None: they wait.
        notes: gets the reasons of decisions; None: no reasons are kept.
        clock: source of the timings of requests that ask for them.
        publishing: keeps last answers back until KV is in the shared cache; None: requests cannot ask for that, or wait
            for such KV.
        ends_early: whether every request ends with its first token, and publishes its KV.
        images: makes rows of images.
    """

    __slots__ = (
        "_clock", "_compiler", "_deadlines", "_ends_early", "_eos_token_ids", "_flushes", "_fresh", "_images", "_kv",
        "_max_length", "_max_live", "_max_queue_s", "_notes", "_num_arrivals", "_publishing", "_quotas",
        "_requirements", "_rest", "_seed", "_sign", "_state", "_vector_tail",
    )  # fmt: skip

    def __init__(
        self,
        *,
        state: EngineState,
        kv: AnyKV,
        requirements: Requirements,
        rest: Rest,
        max_length: int,
        eos_token_ids: frozenset[int],
        seed: int,
        compiler: Compiler | None = None,
        vector_tail: VectorTail | None = None,
        low_priority_first: bool = False,
        max_queue_s: float | None = None,
        max_live: int | None = None,
        quotas: Quotas | None = None,
        deadlines: Deadlines | None = None,
        notes: Notes | None = None,
        clock: Callable[[], float] = monotonic,
        publishing: Publishing | None = None,
        ends_early: bool = False,
        images: ImageEncoder,
    ) -> None:
        self._rest = rest
        self._requirements = requirements
        self._images = images
        self._publishing = publishing
        self._ends_early = ends_early
        self._notes = notes
        self._clock = clock
        self._compiler = compiler
        self._state = state
        self._kv = kv
        self._max_length = max_length
        self._eos_token_ids = eos_token_ids
        self._seed = seed
        self._vector_tail = vector_tail
        self._sign = -1 if low_priority_first else 1
        self._max_queue_s = max_queue_s
        self._max_live = max_live
        self._quotas = quotas
        self._deadlines = deadlines
        self._fresh: deque[Request] = deque()
        """Requests in order of arrival, for `expire`; those at the head that have run are dropped there."""
        # written by: intake
        self._num_arrivals = 0  # written by: intake
        self._flushes: list[str] = []
        """Ids of flushes that wait for an idle engine."""  # written by: intake

    def take_all(self, commands: Iterable[Command], now_s: float) -> list[list[Delta]]:
        """Carry out commands in order; return the answers that each causes at once, the one to itself last."""
        if self._deadlines is not None:
            self._deadlines.begin()
        answers: list[list[Delta]] = []
        for command in commands:
            deltas: list[Delta] = []
            if isinstance(command, Pause) and command.abort:
                deltas += [end(self._state, self._kv, r, FinishReason.ABORT) for r in list(self._state.by_id.values())]
            delta = self.take(command, now_s)
            if delta is not None:
                deltas.append(delta)
            answers.append(deltas)
        return answers

    def take(self, command: Command, now_s: float) -> Delta | None:
        """Carry out a command; return its answer, or None if the answer comes later or not at all."""
        match command:
            case Submit():
                return self._submit(command, now_s)
            case Abort():
                request = self._state.by_id.get(command.request_id)
                if request is None:
                    return self._take_back(command.request_id)
                return end(self._state, self._kv, request, FinishReason.ABORT)
            case SetPriority():
                self._set_priority(command)
                return None
            case Refuse():
                return refuse(command.request_id, command.refusal)
            case PassOn():
                return Delta(command.request_id, finish=FinishReason.STOP, first=True, carry=command.carry)
            case Flush():
                if command.when_idle and not self._state.is_idle:
                    self._flushes.append(command.request_id)
                    return None
                return self._flush(command.request_id)
            case Retain():
                return self._retain(command)
            case LoadAdapter():
                return self._load_adapter(command)
            case UnloadAdapter():
                return self._unload_adapter(command)
            case Sleep():
                return self._rest.sleep(command)
            case WakeUp():
                return self._rest.wake_up(command)
            case NameVersion():
                return self._rest.name_version(command)
            case PauseRequest():
                request = self._state.by_id.get(command.request_id)
                if request is not None:
                    pause(self._state, request, retract=command.retract)
                return None
            case ResumeRequest():
                request = self._state.by_id.get(command.request_id)
                if request is not None:
                    resume(self._state, request)
                return None
            case Pause():
                return self._rest.pause(command)
            case Resume():
                return self._rest.resume(command.request_id)
            case _:  # weights
                return self._rest.update(command)

    def _submit(self, submit: Submit, now_s: float) -> Delta | None:
        prompt = np.frombuffer(submit.tokens[: len(submit.tokens) // 4 * 4], "<i4")
        refusal, adapter = self._requirements.refusal(submit, prompt), self._requirements.adapter(submit.adapter)
        if refusal is not None:
            return refuse(submit.request_id, refusal, submit.carry)
        if isinstance(adapter, Refusal):
            return refuse(submit.request_id, adapter, submit.carry)
        activation = None if adapter is None else adapter.activation_in(prompt)
        if adapter is not None and adapter.invocation and activation is None:
            adapter = None  # nothing in the prompt activates it
        sampling, pooling = submit.sampling, submit.pooling
        max_tokens = self._max_length - len(prompt) if sampling.max_tokens is None else sampling.max_tokens
        if pooling is not None:
            sampling, max_tokens = _NO_SAMPLING, 0
        is_long = self._rest.keys.is_long(len(prompt) + max_tokens)  # also on the engine that goes on with it
        if self._ends_early:
            max_tokens = min(max_tokens, 1)
        output = np.frombuffer(submit.output, "<i4")
        num_known = len(prompt) + len(output)
        tokens = np.empty(len(prompt) + max_tokens, np.int32)
        tokens[: len(prompt)] = prompt
        tokens[len(prompt) : num_known] = output
        self._num_arrivals += 1
        eos = frozenset[int]() if sampling.ignore_eos else self._eos_token_ids
        request = Request(
            request_id=submit.request_id,
            sampling=sampling,
            seed=arrival_seed(self._seed, self._num_arrivals) if sampling.seed is None else sampling.seed,
            stop_ids=eos.union(sampling.stop_token_ids),
            priority=self._sign * submit.priority,
            key=self._rest.keys.of(submit.namespace, is_long=is_long, adapter=adapter),
            is_long=is_long,
            adapter=adapter,
            activation=activation,
            carry=submit.carry,
            arrival=self._num_arrivals,
            arrived_s=now_s,
            deadline_s=inf if submit.deadline_s is None else submit.deadline_s,
            tenant=(submit.namespace or "") if submit.tenant is None else submit.tenant,
            service_class=submit.service_class,
            tag=submit.tag,
            retain_s=submit.retain_s,
            explains=submit.explain or submit.explain_admission,
            timeline=Timeline(self._clock, now_s) if submit.explain else None,
            num_prompt=len(prompt),
            is_search=submit.is_search,
            keeps_stop_token=submit.keep_stop_token or submit.is_search,  # a search needs what is reported with it
            max_length=len(tokens),
            tokens=tokens,
            num_known=num_known,
            num_unscored=(
                0 if sampling.prompt_logprobs is None else max(0, len(prompt) - sampling.prompt_logprobs_start)
            ),
            experts=InnerRows.of(sampling.routed_experts_from, num_prompt=len(prompt), num_known=num_known),
            states=InnerRows.of(sampling.hidden_states_from, num_prompt=len(prompt), num_known=num_known),
            pool=None if pooling is None else Pool.of(pooling, len(prompt), self._vector_tail),
            threshold=0.0 if submit.output else submit.cache_hit_threshold,
            awaits_kv=submit.handover == "await",
        )
        refusal = None if request.is_resumed else self._limit_refusal(request, now_s)
        if refusal is not None:
            return refuse(submit.request_id, refusal, submit.carry)
        if not self._state.by_id:
            self._state.has_priorities = False
        self._state.has_priorities |= request.priority != 0
        self._state.by_id[request.request_id] = request
        self._state.num_reported += sampling.logprobs is not None
        if self._max_queue_s is not None:
            self._fresh.append(request)
        if self._publishing is not None and (submit.handover == "publish" or (self._ends_early and pooling is None)):
            self._publishing.add(request)
        if submit.images:
            encode(request, submit.images, self._images)
        elif request.threshold:
            request.probe = self._kv.probe(request)
        if sampling.grammar is not None and self._compiler is not None:
            request.compiling = self._compiler.compile(
                sampling.grammar, end_tokens=request.stop_ids, priority=request.priority
            )
        if request.compiling is None and request.probe is None and not submit.images:
            self._queue(request)
        else:
            self._state.compiling.append(request)
        if submit.is_paused or self._rest.keeps_back:
            pause(self._state, request, retract=False)
            if not submit.is_paused:
                self._rest.keep_back(request)
        return None

    def poll(self) -> list[Delta]:
        """Queue the requests whose images have been encoded, whose grammars have been compiled and of which enough is
        cached, let requests name the adapters that have been read, and pause if a pause has waited for the end of
        requests.

        Returns:
            The answers to requests that end instead, and those to the commands.
        """
        deltas = self._loaded_adapters() if self._state.num_loading and self._kv.adapters is not None else []
        deltas += self._rest.poll()
        for request in list(self._state.compiling):
            if request.encoding is not None:
                if not request.encoding.done():
                    continue
                found = request.encoding.result()
                request.encoding = None
                if isinstance(found, Refusal):
                    deltas.append(end(self._state, self._kv, request, FinishReason.REFUSED, refusal=found))
                    continue
                if found.version != self._images.version:
                    encode(request, found.sources, self._images)
                    continue
                is_first, request.images = request.images is None, found
                if request.threshold and is_first:
                    request.probe = self._kv.probe(request)
            if request.probe is not None:
                share = self._kv.cached_share(request)
                if share is None:
                    continue
                request.probe = None
                if share < request.threshold:
                    deltas.append(end(self._state, self._kv, request, FinishReason.CACHE_THRESHOLD))
                    continue
            if request.compiling is not None:
                if not request.compiling.done():
                    continue
                result = request.compiling.result()
                request.compiling = None
                if isinstance(result, Refusal):
                    deltas.append(end(self._state, self._kv, request, FinishReason.REFUSED, refusal=result))
                    continue
                if request.num_generated:
                    result.advance(request.tokens[request.num_prompt : request.num_known].tolist())
                    if result.error is not None:
                        refusal = broken_grammar(result.error)
                        deltas.append(end(self._state, self._kv, request, FinishReason.ERROR, refusal=refusal))
                        continue
                    if result.is_finished:
                        deltas.append(end(self._state, self._kv, request, FinishReason.STOP))
                        continue
                request.matcher = result
                self._state.num_constrained += 1
                if self._notes is not None:
                    self._notes.note(Reason.COMPILED, request)
            self._state.compiling.remove(request)
            if request.pause != "no":
                pause_compiled(self._state, request)
            else:
                self._queue(request)
        return deltas

    def expire(self, now_s: float) -> list[Delta]:
        """Refuse the requests that have waited too long for their first step; return the answers."""
        deltas: list[Delta] = []
        while self._fresh and self._max_queue_s is not None:
            request = self._fresh[0]
            has_run = request.num_cached >= 0 or request.was_paused or request.is_resumed
            if not has_run and request.finish is None:
                if now_s - request.arrived_s < self._max_queue_s:
                    break
                refusal = Refusal(
                    message=f"no step had room for the request within {self._max_queue_s:g} s", code="queue_timeout"
                )
                deltas.append(end(self._state, self._kv, request, FinishReason.REFUSED, refusal=refusal))
            self._fresh.popleft()
        return deltas

    def flush_idle(self) -> list[Delta]:
        """Carry out the flushes that have waited for the engine to be idle, as it is now; return the answers."""
        names, self._flushes = self._flushes, []
        return [self._flush(name) for name in names]

    def drop_flushes(self) -> list[Delta]:
        """Take back the commands that wait, because the engine ends; return the answers."""
        names, self._flushes = self._flushes, []
        names += self._rest.drop()
        return [Delta(name, finish=FinishReason.ABORT, first=True) for name in names]

    def close(self) -> None:
        """Compile no more grammars, encode no more images, and read no more adapters and weights."""
        self._images.close()
        self._rest.close()
        if self._compiler is not None:
            self._compiler.close()
        if self._kv.adapters is not None:
            self._kv.adapters.close()

    def _flush(self, request_id: str) -> Delta:
        num_tokens = self._kv.flush() * self._kv.page_size
        return Delta(request_id, finish=FinishReason.STOP, first=True, num_cached_tokens=num_tokens)

    def _take_back(self, request_id: str) -> Delta | None:
        """Take back a flush that waits; return its answer, or None if there is no such flush."""
        if request_id not in self._flushes:
            return None
        self._flushes.remove(request_id)
        return Delta(request_id, finish=FinishReason.ABORT, first=True)

    def _retain(self, command: Retain) -> Delta:
        """Retain the cached prefix of a text, or drop it."""
        if len(command.tokens) % 4 or not command.tokens:
            message = f"tokens must be one or more int32 token ids, got {len(command.tokens)} bytes"
            return refuse(command.request_id, Refusal(message=message, param="prompt"))
        tokens = np.frombuffer(command.tokens, "<i4").astype(np.int32, copy=False)
        adapter = self._requirements.adapter(command.adapter)
        if isinstance(adapter, Refusal):
            return refuse(command.request_id, adapter)
        activation = None if adapter is None else adapter.activation_in(tokens)
        tokens = tokens if activation is None else activation.marked(tokens, 0)
        keys = self._rest.keys.all_of(command.namespace, adapter=adapter)
        if not command.seconds:
            num_tokens = sum(self._kv.drop(tokens, key) for key in keys) * self._kv.page_size
        else:
            found = [self._kv.retain(tokens, key, command.seconds) for key in keys]
            if None in found:
                message = "seconds must be 0: this engine retains nothing, because retained_share is 0"
                return refuse(command.request_id, Refusal(message=message, param="seconds", code="no_retention"))
            num_tokens = max(num or 0 for num in found)
        return Delta(command.request_id, finish=FinishReason.STOP, first=True, num_cached_tokens=num_tokens)

    def _load_adapter(self, command: LoadAdapter) -> Delta | None:
        adapters = self._kv.adapters
        refusal = _NO_ADAPTERS if adapters is None else adapters.begin_load(command)
        if refusal is not None:
            return refuse(command.request_id, refusal)
        self._state.num_loading += 1
        return None

    def _loaded_adapters(self) -> list[Delta]:
        assert self._kv.adapters is not None
        ended = self._kv.adapters.poll()
        self._state.num_loading -= len(ended)
        return [
            refuse(command.request_id, found)
            if isinstance(found, Refusal)
            else Delta(command.request_id, finish=FinishReason.STOP, first=True)
            for command, found in ended
        ]

    def _unload_adapter(self, command: UnloadAdapter) -> Delta:
        adapters = self._kv.adapters
        if adapters is None or not adapters.unload(command.name):
            return refuse(command.request_id, no_adapter(command.name))
        return Delta(command.request_id, finish=FinishReason.STOP, first=True)

    def _queue(self, request: Request) -> None:
        self._state.waiting.add(request)
        if request.timeline is not None:
            request.timeline.queued()

    def _set_priority(self, command: SetPriority) -> None:
        request = self._state.by_id.get(command.request_id)
        if request is None:
            return
        request.priority = request.own_priority = self._sign * command.priority
        self._state.has_priorities |= request.priority != 0
        if request.compiling is not None:
            request.compiling.prefer(request.priority)
        self._state.waiting.update(request)
        if request.row >= 0:
            self._state.sort_running()

    def _limit_refusal(self, request: Request, now_s: float) -> Refusal | None:
        """Return why a request exceeds a limit of the operator, or None if it exceeds none."""
        if self._max_live is not None and len(self._state.by_id) >= self._max_live:
            return Refusal(
                message=f"the engine already holds {self._max_live} requests, as many as may run and be queued",
                code="queue_full",
            )
        if self._quotas is not None and not (verdict := self._quotas.can_ever_run(request)).fits:
            return Refusal(
                message=f"the request exceeds the quota of its tenant even if it runs alone: {verdict.reason}",
                code="quota_exceeded",
            )
        if self._deadlines is not None:
            refusal = self._deadlines.refusal(request, now_s)
            if refusal is not None:
                return refusal
            self._deadlines.accepted(request)
        return None
