"""Log probabilities of output and prompt tokens, against `transformers`, and on both runners.

Engines must report the same under overlap, chunks, preemption, cache hits, aborts and every kind of drafts.
"""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chi_square import is_near_the_largest
from pagewood.engine.api import EngineConfig, SamplingParams, Submit, TokenLogprob
from pagewood.engine.build import build_engine
from pagewood.engine.core.messages import logprobs as core_logprobs
from pagewood.engine.core.request import Request
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.runner.cpu.program import adjustments, reports
from scale import scaled
from seeded_faults import Edit, seed_fault
from speculating import Answer, arrival, make, random_drafting, random_traffic, run, traffic
from tiny_models import model_folder

ERROR = 1e-4
PROMPT = [9, 8, 7, 3, 9, 8, 30, 31, 5, 6, 57, 12]


def answers(requests: list[tuple[list[int], dict[str, Any]]], **config: Any) -> list[Answer]:
    """Return the answers of an engine to requests that come one after the other."""
    inbox, outbox = MemoryInbox(), MemoryOutbox()
    folder = str(model_folder("llama"))
    engine = build_engine(
        EngineConfig(**{"model": folder, "max_total_tokens": 512, "max_length": 128, "num_threads": 1, **config}),
        inbox=inbox,
        outbox=outbox,
    )
    found: list[Answer] = []
    pending = None
    for prompt, options in requests:
        sampling = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": 16, **options})
        inbox.put(Submit(request_id="x", tokens=np.array(prompt, "<i4").tobytes(), sampling=sampling))
        answer = Answer()
        while answer.last is None:
            pending = engine.advance(pending)
            for delta in outbox.take():
                assert delta.refusal is None, delta.refusal
                answer.add(delta)
        found.append(answer)
    engine.close()
    return found


