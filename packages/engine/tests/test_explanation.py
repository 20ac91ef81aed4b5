"""`Submit.explain`: why no more of a prompt was cached, and when its request was admitted."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from echo_bench import echo_engine
from pagewood.engine.api import Abort, Delta, EngineConfig, SamplingParams, Submit
from pagewood.engine.assembly.tiers.lower_caches import TieredCaches
from pagewood.engine.core.memory.kv import KVSpace
from pagewood.kvpool import MultiHeadLayout, PageAllocator
from pagewood.kvpool.storage import KVStorage
from parts import make_request

PAGE = 4
VOCAB = 100


class Echo:
    """An engine with the echo model, on a clock that a test moves."""

    def __init__(self, *, num_pages: int = 256, max_length: int = 64, **options: Any) -> None:
        self.now_s = 1.0
        self.engine, self.inbox, self.outbox = echo_engine(
            num_pages=num_pages, max_length=max_length, vocab_size=VOCAB, overlap=False,
            parts={"clock": lambda: self.now_s}, **options,
        )  # fmt: skip
        self._count = 0

    def submit(self, tokens: list[int], *, max_tokens: int = 2, explain: bool = True, **options: Any) -> str:
        self._count += 1
        name = f"r{self._count}"
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, **options.pop("sampling", {}))
        data = np.array(tokens, "<i4").tobytes()
        self.inbox.put(Submit(request_id=name, tokens=data, sampling=sampling, explain=explain, **options))
        return name

    def answer(self, tokens: list[int], **options: Any) -> list[Delta]:
        """Return the answers to a request, which runs alone."""
        name = self.submit(tokens, **options)
        deltas: list[Delta] = []
        for _ in range(200):
            self.engine.advance(None)
            deltas += [delta for delta in self.outbox.take() if delta.request_id == name]
            if deltas and deltas[-1].finish is not None:
                return deltas
        raise AssertionError("not finished")

    def prefix(self, tokens: list[int], **options: Any) -> Any:
        first, *others = self.answer(tokens, **options)
        assert first.explanation is not None
        assert all(delta.explanation is None for delta in others)
        assert first.explanation.prefix.num_tokens == first.num_cached_tokens
        return first.explanation.prefix


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("seed", range(5))
def test_it_is_what_a_comparison_with_all_earlier_texts_says(seed: int) -> None:
    rng, echo = random.Random(seed), Echo()
    cached: list[tuple[str | None, list[int]]] = []
    causes: set[str] = set()
    for _ in range(60):
        namespace = rng.choice((None, "a"))
        if cached and rng.random() < 0.8:
            text = rng.choice(cached)[1]
            prompt = [*text[: rng.randrange(len(text) + 1)], *rng.choices(range(3), k=rng.randrange(9))][:50] or [0]
        else:
            prompt = rng.choices(range(3), k=rng.randint(1, 30))
        found = echo.prefix(prompt, namespace=namespace)
        reusable = prompt[:-1]
        longest = max((common(reusable, text) for name, text in cached if name == namespace), default=0)
        num_tokens = longest // PAGE * PAGE
        num_left = len(reusable) - num_tokens
        cause = "complete" if not num_left else "page_rounding" if longest % PAGE or num_left < PAGE else "never_seen"
        expected = (cause, len(reusable), num_tokens, longest, longest)
        assert (
            found.cause, found.num_reusable_tokens, found.num_tokens, found.first_difference, found.num_possible_tokens
        ) == expected  # fmt: skip
        assert (found.evicted_by, found.evicted_s) == (None, None)
        causes.add(cause)
        (again,) = echo.answer(prompt, namespace=namespace, max_tokens=1, explain=False)
        output = list(again.tokens)
        text = [*prompt, *output]  # the second token of the first request has no KV
        cached.append((namespace, text[: (len(prompt) + 1) // PAGE * PAGE]))
    assert causes == {"complete", "page_rounding", "never_seen"}


def test_what_was_evicted_is_known_if_it_is_remembered() -> None:
    for history, cause in ((1000, "evicted"), (0, "never_seen")):
        echo = Echo(num_pages=8, max_length=32, cache_history_tokens=history)
        first = list(range(17))
        echo.answer(first)
        echo.now_s = 7.0
        echo.answer(list(range(50, 75)))
        echo.now_s = 9.0
        found = echo.prefix(first)
        assert found.cause == cause
        assert found.num_tokens < 16
        assert found.num_possible_tokens == (16 if history else found.num_tokens)
        assert (found.evicted_by, found.evicted_s) == (("LRU", 7.0) if history else (None, None))


def test_other_namespaces_are_not_told() -> None:
    """A salt keeps a client from finding out what others have sent."""
    echo = Echo()
    prompt = list(range(20))
    unknown = echo.prefix(prompt, namespace="mine")
    echo.engine.close()
    echo = Echo()
    echo.answer(prompt, namespace="theirs")
    assert echo.prefix(prompt, namespace="mine") == unknown
    assert unknown.cause == "never_seen"


def test_an_engine_without_a_prefix_cache_says_so() -> None:
    found = Echo(prefix_cache=False).prefix(list(range(20)))
    assert (found.cause, found.num_tokens, found.num_reusable_tokens) == ("no_cache", 0, 19)


def test_log_probabilities_of_a_prompt_leave_less_to_reuse() -> None:
    echo = Echo()
    echo.answer(list(range(20)))
    found = echo.prefix(list(range(20)), sampling={"prompt_logprobs": 0, "prompt_logprobs_start": 9})
    assert (found.cause, found.num_reusable_tokens, found.num_tokens) == ("complete", 8, 8)


def test_times_are_those_of_the_queue() -> None:
    echo = Echo()
    running = [echo.submit([i], max_tokens=8) for i in range(2)]
    echo.engine.advance(None)
    echo.now_s = 5.0
    waiting, aborted = echo.submit([7]), echo.submit([8])
    echo.engine.advance(None)
    echo.inbox.put(Abort(request_id=aborted))
    echo.now_s = 6.0
    deltas: dict[str, list[Delta]] = {}
    ended_s: dict[str, float] = {}
    for _ in range(20):
        echo.engine.advance(None)
        for delta in echo.outbox.take():
            deltas.setdefault(delta.request_id, []).append(delta)
            if delta.finish is not None:
                ended_s[delta.request_id] = echo.now_s
        echo.now_s += 1.0
    first = {name: found[0].explanation for name, found in deltas.items()}
    for name in running:
        found = first[name]
        assert found is not None
        assert (found.arrived_s, found.admitted_s) == (1.0, 1.0)
    late = first[waiting]
    assert late is not None
    assert (late.arrived_s, late.admitted_s) == (5.0, min(ended_s[name] for name in running) + 1.0)
    assert first[aborted] is None, "it was never admitted"


def test_it_is_off_by_default() -> None:
    assert all(delta.explanation is None for delta in Echo().answer(list(range(20)), explain=False))


def test_a_cache_with_tiers_explains_its_device() -> None:
    memory = KVStorage(MultiHeadLayout(num_layers=1, num_kv_heads=1, head_dim=4, page_size=PAGE), 16).memory
    config = EngineConfig(host_cache_gb=0.001, cache_history_tokens=100)
    kv = KVSpace(
        make_cache=TieredCaches(config, memory=memory, page_size=PAGE, fingerprint=b"").make,
        allocator=PageAllocator(16),
        page_size=PAGE,
        num_rows=2,
    )
    for cause, num_tokens in (("never_seen", 0), ("complete", 8), ("evicted", 0)):
        request = make_request(list(range(9)))
        request.explains = True
        assert kv.admit(request, max_tokens=100, num_reserved=0)
        assert request.cached_prefix is not None
        assert (request.cached_prefix.cause, request.cached_prefix.num_tokens) == (cause, num_tokens)
        request.num_computed = 9
        kv.release(request)
        if cause == "complete":
            kv.flush()
    kv.close()
