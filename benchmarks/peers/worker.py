# pyright: basic, reportMissingImports=false
# (other engines have no types)
"""Keeps one engine loaded, and generates when it is asked to: a line of JSON each way. Imports nothing of ours.

python worker.py '{"system": "llama.cpp", "model": "m.gguf", "threads": 2}'
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

Generate = Callable[[list[list[int]], int], int]
"""Generates that many tokens after each prompt, greedily; returns how many it has made in all."""


def main() -> None:
    """Load, say so, and answer until the input ends."""
    options = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what engines print is no answer
    generate = LOADERS[options["system"]](options)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        started = time.perf_counter()
        count = generate(asked["prompts"], asked["num_tokens"])
        print(json.dumps({"tokens": count, "seconds": time.perf_counter() - started}), file=answers, flush=True)


def pagewood(options: dict[str, Any]) -> Generate:
    """Load this engine."""
    from pagewood.engine import LLM, SamplingParams

    llm = LLM(options["model"], weights=options["form"], num_threads=options["threads"], max_total_tokens=16384)

    def generate(prompts: list[list[int]], num_tokens: int) -> int:
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        return sum(len(one.tokens) for one in llm.generate(prompts, sampling))

    return generate


def openvino(options: dict[str, Any]) -> Generate:
    """Load OpenVINO GenAI's continuous batching, which schedules requests as a server does."""
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1  # GB
    scheduler.enable_prefix_caching = False
    pipeline = genai.ContinuousBatchingPipeline(
        options["model"], scheduler, "CPU", {"INFERENCE_NUM_THREADS": options["threads"]}
    )

    def generate(prompts: list[list[int]], num_tokens: int) -> int:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = num_tokens, True, False
        config.set_eos_token_id(0)  # the folder has no tokenizer that could name one
        config.stop_token_ids = {0}
        tensors = [ov.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        results = pipeline.generate(tensors, [config] * len(prompts))
        return sum(len(result.m_generation_ids[0]) for result in results)

    return generate


def llama_cpp(options: dict[str, Any]) -> Generate:
    """Load llama.cpp by its C functions: prompts, and then one token of each sequence in a batch."""
    import llama_cpp as c

    most = 8
    c.llama_backend_init()
    how = c.llama_model_default_params()
    how.use_extra_bufts = options["repacks"]
    model = c.llama_model_load_from_file(options["model"].encode(), how)
    assert model, options["model"]
    params = c.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 512 * most, 512, 512, most
    params.n_threads = params.n_threads_batch = options["threads"]
    context = c.llama_init_from_model(model, params)
    vocab_size = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))
    batch = c.llama_batch_init(512, 0, 1)

    def compute(items: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Compute (token, position, sequence, whether its logits are wanted); return the greedy token of sequences."""
        batch.n_tokens = len(items)
        for at, (token, position, sequence, is_wanted) in enumerate(items):
            batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, position, 1
            batch.seq_id[at][0], batch.logits[at] = sequence, int(is_wanted)
        assert c.llama_decode(context, batch) == 0
        found: dict[int, int] = {}
        for at, (_, _, sequence, is_wanted) in enumerate(items):
            if is_wanted:
                logits = np.ctypeslib.as_array(c.llama_get_logits_ith(context, at), (vocab_size,))
                found[sequence] = int(logits.argmax())
        return found

    def generate(prompts: list[list[int]], num_tokens: int) -> int:
        c.llama_memory_clear(c.llama_get_memory(context), True)
        last: dict[int, int] = {}
        for sequence, prompt in enumerate(prompts):
            last |= compute([(one, at, sequence, at == len(prompt) - 1) for at, one in enumerate(prompt)])
        for step in range(num_tokens - 1):
            last = compute([(last[one], len(prompts[one]) + step, one, True) for one in range(len(prompts))])
        return num_tokens * len(prompts)

    return generate


def transformers(options: dict[str, Any]) -> Generate:
    """Load `transformers`, which computes a static batch of prompts of one length."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(options["threads"])
    how = {"experts_implementation": options["experts"]} if options.get("experts") else {}
    dtype = getattr(torch, options["form"])
    model: Any = AutoModelForCausalLM.from_pretrained(options["model"], dtype=dtype, **how).eval()

    def generate(prompts: list[list[int]], num_tokens: int) -> int:
        ids = torch.tensor(prompts)
        limits = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "do_sample": False}
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **limits)
        return out[:, ids.shape[1] :].numel()

    return generate


LOADERS: dict[str, Callable[[dict[str, Any]], Generate]] = {
    "pagewood": pagewood,
    "openvino": openvino,
    "llama.cpp": llama_cpp,
    "transformers": transformers,
}

if __name__ == "__main__":
    main()
