"""Penalties, biases, bad words and the like, against `transformers` and against their formulas; on both runners.

Engines must give the same text with and without overlap, preemption, cache hits, chunks and every kind of drafts.
"""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from answered import answers_to, request, tokens_of
from pagewood.engine.api import EngineConfig, FinishReason, SamplingParams
from pagewood.engine.build import build_engine
from pagewood.engine.core.messages import adjustments as core_adjustments
from pagewood.engine.core.messages.adjustments import Adjustments
from pagewood.engine.core.steps import batch_builder
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.runner.cpu.program import adjustments
from pagewood.engine.runner.cuda.drawing.adjust import RowAdjustments
from row_driver import DrivenSequence
from scale import scaled
from seeded_faults import Edit, seed_fault
from speculating import Drafter, arrival, make, random_drafting, random_traffic, run, traffic
from tiny_models import model_folder

PROMPT = [9, 8, 7, 3, 9, 8]
NUM_TOKENS = 30


def answer(prompt: list[int], **options: Any) -> tuple[list[int], FinishReason]:
    """Return the answer of an engine, greedy unless told otherwise."""
    inbox, outbox = MemoryInbox(), MemoryOutbox()
    config = EngineConfig(model=str(model_folder("llama")), max_total_tokens=256, max_length=128, num_threads=1)
    engine = build_engine(config, inbox=inbox, outbox=outbox)
    found = request("x", prompt, **{"max_tokens": NUM_TOKENS, **options})
    [answer] = answers_to(engine, inbox, outbox, [found])
    engine.close()
    assert answer[-1].refusal is None, answer[-1].refusal
    assert answer[-1].finish is not None
    return tokens_of(answer), answer[-1].finish


def reference() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(model_folder("llama"))


def generated(**options: Any) -> list[int]:
    """Return what `transformers` generates, greedy."""
    ids = torch.tensor([PROMPT])
    output = reference().generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0,
        **{"eos_token_id": None, **options},
    )  # fmt: skip
    return output[0, len(PROMPT) :].tolist()


def decoded(change: Callable[[torch.Tensor, list[int]], None]) -> list[int]:
    """Return greedy tokens after `change` of the logits, by the output so far."""
    model, output = reference(), []
    for _ in range(NUM_TOKENS):
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT + output])).logits[0, -1].clone()
        change(logits, output)
        output.append(int(logits.argmax()))
    return output


@pytest.mark.parametrize("penalty", [1.5, 0.8])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    expected = generated(repetition_penalty=penalty)
    assert answer(PROMPT, repetition_penalty=penalty)[0] == expected
    assert expected != generated()


@pytest.mark.parametrize(("frequency", "presence"), [(0.7, 0.0), (0.0, 1.2), (0.5, -0.3), (-1.0, 0.5)])
def test_frequency_and_presence_penalties_are_those_of_their_formula(frequency: float, presence: float) -> None:
    def change(logits: torch.Tensor, output: list[int]) -> None:
        for token, count in Counter(output).items():
            logits[token] -= frequency * count + presence

    expected = decoded(change)
    assert answer(PROMPT, frequency_penalty=frequency, presence_penalty=presence)[0] == expected


def test_logit_bias_is_that_of_transformers() -> None:
    first = generated()[0]
    expected = generated(sequence_bias={(5,): 3.0, (first,): -100.0})
    assert answer(PROMPT, logit_bias=((5, 3.0), (first, -100.0)))[0] == expected
    assert first not in expected
    assert first not in answer(PROMPT, logit_bias=((first, -np.inf),), temperature=2.0, seed=1)[0]


def test_all_changes_together_in_their_order() -> None:
    def change(logits: torch.Tensor, output: list[int]) -> None:
        for token in {*PROMPT, *output}:
            logits[token] = logits[token] / 1.3 if logits[token] > 0 else logits[token] * 1.3
        for token, count in Counter(output).items():
            logits[token] -= 0.4 * count + 0.2
        logits[11] += 1.5

    together = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2}
    assert answer(PROMPT, logit_bias=((11, 1.5),), **together)[0] == decoded(change)


