"""Checks of what a request may ask for, through `LLM`: the GPU's answers against the CPU's, and drafts against none."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gpu_checks.host import Failed, Host, Skipped
from pagewood.engine import LLM, Grammar, SamplingParams
from pagewood.engine.api import FinishReason, LogitsProcessor
from pagewood.engine.model_folder.folder import model_folder
from pagewood.engine.offline.calls import Completion

_ASKED = (
    "What is 12 + 7?", "Reverse: stone", "What is 9 times 8?", "What is the capital of France?", "Hello!",
    "Say the word lantern three times.", "What is 81 - 27?", "Sort the numbers: 9, 2, 5", "How are you today?",
    "What is 6 times 7?", "Reverse: garden", "Tell me a story.",
)  # fmt: skip
_NEAR = 0.1
"""Two tokens whose log probabilities on the CPU differ by less are equally right: float16 cannot tell them apart."""
_NEAR_SCORE = 0.03
"""Most that a log probability may differ in float16, and as a share of a large one: scores of 20 have such steps."""
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_GREEDY = SamplingParams(temperature=0, max_tokens=32, logprobs=8, logprobs_kind="processed")
_CHANGED: dict[str, SamplingParams] = {
    "penalties": replace(_GREEDY, repetition_penalty=1.2, frequency_penalty=0.5, presence_penalty=0.3),
    "biases": replace(_GREEDY, logit_bias=((20, 5.0), (21, float("-inf")), (40, -3.0)), min_tokens=12),
    "bad words": replace(_GREEDY, bad_words=((32,), (10, 11), (45, 46))),
    "a processor": replace(_GREEDY, logits_processors=(LogitsProcessor("forbid", '{"token": 40}'),)),
    "an expression": replace(_GREEDY, grammar=Grammar.regex("[a-z ]{5,20}!")),
    "a schema": replace(_GREEDY, grammar=Grammar.json_schema(_SCHEMA), max_tokens=64),
}


def forbid(tokens: Any, logits: Any, *, token: int) -> None:
    """Give `token` no probability: a function of an operator."""
    logits[token] = float("-inf")


_OPTIONS: dict[str, Any] = {
    "max_running": 6, "max_total_tokens": 4096, "logits_processors": (("forbid", "gpu_checks.features:forbid"),),
}  # fmt: skip


def check_sampling(host: Host) -> str:
    """With penalties, biases, processors and grammars, greedy answers are the CPU runner's; most sampled ones are."""
    names = ["nothing", *_CHANGED]
    wanted = [one for one in (_GREEDY, *_CHANGED.values()) for _ in _ASKED]
    sampled = SamplingParams(temperature=1.0, top_k=40, top_p=0.95, min_p=0.02, typical_p=0.95, max_tokens=24)
    draws = [replace(sampled, seed=seed) for seed in range(len(_ASKED))]
    with LLM(**_OPTIONS) as llm:
        prompts = _prompts(llm)
        expected, drawn = llm.generate(prompts * len(names), wanted), llm.generate(prompts, draws)
    with host.llm(**_OPTIONS) as llm:
        got, drawn_here = llm.generate(prompts * len(names), wanted), llm.generate(prompts, draws)
    found = [
        f"with {names[index // len(_ASKED)]}, {_ASKED[index % len(_ASKED)]!r}: {problem}"
        for index, (mine, theirs) in enumerate(zip(got, expected, strict=True))
        if (problem := _difference(mine, theirs))
    ]
    for one in got[-len(_ASKED) :]:
        if one.finish is FinishReason.STOP and set(json.loads(one.text)) != {"name", "age"}:
            found.append(f"{one.text!r} is not of the schema")
    num_alike = sum(mine.tokens == theirs.tokens for mine, theirs in zip(drawn_here, drawn, strict=True))
    if 2 * num_alike < len(_ASKED):
        found.append(f"only {num_alike} of {len(_ASKED)} sampled answers are alike")
    if found:
        raise Failed(f"{len(found)} differ: " + "; ".join(found[:4]))
    num_same = sum(mine.tokens == theirs.tokens for mine, theirs in zip(got, expected, strict=True))
    return (
        f"{len(names)} kinds; {num_same} of {len(got)} greedy answers and {num_alike} of {len(_ASKED)} sampled ones "
        "are the same, the others differ in ties"
    )


def check_reports(host: Host) -> str:
    """Log probabilities of prompts and answers, and vectors, are the CPU runner's."""
    sampling = replace(_GREEDY, prompt_logprobs=4, logprobs_kind="raw", max_tokens=8)
    with LLM(**_OPTIONS) as llm:
        prompts = _prompts(llm)
        expected, vectors = llm.generate(prompts, sampling), llm.embed(list(_ASKED))
    with host.llm(**_OPTIONS) as llm:
        runs = [llm.generate(prompts, sampling) for _ in range(2)]  # the second finds its prompts in the cache
        mine = llm.embed(list(_ASKED))
    worst = 0.0
    for got in runs:
        for one, other in zip(got, expected, strict=True):
            pairs = [*zip(one.prompt_logprobs, other.prompt_logprobs, strict=True)]
            for pair in zip(one.logprobs, other.logprobs, strict=False):
                if pair[0].token != pair[1].token:
                    break
                pairs.append(pair)
            worst = max([worst, *(abs(a.logprob - b.logprob) / max(1.0, abs(b.logprob)) for a, b in pairs)])
    if not worst <= _NEAR_SCORE:
        raise Failed(f"a log probability differs by {worst:.3g} of it, more than {_NEAR_SCORE}")
    nearness = float((np.asarray(mine) * np.asarray(vectors)).sum(-1).min())
    if not nearness >= 0.9995:
        raise Failed(f"the cosine of a vector and the CPU's is {nearness:.5f}, less than 0.9995")
    return f"log probabilities differ by at most {worst:.3g} of them, vectors by a cosine of {nearness:.6f}"


