"""Results that break a rule of `core.messages.result_rules`, one rule each, and a runner that returns one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pagewood.engine.core.loop import Runner, StepHandle
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.logprobs import Logprobs
from pagewood.engine.core.messages.result import StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrong:
    """One way to be wrong."""

    edit: Callable[[Any], object]
    """From a right result to a wrong one."""
    message: str
    """A pattern of the error that names the field."""
    when: Callable[[Any, Batch], bool] = lambda result, batch: bool(result.counts.any())
    """Whether the result of a step can be wrong in this way."""


def field(name: str, edit: Callable[[Any], object]) -> Callable[[Any], object]:
    return lambda result: replace(result, **{name: edit(getattr(result, name))})


def reported(name: str, edit: Callable[[Any], object]) -> Callable[[Any], object]:
    return field("logprobs", lambda found: replace(found, **{name: edit(getattr(found, name))}))


def at_first(value: int) -> Callable[[Int32], Int32]:
    def edit(array: Int32) -> Int32:
        array = array.copy()
        np.put(array, 0, value)
        return array

    return edit


def shift(counts: Int32) -> Int32:
    """Move one token from the first grant to the last: the sum stays."""
    counts = counts.copy()
    counts[0] -= 1
    counts[-1] += 1
    return counts


def longer(array: Any) -> Any:
    return np.concatenate([array, array[-1:]])


def two_plain(result: Any, batch: Batch) -> bool:
    return len(result.counts) > 1 and bool((result.counts == 1).all() and (batch.num_promised == 1).all())


def drafts(result: Any, batch: Batch) -> bool:
    return bool((result.counts > 1).any())


def drawn(result: Any, batch: Batch) -> bool:
    return result.logprobs is not None and len(result.tokens) > 0 and bool((result.logprobs.num_top > 0).all())


def scored(result: Any, batch: Batch) -> bool:
    return result.prompt_logprobs is not None


def pooled(result: Any, batch: Batch) -> bool:
    return result.vectors is not None


def no_scored(result: Any, batch: Batch) -> bool:
    return result.prompt_logprobs is None


def no_pooled(result: Any, batch: Batch) -> bool:
    return result.vectors is None


def logprobs_of(num: int) -> Logprobs:
    zeros, none = np.zeros(num, np.int32), np.zeros((num, 0))
    return Logprobs(
        tokens=zeros, values=zeros.astype(np.float32), ranks=zeros, num_top=zeros, top_ids=none.astype(np.int32),
        top_values=none.astype(np.float32),
    )  # fmt: skip


WRONG: dict[str, Wrong] = {
    "no result": Wrong(edit=lambda result: None, message="wait must return a StepResult, got None"),
    "a tuple": Wrong(edit=lambda result: (result.tokens, result.counts), message="must return a StepResult, got tuple"),
    "a list of tokens": Wrong(edit=field("tokens", list), message="StepResult.tokens must be a numpy array, got list"),
    "no counts": Wrong(
        edit=field("counts", lambda _: None), message="StepResult.counts must be a numpy array, got None"
    ),
    "tokens of int64": Wrong(
        edit=field("tokens", lambda tokens: tokens.astype(np.int64)),
        message="StepResult.tokens must be int32, got int64",
    ),
    "tokens of float64": Wrong(
        edit=field("tokens", lambda tokens: tokens.astype(float)),
        message="StepResult.tokens must be int32, got float64",
    ),
    "counts of float64": Wrong(
        edit=field("counts", lambda counts: counts.astype(float)),
        message="StepResult.counts must be int32, got float64",
    ),
    "too few counts": Wrong(
        edit=field("counts", lambda counts: counts[:-1]),
        message=r"StepResult.counts must have shape \(\d,\), one for each sampled grant, got \(\d,\)",
    ),
    "too many counts": Wrong(edit=field("counts", longer), message="StepResult.counts must have shape"),
    "counts in two dimensions": Wrong(
        edit=field("counts", lambda counts: counts[:, None]), message="StepResult.counts must have shape"
    ),
    "negative count": Wrong(
        edit=field("counts", at_first(-1)),
        message=r"StepResult.counts must be in \[0, num_promised\], got -1 for sampled grant 0, which promised \d",
    ),
    "a token of another request": Wrong(
        edit=field("counts", shift), message=r"counts must be in .*, got 2 for sampled grant \d, which promised 1",
        when=two_plain,
    ),
    "more tokens than promised": Wrong(
        edit=lambda result: replace(result, counts=result.counts * 9, tokens=np.repeat(result.tokens, 9)),
        message=r"StepResult.counts must be in \[0, num_promised\], got \d+",
    ),
    "a token too few": Wrong(
        edit=field("tokens", lambda tokens: tokens[:-1]),
        message=r"StepResult.tokens must have shape \(\d+,\), the sum of counts, got",
    ),
    "a token too many": Wrong(edit=field("tokens", longer), message="StepResult.tokens must have shape"),
    "tokens in two dimensions": Wrong(
        edit=field("tokens", lambda tokens: tokens[:, None]), message="StepResult.tokens must have shape"
    ),
    "negative token": Wrong(
        edit=field("tokens", at_first(-1)), message=r"StepResult.tokens must be token ids in \[0, 50\), got -1"
    ),
    "token beyond the vocabulary": Wrong(
        edit=field("tokens", at_first(50)), message=r"StepResult.tokens must be token ids in \[0, 50\), got 50"
    ),
    "no numbers of drafts": Wrong(
        edit=field("num_drafted", lambda _: None), message="num_drafted must be given where counts are above 1",
        when=drafts,
    ),
    "drafts of int64": Wrong(
        edit=field("num_drafted", lambda nums: nums.astype(np.int64)), message="num_drafted must be int32, got int64"
    ),
    "too few numbers of drafts": Wrong(
        edit=field("num_drafted", lambda nums: nums[:-1]), message="StepResult.num_drafted must have shape"
    ),
    "more drafts than granted": Wrong(
        edit=field("num_drafted", at_first(9)), message=r"num_drafted must be in \[0, num_promised\), got 9"
    ),
    "negative number of drafts": Wrong(
        edit=field("num_drafted", at_first(-1)), message=r"num_drafted must be in \[0, num_promised\), got -1"
    ),
    "more accepted than drafted": Wrong(
        edit=field("num_drafted", lambda nums: nums * 0), message="counts must be at most num_drafted [+] 1, got",
        when=drafts,
    ),
    "excluded with a token": Wrong(
        edit=field("excluded", lambda _: (0,)), message="excluded must be indices of sampled grants whose counts are 0",
        when=lambda result, batch: bool(result.counts.all()),
    ),
    "excluded out of range": Wrong(
        edit=field("excluded", lambda _: [99]), message="StepResult.excluded must be indices"
    ),
    "excluded of another type": Wrong(
        edit=field("excluded", lambda _: None), message="excluded must be a collection of indices, got None"
    ),
    "excluded of floats": Wrong(edit=field("excluded", lambda _: [0.5]), message="StepResult.excluded must be indices"),
    "no reports": Wrong(
        edit=field("logprobs", lambda _: None), message="logprobs must be Logprobs, because a request wants them",
        when=drawn,
    ),
    "a report too few": Wrong(
        edit=reported("values", lambda values: values[:-1]), message="StepResult.logprobs.values must have shape",
        when=drawn,
    ),
    "reports of float64": Wrong(
        edit=reported("values", lambda values: values.astype(float)),
        message="StepResult.logprobs.values must be float32, got float64", when=drawn,
    ),
    "ranks of int64": Wrong(
        edit=reported("ranks", lambda ranks: ranks.astype(np.int64)), message="logprobs.ranks must be int32", when=drawn
    ),
    "report without a token id": Wrong(
        edit=reported("tokens", at_first(-1)),
        message=r"logprobs.tokens must be token ids in \[0, 50\), got -1", when=drawn,
    ),
    "alternative without a token id": Wrong(
        edit=reported("top_ids", at_first(50)), message=r"logprobs.top_ids must be token ids in \[0, 50\)", when=drawn
    ),
    "alternatives in one dimension": Wrong(
        edit=reported("top_ids", np.ravel), message="logprobs.top_ids must have shape", when=drawn
    ),
    "alternatives without values": Wrong(
        edit=reported("top_values", lambda values: values[:, :-1]),
        message="logprobs.top_values must have shape", when=drawn,
    ),
    "alternatives of float64": Wrong(
        edit=reported("top_values", lambda values: values.astype(float)),
        message="top_values must be float32", when=drawn,
    ),
    "fewer alternatives than wanted": Wrong(
        edit=reported("num_top", at_first(0)), message="num_top must be what the request wants, 2, got 0", when=drawn
    ),
    "more alternatives than columns": Wrong(
        edit=reported("num_top", at_first(5)), message="num_top must be at most the columns of top_ids, 2, got 5",
        when=drawn,
    ),
    "token that is not reported": Wrong(
        edit=reported("num_top", at_first(-1)), message="num_top must be what the request wants, 2, got -1", when=drawn
    ),
    "no reports of the prompt": Wrong(
        edit=field("prompt_logprobs", lambda _: None), message="prompt_logprobs must be Logprobs", when=scored
    ),
    "a prompt token too few": Wrong(
        edit=field("prompt_logprobs", lambda found: replace(found, tokens=found.tokens[:-1])),
        message="prompt_logprobs.tokens must have shape .*Batch.scored", when=scored,
    ),
    "a prompt that is not reported": Wrong(
        edit=field("prompt_logprobs", lambda _: logprobs_of(3)), message="prompt_logprobs.tokens must have shape",
        when=no_scored,
    ),
    "no vectors": Wrong(
        edit=field("vectors", lambda _: None), message="StepResult.vectors must be a numpy array", when=pooled
    ),
    "vectors of float64": Wrong(
        edit=field("vectors", lambda vectors: vectors.astype(float)), message="vectors must be float32", when=pooled
    ),
    "a vector too many": Wrong(
        edit=field("vectors", longer), message="vectors must have shape .*Batch.pooled", when=pooled
    ),
    "short vectors": Wrong(
        edit=field("vectors", lambda vectors: vectors[:, :-1]), message="vectors must have shape", when=pooled
    ),
    "vectors that nobody wants": Wrong(
        edit=field("vectors", lambda _: np.zeros((1, 4), np.float32)), message="vectors must have shape", when=no_pooled
    ),
    "time that is not a number": Wrong(
        edit=field("draft_s", lambda _: float("nan")), message="StepResult.draft_s must be a number >= 0, got nan"
    ),
    "negative time": Wrong(edit=field("verify_s", lambda _: -1.0), message="StepResult.verify_s must be a number >= 0"),
    "no time": Wrong(
        edit=field("verify_s", lambda _: None), message="StepResult.verify_s must be a number >= 0, got None"
    ),
    "negative number of rebuilt positions": Wrong(
        edit=field("num_rebuilt", lambda _: -1), message="StepResult.num_rebuilt must be a number >= 0, got -1"
    ),
}  # fmt: skip


class WrongRunner:
    """A runner that is wrong in one way, once: in the first step after `first` others in which it can be."""

    def __init__(
        self, inner: Runner, wrong: Wrong, *, first: int = 2, on_wrong: Callable[[Batch], object] = lambda _: None
    ) -> None:
        self._inner = inner
        self._wrong = wrong
        self._num_left = first  # written by: wrong_results
        self._on_wrong = on_wrong
        self.was_wrong = False  # written by: wrong_results
        self.close = inner.close

    def launch(self, batch: Batch) -> StepHandle:
        return _WrongStep(self._inner.launch(batch), batch, self)

    def result(self, batch: Batch, result: StepResult) -> object:
        """Return what the step of `batch` has as its result."""
        self._num_left -= 1
        if self.was_wrong or self._num_left >= 0 or not self._wrong.when(result, batch):
            return result
        self.was_wrong = True
        self._on_wrong(batch)
        return self._wrong.edit(result)


class _WrongStep:
    def __init__(self, step: Any, batch: Batch, runner: WrongRunner) -> None:
        self._step = step
        self._batch = batch
        self._runner = runner

    def drafts(self) -> Sequence[Sequence[int]]:
        return self._step.drafts()

    def constrain(self, masks: Int32) -> None:
        self._step.constrain(masks)

    def wait(self) -> Any:
        return self._runner.result(self._batch, self._step.wait())