@pytest.mark.parametrize("num", [0, 1, 4, 12])
def test_no_stop_token_is_drawn_before_min_tokens(num: int) -> None:
    stop = generated()[0]
    expected = generated(eos_token_id=stop, min_new_tokens=num)
    tokens, finish = answer(PROMPT, stop_token_ids=(stop,), min_tokens=num)
    assert finish is (FinishReason.STOP if expected[-1] == stop else FinishReason.LENGTH)
    assert tokens == (expected[:-1] if expected[-1] == stop else expected)
    assert len(tokens) >= num


def test_a_bias_of_an_unknown_token_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"logit_bias must have token ids in \[0, \d+\), got 999999"):
        answer(PROMPT, logit_bias=((999999, 1.0),))


def test_bad_words_are_those_of_transformers() -> None:
    """Each round forbids a longer part of the text so far; some of it begins in the prompt."""
    words: list[tuple[int, ...]] = [(23, 24, 25)]
    for size in (1, 2, 3, 5, 8):
        text = PROMPT + generated(bad_words_ids=[list(word) for word in words])
        for end in (len(PROMPT) + 1, len(PROMPT) + 9):
            words.append(tuple(text[max(end - size, 0) : end]))
        expected = generated(bad_words_ids=[list(word) for word in words])
        assert answer(PROMPT, bad_words=tuple(words))[0] == expected
        assert expected != text[len(PROMPT) :]


def test_a_bad_word_is_longer_than_the_text() -> None:
    plain = generated()
    text = (*PROMPT, *plain)
    whole, longer = text[: len(PROMPT) + 1], (5, *text[: len(PROMPT) + 1])
    assert answer(PROMPT, bad_words=(longer, (4,) * 32))[0] == plain
    assert answer(PROMPT, bad_words=(whole,))[0] == generated(bad_words_ids=[list(whole)])
    assert answer(PROMPT, bad_words=(whole,))[0][0] != plain[0]


def test_a_bad_word_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"bad_words must have token ids in \[0, \d+\), got 999999"):
        answer(PROMPT, bad_words=((1, 999999),))


