# pyright: basic
# (torch and transformers are not dependencies of this package)
"""Prefix reuse for `generate` of transformers: tokens of earlier prompts and answers are not computed again."""

from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from pagewood.radixcache import RadixCache
from pagewood.radixcache.arrays import Int32
from pagewood.radixcache.counts import require_count
from pagewood.radixcache.namespaces import Namespace
from pagewood.radixcache.node import Node


class CachedGenerator:
    """A model with a memory of pages that keeps the keys and values of earlier prompts and answers.

    The tokens are those of `model.generate`. When the memory is full, the least recently used pages make room.

    Invariant: between two calls each page is either free or in the tree, and nothing is locked.

    Args:
        model: a decoder of transformers in which every layer attends to all tokens.
        num_pages: pages of the memory.
        page_size: tokens per page.

    Raises:
        ValueError: `num_pages` is not an integer >= 1, or the model has layers of another kind.
    """

    def __init__(self, model: Any, *, num_pages: int, page_size: int = 16) -> None:
        num_pages = require_count("num_pages", num_pages, least=1)
        config = model.config.get_text_config()
        others = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
        if others or getattr(config, "sliding_window", None):
            found = ", ".join(sorted(others)) or f"sliding_window {config.sliding_window}"
            raise ValueError(f"model must attend to all tokens in every layer, got {found}")
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, 2, config.num_key_value_heads, num_pages, page_size, head_dim)
        self.model = model
        self.memory = torch.empty(shape, dtype=model.dtype, device=model.device)
        self.cache = RadixCache(page_size)
        self.free: Int32 = np.arange(num_pages, dtype=np.int32)

    @torch.inference_mode()
    def generate(self, prompt: list[int], *, namespace: Namespace = None, **options: Any) -> tuple[list[int], int]:
        """Return the prompt with its continuation, and the number of prompt tokens that were not computed.

        Args:
            prompt: `[>= 1]`, token ids.
            namespace: prompts of different namespaces share nothing, for example those of different adapters.
            options: for `model.generate`; one sequence is generated.

        Raises:
            ValueError: `prompt` is empty, or the options ask for several sequences.
        """
        if not prompt:
            raise ValueError("prompt must have at least 1 token, got 0")
        for name in ("num_beams", "num_return_sequences"):
            if options.get(name, 1) != 1:
                raise ValueError(f"{name} must be 1, got {options[name]}")
        match = self.cache.match(np.array(prompt[:-1], np.int32), namespace)  # the last token must be computed
        lease = self.cache.lock(match.node)
        try:
            past = DynamicCache()
            for index, layer in enumerate(self.memory[..., match.pages.tolist(), :, :].flatten(3, 4)):
                past.update(layer[0][None], layer[1][None], index)
            ids = torch.tensor([prompt], device=self.model.device)
            output = self.model.generate(ids, past_key_values=past, attention_mask=torch.ones_like(ids), **options)[0]
            tokens = output.tolist()
            self._keep(np.array(tokens[: past.get_seq_length()], np.int32), past, match.num_tokens, lease)
        finally:
            self.cache.unlock(lease)
        return tokens, match.num_tokens

    def _keep(self, tokens: Int32, past: DynamicCache, start: int, lease: Node) -> None:
        """Copy the pages after `start` to the memory, as many as fit, and let the tree adopt them."""
        num_wanted = (len(tokens) - start) // self.cache.page_size
        evicted = self.cache.evict(max(0, num_wanted - len(self.free)))
        self.free = np.concatenate((self.free, evicted))
        pages, self.free = self.free[:num_wanted], self.free[num_wanted:]
        end = start + len(pages) * self.cache.page_size
        layers: Any = past.layers
        for memory, layer in zip(self.memory, layers, strict=True):
            new = torch.cat((layer.keys, layer.values))[:, :, start:end]  # [2, heads, tokens, head_dim]
            memory[:, :, pages.tolist()] = new.unflatten(2, (len(pages), self.cache.page_size))
        insertion = self.cache.insert(tokens[start:end], pages, after=lease)
        self.free = np.concatenate((self.free, pages[: insertion.num_existing]))  # they were cached already
