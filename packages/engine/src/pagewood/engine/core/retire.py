"""A request's tokens and its end: takes the results of a step into the state, and answers."""

from __future__ import annotations

from collections.abc import Sequence

from pagewood.engine.api import Delta, FinishReason, Refusal
from pagewood.engine.core.kv import KVSpace
from pagewood.engine.core.plan import Grant
from pagewood.engine.core.state import EngineState, Request


def retire(state: EngineState, kv: KVSpace, grants: Sequence[Grant], tokens: Sequence[int]) -> list[Delta]:
    """Take a finished step into the state.

    Args:
        state: the launch counters of its requests no longer count this step.
        kv: publishes computed prompts, and releases what ended.
        grants: those of the step.
        tokens: the sampled tokens, one for each grant that samples, in order.

    Returns:
        One answer for each request that got a token.
    """
    deltas: list[Delta] = []
    sampled = iter(tokens)
    for request, start, count, samples, _ in grants:
        token = next(sampled) if samples else -1
        if request.finish is not None:  # it ended while this step was in flight
            continue
        request.num_computed = start + count
        if start < request.num_prompt:
            kv.publish(request)
        if samples:
            deltas.append(_accept(state, kv, request, token))
    if state.draining:
        _release_drained(state, kv)
    return deltas


def end(
    state: EngineState, kv: KVSpace, request: Request, reason: FinishReason, *, refusal: Refusal | None = None
) -> Delta:
    """End a request wherever it is; its row and pages go back as soon as nothing in flight reads them."""
    return _answer(state, kv, request, (), reason, refusal)


def refuse(request_id: str, refusal: Refusal, carry: bytes) -> Delta:
    """Answer a request that never came to be one."""
    return Delta(request_id=request_id, finish=FinishReason.REFUSED, refusal=refusal, first=True, carry=carry)


def _accept(state: EngineState, kv: KVSpace, request: Request, token: int) -> Delta:
    """Append a sampled token, and end the request if it was the last one."""
    request.tokens[request.num_known] = token
    request.num_known += 1
    if token in request.stop_ids:
        return _answer(state, kv, request, (), FinishReason.STOP, None)
    finish = FinishReason.LENGTH if request.num_known == request.max_length else None
    return _answer(state, kv, request, (token,), finish, None)


def _answer(
    state: EngineState,
    kv: KVSpace,
    request: Request,
    tokens: tuple[int, ...],
    finish: FinishReason | None,
    refusal: Refusal | None,
) -> Delta:
    first = not request.answered
    request.answered = True
    delta = Delta(
        request_id=request.request_id,
        tokens=tokens,
        finish=finish,
        refusal=refusal,
        first=first,
        carry=request.carry if first else b"",
        num_prompt_tokens=request.num_prompt,
        num_cached_tokens=max(0, request.num_cached),
        num_output_tokens=request.num_known - request.num_prompt,
    )
    if finish is not None:
        _leave(state, kv, request, finish)
    return delta


def _leave(state: EngineState, kv: KVSpace, request: Request, finish: FinishReason) -> None:
    request.finish = finish
    del state.by_id[request.request_id]
    if request.row < 0:
        state.waiting.remove(request)
        kv.forget(request)
        return
    state.running.remove(request)
    state.waiting.stop(request)
    if request.num_in_flight:
        state.draining.append(request)
    else:
        kv.release(request)


def _release_drained(state: EngineState, kv: KVSpace) -> None:
    still_read: list[Request] = []
    for request in state.draining:
        if request.num_in_flight:
            still_read.append(request)
        else:
            kv.release(request)
    state.draining = still_read
