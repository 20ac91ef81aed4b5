"""Requests with a grammar on real models: a draw waits for its mask, and forced tokens are computed together.

The grammars are those of the echo model, which know any vocabulary. Engines must give the text of plain decoding, one
request at a time, under overlap, chunks, preemption, cache hits, aborts and drafts for other requests.
"""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

import random
import time
from dataclasses import replace
from functools import cache
from typing import Any

import numba
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewood.engine.api import FinishReason, Grammar, SamplingParams
from pagewood.engine.core import loop, retire
from pagewood.engine.core.steps import batch_builder
from pagewood.engine.runner.cpu import runner as cpu_runner
from pagewood.engine.runner.cpu.compiled.drawing.masks import apply_mask
from pagewood.engine.runner.cuda.drawing.adjust import forbid
from pagewood.engine.testing.echo_grammar import allowed_tokens, read_mask, write_mask
from scale import scaled
from scenarios.drawing import random_grammar
from seeded_faults import Edit, seed_fault
from speculating import arrival, make, plain_answer, random_drafting, random_traffic, run, traffic
from tiny_models import model_folder

VOCAB_SIZE = 60


def constrained(rng: random.Random, sampling: SamplingParams) -> SamplingParams:
    """Return the parameters with a random grammar, sometimes with reports and penalties."""
    return replace(
        sampling,
        grammar=random_grammar(rng) if rng.random() < 0.6 else None,
        logprobs=rng.choice((None, None, 2)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.5)),
        logit_bias=rng.choice(((), (), ((3, 2.0), (7, -100.0)))),
    )


@settings(max_examples=scaled(5), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rng=st.randoms(use_true_random=False), kind=st.sampled_from(["off", "off", "ngram", "unrelated", "eagle"]))
def test_engines_constrain_as_plain_decoding_does(rng: random.Random, kind: str) -> None:
    scenario = random_traffic(rng, overlap=rng.random() < 0.7)
    arrivals = tuple(replace(one, sampling=constrained(rng, one.sampling)) for one in scenario.arrivals)
    model, drafter = make("suffix" if kind == "off" else kind, "llama")
    options: dict[str, Any] = {"num_tokens": rng.choice((2, 4, 8)), "make_drafting": random_drafting(rng)}
    run(replace(scenario, arrivals=arrivals), model=model, drafter=None if kind == "off" else drafter, **options)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_plain_answer_is_in_its_grammar(temperature: float) -> None:
    """The oracle of the other tests, one token after the other."""
    num_tokens = 0
    for seed in range(12):
        grammar = Grammar(kind="regex", text=f"{seed} 20 999 0")
        sampling = SamplingParams(max_tokens=40, temperature=temperature, seed=seed, ignore_eos=True, grammar=grammar)
        tokens = plain_answer(model_folder("llama"), False, (seed + 1, 5, 9), sampling).tokens
        for num, token in enumerate(tokens):
            assert token in allowed_tokens(grammar, tokens[:num], frozenset(), VOCAB_SIZE)
        assert len(tokens) == 20
        num_tokens += len(set(tokens))
    assert num_tokens > 100


def test_the_neighbours_of_a_constrained_request_get_the_same_tokens() -> None:
    others = [arrival([i, 8, 9], max_tokens=30, temperature=0.8, seed=i) for i in range(3)]
    alone = [plain_answer(model_folder("llama"), False, one.prompt, one.sampling).tokens for one in others]
    assert len({len(tokens) for tokens in alone}) == 1
    grammar = Grammar(kind="regex", text="3 40 999 0")
    scenario = traffic([*others, arrival([4, 4], max_tokens=30, grammar=grammar)], num_pages=80, page_size=4)
    run(scenario, model=model_folder("llama"), drafter=None)


def test_a_mask_on_a_cuda_device_leaves_the_allowed_tokens() -> None:
    rng = np.random.default_rng(0)
    logits = torch.randn(5, 70)
    allowed = [sorted(rng.choice(70, 9, replace=False).tolist()), [69], list(range(70))]
    masks = np.zeros((3, 3), np.int32)
    for row, tokens in zip(masks, allowed, strict=True):
        write_mask(tokens, row)
        assert read_mask(row, 70) == tokens
    changed = forbid(logits, np.array([3, 0, 2]), masks)
    for row, tokens in zip((3, 0, 2), allowed, strict=True):
        assert torch.isfinite(changed[row]).nonzero().flatten().tolist() == tokens
        assert torch.equal(changed[row, tokens], logits[row, tokens])
    assert torch.equal(changed[[1, 4]], logits[[1, 4]])


