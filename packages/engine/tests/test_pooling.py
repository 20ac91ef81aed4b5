"""Vectors of prompts: against `transformers`, and the same with chunks, cache hits, drafts and tiers."""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from answered import answers_to, request
from pagewood.engine.api import Delta, EngineConfig, FinishReason, PoolingParams
from pagewood.engine.build import build_engine
from pagewood.engine.core.pooling import Pool
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.runner.cpu import runner as cpu_runner
from pagewood.kvpool.tiers import ArrayPages, HostTier, TieredIndex
from pagewood.radixcache import RadixCache
from scenarios.drawing import random_scenario, with_pooling
from scenarios.running import run_scenario
from seeded_faults import seed_fault
from tiny_models import VOCAB_SIZE, head_folder, model_folder

ERROR = 1e-4
PLAIN = PoolingParams(normalize=False)


def random_prompts(seed: int, *, num: int = 5, shared: int = 20) -> list[list[int]]:
    """Return prompts of different lengths, most of which begin in the same way."""
    rng = random.Random(seed)
    stem = [rng.randrange(1, VOCAB_SIZE) for _ in range(shared)]
    tails = [[rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randint(1, 40))] for _ in range(num)]
    return [[3], *[stem[: rng.choice((5, shared))] + tail for tail in tails]]


