"""What a request must fulfil to be queued, whatever else the engine holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from pagewood.engine.api import MAX_INNER_BYTES, Overflow, PoolingParams, Refusal, Submit
from pagewood.engine.core.adapter import Adapter
from pagewood.engine.core.images import ImageEncoder
from pagewood.engine.core.memory.divided_kv import AnyKV
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.processors import processors_refusal
from pagewood.engine.core.queue.publishing import Publishing
from pagewood.engine.core.queue.state import EngineState


class Requirements:
    """Refuses what this engine cannot compute. Invariant: a request without a refusal fits into memory when alone.

    Args:
        state: the requests that there are.
        kv: what is cached, and the adapters.
        images: makes rows of images, or refuses them.
        publishing: see `Intake`.
        max_length: longest prompt plus output of one request.
        vocab_size: token ids must be below it.
        has_grammars: otherwise requests with a grammar are refused.
        processors: the functions that `logits_processors` of a request may name.
        vector_size: elements of a vector; 0: requests for one are refused.
        expert_shape: see `EngineInfo`; None: requests for experts are refused.
        state_size: elements of a hidden state; 0: requests for hidden states are refused.
        reports_kept: whether the runner reports what the filters leave; otherwise requests for that are refused.
        generates: whether the model generates tokens; otherwise requests for anything but a vector are refused.
        ends_early: whether every request ends with its first token.
    """

    __slots__ = (
        "_ends_early", "_generates", "_has_grammars", "_images", "_kv", "_max_length", "_processors", "_publishing",
        "_reports_kept", "_row_sizes", "_state", "_vector_size", "_vocab_size",
    )  # fmt: skip

    def __init__(
        self,
        *,
        state: EngineState,
        kv: AnyKV,
        images: ImageEncoder,
        publishing: Publishing | None,
        max_length: int,
        vocab_size: int,
        has_grammars: bool,
        processors: Mapping[str, Callable[..., None]] | None,
        vector_size: int,
        expert_shape: tuple[int, int] | None,
        state_size: int,
        reports_kept: bool,
        generates: bool,
        ends_early: bool,
    ) -> None:
        self._state = state
        self._kv = kv
        self._images = images
        self._publishing = publishing
        self._max_length = max_length
        self._vocab_size = vocab_size
        self._has_grammars = has_grammars
        self._processors = processors or {}
        self._vector_size = vector_size
        self._row_sizes = {
            "routed_experts_from": math.prod(expert_shape or (0,)),
            "hidden_states_from": state_size,
        }
        """Numbers of a position, by the field that asks for them; 0: they are not reported."""
        self._reports_kept = reports_kept
        self._generates = generates
        self._ends_early = ends_early

    def adapter(self, name: str | None) -> Adapter | Refusal | None:
        """Return the adapter of a name, or the refusal of an unknown name; None: no name was given."""
        if name is None:
            return None
        found = None if self._kv.adapters is None else self._kv.adapters.current(name)
        return no_adapter(name) if found is None else found

    def refusal(self, submit: Submit, prompt: Int32) -> Refusal | None:
        """Return why a request is refused, whatever else there is now; None: it may come.

        Args:
            submit: the request.
            prompt: its token ids, as far as they are whole.
        """
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
        if submit.sampling.grammar is not None and not self._has_grammars:
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
            why = "in a beam search" if submit.is_search else "because this engine does not report them"
            return Refusal(
                message=f"kept_tokens must be None {why}, got {kept}", param="kept_tokens", code="not_reported"
            )
        most = self._max_length - num_prompt if submit.sampling.max_tokens is None else submit.sampling.max_tokens
        for param, size in self._row_sizes.items():
            start = getattr(submit.sampling, param)
            if start is None:
                continue
            if not size or submit.is_search:
                why = "in a beam search" if size else "because the model has none, or this engine does not report them"
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
        adapter = self.adapter(submit.adapter)
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


def no_adapter(name: str) -> Refusal:
    """Return the refusal of a name that no loaded adapter has."""
    message = f"adapter must be the name of a loaded one, got {name!r}"
    return Refusal(message=message, param="adapter", code="adapter_not_found")
