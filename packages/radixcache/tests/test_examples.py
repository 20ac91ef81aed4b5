"""The examples run and print what they should."""

import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from pagewood.radixcache.arrays import Int32

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str) -> list[str]:
    command = [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py")]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.splitlines()


def ids(*items: int) -> Int32:
    return np.array(items, np.int32)


def test_the_response_cache_finds_the_previous_turn() -> None:
    assert run("response_cache") == [
        "documents 3 and 8: retrieved 120 tokens before the end",
        "the same question again: Found(num_tokens=500, value='documents 3 and 8')",
        "the same for another tenant: None",
    ]


ResponseCache: Any = runpy.run_path(str(EXAMPLES / "response_cache.py"))["ResponseCache"]
PUTS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple), st.sampled_from([None, "a"])), max_size=15
)


@given(PUTS, st.integers(1, 12))
def test_the_response_cache_returns_the_last_value_of_a_prompt(
    puts: list[tuple[tuple[int, ...], str | None]], budget: int
) -> None:
    cache = ResponseCache(budget)
    last: dict[tuple[str | None, tuple[int, ...]], int] = {}
    for value, (tokens, tenant) in enumerate(puts):
        if not cache.put(ids(*tokens), value, tenant):
            assert len(tokens) > budget
            continue
        last[tenant, tokens] = value
        longest = cache.find(ids(*tokens, 9), tenant)
        assert (longest.num_tokens, longest.value) == (len(tokens), value)
    for tenant, tokens in last:
        found = cache.find(ids(*tokens), tenant)
        assert found is None or last[tenant, tokens[: found.num_tokens]] == found.value
    if sum(len(tokens) for _, tokens in last) <= budget:
        assert all(cache.find(ids(*tokens), tenant).value == value for (tenant, tokens), value in last.items())


router: Any = SimpleNamespace(**runpy.run_path(str(EXAMPLES / "router.py")))


def test_the_router_beats_round_robin() -> None:
    shares = [int(re.findall(r"(\d+)%", line)[0]) for line in run("router")]
    assert len(shares) == 2
    assert shares[1] >= shares[0] + 20


def test_the_router_weighs_the_prefix_against_the_queue() -> None:
    replicas, routes = [router.Replica(num_pages=20) for _ in range(2)], router.Router(2)
    prompt = np.arange(160, dtype=np.int32)
    replicas[1].serve(prompt)
    for number, replica in enumerate(replicas):
        routes.listen(number, replica.log, lambda: False)
    assert routes.pick(prompt) == 1
    assert routes.pick(np.arange(500, 600, dtype=np.int32)) == 0
    routes.routes[1].num_queued = 300
    assert routes.pick(prompt) == 0


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(1, 6), st.booleans()), max_size=20))
def test_the_router_recovers_from_lost_updates(steps: list[tuple[int, int, int, bool]]) -> None:
    replicas, routes = [router.Replica(num_pages=8) for _ in range(2)], router.Router(2)
    prompts = [np.arange(start, start + 16 * 6, dtype=np.int32) // 48 for start in (0, 16, 48, 96)]
    for number, prompt, num_blocks, is_lost in steps:
        replica, route = replicas[number], routes.routes[number]
        replica.serve(prompts[prompt][: num_blocks * 16])
        routes.listen(number, replica.log, lambda is_lost=is_lost: is_lost)
        if not is_lost:
            assert route.index.is_in_sync
            assert len(route.index) == replica.cache.num_pages
            assert all(route.index.match(tokens) == replica.cache.peek(tokens).num_tokens for tokens in prompts)