def reference_logits(tokens: list[int]) -> torch.Tensor:
    """Return the logits after each token, `[tokens, V] float32`."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(model_folder("llama"))
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float()


def check(entries: tuple[TokenLogprob, ...], logits: torch.Tensor, tokens: list[int], num_top: int) -> None:
    """Compare reports with the distributions of `logits` `[tokens, V]`."""
    expected, num_top = logits.log_softmax(-1), min(num_top, logits.shape[1])
    assert [entry.token for entry in entries] == tokens
    for entry, row in zip(entries, expected, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=ERROR)
        assert (
            abs(entry.rank - 1 - int((row > row[entry.token]).sum()))
            <= int((row - row[entry.token]).abs().lt(ERROR).sum()) - 1
        )
        best = row.topk(num_top).values.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best, abs=ERROR)
        assert [value for _, value in entry.top] == pytest.approx(
            row[[token for token, _ in entry.top]].tolist(), abs=ERROR
        )
        assert len({token for token, _ in entry.top}) == num_top


@pytest.mark.parametrize("num_top", [0, 1, 5, 64])
@pytest.mark.parametrize("chunk", [3, 64])
def test_raw_log_probabilities_are_those_of_transformers(num_top: int, chunk: int) -> None:
    asked = {"logprobs": num_top, "prompt_logprobs": num_top, "repetition_penalty": 1.5, "temperature": 0.7, "seed": 3}
    (answer,) = answers([(PROMPT, asked)], chunked_prefill_size=chunk)
    logits = reference_logits([*PROMPT, *answer.tokens])
    check(answer.prompt_logprobs, logits[: len(PROMPT) - 1], PROMPT[1:], num_top)
    check(answer.logprobs, logits[len(PROMPT) - 1 : -1], list(answer.tokens), num_top)


def test_a_cached_prompt_is_reported_too_and_usage_says_that_it_was_computed() -> None:
    again = [*PROMPT, *PROMPT, 4]
    first, second, third = answers(
        [(again, {}), (again, {"prompt_logprobs": 2, "logprobs": 1}), (again, {"logprobs": 1})], page_size=4
    )
    assert (second.last and second.last.num_cached_tokens, third.last and third.last.num_cached_tokens) == (0, 24)
    logits = reference_logits([*again, *second.tokens])
    check(second.prompt_logprobs, logits[: len(again) - 1], again[1:], 2)
    check(second.logprobs, logits[len(again) - 1 : -1], list(second.tokens), 1)
    assert first.prompt_logprobs == third.prompt_logprobs == ()
    assert third.logprobs == second.logprobs


@pytest.mark.parametrize("chunk", [3, 64])
@pytest.mark.parametrize(
    ("start", "num_cached"), [(1, 0), (2, 0), (5, 4), (6, 4), (23, 20), (24, 20), (25, 24), (99, 24)]
)
def test_reports_may_begin_behind_a_cached_prefix(start: int, num_cached: int, chunk: int) -> None:
    again = [*PROMPT, *PROMPT, 4]
    asked = {"prompt_logprobs": 2, "logprobs": 1, "prompt_logprobs_start": start}
    cold, warm = answers([(again, asked), (again, asked)], page_size=4, chunked_prefill_size=chunk)
    assert warm.last is not None
    assert warm.last.num_cached_tokens == num_cached
    logits = reference_logits(again)
    check(warm.prompt_logprobs, logits[start - 1 : len(again) - 1], again[start:], 2)
    assert (cold.prompt_logprobs, cold.logprobs) == (warm.prompt_logprobs, warm.logprobs)


def near_the_largest(rows: torch.Tensor, n: float) -> torch.Tensor:
    """Return `rows` `[S, V]` with minus infinity more than `n` standard deviations below the largest of each."""
    kept = np.stack([is_near_the_largest(row, n) for row in rows.numpy()])
    return rows.masked_fill(~torch.from_numpy(kept), -torch.inf)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.6}, {"temperature": 1.7, "top_k": 4}, {"temperature": 1.2, "top_p": 0.6},
        {"temperature": 0.9, "min_p": 0.2}, {"temperature": 1.1, "top_k": 20, "typical_p": 0.6},
        {"temperature": 1.6, "top_n_sigma": 1.4}, {"temperature": 1.3, "top_n_sigma": 2.0, "top_p": 0.9},
        {"temperature": 1.6, "top_n_sigma": 0.7, "logit_bias": tuple((token, -np.inf) for token in range(3, 60, 2))},
        {"temperature": 1.0, "repetition_penalty": 1.8, "top_k": 9, "top_p": 0.9},
    ],
)  # fmt: skip
def test_processed_log_probabilities_are_those_of_the_processors_of_transformers(options: dict[str, Any]) -> None:
    asked = {**options, "logprobs": 8, "logprobs_kind": "processed", "seed": 9}
    (answer,) = answers([(PROMPT, asked)])
    tokens = [*PROMPT, *answer.tokens]
    processors: Any = transformers.LogitsProcessorList()
    if "repetition_penalty" in options:
        processors.append(transformers.RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]))
    if "logit_bias" in options:  # what is ruled out does not count for the deviation
        ruled_out = torch.tensor([token for token, _ in options["logit_bias"]])
        processors.append(lambda _, rows: rows.index_fill(1, ruled_out, -torch.inf))
    if "top_n_sigma" in options:
        processors.append(lambda _, rows: near_the_largest(rows, options["top_n_sigma"]))
    processors.append(transformers.TemperatureLogitsWarper(options["temperature"]))
    if "top_k" in options:
        processors.append(transformers.TopKLogitsWarper(int(options["top_k"])))
    if "top_p" in options:
        processors.append(transformers.TopPLogitsWarper(options["top_p"]))
    if "min_p" in options:
        processors.append(transformers.MinPLogitsWarper(options["min_p"]))
    if "typical_p" in options:
        processors.append(transformers.TypicalLogitsWarper(options["typical_p"]))
    logits = reference_logits(tokens)
    for i, entry in enumerate(answer.logprobs):
        place = len(PROMPT) + i
        row = processors(torch.tensor([tokens[:place]]), logits[place - 1][None].clone())[0].log_softmax(-1)
        assert entry.logprob == pytest.approx(float(row[tokens[place]]), abs=ERROR)
        assert [value for _, value in entry.top] == pytest.approx(row.topk(8).values.tolist(), abs=ERROR)


def test_a_greedy_token_has_all_of_the_processed_probability() -> None:
    (answer,) = answers([(PROMPT, {"logprobs": 3, "logprobs_kind": "processed"})])
    for entry in answer.logprobs:
        assert (entry.logprob, entry.rank, entry.top[0]) == (0.0, 1, (entry.token, 0.0))
        assert [value for _, value in entry.top[1:]] == [-np.inf, -np.inf]


def reported(rng: random.Random, sampling: SamplingParams) -> SamplingParams:
    """Return the parameters with random reports, often none, sometimes with penalties."""
    return replace(
        sampling,
        logprobs=rng.choice((None, 0, 3)),
        logprobs_kind=rng.choice(("raw", "raw", "processed")),
        prompt_logprobs=rng.choice((None, None, None, 2)),
        prompt_logprobs_start=rng.choice((1, 1, 4, 9)),
        frequency_penalty=rng.choice((0.0, 0.0, 0.6)),
        logit_bias=rng.choice(((), (), ((3, 2.0), (7, -100.0)))),
    )


@settings(max_examples=scaled(5), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rng=st.randoms(use_true_random=False), kind=st.sampled_from(["off", "ngram", "unrelated", "eagle"]))
def test_engines_report_what_plain_decoding_does(rng: random.Random, kind: str) -> None:
    """To the bit, under overlap, chunks, preemption, cache hits, aborts, and drafts."""
    scenario = random_traffic(rng, overlap=rng.random() < 0.7)
    arrivals = tuple(replace(one, sampling=reported(rng, one.sampling)) for one in scenario.arrivals)
    model, drafter = make("suffix" if kind == "off" else kind, "llama")
    options: dict[str, Any] = {"num_tokens": rng.choice((2, 4, 8)), "make_drafting": random_drafting(rng)}
    run(replace(scenario, arrivals=arrivals), model=model, drafter=None if kind == "off" else drafter, **options)


FAULTS: dict[str, list[Edit]] = {
    "former request's report": [(adjustments.RowAdjustments, "begin", "self._table[row] = 0", "pass")],
    "changed logits reported": [
        (core_logprobs.Reports, "of", 'one.sampling.logprobs_kind == "processed"', "one.sampling.changes_logits")
    ],
    "reports of rejected drafts": [(reports, "of_drawn", "reports[places]", "reports[firsts]")],
    "first report left out": [
        (
            Request,
            "num_scored_in",
            "end < self.sampling.prompt_logprobs_start",
            "end <= self.sampling.prompt_logprobs_start",
        )
    ],
    "cached prompt not computed": [(Request, "reusable_tokens", "if self.num_unscored:", "if False:")],
}


def check_all() -> None:
    """Run tests that must find every fault."""
    test_raw_log_probabilities_are_those_of_transformers(1, 3)
    test_a_cached_prompt_is_reported_too_and_usage_says_that_it_was_computed()
    test_reports_may_begin_behind_a_cached_prefix(24, 20, 3)
    asked = {"max_tokens": 30, "temperature": 0.0, "logprobs": 1, "prompt_logprobs": 0}
    first = arrival([1, 2, 3], **asked, logit_bias=tuple((token, 100.0) for token in (4, 5)))
    others = [arrival([7] * 5, at_step=60, max_tokens=30), arrival([4] * 20, at_step=90, **asked)]
    scenario = traffic([first, *others], num_pages=40, page_size=4, max_running=1)
    model, drafter = make("ngram", "llama")
    run(scenario, model=model, drafter=drafter)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seed_fault(FAULTS[fault], monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        check_all()
