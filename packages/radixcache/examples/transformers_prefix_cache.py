# pyright: basic
# (torch and transformers are untyped where it matters)
"""Prefix caching for `generate` of transformers: tokens of earlier prompts are not computed again.

Run it to compare a long system prompt with and without it:

    pip install pagewood-radixcache torch transformers
    python transformers_prefix_cache.py
"""

import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pagewood.radixcache.integrations.transformers import CachedGenerator

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(hidden_size=256, intermediate_size=688, num_hidden_layers=8)).eval()
system = torch.randint(3, 32_000, (1000,)).tolist()

generator = CachedGenerator(model, num_pages=200)
for question in range(5):
    started = time.perf_counter()
    _, num_saved = generator.generate([*system, 5, question], max_new_tokens=1, do_sample=False)
    print(f"question {question}: {num_saved:4} of 1002 tokens from the cache, {time.perf_counter() - started:.3f} s")