def check_drafts(host: Host) -> str:
    """In batch-invariant mode, drafts change no token, greedy, sampled or structured, with and without graphs."""
    greedy = replace(_GREEDY, max_tokens=40, logprobs=None)
    wanted = [replace(greedy, temperature=float(index % 2), seed=index) for index in range(2 * len(_ASKED))]
    changed = replace(greedy, temperature=1.0, repetition_penalty=1.1, presence_penalty=0.5, top_p=0.95)
    wanted += [replace(changed, seed=index) for index in range(len(_ASKED))]
    structured = replace(greedy, temperature=0.7, grammar=Grammar.json_schema(_SCHEMA), max_tokens=64)
    wanted += [replace(structured, seed=index) for index in range(len(_ASKED))]
    options = _OPTIONS | {"batch_invariant": True, "max_running": 16}
    with host.llm(**options) as llm:
        prompts = _prompts(llm) * 4
        expected = llm.generate(prompts, wanted)
    texts: list[str] = []
    found: list[str] = []
    for drafter, cuda_graph in (
        ("ngram", True), ("eagle", True), ("eagle", False), ("draft", True), ("draft", False)
    ):  # fmt: skip
        model = {"speculative_model": str(model_folder(None))} if drafter == "draft" else {}
        name = f"{drafter}{'' if cuda_graph else ' without graphs'}"
        try:
            with host.llm(
                **options, speculative=drafter, speculative_control="fixed", cuda_graph=cuda_graph, **model
            ) as llm:
                got = llm.generate(prompts, wanted)
        except Exception as error:  # the remaining drafters still run
            found.append(f"{name}: {type(error).__name__}: {error}")
            continue
        num_different = sum(mine.tokens != theirs.tokens for mine, theirs in zip(got, expected, strict=True))
        if num_different:
            found.append(f"{name}: {num_different} of {len(expected)} answers differ")
        accepted, drafted = sum(one.num_accepted_tokens for one in got), sum(one.num_drafted_tokens for one in got)
        texts.append(f"{name} {accepted} of {drafted}")
    if found:
        raise Failed("; ".join(found))
    return f"{len(expected)} answers alike; accepted: {', '.join(texts)}"


_RANKS: dict[str, dict[str, Any]] = {
    "ranks": {"tensor_parallel_size": 2},
    "batch-invariant ranks": {"tensor_parallel_size": 2, "batch_invariant": True},
    "stages": {"pipeline_parallel_size": 2},
    "stages with drafts": {"pipeline_parallel_size": 2, "speculative": "ngram"},
    "ranks with drafts": {"tensor_parallel_size": 2, "speculative": "ngram"},
    "ranks with a host cache": {"tensor_parallel_size": 2, "host_cache_gb": 0.05},
    "ranks by request": {"tensor_parallel_size": 2, "enable_dp_attention": True},
}


def check_ranks(host: Host) -> str:
    """Two ranks or stages, on a device each or both on one, give the CPU runner's greedy answers."""
    if host.is_slow:
        raise Skipped("other processes do not have the emulated GPU")
    with LLM(**_OPTIONS) as llm:
        prompts = _prompts(llm)
        expected = llm.generate(prompts, _GREEDY)
    found: list[str] = []
    num_same = 0
    for name, options in _RANKS.items():
        with host.llm(**_OPTIONS, **options) as llm:
            runs = [llm.generate(prompts, _GREEDY) for _ in range(2)]  # the second finds its prompts in the cache
        num_same += sum(mine.tokens == theirs.tokens for mine, theirs in zip(runs[0], expected, strict=True))
        found += [
            f"{name}, {question!r}: {problem}"
            for got in runs
            for question, mine, theirs in zip(_ASKED, got, expected, strict=True)
            if (problem := _difference(mine, theirs))
        ]
        if "batch_invariant" in options and [one.tokens for one in runs[0]] != [one.tokens for one in runs[1]]:
            found.append("batch-invariant answers change when their prompts are cached")
    if found:
        raise Failed(f"{len(found)} differ: " + "; ".join(found[:4]))
    how = "NCCL" if host.is_gpu and torch.cuda.device_count() > 1 else "gloo"
    return f"by {how}, {num_same} of {len(_RANKS) * len(_ASKED)} answers are the same, the others differ in ties"


def _prompts(llm: LLM) -> list[list[int]]:
    return [list(llm.tokenizer.encode_chat([{"role": "user", "content": text}])) for text in _ASKED]


def _difference(mine: Completion, theirs: Completion) -> str | None:
    """Return how a greedy answer differs from the CPU's before a tie, or None."""
    for index, (got, report) in enumerate(zip(mine.tokens, theirs.logprobs, strict=False)):
        if got == theirs.tokens[index]:
            continue
        there = dict(report.top).get(got, float("-inf"))
        if report.logprob - there <= _NEAR:
            return None  # texts differ behind a tie
        return f"token {index} is {got} instead of {theirs.tokens[index]}, {report.logprob - there:.3g} less probable"
    if mine.tokens != theirs.tokens and len(mine.tokens) != len(theirs.tokens):
        return f"{len(mine.tokens)} tokens instead of {len(theirs.tokens)}"
    return None
