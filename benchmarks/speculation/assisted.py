# pyright: basic
# (transformers is untyped)
"""Assisted generation of `transformers` with the embedded model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from transformers import LlamaForCausalLM

from pagewood.engine.model_folder.folder import model_folder

_NUM_LOOKUP = 10  # the value of its documentation


class AssistedGeneration:
    """`model.generate`, one prompt at a time: plain, with prompt lookup, or with the draft model."""

    def __init__(self, name: str, *, num_threads: int) -> None:
        folder = model_folder(None)
        self.name = name
        self._num_threads = num_threads
        self._model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._options: dict[str, Any] = {}
        if name == "ngram":
            self._options = {"prompt_lookup_num_tokens": _NUM_LOOKUP}
        elif name == "draft":
            draft = LlamaForCausalLM.from_pretrained(folder / "draft", dtype=torch.float32).eval()
            self._options = {"assistant_model": draft}
        logging.getLogger("transformers").setLevel(logging.ERROR)

    def tokens_per_s(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        """Answer the prompts greedily; return output tokens per second, prompts included in the time."""
        torch.set_num_threads(self._num_threads)
        num_tokens = 0
        with torch.inference_mode():
            start = perf_counter()
            for prompt in prompts:
                ids = torch.tensor([list(prompt)])
                output = self._model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=max_tokens,
                    do_sample=False,
                    pad_token_id=0,
                    **self._options,
                )
                num_tokens += output.shape[1] - ids.shape[1]
            return num_tokens / (perf_counter() - start)
