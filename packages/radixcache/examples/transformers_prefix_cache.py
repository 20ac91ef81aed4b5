# pyright: basic
# (torch and transformers are untyped where it matters)
"""Prefix caching for `generate` of transformers: tokens of earlier prompts are not computed again.

For decoders in which every layer attends to all tokens. Run it to compare a long system prompt with and without it:

    pip install pagewood-radixcache torch transformers
    python transformers_prefix_cache.py
"""

import time

import numpy as np
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from pagewood.radixcache import RadixCache


class CachedGenerator:
    """A model with a memory of `num_pages` pages, which keeps the keys and values of earlier prompts."""

    def __init__(self, model, *, num_pages: int, page_size: int = 16) -> None:
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, 2, config.num_key_value_heads, num_pages, page_size, head_dim)
        self.model = model
        self.memory = torch.empty(shape, dtype=model.dtype, device=model.device)
        self.cache = RadixCache(page_size)
        self.free = np.arange(num_pages, dtype=np.int32)

    @torch.inference_mode()
    def generate(self, prompt: list[int], **options) -> tuple[list[int], int]:
        """Return the prompt with its continuation, and the number of prompt tokens that were not computed."""
        match = self.cache.match(np.array(prompt[:-1], np.int32))  # the last token must be computed
        lease = self.cache.lock(match.node)
        try:
            past = DynamicCache()
            for index, layer in enumerate(self.memory[..., match.pages.tolist(), :, :].flatten(3, 4)):
                past.update(layer[0][None], layer[1][None], index)
            ids = torch.tensor([prompt], device=self.model.device)
            output = self.model.generate(ids, past_key_values=past, attention_mask=torch.ones_like(ids), **options)[0]
            self.keep(np.array(output.tolist()[: past.get_seq_length()], np.int32), past, match.num_tokens, lease)
        finally:
            self.cache.unlock(lease)
        return output.tolist(), match.num_tokens

    def keep(self, tokens, past, start: int, lease) -> None:
        """Copy the pages after `start` to the memory, as many as fit, and let the cache adopt them."""
        num_wanted = (len(tokens) - start) // self.cache.page_size
        evicted = self.cache.evict(max(0, num_wanted - len(self.free)))
        self.free = np.concatenate((self.free, evicted))
        pages, self.free = self.free[:num_wanted], self.free[num_wanted:]
        end = start + len(pages) * self.cache.page_size
        for memory, layer in zip(self.memory, past.layers, strict=True):
            new = torch.cat((layer.keys, layer.values))[:, :, start:end]  # [2, heads, tokens, head_dim]
            memory[:, :, pages.tolist()] = new.unflatten(2, (len(pages), self.cache.page_size))
        insertion = self.cache.insert(tokens[start:end], pages, after=lease)
        self.free = np.concatenate((self.free, pages[: insertion.num_existing]))  # they were cached already


def main() -> None:
    """Ask five questions after the same 1,000 tokens."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(hidden_size=256, intermediate_size=688, num_hidden_layers=8)).eval()
    generator = CachedGenerator(model, num_pages=200)
    system = torch.randint(3, 32_000, (1000,)).tolist()
    for question in range(5):
        started = time.perf_counter()
        _, num_saved = generator.generate([*system, 5, question], max_new_tokens=1, do_sample=False)
        print(
            f"question {question}: {num_saved:4} of 1002 tokens from the cache, {time.perf_counter() - started:.3f} s"
        )


if __name__ == "__main__":
    main()
