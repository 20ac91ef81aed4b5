"""An engine as trainers call it: token ids in and out, around updates of weights, sleep and partial answers.

Methods, arguments and answers are those of verl's rollout servers; nothing of verl is imported. `verl` makes actors of
it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import uuid4

from pagewood.engine.api import FinishReason, Flush, Pause, Resume, SamplingParams
from pagewood.engine.offline.async_llm import AsyncLLM
from pagewood.engine.weight_commands import Sleep, SleepTag, UpdateWeights

_SAME = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "ignore_eos",
    "seed", "min_tokens",
)  # fmt: skip
"""Sampling parameters with the same name and meaning there and here."""
_OTHERS = ("top_k", "logprobs", "stop_token_ids", "max_tokens", "max_new_tokens", "n")


class RolloutServer:
    """One engine for answers of a policy in training. Invariant: no request ends early but by `abort_all_requests`.

    Args:
        answer: makes what `generate` returns, of `token_ids`, `log_probs`, `routed_experts`, `stop_reason` and
            `extra_fields`.
        options: fields of `EngineConfig`, with `model`.
        prompt_length: longest prompt that the trainer makes.
        response_length: longest answer that it wants.
        has_processed: whether log probabilities are those after temperature and filters.
        has_experts: whether answers have the experts of all tokens of prompt and answer but the last one,
            `[tokens - 1, layers, experts of a token] int32`; then no request reads cached prefixes.
        defaults: sampling parameters that requests may leave out.
        level: of `sleep`; 0: it does nothing; None: nor does `release_kv_cache`, as with 1.
    """

    __slots__ = (
        "_admitted", "_answer", "_defaults", "_has_experts", "_has_processed", "_is_rejecting", "_level",
        "_llm", "_prompt_length", "_response_length", "_steps",
    )  # fmt: skip

    def __init__(
        self,
        answer: Callable[..., Any],
        options: Mapping[str, Any],
        *,
        prompt_length: int,
        response_length: int,
        has_processed: bool = True,
        has_experts: bool = False,
        defaults: Mapping[str, Any] | None = None,
        level: int | None = 2,
    ) -> None:
        self._answer = answer
        self._llm = AsyncLLM(**options)
        self._prompt_length = prompt_length
        self._response_length = response_length
        self._has_processed = has_processed
        self._has_experts = has_experts
        self._defaults = dict(defaults or {})
        self._level = level
        self._steps: int | None = None
        """The step of the trainer that the weights are of."""  # written by: update_weights, set_global_steps
        self._admitted = asyncio.Event()
        """Set unless requests wait for `resume_generation`."""
        # contents written by: abort_all_requests, resume_generation
        self._admitted.set()
        self._is_rejecting = False  # written by: abort_all_requests, resume_generation

    async def launch_server(self) -> None:
        """Load the model."""
        await self._llm.start()

    async def close(self) -> None:
        """Release everything."""
        await self._llm.close()

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
        priority: int = 0,
    ) -> Any:
        """Return an answer; one that was aborted has the tokens so far, and can be continued with them.

        Raises:
            ValueError: a parameter is unknown or out of its range, the prompt is too long, or there are images.
        """
        del request_id, mm_processor_kwargs
        for name, data in (("image_data", image_data), ("video_data", video_data), ("audio_data", audio_data)):
            if data:
                raise ValueError(f"{name} must be empty, because only text is read, got {len(data)}")
        sampling = self._sampling(len(prompt_ids), {**self._defaults, **sampling_params})
        while not self._admitted.is_set():
            if self._is_rejecting:
                return self._answered([], None, is_whole=False)
            await self._admitted.wait()
        [found] = await self._llm.generate([list(prompt_ids)], sampling, keep_stop_token=True, priority=priority)
        if found.refusal is not None:
            raise ValueError(found.refusal.message)
        return self._answered(
            list(found.tokens),
            None if sampling.logprobs is None else [one.logprob for one in found.logprobs],
            is_whole=found.finish is not FinishReason.ABORT,
            num_cached=found.num_cached_tokens,
            experts=found.routed_experts,
        )

    async def update_weights(self, files: Sequence[str], global_steps: int | None = None) -> None:
        """Compute with the tensors in files from the next step on; no request gets KV of older ones."""
        version = None if global_steps is None else str(global_steps)
        await self._llm.tell(UpdateWeights(request_id=uuid4().hex, files=tuple(files), version=version))
        self._steps = global_steps

    async def set_global_steps(self, global_steps: int) -> None:
        """Note the step of the trainer that the weights are of."""
        self._steps = global_steps

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """End all requests with what they have; new ones wait for `resume_generation`, or end at once."""
        self._admitted.clear()
        self._is_rejecting = reject_request
        await self._llm.tell(Pause(request_id=uuid4().hex, abort=True))

    async def resume_generation(self) -> None:
        """Take requests again."""
        await self._llm.tell(Resume(request_id=uuid4().hex))
        self._is_rejecting = False
        self._admitted.set()

    async def clear_kv_cache(self) -> None:
        """Drop cached KV."""
        await self._llm.tell(Flush(request_id=uuid4().hex))

    async def sleep(self) -> None:
        """Give memory back."""
        if self._level:
            await self._llm.sleep(self._level)

    async def wake_up(self, tags: Sequence[SleepTag] | None = None) -> None:
        """Take memory again."""
        if self._level:
            await self._llm.wake_up(tags)

    async def release_kv_cache(self) -> None:
        """Give the memory of KV back."""
        if self._level in (0, 2):
            await self._llm.tell(Sleep(request_id=uuid4().hex, tags=("kv_cache",)))

    async def resume_kv_cache(self) -> None:
        """Take the memory of KV again."""
        if self._level in (0, 2):
            await self._llm.wake_up(("kv_cache",))

    def _answered(
        self, tokens: list[int], scores: list[float] | None, *, is_whole: bool, num_cached: int = 0, experts: Any = None
    ) -> Any:
        return self._answer(
            token_ids=tokens,
            log_probs=scores,
            routed_experts=experts,
            stop_reason="completed" if is_whole else "aborted",
            extra_fields={"global_steps": self._steps, "num_cached_tokens": num_cached},
        )

    def _sampling(self, num_prompt: int, wanted: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters of a request.

        Raises:
            ValueError: see `generate`.
        """
        unknown = wanted.keys() - {*_SAME, *_OTHERS}
        if unknown:
            raise ValueError(f"sampling_params must be some of {', '.join((*_SAME, *_OTHERS))}, got {min(unknown)!r}")
        if wanted.get("n", 1) != 1:
            raise ValueError(f"n must be 1, because each answer is a request of its own, got {wanted['n']!r}")
        most = self._llm.info.max_length - num_prompt
        if most < 1:
            raise ValueError(f"a prompt must have at most {self._llm.info.max_length - 1} tokens, got {num_prompt}")
        length = wanted.get("max_tokens", wanted.get("max_new_tokens"))
        if length is None:
            length = min(self._response_length, self._prompt_length + self._response_length - num_prompt)
        return SamplingParams(
            max_tokens=max(1, min(length, most)),
            top_k=max(0, wanted.get("top_k", 0)),
            logprobs=0 if wanted.get("logprobs") not in (None, False) else None,
            logprobs_kind="processed" if self._has_processed else "raw",
            routed_experts_from=0 if self._has_experts else None,
            stop_token_ids=tuple(wanted.get("stop_token_ids") or ()),
            **{name: wanted[name] for name in _SAME if wanted.get(name) is not None},
        )