@pytest.mark.parametrize("size", [1, 31, 32, 33, 64, 70, 1000])
def test_a_mask_on_a_cpu_leaves_the_allowed_tokens(size: int) -> None:
    """All words of a mask, those of the end too, and nothing behind the logits."""
    rng = np.random.default_rng(size)
    for share in (0.0, 0.03, 0.5, 1.0):
        is_allowed = rng.random(size) < share
        mask = np.zeros((size + 31) // 32, np.int32)
        write_mask(np.flatnonzero(is_allowed).tolist(), mask)
        memory = rng.standard_normal(size + 64).astype(np.float32)
        expected = memory.copy()
        expected[:size][~is_allowed] = -np.inf
        masked()(memory[:size], mask)
        assert np.array_equal(memory, expected)


def test_masks_come_before_the_answers_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a step is retired, the draws that wait are given their masks before plain requests are looked at."""
    events: list[str] = []

    def noted(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            events.append(name)
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    for owner, name in ((batch_builder.BatchBuilder, "build"), (loop, "fill_masks"), (retire, "_retire")):
        noted(owner, name)
    grammar = Grammar(kind="regex", text="3 40 999 0")
    some = [arrival([i, 4], max_tokens=20, temperature=0.5, grammar=None if i else grammar) for i in range(4)]
    scenario = traffic(some, num_pages=80, page_size=4)
    assert scenario.config.resolved().overlap
    run(scenario, model=model_folder("llama"), drafter=None)
    steps = " ".join(events).split("build")
    both = [step.split() for step in steps if step.count("_retire") == 2]
    assert len(both) > 10
    # The request with a grammar is retired before, and the others afterwards.
    assert all(step == ["_retire", "fill_masks", "_retire"] for step in both)


@cache
def masked() -> Any:
    @numba.njit
    def run(logits: Any, mask: Any) -> None:
        apply_mask(logits, mask)

    return run


def test_draws_wait_for_masks_that_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the threads of a step spin and yield, with one thread and with the engine's too."""
    fill = loop.fill_masks

    def late(*arguments: Any, **options: Any) -> None:
        time.sleep(0.003)
        fill(*arguments, **options)

    monkeypatch.setattr(loop, "fill_masks", late)
    grammar = Grammar(kind="regex", text="3 40 999 0")
    some = [arrival([i, 4], max_tokens=20, temperature=0.5, grammar=grammar if i else None) for i in range(3)]
    for num_threads in (1, 2):
        run(
            traffic(some, num_pages=80, page_size=4), model=model_folder("llama"), drafter=None, num_threads=num_threads
        )


def test_requests_with_a_grammar_get_drafts() -> None:
    """Beside requests without one. The grammar begins behind tokens that come late, if they do."""
    model, drafter = make("perturbed", "llama")
    grammar = Grammar(kind="regex", text="3 40 999 0", after=("<59>",))
    some = [arrival([i, 4], max_tokens=24, temperature=0.0, grammar=grammar if i else None) for i in range(3)]
    options: dict[str, Any] = {"model": model, "drafter": drafter, "num_tokens": 6}
    counts = run(traffic(some[1:], num_pages=160, page_size=4), **options).counts
    assert counts.num_accepted > 10
    run(traffic(some, num_pages=160, page_size=4), **options)


def test_a_matcher_that_fails_behind_drafts_ends_its_text_where_plain_decoding_does() -> None:
    model, drafter = make("perturbed", "llama")
    grammars = [Grammar(kind="regex", text=f"{i} 40 {4 + i} 0") for i in range(8)]
    some = [arrival([i, 4], max_tokens=24, temperature=1.0, seed=i, grammar=one) for i, one in enumerate(grammars)]
    options: dict[str, Any] = {"model": model, "drafter": drafter, "num_tokens": 6}
    assert run(traffic(some, num_pages=160, page_size=4), **options).counts.num_accepted > 10
    ends = [plain_answer(model, False, one.prompt, one.sampling).finish for one in some]
    assert ends.count(FinishReason.ERROR) > 5


FAULTS: dict[str, list[Edit]] = {
    "masks of another row": [(cpu_runner._Constraint, "of", "np.arange(1, num + 1)", "np.arange(num, 0, -1)")],
    "masks not applied": [
        (cpu_runner.CPURunner, "_work_through", "constraint.gate.ctypes.data", "0 * constraint.gate.ctypes.data")
    ],
    "forced tokens not sent": [(batch_builder, "_untold", "grant.request.num_untold and", "False and")],
    "mask behind the forced tokens": [(loop, "fill_masks", "if foreseen is not None:", "if False:")],
    "foreseen token answered twice": [(retire, "_advance", "tokens[num_old:]", "tokens")],
    "forced token lost": [(retire, "_follow", "tokens + forced", "tokens")],
}


def check_all() -> None:
    """Run tests that must find every fault."""
    grammars = [Grammar(kind="regex", text=f"{seed} 30 999 0") for seed in (3, 4, 5)]
    some = [arrival([i, 8], max_tokens=30, grammar=grammar, temperature=0.0) for i, grammar in enumerate(grammars)]
    later = [arrival([9, 8, i], at_step=60, max_tokens=12, temperature=0.0, logit_bias=((3, 0.1),)) for i in range(3)]
    run(traffic([*some, *later], num_pages=80, page_size=4, max_running=3), model=model_folder("llama"), drafter=None)


def test_without_a_fault_nothing_is_found() -> None:
    check_all()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seed_fault(FAULTS[fault], monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011 - any error counts
        check_all()