def random_words(rng: random.Random, *, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Return sequences of few tokens, so that many of them occur."""
    return tuple(
        tuple(rng.randrange(vocab_size) for _ in range(rng.choice((1, 2, 2, 3, 6)))) for _ in range(rng.choice((1, 30)))
    )


def changed(rng: random.Random, sampling: SamplingParams) -> SamplingParams:
    """Return the parameters with random changes of the logits, often none."""
    most = sampling.max_tokens or 1
    return replace(
        sampling,
        repetition_penalty=rng.choice((1.0, 1.0, 1.4, 0.7)),
        frequency_penalty=rng.choice((0.0, 0.0, 0.6, -0.5)),
        presence_penalty=rng.choice((0.0, 0.0, 0.9)),
        logit_bias=rng.choice(((), (), ((3, 2.0), (7, -100.0)), tuple((token, -np.inf) for token in range(20)))),
        bad_words=rng.choice(((), (), random_words(rng, vocab_size=40), tuple((1, token) for token in range(40)))),
        min_tokens=rng.choice((0, 0, min(5, most), most)),
    )


@settings(max_examples=scaled(5), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rng=st.randoms(use_true_random=False), kind=st.sampled_from(["off", "ngram", "unrelated", "eagle"]))
def test_engines_change_logits_as_plain_decoding_does(rng: random.Random, kind: str) -> None:
    """Under overlap, chunks, preemption, cache hits, aborts, and drafts."""
    scenario = random_traffic(rng, overlap=rng.random() < 0.7)
    arrivals = tuple(replace(one, sampling=changed(rng, one.sampling)) for one in scenario.arrivals)
    model, drafter = make("suffix" if kind == "off" else kind, "llama")
    options: dict[str, Any] = {"num_tokens": rng.choice((2, 4, 8)), "make_drafting": random_drafting(rng)}
    run(replace(scenario, arrivals=arrivals), model=model, drafter=None if kind == "off" else drafter, **options)


def test_a_draft_model_drafts_with_the_changes() -> None:
    """The target drafts for itself: every draft is right, whatever changes the logits, as `run` checks."""
    model, drafter = make("self", "llama")
    changes: list[dict[str, Any]] = [
        {"frequency_penalty": 1.5, "presence_penalty": 0.5}, {"repetition_penalty": 1.8, "min_tokens": 8},
        {"logit_bias": ((4, 3.0), (5, 3.0)), "bad_words": ((4, 5),)},
    ]  # fmt: skip
    each = [(i, one, temperature) for i, one in enumerate(changes) for temperature in (0.0, 1.0)]
    some = [arrival([i, 2, 3], max_tokens=24, temperature=temperature, **one) for i, one, temperature in each]
    counts = run(traffic(some, num_pages=120, page_size=4), model=model, drafter=drafter, num_tokens=4).counts
    assert counts.num_drafted == counts.num_accepted > 80


def test_drafts_are_verified_with_the_changes() -> None:
    """Text that repeats is drafted by its earlier occurrence, and a penalty makes these drafts wrong."""
    bias = tuple((token, 100.0) for token in (4, 5))
    one = arrival([1, 2, 3], max_tokens=40, temperature=0.0, logit_bias=bias, repetition_penalty=5.0)
    model = model_folder("llama")
    report = run(traffic([one], num_pages=60, page_size=4), model=model, drafter=Drafter(kind="ngram"))
    assert report.drafter is not None


FAULTS: dict[str, list[Edit]] = {
    "cached text not sent": [(batch_builder.BatchBuilder, "build", "or request.sampling.changes_logits", "")],
    "prompt counts as output": [(Adjustments, "of", "[one.num_prompt for one in adjusted]", "[0 for one in adjusted]")],
    "end one late": [(core_adjustments, "_biases", "request.num_prompt + ", "request.num_prompt + 1 + ")],
    "former request's changes": [
        (RowAdjustments, "admit", "self._is_on[batch.rows[batch.admitted]] = False", "pass"),
        (adjustments.RowAdjustments, "begin", "self._table[row] = 0", "pass"),
    ],
    "bad words not kept": [(adjustments.RowAdjustments, "begin", "words.ctypes.data, num_words", "0, 0")],
    "bad words of another": [(adjustments, "_ends", "[:-1]", "[:-1] * 0")],
}


def check_all() -> None:
    """Run tests that must find every fault."""
    test_frequency_and_presence_penalties_are_those_of_their_formula(0.7, 0.0)
    test_a_bad_word_is_longer_than_the_text()
    forbidden = (tuple(PROMPT[-1:] + generated()[:1]),)
    one = arrival(PROMPT, max_tokens=12, temperature=0.0, logit_bias=((generated()[0], -100.0),))
    two = arrival(PROMPT, at_step=40, max_tokens=12, temperature=0.0)
    penalised = {"max_tokens": 12, "temperature": 0.0, "repetition_penalty": 2.0}
    others = [arrival([4] * 9, at_step=80, **penalised), arrival(PROMPT, at_step=120, **penalised)]
    scenario = traffic([one, two, *others], num_pages=60, page_size=4, max_running=1)
    run(scenario, model=model_folder("llama"), drafter=None)
    both = [arrival(PROMPT, max_tokens=12, temperature=0.0, bad_words=words) for words in (forbidden, ((1, 2), (3,)))]
    run(traffic(both, num_pages=60, page_size=4), model=model_folder("llama"), drafter=None)
    for num in range(1, 13):
        test_no_stop_token_is_drawn_before_min_tokens(num)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seed_fault(FAULTS[fault], monkeypatch)
    with pytest.raises(AssertionError):
        check_all()


# --- the device ---


@given(seed=st.integers(0, 2**32))
def test_a_cuda_device_forbids_the_words_that_transformers_forbids(seed: int) -> None:
    """Rows of other requests before, with more and longer words."""
    rng = random.Random(seed)
    vocab_size, width, num_rows = 12, 40, 4
    text = np.array([[rng.randrange(3) for _ in range(width)] for _ in range(num_rows)], np.int32)
    device = RowAdjustments(max_rows=num_rows, tokens_per_row=width, device=torch.device("cpu"))
    parameters: list[SamplingParams] = []
    for _ in range(2):
        parameters = [
            SamplingParams(
                bad_words=tuple(tuple(rng.randrange(3) for _ in range(rng.randrange(1, 6))) for _ in range(num)),
                logit_bias=((5, 1.0),),
            )
            for num in rng.choices((0, 1, 5), k=num_rows)
        ]
        sequences = [
            DrivenSequence(
                row=row, tokens=[], pages=[], num_prompt=4, num_computed=0, num_sent_tokens=0, sampling=one, seed=0
            )
            for row, one in enumerate(parameters)
        ]
        every = np.arange(num_rows)
        device.admit(Admission(admitted=every, rows=every, adjustments=Adjustments.of(sequences)))  # pyright: ignore
    rows = np.repeat(np.arange(num_rows, dtype=np.int32), 3)
    positions = np.array([rng.choice((1, 2, 9, width - 1)) for _ in rows])
    logits = torch.randn(len(rows), vocab_size)
    result = device.apply(
        logits, rows, torch.from_numpy(rows * width + positions), torch.from_numpy(text.reshape(-1).copy())
    )
    for i, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
        expected = logits[i : i + 1].clone()
        expected[0, 5] += 1.0
        if words := [list(word) for word in parameters[row].bad_words]:
            before = torch.from_numpy(text[row : row + 1, :position]).long()
            expected = transformers.NoBadWordsLogitsProcessor(words)(before, expected)  # pyright: ignore
        torch.testing.assert_close(result[i : i + 1], expected)


def test_a_cuda_device_changes_logits_as_their_formulas_say() -> None:
    """On plain torch, for rows of which some have changes, at several positions of one row."""
    rng = np.random.default_rng(3)
    vocab_size, width = 40, 16
    text = rng.integers(0, vocab_size, (3, width)).astype(np.int32)
    parameters = [
        SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.25, logit_bias=((7, 1.5),)),
        SamplingParams(),
        SamplingParams(stop_token_ids=(1, 2), min_tokens=5, logit_bias=((3, -1.0), (1, 2.0), (9, 4.0)), max_tokens=9),
    ]
    sequences = [
        DrivenSequence(
            row=row, tokens=[], pages=[], num_prompt=4, num_computed=0, num_sent_tokens=0, sampling=one, seed=0
        )
        for row, one in enumerate(parameters)
    ]
    device = RowAdjustments(max_rows=4, tokens_per_row=width, device=torch.device("cpu"))
    new = Adjustments.of(sequences)
    assert new is not None
    device._is_on[1] = True  # of a request before
    device.admit(Admission(admitted=np.array([0, 1, 2]), rows=np.array([0, 1, 2]), adjustments=new))  # pyright: ignore
    rows, positions = np.array([0, 2, 0, 1, 2], np.int32), np.array([6, 8, 7, 9, 9])
    logits = torch.randn(5, vocab_size)
    result = device.apply(
        logits, rows, torch.from_numpy(rows * width + positions), torch.from_numpy(text.reshape(-1).copy())
    )
    for i, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
        expected, sampling = logits[i].clone(), parameters[row]
        for token in set(text[row, :position].tolist()):
            x, r = expected[token], sampling.repetition_penalty
            expected[token] = x / r if x > 0 else x * r
        for token, count in Counter(text[row, 4:position].tolist()).items():
            expected[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
        for token, bias in sampling.logit_bias:
            expected[token] += bias
        if position < 4 + sampling.min_tokens:
            expected[list(sampling.stop_token_ids)] = -torch.inf
        torch.testing.assert_close(result[i], expected)


class Admission:
    """The fields of a batch that are read at admission."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)
