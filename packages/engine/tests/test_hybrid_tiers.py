"""Hybrid models over lower tiers: what comes back has the bits of what is computed alone.

A search of a store has a time limit, after which a prompt is computed. So where a store is searched, some prompts must
be found there, and every answer must be right.
"""

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from families.case import build
from families.registry import CASES
from pagewood.engine.api import SamplingParams, TokenLogprob
from sides import Side

PAGE, LENGTH, NUM_OUTPUT = 16, 70, 16
NUM_WHOLE = (LENGTH - 1) // PAGE * PAGE
SAMPLED = SamplingParams(temperature=1.0, seed=7, max_tokens=NUM_OUTPUT, ignore_eos=True, logprobs=2)
SMALL: dict[str, Any] = {"max_total_tokens": 256, "max_running": 1, "state_places": 3}
Answered = tuple[list[int], list[TokenLogprob]]


def prompt(seed: int, n: int = LENGTH) -> list[int]:
    return [3 + (seed * 7919 + i * i * 31 + i) % 90 for i in range(n)]


def answered(side: Side, name: str, tokens: list[int]) -> Answered:
    """Return tokens and log probabilities of an answer."""
    return side.answer(name, tokens, SAMPLED), side.logprobs[name]


@pytest.fixture(scope="module", params=["qwen3.5", "granite4-states"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid") / "model"
    build(CASES[request.param], path)
    return path


@pytest.fixture
def sides(folder: Path) -> Generator[Callable[..., Side]]:
    """Make engines whose memory is soon full; they are closed at the end."""
    made: list[Side] = []

    def make(**options: Any) -> Side:
        made.append(Side(**{"model": str(folder), **SMALL, **options}))
        return made[-1]

    yield make
    for side in made:
        side.engine.close()


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[int, Answered]:
    """The answers to five prompts, each computed alone."""
    side = Side(model=str(folder), prefix_cache=False, max_running=1)
    found = {seed: answered(side, f"{seed}", prompt(seed)) for seed in range(5)}
    side.engine.close()
    return found


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_the_host_brings_pages_and_states_back(
    sides: Callable[..., Side], expected: dict[int, Answered], policy: str
) -> None:
    side = sides(host_cache_gb=0.02, cache_write_policy=policy)
    for turn in range(2):
        for seed, right in expected.items():
            assert answered(side, f"{turn} {seed}", prompt(seed)) == right
            assert side.ends[f"{turn} {seed}"].num_cached_tokens == turn * NUM_WHOLE
    resumed = prompt(0) + expected[0][0] + prompt(9, 20)  # others have needed the memory since
    right = answered(sides(prefix_cache=False), "alone", resumed)
    assert answered(side, "resumed", resumed) == right
    assert side.ends["resumed"].num_cached_tokens == (LENGTH + NUM_OUTPUT - 1) // PAGE * PAGE


@pytest.mark.parametrize("below", ["disk", "folder"])
def test_a_later_engine_finds_pages_and_states(
    sides: Callable[..., Side], folder: Path, expected: dict[int, Answered], below: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"disk_cache_path": str(tmp_path), "disk_cache_gb": 0.02}
    if below == "folder":
        options = {"remote_cache": str(tmp_path), "remote_cache_gb": 0.05}
    first = Side(model=str(folder), host_cache_gb=0.01, **SMALL, **options)
    for seed, right in expected.items():
        assert answered(first, f"{seed}", prompt(seed)) == right
    first.engine.close()  # everything is stored then
    second = sides(host_cache_gb=0.01, **options)
    for seed, right in expected.items():
        assert answered(second, f"{seed}", prompt(seed)) == right
    assert NUM_WHOLE in {end.num_cached_tokens for end in second.ends.values()}


def test_an_engine_goes_on_with_prompts_of_another(
    sides: Callable[..., Side], expected: dict[int, Answered], tmp_path: Path
) -> None:
    shared = {"host_cache_gb": 0.01, "remote_cache": str(tmp_path), "remote_cache_gb": 0.05}
    prefill, decode = sides(role="prefill", **shared), sides(role="decode", **shared)
    for seed, right in expected.items():
        assert prefill.answer(f"{seed}", prompt(seed), SAMPLED) == right[0][:1]
        assert answered(decode, f"{seed}", prompt(seed)) == right
    assert NUM_WHOLE in {end.num_cached_tokens for end in decode.ends.values()}


def test_damaged_states_and_pages_are_computed_again(
    sides: Callable[..., Side], expected: dict[int, Answered], tmp_path: Path
) -> None:
    shared = {"host_cache_gb": 0.01, "remote_cache": str(tmp_path), "remote_cache_gb": 0.05}
    prefill = sides(role="prefill", **shared)
    for seed in expected:
        prefill.answer(f"{seed}", prompt(seed), SAMPLED)
    for path in tmp_path.rglob("*.pages"):
        content = bytearray(path.read_bytes())
        for at in range(0, len(content), 5000):
            content[at] ^= 16
        path.write_bytes(content)
    decode = sides(role="decode", **shared)
    for seed, right in expected.items():
        assert answered(decode, f"{seed}", prompt(seed)) == right


def test_what_does_not_go_together_is_refused(sides: Callable[..., Side], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"host_cache_gb must hold at least one page of .*e9 bytes and a state of"):
        sides(host_cache_gb=1e-5)
    with pytest.raises(ValueError, match="host_cache_gb must be None for models with recurrent layers with a decision"):
        sides(host_cache_gb=0.01, decision_log=str(tmp_path / "log"))
