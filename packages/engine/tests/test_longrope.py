"""A model with two sets of factors for rotations: each request has one of them, from its first token to its last."""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from answered import answers_to, request, tokens_of
from families.case import Case, build
from families.registry import CASES
from families.ropes import rope
from pagewood.engine.api import Command, Delta, EngineConfig, FinishReason, Retain
from pagewood.engine.assemble import assemble
from pagewood.engine.assembly.model_check import check_model
from pagewood.engine.build import build_engine
from pagewood.engine.core.cache_keys import CacheKeys
from pagewood.engine.decision_log.replay import replay
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.stored.checkpoint import Checkpoint
from pagewood.engine.quantise.layers import read_layers, run_layer
from pagewood.radixcache import CacheKey
from scratch import scratch_folder

SHORT, LONGEST, PAGE_SIZE = 64, 200, 4
"""Tokens of the longest request with the first set, of the longest request, and of a page."""
_ORIGINAL = "original_max_position_embeddings"


@cache
def model() -> tuple[Path, Any]:
    """Return a folder with a model, and its reference."""
    folder = scratch_folder()
    return folder, build(CASES["phi4-both"], folder)


@torch.inference_mode()
def expected(prompt: Sequence[int], num_tokens: int, *, is_long: bool) -> list[int]:
    """Return the greedy tokens of the reference with one set of factors for all lengths."""
    reference = model()[1]
    numbers, tokens = reference.config.rope_parameters, list(prompt)
    reference(torch.zeros(1, SHORT + 1, dtype=torch.long))  # computes the frequencies of long sequences
    numbers[_ORIGINAL] = 0 if is_long else LONGEST
    for _ in range(num_tokens):
        tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
    numbers[_ORIGINAL] = SHORT
    return tokens[len(prompt) :]


class Bench:
    """An engine, and what it has answered."""

    def __init__(self, **options: Any) -> None:
        self.inbox, self.outbox = MemoryInbox(), MemoryOutbox()
        config: dict[str, Any] = {
            "page_size": PAGE_SIZE, "num_threads": 1, "max_running": 8, "weights": "float32", "max_length": LONGEST,
            "max_total_tokens": 2000, "chunked_prefill_size": 16,
        }  # fmt: skip
        self.engine = build_engine(
            EngineConfig(model=str(model()[0]), **{**config, **options}), inbox=self.inbox, outbox=self.outbox
        )

    def ask(self, *work: tuple[Sequence[int], int]) -> tuple[list[list[int]], list[int]]:
        """Return the outputs of prompts that arrive together, each with its number of tokens, and what was cached."""
        submits = [request(i, prompt, max_tokens=num) for i, (prompt, num) in enumerate(work)]
        answers = self.answers(submits)
        assert all(answer[-1].finish is FinishReason.LENGTH for answer in answers)
        return [tokens_of(answer) for answer in answers], [answer[0].num_cached_tokens for answer in answers]

    def answers(self, commands: Sequence[Command]) -> list[list[Delta]]:
        answers = answers_to(self.engine, self.inbox, self.outbox, commands)
        self.engine.step()
        assert self.engine.violation() is None
        return answers


def text(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, 97, length).tolist()


def test_requests_of_both_lengths_share_steps_but_no_prefix() -> None:
    bench, prompt = Bench(), text(0, 45)
    assert bench.engine.info.short_length == SHORT
    work = [(prompt, SHORT - 45), (prompt, SHORT - 44), (text(1, 90), 30), (text(2, 9), 40)]
    right = [
        expected(prompt, SHORT - 45, is_long=False),
        expected(prompt, SHORT - 44, is_long=True),
        expected(text(1, 90), 30, is_long=True),
        expected(text(2, 9), 40, is_long=False),
    ]
    assert right[0] != right[1][:-1]
    tokens, cached = bench.ask(*work)
    assert (tokens, cached) == (right, [0] * 4)
    tokens, cached = bench.ask(*work)
    assert (tokens, cached) == (right, [44, 44, 88, 8])
    bench.engine.close()


@pytest.mark.parametrize("long_first", [False, True])
def test_a_prefix_of_one_length_is_a_hit_for_that_length_only(long_first: bool) -> None:
    bench, prompt = Bench(), text(3, 41)
    outputs = [60, 20] if long_first else [20, 60]
    cached = [bench.ask((prompt, num))[1] for num in (outputs[0], outputs[1], outputs[0] - 1, outputs[1] + 1)]
    assert cached == [[0], [0], [40], [40]]
    found = [bench.ask((prompt, num))[0][0] for num in outputs]
    assert found == [expected(prompt, num, is_long=num == 60) for num in outputs]
    bench.engine.close()


