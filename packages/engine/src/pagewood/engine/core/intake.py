"""Turn commands into requests, or answer them at once."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import inf
from time import monotonic
from typing import Literal

import numpy as np
from msgspec.structs import replace as replace_fields

from pagewood.engine.api import (
    MAX_INNER_BYTES,
    Abort,
    Command,
    Delta,
    FinishReason,
    Flush,
    LoadAdapter,
    Overflow,
    PassOn,
    Pause,
    PauseRequest,
    PoolingParams,
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
from pagewood.engine.core.adapter import Adapter
from pagewood.engine.core.cache_keys import CacheKeys
from pagewood.engine.core.images import ImageEncoder
from pagewood.engine.core.inner_rows import InnerRows
from pagewood.engine.core.masks.constrain import Compiler
from pagewood.engine.core.memory.divided_kv import AnyKV
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.processors import processors_refusal
from pagewood.engine.core.pooling import Pool
from pagewood.engine.core.queue.deadlines import Deadlines
from pagewood.engine.core.queue.pausing import pause, pause_compiled, resume, retract_all
from pagewood.engine.core.queue.publishing import Publishing
from pagewood.engine.core.queue.quota_queue import Quotas
from pagewood.engine.core.queue.renewal import renew
from pagewood.engine.core.queue.state import EngineState
from pagewood.engine.core.reasons import Notes, Reason
from pagewood.engine.core.request import Request
from pagewood.engine.core.retire import broken_grammar, end, refuse
from pagewood.engine.core.timeline import Timeline
from pagewood.engine.core.vector_tail import VectorTail
from pagewood.engine.core.weights import ServedWeights
from pagewood.engine.seeds import arrival_seed
from pagewood.engine.weight_commands import (
    CheckWeights,
    JoinGroup,
    LeaveGroup,
    NameVersion,
    Sleep,
    SleepTag,
    UpdateWeights,
    WakeUp,
    WeightCommand,
)

_NO_SAMPLING = SamplingParams()
"""The parameters of requests for a vector, which draw no tokens."""
_BUSY = Refusal(message="weights must be updated, and sleep, one after the other", code="weights_busy")
_NO_ADAPTERS = Refusal(message="this engine has no adapters, because max_adapters is 0", param="name")


class Intake:
    """Turns commands into requests. Invariant: each request that it queues fits into memory when it runs alone.

    Args:
        state: where requests are queued.
        kv: releases the pages of aborted requests.
        keys: of cached prefixes.
        max_length: longest prompt plus output of one request.
        vocab_size: token ids must be below it.
        eos_token_ids: tokens that end a request unless it ignores them.
        seed: with the arrival number, gives a seed to each request without one.
        compiler: compiles grammars; None: requests with a grammar are refused.
        processors: the functions that `logits_processors` of a request may name.
        vector_size: elements of a hidden state; 0: requests for a vector are refused.
        vector_tail: what follows the pooling of states; None: nothing.
        expert_shape: see `EngineInfo`; None: requests for experts are refused.
        state_size: elements of a hidden state; 0: requests for hidden states are refused.
        reports_kept: whether the runner reports what the filters leave; otherwise requests for that are refused.
        generates: whether the model generates tokens; otherwise requests for anything but a vector are refused.
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
        weights: what the model computes with; None: it never changes.
        images: makes rows of images, or refuses them.
    """

    __slots__ = (
        "_asleep", "_awaited", "_clock", "_compiler", "_deadlines", "_ends_early", "_eos_token_ids", "_falling",
        "_flushes", "_fresh", "_generates", "_images", "_kept_back", "_keys", "_kv", "_max_length", "_max_live",
        "_max_queue_s", "_notes", "_num_arrivals", "_paused", "_processors", "_publishing", "_quotas", "_reports_kept",
        "_row_sizes", "_seed", "_sign", "_slept_before", "_state", "_vector_size", "_vector_tail", "_vocab_size",
        "_weights",
    )  # fmt: skip

    def __init__(
        self,
        *,
        state: EngineState,
        kv: AnyKV,
        keys: CacheKeys,
        max_length: int,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        seed: int,
        compiler: Compiler | None = None,
        processors: Mapping[str, Callable[..., None]] | None = None,
        vector_size: int = 0,
        vector_tail: VectorTail | None = None,
        expert_shape: tuple[int, int] | None = None,
        state_size: int = 0,
        reports_kept: bool = False,
        generates: bool = True,
        low_priority_first: bool = False,
        max_queue_s: float | None = None,
        max_live: int | None = None,
        quotas: Quotas | None = None,
        deadlines: Deadlines | None = None,
        notes: Notes | None = None,
        clock: Callable[[], float] = monotonic,
        publishing: Publishing | None = None,
        ends_early: bool = False,
        weights: ServedWeights | None = None,
        images: ImageEncoder,
    ) -> None:
        self._images = images
        self._publishing = publishing
        self._weights = weights or ServedWeights(None, why_fixed="its runner cannot change them")
        self._ends_early = ends_early
        self._notes = notes
        self._clock = clock
        self._compiler = compiler
        self._processors = processors or {}
        self._state = state
        self._kv = kv
        self._keys = keys  # written by: intake
        self._max_length = max_length
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._seed = seed
        self._vector_size = vector_size if vector_tail is None else vector_tail.size
        self._vector_tail = vector_tail
        self._row_sizes = {
            "routed_experts_from": math.prod(expert_shape or (0,)),
            "hidden_states_from": state_size,
        }
        """Numbers of a position, by the field that asks for them; 0: they are not reported."""
        self._reports_kept = reports_kept
        self._generates = generates
        self._sign = -1 if low_priority_first else 1
        self._max_queue_s = max_queue_s
        self._max_live = max_live
        self._quotas = quotas
        self._deadlines = deadlines
        self._fresh: deque[Request] = deque()
        """Requests in order of arrival, for `expire`; those at the head that have run are dropped there."""
        # written by: intake
        self._num_arrivals = 0  # written by: intake
        self._awaited: Pause | None = None
        """A pause that waits for the end of requests."""  # written by: intake
        self._kept_back: list[Request] = []
        """Those that came after it."""  # written by: intake
        self._paused: Literal["no", "in_place", "retract"] = "no"
        """How the latest `Pause` wants it."""  # written by: intake
        self._asleep: frozenset[SleepTag] = frozenset()
        """What sleeps, or is about to; weights that are dropped do not."""  # written by: intake
        self._slept_before = self._asleep
        """The same before the latest `Sleep`."""  # written by: intake
        self._falling: Sleep | None = None
        """A command whose memory is still in use; it has the tags of what was awake."""  # written by: intake
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
            case UpdateWeights() | JoinGroup() | LeaveGroup() | CheckWeights():
                return self._update_weights(command)
            case Sleep():
                return self._sleep(command)
            case WakeUp():
                return self._wake_up(command)
            case NameVersion():
                self._weights.version = self._state.weight_version = command.version
                return self._versioned(command.request_id)
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
            case Pause(waits=True) if self._awaited is None:
                self._awaited = command
                self._state.num_loading += 1
                return None
            case Pause():
                self._paused = "retract" if command.retract else "in_place"
                if command.retract:
                    retract_all(self._state)
                self._rest()
                return Delta(command.request_id, finish=FinishReason.STOP, first=True)
            case Resume():
                self._paused = "no"
                self._rest()
                self._go_on()
                return Delta(command.request_id, finish=FinishReason.STOP, first=True)

    def _submit(self, submit: Submit, now_s: float) -> Delta | None:
        prompt = np.frombuffer(submit.tokens[: len(submit.tokens) // 4 * 4], "<i4")
        refusal, adapter = self._refusal(submit, prompt), self._adapter(submit.adapter)
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
        is_long = self._keys.is_long(len(prompt) + max_tokens)  # also on the engine that goes on with it
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
            key=self._keys.of(submit.namespace, is_long=is_long, adapter=adapter),
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
            request.encoding = self._images.encode(
                request.tokens[: len(prompt)],
                submit.images,
                namespace=submit.namespace,
                is_wanted=lambda: not request.has_ended,
            )
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
        if submit.is_paused or self._awaited is not None:
            pause(self._state, request, retract=False)
            if not submit.is_paused:
                self._kept_back.append(request)
        return None

    def poll(self) -> list[Delta]:
        """Queue the requests whose images have been encoded, whose grammars have been compiled and of which enough is
        cached, let requests name the adapters that have been read, and pause if a pause has waited for the end of
        requests.

        Returns:
            The answers to requests that end instead, and those to the commands.
        """
        deltas = self._loaded_adapters() if self._state.num_loading and self._kv.adapters is not None else []
        if self._awaited is not None and all(one.pause != "no" for one in self._state.by_id.values()):
            deltas.append(self._pause_awaited())
        if self._falling is not None and (answer := self._fall_asleep(self._falling)) is not None:
            deltas.append(answer)
        for request in list(self._state.compiling):
            if request.encoding is not None:
                if not request.encoding.done():
                    continue
                found = request.encoding.result()
                request.encoding = None
                if isinstance(found, Refusal):
                    deltas.append(end(self._state, self._kv, request, FinishReason.REFUSED, refusal=found))
                    continue
                request.images = found
                if request.threshold:
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
        if self._awaited is not None:
            names.append(self._pause_awaited().request_id)
        update = self._weights.drop()
        if self._falling is not None:
            update, self._falling = self._falling.request_id, None
        if update is not None:
            self._state.num_loading -= 1
            names.append(update)
        return [Delta(name, finish=FinishReason.ABORT, first=True) for name in names]

    def close(self) -> None:
        """Compile no more grammars, encode no more images, and read no more adapters and weights."""
        self._images.close()
        self._weights.close()
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
        adapter = self._adapter(command.adapter)
        if isinstance(adapter, Refusal):
            return refuse(command.request_id, adapter)
        activation = None if adapter is None else adapter.activation_in(tokens)
        tokens = tokens if activation is None else activation.marked(tokens, 0)
        keys = self._keys.all_of(command.namespace, adapter=adapter)
        if not command.seconds:
            num_tokens = sum(self._kv.drop(tokens, key) for key in keys) * self._kv.page_size
        else:
            found = [self._kv.retain(tokens, key, command.seconds) for key in keys]
            if None in found:
                message = "seconds must be 0: this engine retains nothing, because retained_share is 0"
                return refuse(command.request_id, Refusal(message=message, param="seconds", code="no_retention"))
            num_tokens = max(num or 0 for num in found)
        return Delta(command.request_id, finish=FinishReason.STOP, first=True, num_cached_tokens=num_tokens)

    def _adapter(self, name: str | None) -> Adapter | Refusal | None:
        """Return the adapter of a name, or the refusal of an unknown name; None: no name was given."""
        if name is None:
            return None
        found = None if self._kv.adapters is None else self._kv.adapters.current(name)
        return _no_adapter(name) if found is None else found

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
            return refuse(command.request_id, _no_adapter(command.name))
        return Delta(command.request_id, finish=FinishReason.STOP, first=True)

    def _pause_awaited(self) -> Delta:
        assert self._awaited is not None
        command, self._awaited = self._awaited, None
        self._state.num_loading -= 1
        self._paused = "in_place"
        self._rest()
        return Delta(command.request_id, finish=FinishReason.STOP, first=True)

    def _go_on(self) -> None:
        """Let the requests run that were kept back for a pause that waits, or has waited."""
        kept, self._kept_back = self._kept_back, []
        for request in kept:
            if request.finish is None:
                resume(self._state, request)

    def _update_weights(self, command: WeightCommand) -> Delta | None:
        if isinstance(command, UpdateWeights) and command.old_kv == "keep" and self._kv.tiers is not None:
            message = "old_kv must be drop or recompute with a host cache, which may outlive the update, got keep"
            return refuse(command.request_id, Refusal(message=message, param="old_kv"))
        is_check = isinstance(command, CheckWeights)
        if (isinstance(command, UpdateWeights) and "weights" in self._asleep) or (
            is_check and "weights" in self.asleep
        ):
            message = "weights must be awake when they are updated or checked"
            return refuse(command.request_id, Refusal(message=message, code="asleep"))
        refusal = self._weights.begin(command) if self._falling is None else _BUSY
        if refusal is not None:
            return refuse(command.request_id, refusal)
        self._state.num_loading += 1
        return None

    @property
    def asleep(self) -> frozenset[SleepTag]:
        """What sleeps, or is about to; weights that were dropped sleep until they are updated."""
        dropped: set[SleepTag] = {"weights"} if self._weights.are_dropped else set()
        return self._asleep | dropped

    def _rest(self) -> None:
        """Launch steps, or none, as pauses and sleep want it."""
        if "kv_cache" in self._asleep or self._paused == "retract":
            self._state.paused = "retract"
        elif self._asleep or self._weights.are_dropped or self._paused != "no":
            self._state.paused = "in_place"
        else:
            self._state.paused = "no"

    def _sleep(self, command: Sleep) -> Delta | None:
        memory = frozenset(command.tags) - {"scheduling"} - self.asleep
        refusal = self._weights.why_awake(command) if memory or command.drops_weights else None
        if self._falling is not None or self._weights.is_busy:
            refusal = _BUSY
        elif command.drops_weights and "weights" in self._asleep:
            refusal = Refusal(message="weights must be awake to be dropped; they sleep already", code="asleep")
        if refusal is not None:
            return refuse(command.request_id, refusal)
        kept = frozenset(command.tags) - ({"weights"} if command.drops_weights or self._weights.are_dropped else set())
        self._slept_before, self._asleep = self._asleep, self._asleep | kept
        self._rest()
        if not memory:
            return Delta(command.request_id, finish=FinishReason.STOP, first=True)
        if "kv_cache" in memory:
            retract_all(self._state)
            waiting = self._state.waiting
            for request in [one for one in self._state.by_id.values() if waiting.is_recalling(one)]:
                waiting.remove(request)  # what is copied for it is given up
                waiting.add(request)
        self._falling = replace_fields(command, tags=tuple(sorted(memory)))
        self._state.num_loading += 1
        return None

    def _fall_asleep(self, command: Sleep) -> Delta | None:
        """Begin to give memory back if no request and no copy uses it; return the refusal if that cannot be."""
        if "kv_cache" in command.tags and (self._state.holders or not self._kv.empty()):
            return None
        self._falling = None
        refusal = self._weights.begin(command)
        if refusal is None:
            return None
        self._state.num_loading -= 1
        return self._slept(command, refusal)

    def _wake_up(self, command: WakeUp) -> Delta | None:
        tags = frozenset(command.tags) or self._asleep
        memory = (tags & self._asleep) - {"scheduling"}
        if self._falling is not None or self._weights.is_busy:
            return refuse(command.request_id, _BUSY)
        if not memory:
            return self._slept(replace_fields(command, tags=tuple(tags)), None)
        refusal = self._weights.begin(replace_fields(command, tags=tuple(sorted(memory))))
        if refusal is not None:
            return refuse(command.request_id, refusal)
        self._state.num_loading += 1
        return None

    def _slept(self, command: Sleep | WakeUp, refusal: Refusal | None) -> Delta:
        """Note that memory was given back or taken again, or could not be; return the answer."""
        if isinstance(command, WakeUp) and refusal is None:
            left = self._asleep - frozenset(command.tags)
            self._asleep = left if left - {"scheduling"} else frozenset()
        elif isinstance(command, Sleep) and refusal is not None:
            self._asleep = self._slept_before
        self._rest()
        if refusal is not None:
            return refuse(command.request_id, refusal)
        return Delta(command.request_id, finish=FinishReason.STOP, first=True)

    @property
    def has_new_weights(self) -> bool:
        """Whether an update of weights has been read, for `exchange_weights`."""
        return self._weights.is_due

    def exchange_weights(self) -> tuple[Delta, int]:
        """Carry out or refuse the update that has been read; no step is in flight.

        Returns:
            Its answer, and how many requests were preempted.
        """
        weights, old = self._weights, self._weights.digest
        command, refusal = weights.exchange()
        self._state.num_loading -= 1
        if isinstance(command, Sleep | WakeUp):
            return self._slept(command, refusal), 0
        if refusal is not None:
            return refuse(command.request_id, refusal), 0
        if isinstance(command, CheckWeights):
            return Delta(command.request_id, finish=FinishReason.STOP, first=True, weights=weights.checksum), 0
        num_preempted = 0
        self._rest()
        self._state.weight_version = weights.version
        if weights.digest != old:
            self._keys = replace(self._keys, weights=weights.digest)
            recomputes = isinstance(command, UpdateWeights) and command.old_kv == "recompute"
            num_preempted = renew(self._state, self._kv, self._keys, recomputes=recomputes)
        return self._versioned(command.request_id), num_preempted

    def _versioned(self, request_id: str) -> Delta:
        return Delta(request_id, finish=FinishReason.STOP, first=True, weights=self._weights.version)

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

    def _refusal(self, submit: Submit, prompt: Int32) -> Refusal | None:
        if submit.request_id in self._state.by_id:
            return Refusal(
                message=f"request_id must be unique among live requests, got {submit.request_id!r} again",
                param="request_id",
            )
        if len(submit.tokens) % 4 or not len(prompt):
            return Refusal(
                message=f"prompt must be one or more int32 token ids, got {len(submit.tokens)} bytes", param="prompt"
            )
        if int(prompt.min()) < 0 or int(prompt.max()) >= self._vocab_size:
            bad = int(prompt[(prompt < 0) | (prompt >= self._vocab_size)][0])
            return Refusal(message=f"prompt must have token ids in [0, {self._vocab_size}), got {bad}", param="prompt")
        if submit.handover is not None and (
            self._publishing is None or (submit.handover == "await" and self._ends_early)
        ):
            why = "has no shared cache, or logs its decisions" if self._publishing is None else "computes prompts only"
            message = f"handover must be None, because this engine {why}, got {submit.handover!r}"
            return Refusal(message=message, param="handover", code="no_shared_cache")
        if submit.cache_hit_threshold and (submit.is_search or not self._kv.can_probe):
            why = "for a step of a search" if submit.is_search else "with a log of decisions"
            message = f"cache_hit_threshold must be 0 {why}, got {submit.cache_hit_threshold}"
            return Refusal(message=message, param="cache_hit_threshold")
        if submit.output and (refusal := self._output_refusal(submit)) is not None:
            return refusal
        if (refusal := self._image_refusal(submit, prompt)) is not None:
            return refusal
        if submit.pooling is not None:
            return self._pooling_refusal(submit.pooling, len(prompt))
        if not self._generates:
            message = "model must generate text for this request; this one is an encoder, which makes vectors only"
            return Refusal(message=message, param="model", code="not_generative")
        named = {
            "logit_bias": [token for token, _ in submit.sampling.logit_bias],
            "bad_words": [token for word in submit.sampling.bad_words for token in word],
        }
        for param, tokens in named.items():
            unknown = [token for token in tokens if token >= self._vocab_size]
            if unknown:
                return Refusal(
                    message=f"{param} must have token ids in [0, {self._vocab_size}), got {unknown[0]}", param=param
                )
        if submit.sampling.grammar is not None and self._compiler is None:
            return Refusal(message="grammar must be None: this engine has no grammars", param="grammar")
        if submit.sampling.logits_processors:
            refusal = processors_refusal(submit.sampling.logits_processors, self._processors)
            if refusal is not None:
                return refusal
        max_tokens = 1 if self._ends_early else submit.sampling.max_tokens
        if len(prompt) + (max_tokens or 1) > self._max_length:
            return Overflow(num_prompt=len(prompt), max_length=self._max_length, max_tokens=max_tokens).refusal()
        return self._rows_refusal(submit, len(prompt))

    def _rows_refusal(self, submit: Submit, num_prompt: int) -> Refusal | None:
        """Return why a request cannot have its inner rows, or its kept tokens, or None.

        Its prompt has `num_prompt` tokens.
        """
        kept = submit.sampling.kept_tokens
        if kept is not None and (submit.is_search or not self._reports_kept):
            why = "in a beam search" if submit.is_search else "because the model is not on the CPU of one process"
            return Refusal(
                message=f"kept_tokens must be None {why}, got {kept}", param="kept_tokens", code="not_reported"
            )
        most = self._max_length - num_prompt if submit.sampling.max_tokens is None else submit.sampling.max_tokens
        for param, size in self._row_sizes.items():
            start = getattr(submit.sampling, param)
            if start is None:
                continue
            if not size or submit.is_search:
                why = "in a beam search" if size else "because the model has none, or is not on the CPU of one process"
                return Refusal(message=f"{param} must be None {why}, got {start}", param=param, code="not_reported")
            if start > num_prompt:
                message = f"{param} must be at most the length of the prompt, {num_prompt}, got {start}"
                return Refusal(message=message, param=param, code="invalid_value")
            num = num_prompt + most - 1 - (num_prompt - 1 if start == -1 else start)
            if num > (most_rows := MAX_INNER_BYTES // (4 * size)):
                message = f"{param} must ask for at most {most_rows} positions ({MAX_INNER_BYTES} bytes), got {num}"
                return Refusal(message=message, param=param, code="invalid_value")
        return None

    def _image_refusal(self, submit: Submit, prompt: Int32) -> Refusal | None:
        """Return why a request cannot have its images, or lacks some, or None."""
        refusal = self._images.refusal(prompt, submit.images)
        if refusal is not None or not submit.images:
            return refusal
        adapter = self._adapter(submit.adapter)
        others = {
            "pooling": submit.pooling is not None,
            "prompt_logprobs": submit.sampling.prompt_logprobs is not None,
            "routed_experts_from": submit.sampling.routed_experts_from is not None,
            "hidden_states_from": submit.sampling.hidden_states_from is not None,
            "adapter": isinstance(adapter, Adapter) and bool(adapter.invocation),
        }
        for param, is_there in others.items():
            if is_there:
                what = "the name of an adapter without invocation tokens" if param == "adapter" else "None"
                message = f"{param} must be {what} in a request with images, got {len(submit.images)} images"
                return Refusal(message=message, param=param, code="images_not_supported")
        return None

    def _output_refusal(self, submit: Submit) -> Refusal | None:
        """Return why a request cannot go on behind its output, or None."""
        if len(submit.output) % 4:
            return Refusal(message=f"output must be int32 token ids, got {len(submit.output)} bytes", param="output")
        if submit.pooling is not None:
            return Refusal(message="output must be empty with pooling, which makes no tokens", param="output")
        output = np.frombuffer(submit.output, "<i4")
        bad = output[(output < 0) | (output >= self._vocab_size)]
        if len(bad):
            return Refusal(
                message=f"output must have token ids in [0, {self._vocab_size}), got {bad[0]}", param="output"
            )
        if submit.sampling.max_tokens is not None and len(output) >= submit.sampling.max_tokens:
            message = f"output must be shorter than max_tokens {submit.sampling.max_tokens}, got {len(output)} tokens"
            return Refusal(message=message, param="output")
        return None

    def _pooling_refusal(self, pooling: PoolingParams, num_prompt: int) -> Refusal | None:
        """Return why a request for a vector is refused, or None; its prompt has `num_prompt` tokens."""
        if not self._vector_size:
            return Refusal(message="pooling must be None: this engine makes no vectors", param="pooling")
        if (pooling.dimensions or 1) > self._vector_size:
            return Refusal(
                message=f"dimensions must be in [1, {self._vector_size}], got {pooling.dimensions}",
                param="dimensions",
                code="invalid_value",
            )
        if num_prompt > self._max_length:
            return Overflow(num_prompt=num_prompt, max_length=self._max_length).refusal()
        return None


def _no_adapter(name: str) -> Refusal:
    message = f"adapter must be the name of a loaded one, got {name!r}"
    return Refusal(message=message, param="adapter", code="adapter_not_found")
