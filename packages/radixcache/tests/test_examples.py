"""The examples run, and do what they say."""

import runpy
import subprocess
import sys
from pathlib import Path
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
        "documents 3 and 8: retrieved 120 tokens ago",
        "the same question again: Found(num_tokens=500, value='documents 3 and 8')",
        "another tenant's: None",
    ]


ResponseCache: Any = runpy.run_path(str(EXAMPLES / "response_cache.py"))["ResponseCache"]
PUTS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple), st.sampled_from([None, "a"])), max_size=15
)


@given(PUTS, st.integers(1, 12))
def test_the_response_cache_returns_what_was_put_last(
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
