"""Apply the result of a step to the state: append tokens, end requests, make the answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from pagewood.engine.api import Delta, Explanation, FinishReason, Refusal, TokenLogprob
from pagewood.engine.core.inner_rows import InnerRows
from pagewood.engine.core.memory.divided_kv import AnyKV
from pagewood.engine.core.messages.batch import Batch, num_rows_of
from pagewood.engine.core.messages.logprobs import Logprobs
from pagewood.engine.core.messages.result import StepResult
from pagewood.engine.core.pooling import Float32, Pool
from pagewood.engine.core.queue.pausing import forget
from pagewood.engine.core.queue.state import EngineState
from pagewood.engine.core.request import Request
from pagewood.engine.core.steps.grant import Grant
from pagewood.engine.grammar.matcher import Matcher

_NOT_NUMBERS = Refusal(
    message="the logits of this request are not numbers, so no token can be drawn", code="logits_not_numbers"
)
_EXCLUDED = Refusal(
    message="the biases, the bad words and the grammar of this request exclude every token, so none can be drawn",
    code="all_tokens_excluded",
)

_NO_VECTOR = Refusal(
    message="the hidden states of this request are not numbers, so it has no vector", code="logits_not_numbers"
)


def retire(
    state: EngineState,
    kv: AnyKV,
    grants: Sequence[Grant],
    result: StepResult,
    *,
    batch: Batch | None = None,
    between: Callable[[], None] | None = None,
) -> list[Delta]:
    """Apply a finished step to the state.

    Args:
        state: of the engine; the launch counters of its requests must no longer include this step.
        kv: publishes computed prompts, and releases requests that ended.
        grants: of the step.
        result: of the step; its entries belong to the grants with a promise, in order.
        batch: of the step; None: it asks for no inner rows.
        between: called when the requests with a grammar are up to date; the others then follow. None: all are applied
            in their order.

    Returns:
        One answer for each request that got tokens or its vector, or whose logits or states were not numbers; those of
        higher priority come first.
    """
    if batch is not None and (len(batch.routed) or len(batch.stated)):
        _add_rows(grants, batch, result)
    if between is None:
        deltas = _retire(state, kv, grants, result, None)
    else:
        deltas = _retire(state, kv, grants, result, True)
        between()
        deltas += _retire(state, kv, grants, result, False)
    kv.pass_windows(grant.request for grant in grants)
    release_drained(state, kv)
    if state.weight_version:
        deltas = [replace(delta, weights=state.weight_version) if delta.tokens else delta for delta in deltas]
    if state.has_priorities:
        priorities = {grant.request.request_id: -grant.request.own_priority for grant in grants}
        deltas.sort(key=lambda delta: priorities[delta.request_id])
    return deltas


def _add_rows(grants: Sequence[Grant], batch: Batch, result: StepResult) -> None:
    """Give requests the experts and states of a step, which their next answers then have.

    No request is advanced by this step yet, so that its KV is computed up to where its grant has begun.
    """
    for kind, entries, rows in (("experts", batch.routed, result.experts), ("states", batch.stated, result.states)):
        nums = num_rows_of(entries, batch.counts, batch.sampled, batch.num_promised, result.counts).tolist()
        asked: list[tuple[int, int]] = entries.tolist()
        at = 0
        for (index, left_out), num in zip(asked, nums, strict=True):
            request = grants[index].request
            own: InnerRows | None = getattr(request, kind)
            if request.finish is None and num and own is not None and rows is not None:
                own.add(request.num_computed + left_out, rows[at : at + num])
            at += num


def _retire(
    state: EngineState, kv: AnyKV, grants: Sequence[Grant], result: StepResult, has_grammar: bool | None
) -> list[Delta]:
    """Apply a finished step to the requests with a grammar, to those without, or to all (None)."""
    deltas: list[Delta] = []
    by_grant = result.by_grant()
    logprobs, prompt_logprobs = result.logprobs, result.prompt_logprobs
    is_plain = logprobs is None and prompt_logprobs is None and result.experts is None and result.states is None
    first, num_seen, num_scored = 0, 0, 0
    vectors = iter(() if result.vectors is None else result.vectors)
    if len(by_grant) < len(grants):  # some promise nothing
        yielded = iter(by_grant)
        by_grant = [next(yielded) if grant.num_promised else None for grant in grants]
    for grant, tokens in zip(grants, by_grant, strict=True):
        request, start = grant.request, grant.start
        if has_grammar is not None and (request.matcher is not None) != has_grammar:
            if logprobs is not None:
                num_seen += len(tokens) if tokens else 0
            if prompt_logprobs is not None:
                num_scored += request.num_scored_in(start, grant.num_tokens)
            continue
        # A request that just goes on decoding, as nearly all do. There is one for every token, so nothing else
        # is called.
        if (
            tokens
            and is_plain
            and start >= request.num_prompt
            and request.finish is None
            and request.matcher is None
            and len(tokens) == 1
            and tokens[0] not in request.stop_ids
            and (place := request.num_known) + 1 != request.max_length
            and request.answered
        ):
            request.tokens[place] = tokens[0]
            request.num_known = place + 1
            request.num_computed = place
            num_prompt, num_cached = request.num_prompt, request.num_cached
            deltas.append(
                Delta(  # by position, as one is made for every token
                    request.request_id,
                    tokens,
                    None,  # finish
                    None,  # refusal
                    False,  # first
                    b"",  # carry
                    num_prompt,
                    num_cached if num_cached > 0 else 0,
                    place + 1 - num_prompt,
                    request.num_drafted,
                    request.num_accepted,
                )
            )
            continue
        if logprobs is not None:
            first = num_seen
            num_seen += len(tokens) if tokens else 0
        if prompt_logprobs is not None:
            num_new = request.num_scored_in(start, grant.num_tokens)
            _score(request, start, prompt_logprobs.entries(num_scored, num_scored + num_new))
            num_scored += num_new
        if request.pool is not None:
            _, num_pooled = request.pool.wanted_in(start, grant.num_tokens)
            total = next(vectors) if num_pooled else None
            if request.finish is None:
                deltas += _pool(state, kv, request, request.pool, start + grant.num_tokens, total, num_pooled)
            continue
        if request.finish is not None:  # it ended while this step was in flight
            continue
        if tokens:
            deltas += _advance(state, kv, grant, tokens, logprobs, first)
        elif tokens is None:
            request.num_computed = start + grant.num_tokens
            kv.publish(request)
        else:
            index = sum(one is not None for one in by_grant[: grants.index(grant)])  # among those that yield
            deltas.append(_end_without_token(state, kv, request, is_excluded=index in result.excluded))
    return deltas


def _advance(
    state: EngineState, kv: AnyKV, grant: Grant, tokens: tuple[int, ...], logprobs: Logprobs | None, first: int
) -> list[Delta]:
    """Append the tokens of a grant to its request.

    Args:
        state: of the engine.
        kv: publishes a prompt whose computation this grant has finished.
        grant: of a request that has not ended.
        tokens: that the step has drawn for it, at least one.
        logprobs: of all tokens of the step.
        first: index of the first of `tokens` among them.

    Returns:
        The answer; none if all of `tokens` have been answered before.
    """
    request, start = grant.request, grant.start
    if request.num_foreseen:
        num_old, request.num_foreseen = min(len(tokens), request.num_foreseen), 0
        request.num_computed += num_old  # if drafts before it were rejected, the step began before `start`
        tokens = tokens[num_old:]
        if not tokens:
            return []
    reason, tokens = _append(request, tokens)
    request.num_computed = request.num_known - 1
    if start < request.num_prompt:
        kv.publish(request)
    if request.matcher is not None:
        failure = request.matcher.error
        if failure is not None:
            return [end(state, kv, request, FinishReason.ERROR, refusal=broken_grammar(failure))]
        request.mask_ms = request.matcher.slow_ms
        if reason is None:
            reason, tokens = _follow(request, request.matcher, tokens)
    entries = () if logprobs is None else logprobs.entries(first, first + len(tokens))
    if request.sampling.kept_tokens is not None:
        entries = tuple([_within_limit(request, entry, request.sampling.kept_tokens) for entry in entries])
    return [_answer(state, kv, request, tokens, reason, None, entries)]


def _within_limit(request: Request, entry: TokenLogprob, most: int) -> TokenLogprob:
    """Return the report of the next token, without what the filters have left if that is too much; count that."""
    request.num_kept += len(entry.kept or b"") // 4
    return entry if request.num_kept <= most else entry._replace(kept=None)


def _end_without_token(state: EngineState, kv: AnyKV, request: Request, *, is_excluded: bool) -> Delta:
    """End a request whose grant should have yielded a token, without publishing: its KV may not be numbers either.

    Args:
        state: of the engine.
        kv: releases its memory.
        request: it has not ended.
        is_excluded: whether its logits were numbers, and all of them minus infinity.
    """
    if not is_excluded:
        return end(state, kv, request, FinishReason.ERROR, refusal=_NOT_NUMBERS)
    if request.matcher is not None and request.matcher.is_finished:
        return end(state, kv, request, FinishReason.STOP)
    if request.is_search:  # the search goes on with its other sequences
        return end(state, kv, request, FinishReason.LENGTH)
    return end(state, kv, request, FinishReason.ERROR, refusal=_EXCLUDED)


def end(
    state: EngineState, kv: AnyKV, request: Request, reason: FinishReason, *, refusal: Refusal | None = None
) -> Delta:
    """End a request in any state; its row and pages are released when no launched step reads them any more."""
    return _answer(state, kv, request, (), reason, refusal)


def refuse(request_id: str, refusal: Refusal, carry: bytes = b"") -> Delta:
    """Return the answer to a request that was refused before it was queued."""
    return Delta(request_id=request_id, finish=FinishReason.REFUSED, refusal=refusal, first=True, carry=carry)


def _score(request: Request, start: int, entries: tuple[TokenLogprob, ...]) -> None:
    """Append log probabilities of prompt tokens from position `start` + 1 on to those that are known."""
    num_known = request.num_prompt - 1 - request.num_unscored
    new = entries[max(0, num_known - start) :]
    request.prompt_logprobs += new
    request.num_unscored -= len(new)


def _pool(
    state: EngineState, kv: AnyKV, request: Request, pool: Pool, end_: int, total: Float32 | None, num: int
) -> list[Delta]:
    """Add the sum of `num` hidden states, the next ones of a request, whose KV is computed up to `end_`.

    Returns:
        The answer to the request, if that was the last of them, or if they are not numbers.
    """
    if total is not None and not pool.add(total, num):
        return [end(state, kv, request, FinishReason.ERROR, refusal=_NO_VECTOR)]
    request.num_computed = end_
    kv.publish(request)
    if not pool.is_complete:
        return []
    return [_answer(state, kv, request, (), FinishReason.STOP, None, vector=pool.vector())]


def _append(request: Request, tokens: tuple[int, ...]) -> tuple[FinishReason | None, tuple[int, ...]]:
    """Append the tokens of one grant, up to and including the one that ends the request.

    Returns:
        Why the request ends, if it does, and the tokens of the answer.
    """
    reason, num_answered, matcher = None, 0, request.matcher
    for token in tokens:
        if matcher is not None and matcher.is_finished:
            reason = FinishReason.STOP
            break
        request.tokens[request.num_known] = token
        request.num_known += 1
        if token in request.stop_ids:
            reason = FinishReason.STOP
            num_answered += request.keeps_stop_token
            break
        num_answered += 1
        if matcher is not None and (not matcher.advance((token,)) or matcher.is_finished):
            reason = FinishReason.STOP  # or an error, which the matcher reports
            break
        if request.num_known == request.max_length:
            reason = FinishReason.LENGTH
            break
    return reason, tokens[:num_answered]


def _follow(request: Request, matcher: Matcher, tokens: tuple[int, ...]) -> tuple[FinishReason | None, tuple[int, ...]]:
    """Append the tokens that the grammar of a request forces; one grant then computes them together.

    Nothing is appended if the only forced token is one that a step in flight will draw anyway. Nor is anything forced
    for a request with log probabilities, inner rows or logits processors: its tokens are all drawn.

    Returns:
        The same as `_append`, for `tokens` and the forced ones together.
    """
    sampling = request.sampling
    wants_rows = request.experts is not None or request.states is not None
    if sampling.logprobs is not None or sampling.logits_processors or request.num_unseen > 1 or wants_rows:
        return None, tokens
    forced = matcher.forced()
    if len(forced) <= request.num_unseen:
        return None, tokens
    num_before = request.num_known
    reason, forced = _append(request, forced)
    request.num_foreseen, request.num_unseen = request.num_unseen, 0
    request.num_untold = request.num_known - num_before - request.num_foreseen
    return reason, tokens + forced


def broken_grammar(reason: str) -> Refusal:
    """Return the refusal that ends a request whose matcher has failed."""
    return Refusal(
        message=f"the grammar of this request cannot be followed any further: {reason}", code="grammar_failed"
    )


def _answer(
    state: EngineState,
    kv: AnyKV,
    request: Request,
    tokens: tuple[int, ...],
    finish: FinishReason | None,
    refusal: Refusal | None,
    logprobs: tuple[TokenLogprob, ...] = (),
    vector: bytes = b"",
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
        num_drafted_tokens=request.num_drafted,
        num_accepted_tokens=request.num_accepted,
        logprobs=logprobs,
        prompt_logprobs=tuple(request.prompt_logprobs),
        vector=vector,
        experts=None if request.experts is None else request.experts.take(request.num_known - 1),
        states=None if request.states is None else request.states.take(request.num_known - 1),
    )
    if first and request.explains and request.cached_prefix is not None:
        explanation = Explanation(
            prefix=request.cached_prefix, arrived_s=request.arrived_s, admitted_s=request.admitted_s
        )
        delta = replace(delta, explanation=explanation)
    if request.timeline is not None:
        if tokens:
            request.timeline.answered()
        if finish is not None:
            delta = replace(delta, timings=request.timeline.ended())
    if request.prompt_logprobs:
        request.prompt_logprobs = []
    if finish is not None:
        _leave(state, kv, request, finish)
    return delta


def _leave(state: EngineState, kv: AnyKV, request: Request, finish: FinishReason) -> None:
    request.finish = finish
    del state.by_id[request.request_id]
    state.num_constrained -= request.matcher is not None
    state.num_reported -= request.sampling.logprobs is not None
    if request.row < 0 and request in state.compiling:
        state.compiling.remove(request)
        return
    if request.pause != "no":
        forget(state, request)
        if request.row < 0:
            return
    elif request.row < 0:
        state.waiting.remove(request)
        return
    if state.on_end is not None and finish in (FinishReason.STOP, FinishReason.LENGTH):
        state.on_end(request)
    if request.pause == "no":
        state.stop(request)
    if request.num_in_flight:
        state.draining.append(request)
    else:
        kv.release(request)


def release_drained(state: EngineState, kv: AnyKV) -> None:
    """Release the ended requests whose last launched step has been retired."""
    if not state.draining:
        return
    still_read: list[Request] = []
    for request in state.draining:
        if request.num_in_flight:
            still_read.append(request)
        else:
            kv.release(request)
    state.draining = still_read