class Server:
    """An engine with a tiny model."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self._inbox, self._outbox = MemoryInbox(), MemoryOutbox()
        options = {"max_total_tokens": 1024, "max_length": 128, "num_threads": 1, **config}
        self.engine = build_engine(EngineConfig(model=str(folder), **options), inbox=self._inbox, outbox=self._outbox)

    def answers(self, requests: Sequence[tuple[list[int], PoolingParams | None]]) -> list[Delta]:
        """Return the last answers to requests that come together; None: for tokens."""
        submits = [
            request(i, prompt, max_tokens=12, fields={"pooling": pooling})
            for i, (prompt, pooling) in enumerate(requests)
        ]
        return [answer[-1] for answer in answers_to(self.engine, self._inbox, self._outbox, submits)]

    def vectors(self, prompts: Sequence[list[int]], pooling: PoolingParams) -> list[NDArray[np.float32]]:
        """Return the vectors of prompts that come together."""
        return [vector_of(delta) for delta in self.answers([(prompt, pooling) for prompt in prompts])]


def vector_of(delta: Delta) -> NDArray[np.float32]:
    assert (delta.finish, delta.refusal, delta.tokens) == (FinishReason.STOP, None, ())
    assert delta.num_output_tokens == 0
    return np.frombuffer(delta.vector, "<f4")


@cache
def reference(folder: Path) -> Any:
    return transformers.AutoModel.from_pretrained(folder)


def reference_vector(folder: Path, prompt: list[int], pooling: PoolingParams) -> NDArray[np.float32]:
    with torch.no_grad():
        states = reference(folder)(torch.tensor([prompt])).last_hidden_state[0]
    vector = {"last": states[-1], "mean": states.mean(0), "cls": states[0]}[pooling.kind][: pooling.dimensions]
    return (torch.nn.functional.normalize(vector, dim=0) if pooling.normalize else vector).numpy()


@pytest.mark.parametrize(
    ("architecture", "page_size", "chunk"), [("llama", 1, 7), ("llama", 16, 256), ("qwen3", 16, 7), ("qwen3", 1, 256)]
)
def test_vectors_are_those_of_transformers(architecture: str, page_size: int, chunk: int) -> None:
    folder, prompts = model_folder(architecture), random_prompts(1)
    server = Server(folder, page_size=page_size, chunked_prefill_size=chunk)
    for pooling in (
        PLAIN,
        PoolingParams(kind="mean", normalize=False),
        PoolingParams(kind="cls"),
        PoolingParams(dimensions=5),  # from here on the prompts are cached
        PoolingParams(kind="mean", dimensions=9),
    ):
        for prompt, vector in zip(prompts, server.vectors(prompts, pooling), strict=True):
            expected = reference_vector(folder, prompt, pooling)
            assert vector.shape == expected.shape
            assert np.abs(vector - expected).max() < ERROR, (pooling, len(prompt))
    server.engine.close()


def test_a_last_state_uses_the_cache_and_a_mean_is_computed_anew_and_published() -> None:
    prompt = [5 + i % 50 for i in range(40)]
    server = Server(model_folder("llama"), page_size=4)
    requests = [PoolingParams(kind="mean"), PLAIN, PoolingParams(kind="mean"), PLAIN]
    before, found = 0, list[tuple[int, int]]()
    for pooling in requests:
        [end] = server.answers([(prompt, pooling)])
        num_computed, before = server.engine.counters().num_tokens - before, server.engine.counters().num_tokens
        found.append((end.num_cached_tokens, num_computed))
    assert found == [(0, 40), (36, 4), (0, 40), (36, 4)]
    server.engine.close()


def test_a_vector_has_the_same_bits_in_any_step() -> None:
    """Of the last state; the mean may differ in rounding, because the sum of each chunk is rounded."""
    prompts = random_prompts(2, num=7)
    plain = Server(model_folder("llama"), max_running=1, prefix_cache=False, num_threads=1)
    alone = [plain.vectors([prompt], PLAIN)[0] for prompt in prompts]
    means = [plain.vectors([prompt], PoolingParams(kind="mean"))[0] for prompt in prompts]
    plain.engine.close()
    for options in ({"chunked_prefill_size": 3, "num_threads": 2}, {"page_size": 1}, {"overlap": False}):
        server = Server(model_folder("llama"), **options)
        for _ in range(2):
            for vector, expected in zip(server.vectors(prompts, PLAIN), alone, strict=True):
                assert vector.tolist() == expected.tolist(), options
        for vector, expected in zip(server.vectors(prompts, PoolingParams(kind="mean")), means, strict=True):
            assert np.abs(vector - expected).max() < 1e-6
        server.engine.close()


@pytest.mark.parametrize("kind", ["draft", "eagle", "ngram"])
def test_vectors_and_drafted_tokens_share_steps(kind: str) -> None:
    """Neither changes the other; requests for vectors draft nothing."""
    folder, prompts = model_folder("llama"), random_prompts(3)
    drafter = {"draft": str(folder), "eagle": str(head_folder("llama"))}.get(kind)
    plain = Server(folder)
    requests = [(prompt, None if i % 2 else PLAIN) for i, prompt in enumerate(prompts * 2)]
    expected = [plain.answers([request])[0] for request in requests]
    plain.engine.close()
    server = Server(
        folder, speculative=kind, speculative_model=drafter, speculative_control="fixed", chunked_prefill_size=9
    )
    for end, other in zip(server.answers(requests), expected, strict=True):
        assert (end.finish, end.vector, end.num_output_tokens) == (other.finish, other.vector, other.num_output_tokens)
        assert not end.vector or not end.num_drafted_tokens
    server.engine.close()


def test_vectors_over_int8_kv_are_close() -> None:
    prompts = random_prompts(4)
    server = Server(model_folder("llama"), kv_cache_dtype="int8")
    for prompt, vector in zip(prompts, server.vectors(prompts, PoolingParams()), strict=True):
        assert float(vector @ reference_vector(model_folder("llama"), prompt, PoolingParams())) > 0.99
    server.engine.close()


@pytest.mark.parametrize("seed", range(6))
def test_vectors_over_tiers_have_every_state_once(seed: int) -> None:
    rng = random.Random(seed)

    def make_caches(memory: NDArray[np.uint64], page_size: int) -> Any:
        pages = ArrayPages([[memory.view(np.uint8).reshape(-1, page_size * 8)]])
        return lambda: TieredIndex(
            RadixCache(page_size),
            device=pages,
            host=HostTier(page_bytes=page_size * 8, num_pages=12),
            page_size=page_size,
        )

    scenario = with_pooling(random_scenario(rng, overlap=seed % 2 > 0), rng)
    scenario = replace(scenario, config=replace(scenario.config, prefix_cache=True))
    run_scenario(scenario, make_caches=make_caches)


@pytest.mark.parametrize(
    ("tokens", "pooling", "message"),
    [
        ([1, 2], PoolingParams(dimensions=33), "dimensions must be in [1, 32], got 33"),
        ([1] * 129, PLAIN, "maximum context length is 128 tokens, but the prompt has 129 tokens"),
        ([1, 60], PLAIN, "prompt must have token ids in [0, 60), got 60"),
    ],
)
def test_a_wrong_request_is_refused(tokens: list[int], pooling: PoolingParams, message: str) -> None:
    server = Server(model_folder("llama"))
    [end] = server.answers([(tokens, pooling)])
    assert end.finish is FinishReason.REFUSED
    assert end.refusal is not None
    assert message in end.refusal.message
    server.engine.close()


def test_a_prompt_of_the_longest_length_has_a_vector() -> None:
    prompt = [1 + i % 50 for i in range(128)]
    server = Server(model_folder("llama"), max_total_tokens=128)
    expected = reference_vector(model_folder("llama"), prompt, PLAIN)
    assert np.abs(server.vectors([prompt], PLAIN)[0] - expected).max() < ERROR
    server.engine.close()


def test_wrong_parameters_are_errors() -> None:
    with pytest.raises(ValueError, match="kind must be last, mean or cls, got 'max'"):
        PoolingParams(kind="max")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="dimensions must be >= 1, got 0"):
        PoolingParams(dimensions=0)


def test_positions_that_are_computed_again_are_not_wanted_again() -> None:
    pool = Pool.of(PoolingParams(kind="mean"), 10)
    assert pool.wanted_in(0, 4) == (0, 4)
    assert pool.add(np.ones(2, np.float32), 4)
    assert [pool.wanted_in(0, 3), pool.wanted_in(0, 6), pool.wanted_in(6, 4)] == [(4, 0), (4, 2), (0, 4)]
    assert not pool.is_complete
    assert not pool.add(np.array([1.0, np.nan], np.float32), 6)
    assert Pool.of(PoolingParams(kind="cls"), 10).wanted_in(0, 4) == (0, 1)
    assert [Pool.of(PLAIN, 10).wanted_in(0, 9), Pool.of(PLAIN, 10).wanted_in(5, 5)] == [(9, 0), (4, 1)]


FAULTS = {
    "sums of another grant": (
        cpu_runner.CPURunner, "_step", "now.sums[: len(grants.pooled)]", "now.sums[[0] * len(grants.pooled)]",
    ),
    "truncated after normalising": (
        Pool, "vector", "mean / length if length > 0.0 else mean",
        "self.total[: self.params.dimensions] / np.linalg.norm(self.total)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seed_fault([FAULTS[fault]], monkeypatch)
    with pytest.raises(AssertionError):
        test_vectors_are_those_of_transformers("llama", 16, 7)
