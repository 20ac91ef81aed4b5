# pyright: basic
# (transformers is untyped)
"""`transformers`: a static batch with `generate`, and its continuous batching."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.streamers import BaseStreamer

from end_to_end.cases import Case, Prompts
from end_to_end.run import Run

_PAGE_SIZE = 256  # its default
_SPARE_PAGES = 2
_MAX_BATCH_TOKENS = 512  # the number of tokens per step of our engine; its own choice was twice as slow here
_TIMEOUT_S = 600.0
_NEVER = -1  # means no end token; with None the manager warns


def load(folder: Path) -> Any:
    """Load the model in float32 with the attention that `transformers` prefers on a CPU."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


class StaticBatch:
    """`model.generate` on all prompts as one tensor; all have the same length, so none is padded."""

    name = "transformers, static batch"

    def __init__(self, model: Any, *, num_threads: int) -> None:
        self._model = model
        self._num_threads = num_threads

    def run(self, case: Case, prompts: Prompts) -> Run:
        torch.set_num_threads(self._num_threads)  # an engine's worker may have changed it for the whole process
        ids = torch.tensor(prompts)
        clock = _Clock()
        with torch.inference_mode():
            start = perf_counter()
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=_generation_config(case, eos=None),
                streamer=clock,
            )
        tokens = output[:, ids.shape[1] :].tolist()
        return Run(
            submitted_s=start,
            tokens=tuple(map(tuple, tokens)),
            times_s=tuple(tuple(clock.times_s[1:]) for _ in prompts),
        )

    def logit_gap(self, prompt: Sequence[int], tokens: Sequence[int], others: Sequence[int]) -> float:
        """Return the difference of the logits of the first two tokens in which two answers to a prompt differ."""
        at = next(index for index, (one, other) in enumerate(zip(tokens, others, strict=True)) if one != other)
        with torch.inference_mode():
            logits = self._model(torch.tensor([[*prompt, *tokens[:at]]]), logits_to_keep=1).logits[0, -1]
        return abs(float(logits[tokens[at]] - logits[others[at]]))

    def close(self) -> None: ...


class ContinuousBatching:
    """The manager behind `model.generate_batch`, sized for each case, and started before timing."""

    name = "transformers, continuous batching"

    def __init__(self, model: Any, *, num_threads: int) -> None:
        self._model = model
        self._num_threads = num_threads
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)

    def run(self, case: Case, prompts: Prompts) -> Run:
        torch.set_num_threads(self._num_threads)
        config = ContinuousBatchingConfig(
            page_size=_PAGE_SIZE,
            num_blocks=case.num_requests * ceil(case.length / _PAGE_SIZE) + _SPARE_PAGES,
            max_batch_tokens=max(_MAX_BATCH_TOKENS, case.num_requests),
            max_requests_per_batch=case.num_requests,
        )
        with self._model.continuous_batching_context_manager(
            generation_config=_generation_config(case, eos=_NEVER), continuous_batching_config=config, warmup=False
        ) as manager:
            _answer(manager, ((0,),), num_output=1)  # the first request allocates its memory
            start = perf_counter()
            outputs = _answer(manager, prompts, num_output=case.num_output)
        return Run(
            submitted_s=start,
            tokens=tuple(tuple(output.generated_tokens) for output in outputs),
            times_s=tuple(tuple(output.timestamps) for output in outputs),
        )

    def close(self) -> None: ...


class _Clock(BaseStreamer):
    """Records when `generate` delivers tokens; the first delivery contains the prompts."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times_s.append(perf_counter())

    def end(self) -> None: ...


def _answer(manager: Any, prompts: Prompts, *, num_output: int) -> list[Any]:
    """Return the outputs of `prompts`, in order."""
    ids = manager.add_requests([list(prompt) for prompt in prompts], max_new_tokens=num_output, record_timestamps=True)
    outputs = {}
    while len(outputs) < len(ids):
        output = manager.get_result(timeout=_TIMEOUT_S)
        if output is None:
            raise RuntimeError(f"continuous batching gave no result in {_TIMEOUT_S:.0f} s, or its thread ended")
        if output.error is not None:
            raise RuntimeError(output.error)
        if output.is_finished():
            outputs[output.request_id] = output
    return [outputs[request_id] for request_id in ids]


def _generation_config(case: Case, *, eos: int | None) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=case.num_output, do_sample=False, use_cache=True, eos_token_id=eos, pad_token_id=0
    )
