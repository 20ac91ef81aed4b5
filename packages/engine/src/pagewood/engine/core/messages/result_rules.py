"""The rules for what a runner returns for a step. They are checked once a step, before anything is applied.

All arrays are on the host. A check reads each of them once, whatever the number of requests.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import inf
from typing import Any, cast

import numpy as np

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch, num_rows_of
from pagewood.engine.core.messages.logprobs import Logprobs
from pagewood.engine.core.messages.result import StepResult

_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)


def check_result(
    result: object,
    batch: Batch,
    *,
    vocab_size: int,
    vector_size: int,
    num_top: Sequence[int] | None = None,
    expert_shape: tuple[int, int] | None = None,
) -> StepResult:
    """Return the result of a step if it keeps the rules of `StepResult`.

    Log probabilities and vectors may be any numbers: a request whose logits are not numbers ends alone.

    Args:
        result: what `wait` has returned.
        batch: of the step.
        vocab_size: token ids are below it.
        vector_size: elements of a hidden state.
        num_top: for each of the S sampled grants, the alternatives that are reported with its tokens; negative: its
            tokens need no report. None: no tokens need one.
        expert_shape: layers of the model, and experts of a token in each; None: no experts are reported.

    Raises:
        TypeError: it is not a `StepResult`, or a field has another type.
        ValueError: a field breaks a rule.
    """
    if not isinstance(result, StepResult):
        raise TypeError(f"wait must return a StepResult, got {_type(result)}")
    tokens, counts, promised = result.tokens, result.counts, batch.num_promised
    _check_array("counts", counts, _INT32, promised.shape, "one for each sampled grant")
    # As unsigned numbers negative ones are too large, so one comparison is enough.
    is_wrong = counts.view(np.uint32) > promised.view(np.uint32)
    if is_wrong.any():
        _fail_at("counts", "in [0, num_promised]", counts, promised, "promised", is_wrong)
    num_tokens = int(counts.sum())
    _check_array("tokens", tokens, _INT32, (num_tokens,), "the sum of counts")
    _check_ids("tokens", tokens, vocab_size)
    _check_drafted(result.num_drafted, counts, promised)
    if not isinstance(result.excluded, (tuple, list)) or result.excluded:
        _check_excluded(result.excluded, counts)
    if result.logprobs is not None or num_top is not None:
        wanted = np.repeat(np.array(num_top, np.int32), counts) if num_top else np.full(num_tokens, -1, np.int32)
        _check_logprobs("logprobs", result.logprobs, "the number of tokens", wanted, vocab_size)
    scored = batch.scored
    if result.prompt_logprobs is not None or len(scored):
        wanted = np.repeat(scored[:, 2], scored[:, 1])
        _check_logprobs("prompt_logprobs", result.prompt_logprobs, "Batch.scored", wanted, vocab_size)
    if result.vectors is not None or len(batch.pooled):
        _check_array("vectors", result.vectors, _FLOAT32, (len(batch.pooled), vector_size), "Batch.pooled")
    if result.experts is not None or len(batch.routed):
        num = _total_rows(batch, batch.routed, counts)
        _check_array("experts", result.experts, _INT32, (num, *(expert_shape or ())), "the positions of Batch.routed")
    if result.states is not None or len(batch.stated):
        num = _total_rows(batch, batch.stated, counts)
        _check_array("states", result.states, _FLOAT32, (num, vector_size), "the positions of Batch.stated")
    for name in ("draft_s", "verify_s", "num_rebuilt", "num_postponed", "num_short"):
        value: Any = getattr(result, name)
        if not isinstance(value, (int, float, np.number)) or not 0 <= value < inf:  # false for NaN
            raise ValueError(f"StepResult.{name} must be a number >= 0, got {value!r}")
    return result


def check_drafts(drafts: Sequence[Sequence[int]], batch: Batch, *, vocab_size: int) -> None:
    """Check the drafts for which masks are wanted.

    Args:
        drafts: what `drafts` has returned.
        batch: of the step.
        vocab_size: token ids are below it.

    Raises:
        ValueError: they are not one sequence for each constrained grant, are too many, or are not token ids.
    """
    if len(drafts) != len(batch.constrained):
        num = len(batch.constrained)
        raise ValueError(f"drafts must return one sequence for each of {num} constrained grants, got {len(drafts)}")
    promised = batch.num_promised[batch.constrained]
    for own, most in zip(drafts, (promised - 1).tolist(), strict=True):
        if len(own) > most:
            raise ValueError(
                f"drafts must return at most {most} tokens for a grant that may have {most}, got {len(own)}"
            )
        if len(own) and not 0 <= min(own) <= max(own) < vocab_size:
            raise ValueError(f"drafts must return token ids in [0, {vocab_size}), got {list(own)}")


def _total_rows(batch: Batch, entries: Int32, counts: Int32) -> int:
    return int(num_rows_of(entries, batch.counts, batch.sampled, batch.num_promised, counts).sum())


def _check_drafted(num_drafted: object, counts: Int32, promised: Int32) -> None:
    """Check the numbers of drafts, and that no more were accepted than there were."""
    if num_drafted is None:
        is_wrong = counts > 1
        if is_wrong.any():
            raise ValueError(f"StepResult.num_drafted must be given where counts are above 1, got None for {counts}")
        return
    drafted = _check_array("num_drafted", num_drafted, _INT32, promised.shape, "one for each sampled grant")
    is_wrong = drafted.view(np.uint32) >= promised.view(np.uint32)
    if is_wrong.any():
        _fail_at("num_drafted", "in [0, num_promised)", drafted, promised, "promised", is_wrong)
    is_wrong = counts > drafted + 1
    if is_wrong.any():
        _fail_at("counts", "at most num_drafted + 1", counts, drafted, "drafted", is_wrong)


def _check_excluded(excluded: Any, counts: Int32) -> None:
    """Check that the grants without allowed tokens are sampled grants that yield nothing."""
    if not isinstance(excluded, Collection):
        raise TypeError(f"StepResult.excluded must be a collection of indices, got {_type(excluded)}")
    indices: list[Any] = list(excluded)  # pyright: ignore[reportUnknownArgumentType]
    if not all(isinstance(i, (int, np.integer)) and 0 <= i < len(counts) and not counts[i] for i in indices):
        rule = "indices of sampled grants whose counts are 0"
        raise ValueError(f"StepResult.excluded must be {rule}, got {indices} for counts {counts.tolist()}")


def _check_logprobs(name: str, logprobs: object, source: str, wanted: Int32, vocab_size: int) -> None:
    """Check the reports of some tokens: with each, the `wanted` alternatives; negative: it needs no report."""
    is_wanted = wanted >= 0
    if logprobs is None and not is_wanted.any():
        return
    if not isinstance(logprobs, Logprobs):
        raise TypeError(f"StepResult.{name} must be Logprobs, because a request wants them, got {_type(logprobs)}")
    num = len(wanted)
    _check_array(f"{name}.tokens", logprobs.tokens, _INT32, (num,), source)
    _check_array(f"{name}.values", logprobs.values, _FLOAT32, (num,), source)
    _check_array(f"{name}.ranks", logprobs.ranks, _INT32, (num,), source)
    found = _check_array(f"{name}.num_top", logprobs.num_top, _INT32, (num,), source)
    ids = logprobs.top_ids
    most = _num_columns(ids)
    _check_array(f"{name}.top_ids", ids, _INT32, (num, most), f"({source}, K)")
    _check_array(f"{name}.top_values", logprobs.top_values, _FLOAT32, (num, most), "that of top_ids")
    if logprobs.num_kept is not None:
        num_kept = _check_array(f"{name}.num_kept", logprobs.num_kept, _INT32, (num,), source)
        total = int(np.maximum(num_kept, 0).sum())
        kept = _check_array(f"{name}.kept", logprobs.kept, _INT32, (total,), "the sum of num_kept")
        _check_ids(f"{name}.kept", kept, vocab_size)
    largest = int(found.max(initial=0))
    if largest > most:
        raise ValueError(f"StepResult.{name}.num_top must be at most the columns of top_ids, {most}, got {largest}")
    is_wrong = is_wanted & (found != np.minimum(wanted, vocab_size))
    if is_wrong.any():
        at = int(is_wrong.argmax())
        rule = f"must be what the request wants, {wanted[at]}"
        raise ValueError(f"StepResult.{name}.num_top {rule}, got {found[at]} for token {at}")
    _check_ids(f"{name}.tokens", logprobs.tokens[is_wanted], vocab_size)
    _check_ids(f"{name}.top_ids", ids[is_wanted[:, None] & (np.arange(most) < found[:, None])], vocab_size)


def _check_array(name: str, value: object, dtype: np.dtype[Any], shape: tuple[int, ...], source: str) -> Any:
    """Return `value` if it is an array of this type and shape; `source` says where the shape comes from."""
    if not isinstance(value, np.ndarray):
        raise TypeError(f"StepResult.{name} must be a numpy array, got {_type(value)}")
    array = cast("np.ndarray[Any, np.dtype[Any]]", value)
    if array.dtype != dtype:
        raise ValueError(f"StepResult.{name} must be {dtype}, got {array.dtype}")
    if array.shape != shape:
        raise ValueError(f"StepResult.{name} must have shape {shape}, {source}, got {array.shape}")
    return array


def _num_columns(value: Any) -> int:
    """Return the columns of an array; 0 if it does not have two dimensions."""
    return value.shape[1] if getattr(value, "ndim", 0) == 2 else 0


def _check_ids(name: str, ids: Int32, vocab_size: int) -> None:
    """Check token ids; as unsigned numbers negative ones are too large."""
    if ids.size and int(ids.view(np.uint32).max()) >= vocab_size:
        wrong = ids[(ids < 0) | (ids >= vocab_size)]
        raise ValueError(f"StepResult.{name} must be token ids in [0, {vocab_size}), got {wrong[0]}")


def _fail_at(name: str, rule: str, values: Int32, limits: Int32, verb: str, is_wrong: np.ndarray[Any, Any]) -> None:
    """Raise for the first sampled grant that breaks a rule."""
    at = int(is_wrong.argmax())
    raise ValueError(
        f"StepResult.{name} must be {rule}, got {values[at]} for sampled grant {at}, which {verb} {limits[at]}"
    )


def _type(value: object) -> str:
    return "None" if value is None else type(value).__name__
