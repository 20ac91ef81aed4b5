# pyright: basic, reportMissingImports=false
# (other engines have no types)
"""Keeps one engine loaded, and generates when it is asked to: a line of JSON each way. Imports nothing of ours.

python worker.py '{"system": "llama.cpp", "model": "m.gguf", "threads": 2}'
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

Mark = Callable[[int], None]
"""Is called once, when each prompt has its first token, with the number of all tokens that there are then."""
Generate = Callable[[list[list[int]], int, Mark], int]
"""Generates that many tokens after each prompt; returns how many it has made in all. Greedy, unless the option
"temperature" is 1."""


def main() -> None:
    """Load, say so, and answer until the input ends."""
    options = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what engines print is no answer
    generate = LOADERS[options["system"]](options)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        times: list[float] = [time.perf_counter()]
        marked: list[int] = []

        def mark(count: int, times: list[float] = times, marked: list[int] = marked) -> None:
            times.append(time.perf_counter())
            marked.append(count)

        count = generate(asked["prompts"], asked["num_tokens"], mark)
        ended_s = time.perf_counter()
        later = {"later_tokens": count - marked[0], "later_seconds": ended_s - times[1]}
        print(json.dumps({"tokens": count, "seconds": ended_s - times[0], **later}), file=answers, flush=True)


def pagewood(options: dict[str, Any]) -> Generate:
    """Load this engine, stepped here."""
    from pagewood.engine.api import EngineConfig, SamplingParams, Submit
    from pagewood.engine.build import build_engine
    from pagewood.engine.links import MemoryInbox, MemoryOutbox

    inbox, outbox = MemoryInbox(), MemoryOutbox()
    config = EngineConfig(
        model=options["model"], weights=options["form"], num_threads=options["threads"], max_total_tokens=16384
    )
    engine = build_engine(config, inbox=inbox, outbox=outbox)
    numbers = itertools.count()

    def generate(prompts: list[list[int]], num_tokens: int, mark: Mark) -> int:
        sampling = SamplingParams(
            max_tokens=num_tokens, temperature=options.get("temperature", 0.0), ignore_eos=True, seed=0
        )
        made: dict[str, int] = {}
        for prompt in prompts:
            name = str(next(numbers))
            made[name] = 0
            inbox.put(Submit(request_id=name, tokens=np.array(prompt, "<i4").tobytes(), sampling=sampling))
        pending, num_open, is_marked = None, len(prompts), False
        while num_open or pending is not None:
            pending = engine.advance(pending)
            for delta in outbox.take():
                assert delta.refusal is None, delta.refusal
                made[delta.request_id] += len(delta.tokens)
                num_open -= delta.finish is not None
            if not is_marked and all(made.values()):
                mark(sum(made.values()))
                is_marked = True
        return sum(made.values())

    return generate


def openvino(options: dict[str, Any]) -> Generate:
    """Load OpenVINO GenAI's continuous batching, which schedules requests as a server does."""
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1  # GB
    scheduler.enable_prefix_caching = False
    numbers = itertools.count()
    how = {"INFERENCE_NUM_THREADS": options["threads"]}
    if options.get("precision"):
        how["INFERENCE_PRECISION_HINT"] = options["precision"]
    pipeline = genai.ContinuousBatchingPipeline(options["model"], scheduler, "CPU", how)

    def generate(prompts: list[list[int]], num_tokens: int, mark: Mark) -> int:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = num_tokens, True, bool(options.get("temperature"))
        config.set_eos_token_id(0)  # the folder has no tokenizer that could name one
        config.stop_token_ids = {0}
        handles = [
            pipeline.add_request(next(numbers), ov.Tensor(np.array([prompt], np.int64)), config) for prompt in prompts
        ]
        made, is_marked = [0] * len(handles), False
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for at, handle in enumerate(handles):
                while handle.can_read():
                    made[at] += sum(len(one.generated_ids) for one in handle.read().values())
            if not is_marked and all(made):
                mark(sum(made))
                is_marked = True
        return sum(made)

    return generate


def llama_cpp(options: dict[str, Any]) -> Generate:
    """Load llama.cpp by its C functions: prompts, and then one token of each sequence in a batch."""
    import llama_cpp as c

    most, length = options["most"], options["length"]
    c.llama_backend_init()
    how = c.llama_model_default_params()
    how.use_extra_bufts = options["repacks"]
    model = c.llama_model_load_from_file(options["model"].encode(), how)
    assert model, options["model"]
    params = c.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = length * most, 512, 512, most
    params.n_threads = params.n_threads_batch = options["threads"]
    context = c.llama_init_from_model(model, params)
    assert context, "llama.cpp makes no context for this model"
    vocab_size = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))
    batch = c.llama_batch_init(512, 0, 1)
    rng = np.random.default_rng(0) if options.get("temperature") else None

    def compute(items: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Compute (token, position, sequence, whether its logits are wanted); return the next token of sequences."""
        batch.n_tokens = len(items)
        for at, (token, position, sequence, is_wanted) in enumerate(items):
            batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, position, 1
            batch.seq_id[at][0], batch.logits[at] = sequence, int(is_wanted)
        assert c.llama_decode(context, batch) == 0
        found: dict[int, int] = {}
        for at, (_, _, sequence, is_wanted) in enumerate(items):
            if is_wanted:
                logits = np.ctypeslib.as_array(c.llama_get_logits_ith(context, at), (vocab_size,))
                # a sampled token costs it nothing: random weights give all tokens about the same probability
                found[sequence] = int(logits.argmax() if rng is None else rng.integers(vocab_size))
        return found

    def generate(prompts: list[list[int]], num_tokens: int, mark: Mark) -> int:
        c.llama_memory_clear(c.llama_get_memory(context), True)
        last: dict[int, int] = {}
        items = [
            (one, at, sequence, at == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for at, one in enumerate(prompt)
        ]
        for start in range(0, len(items), 512):
            last |= compute(items[start : start + 512])
        mark(len(prompts))
        for step in range(num_tokens - 1):
            last = compute([(last[one], len(prompts[one]) + step, one, True) for one in range(len(prompts))])
        return num_tokens * len(prompts)

    return generate


def transformers(options: dict[str, Any]) -> Generate:
    """Load `transformers`, which computes a static batch of prompts of one length."""
    import torch
    from transformers import AutoModelForCausalLM

    if options.get("most_bytes"):  # an allocation beyond it is an error of this process alone
        resource.setrlimit(resource.RLIMIT_DATA, (options["most_bytes"], options["most_bytes"]))
    torch.set_num_threads(options["threads"])
    how = {"experts_implementation": options["experts"]} if options.get("experts") else {}
    dtype = getattr(torch, options["form"])
    model: Any = AutoModelForCausalLM.from_pretrained(options["model"], dtype=dtype, **how).eval()

    def generate(prompts: list[list[int]], num_tokens: int, mark: Mark) -> int:
        ids = torch.tensor(prompts)
        how = (
            {"do_sample": True, "temperature": 1.0, "top_k": 0} if options.get("temperature") else {"do_sample": False}
        )

        def stops(tokens: Any, _scores: Any, **_: Any) -> Any:
            """Mark the first step; stop none."""
            if tokens.shape[1] == ids.shape[1] + 1:
                mark(len(tokens))
            return torch.zeros(len(tokens), dtype=torch.bool)

        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), pad_token_id=0, max_new_tokens=num_tokens,
                min_new_tokens=num_tokens, stopping_criteria=[stops], **how,
            )  # fmt: skip
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