def test_preempted_requests_keep_their_set() -> None:
    work = [(text(seed, 30 + 3 * seed), 6 + seed % 2 * 50) for seed in range(4, 10)]
    are_long = [len(prompt) + num > SHORT for prompt, num in work]
    assert {*are_long} == {False, True}
    bench = Bench(max_total_tokens=220, schedule_conservativeness=0.1)
    right = [expected(*one, is_long=is_long) for one, is_long in zip(work, are_long, strict=True)]
    assert bench.ask(*work)[0] == right
    assert bench.engine.counters().num_preempted > 0
    bench.engine.close()


def test_a_text_is_retained_and_dropped_under_all_of_its_keys() -> None:
    bench, prompt = Bench(retained_share=0.5), text(10, 61)
    tokens, _ = bench.ask((prompt, 3), (prompt, 4))
    whole = np.array([*prompt, *tokens[1]], "<i4").tobytes()
    for seconds, num_tokens in ((60.0, 64), (0.0, 60 + 64)):
        [[answer]] = bench.answers([Retain(request_id="prefix", tokens=whole, seconds=seconds)])
        assert answer.num_cached_tokens == num_tokens
    assert bench.ask((prompt, 3), (prompt, 4))[1] == [0, 0]
    bench.engine.close()


@pytest.mark.usefixtures("patient_requests")
def test_pages_of_lower_tiers_are_those_of_one_length(tmp_path: Path) -> None:
    """Those of short requests may be used by a server without long ones too."""
    options = {"host_cache_gb": 0.01, "disk_cache_path": str(tmp_path), "disk_cache_gb": 0.01}
    prompt = text(11, 41)
    for short_first in (True, False):
        bench = Bench(**options)
        tokens, cached = bench.ask((prompt, 4 if short_first else 60))
        assert tokens == [expected(prompt, len(tokens[0]), is_long=not short_first)]
        assert cached == [0]
        bench.engine.close()
    for max_length, num in ((SHORT, 5), (LONGEST, 5), (LONGEST, 60)):
        bench = Bench(**options, max_length=max_length)
        assert bench.engine.info.short_length == (None if max_length == SHORT else SHORT)
        tokens, cached = bench.ask((prompt, num))
        assert tokens == [expected(prompt, num, is_long=num == 60)]
        assert cached == [40]
        bench.engine.close()


def test_a_log_of_decisions_replays(tmp_path: Path) -> None:
    bench, prompt = Bench(decision_log=str(tmp_path / "log")), text(12, 41)
    for _ in range(2):
        bench.ask((prompt, 4), (prompt, 60))
    bench.engine.close()
    found = replay(tmp_path / "log", assemble=assemble)
    assert found.difference is None
    assert found.num_plans > 0


@pytest.mark.parametrize("length", [SHORT - 20, SHORT + 20])
def test_a_check_computes_a_text_with_the_set_of_its_length(length: int) -> None:
    found = check_model(model()[0], tokens=text(13, length))
    assert found.first is None
    assert found.num_equal == length


@pytest.mark.parametrize("length", [SHORT, SHORT + 1])
@torch.inference_mode()
def test_calibration_computes_texts_with_the_set_of_their_length(length: int, tmp_path: Path) -> None:
    factors = {"short_factor": [1.1] * 8, "long_factor": [float(i) for i in range(1, 9)], _ORIGINAL: SHORT}
    peer = build(Case(kind="Llama", extra={**rope("longrope", **factors), _ORIGINAL: SHORT}), tmp_path)
    states = peer(torch.tensor([text(14, length)]), output_hidden_states=True).hidden_states
    config = ModelConfig.from_folder(tmp_path)
    [first, *_] = read_layers(config, Checkpoint(tmp_path, dtype=torch.float32))
    torch.testing.assert_close(run_layer(first, states[0], config), states[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("namespace", [None, "salt"])
def test_keys_of_a_model_with_one_set_are_namespaces(namespace: str | None) -> None:
    one, two = CacheKeys(make=CacheKey.of), CacheKeys(make=CacheKey.of, short_length=SHORT)
    assert one.all_of(namespace) == [namespace]
    assert two.all_of(namespace) == [namespace, CacheKey(namespace, rope="long")]
    assert [two.is_long(length) for length in (SHORT, SHORT + 1)] == [False, True]
    assert not one.is_long(1 << 20)
