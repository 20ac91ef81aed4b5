"""Replays agree with a brute-force cache, and the bound with an exhaustive search; the command line runs."""

import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given

from pagewood.radixcache import RadixCache
from pagewood.radixcache.arrays import Int32
from pagewood.radixcache.trace import (
    num_best_hits,
    num_blocks_of,
    num_unbounded_hits,
    read_trace,
    replay,
)
from pagewood.radixcache.trace.__main__ import main
from pagewood.radixcache.trace.contenders import POLICIES, uses_queue
from pagewood.radixcache.trace.progress import Progress

PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=7)


def requests_of(prompts: Sequence[Sequence[int]]) -> list[Int32]:
    return [np.array(prompt, np.int32) for prompt in prompts]


def prefixes(prompt: Sequence[int], num_blocks: int) -> list[tuple[int, ...]]:
    return [tuple(prompt[:end]) for end in range(1, min(len(prompt), num_blocks) + 1)]


def lru_hits(prompts: Sequence[Sequence[int]], num_blocks: int) -> int:
    """Evict single blocks: the least recently used one first, and of blocks used together the deepest."""
    used: dict[tuple[int, ...], int] = {}
    num_hits = 0
    for now, prompt in enumerate(prompts):
        path = prefixes(prompt, num_blocks)
        num_hits += sum(prefix in used for prefix in path)
        used.update(dict.fromkeys(path, now))
        while len(used) > num_blocks:
            del used[min(used, key=lambda prefix: (used[prefix], -len(prefix)))]
    return num_hits


def most_hits(prompts: Sequence[Sequence[int]], num_blocks: int) -> int:
    """Try every set of victims at every eviction."""
    best = {frozenset[tuple[int, ...]](): 0}  # cached prefixes -> largest number of hits that leads to them
    for prompt in prompts:
        path = prefixes(prompt, num_blocks)
        after: dict[frozenset[tuple[int, ...]], int] = {}
        for cached, hits in best.items():
            others = cached.difference(path)
            num_victims = max(0, len(cached.union(path)) - num_blocks)
            for victims in itertools.combinations(others, num_victims):
                kept = cached.union(path).difference(victims)
                if all(len(prefix) == 1 or prefix[:-1] in kept for prefix in kept):
                    after[kept] = max(after.get(kept, 0), hits + sum(prefix in cached for prefix in path))
        best = after
    return max(best.values())


@given(PROMPTS, st.integers(0, 6))
def test_lru_agrees_with_brute_force(prompts: list[list[int]], num_blocks: int) -> None:
    cache = RadixCache(1)
    assert replay(requests_of(prompts), cache, num_blocks=num_blocks) == lru_hits(prompts, num_blocks)
    cache.check()
    assert cache.num_pages <= num_blocks
    assert cache.num_locked == 0


@given(PROMPTS, st.integers(0, 6))
@example([[0], [1], [0, 0], [2], [0, 1], [1], [0, 0]], 2)
def test_the_bound_is_the_best_of_all_choices(prompts: list[list[int]], num_blocks: int) -> None:
    assert num_best_hits(requests_of(prompts), num_blocks=num_blocks) == most_hits(prompts, num_blocks)


@given(PROMPTS, st.integers(0, 6), st.integers(0, 4))
def test_no_policy_beats_the_bound(prompts: list[list[int]], num_blocks: int, num_waiting: int) -> None:
    requests = requests_of(prompts)
    bound = num_best_hits(requests, num_blocks=num_blocks)
    for make in POLICIES.values():
        cache = RadixCache(1, policy=make())
        assert replay(requests, cache, num_blocks=num_blocks, num_waiting=num_waiting) <= bound
        cache.check()


def test_only_informed_policies_use_the_queue() -> None:
    requests = requests_of([[0], [1], [2], [3], [0]])
    informed, plain = RadixCache(1, policy=POLICIES["queue-lru"]()), RadixCache(1)
    assert uses_queue(POLICIES["queue-lru"]())
    assert not uses_queue(POLICIES["lru"]())
    assert replay(requests, informed, num_blocks=2, num_waiting=2) == 1
    assert replay(requests, plain, num_blocks=2, num_waiting=2) == 0
    short_queue = RadixCache(1, policy=POLICIES["queue-lru"]())
    assert replay(requests, short_queue, num_blocks=2, num_waiting=1) == 0


@given(PROMPTS)
def test_without_evictions_all_hit_counts_agree(prompts: list[list[int]]) -> None:
    requests = requests_of(prompts)
    num_hits = num_unbounded_hits(requests)
    assert num_hits == num_best_hits(requests, num_blocks=99) == replay(requests, RadixCache(1), num_blocks=99)
    assert num_hits <= num_blocks_of(requests)


def test_a_replay_requires_an_empty_cache_of_page_size_1() -> None:
    with pytest.raises(ValueError, match="got 0 pages of 2"):
        replay([], RadixCache(2), num_blocks=9)
    used = RadixCache(1)
    used.insert(np.array([1], np.int32), np.array([1], np.int32))
    with pytest.raises(ValueError, match="got 1 pages of 1"):
        replay([], used, num_blocks=9)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Write a trace of two conversations that alternate, in the form of the public traces."""
    path = tmp_path / "tiny.jsonl"
    lines = [
        {
            "timestamp": 500 * turn,
            "input_length": 512 * 4,
            "output_length": 9,
            "hash_ids": [7, base, base + 1, turn + base],
        }
        for turn, base in itertools.product((10**12, 10**13), (100, 200))
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    return path


def test_requests_are_sorted_by_arrival(tmp_path: Path) -> None:
    path = tmp_path / "late.jsonl"
    path.write_text("\n".join(f'{{"timestamp": {ms}, "hash_ids": [{ms}]}}' for ms in (5, 9, 7)))
    assert [request.tolist() for request in read_trace(path)] == [[0], [2], [1]]


def test_hash_ids_of_any_size_are_numbered(trace: Path) -> None:
    requests = read_trace(trace)
    assert [request.tolist() for request in requests] == [[0, 1, 2, 3], [0, 4, 5, 6], [0, 1, 2, 7], [0, 4, 5, 8]]
    assert num_blocks_of(requests) == 16


@pytest.mark.parametrize(
    "line",
    ["{", "[]", "3", '{"timestamp": 1}', '{"timestamp": null, "hash_ids": []}', '{"timestamp": 1, "hash_ids": [[]]}'],
)
def test_the_error_names_a_bad_line(line: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"timestamp": 1, "hash_ids": [1]}\n' + line)
    with pytest.raises(ValueError, match=r"bad\.jsonl:2 must be a JSON object with timestamp and hash_ids, got "):
        read_trace(path)


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "pagewood.radixcache.trace", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_line_prints_a_table_and_its_progress(trace: Path) -> None:
    done = run(trace, "--policy", "lru", "--capacity", 7, 4)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "Hit rate of blocks, by capacity in blocks: tiny.jsonl, 4 requests, 16 blocks",
        "",
        "| policy            |     4 |     7 |",
        "|-------------------|------:|------:|",
        "| lru               | 0.188 | 0.438 |",
        "| farthest next use | 0.188 | 0.438 |",
        "| infinite cache    | 0.438 | 0.438 |",
    ]
    assert done.stderr.splitlines() == [
        "[1/4] lru, 4 blocks",
        "[2/4] farthest next use, 4 blocks",
        "[3/4] lru, 7 blocks",
        "[4/4] farthest next use, 7 blocks",
    ]


def test_all_policies_are_replayed_by_default(trace: Path) -> None:
    done = run(trace)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 4 + len(POLICIES) + 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--capacity", "0"], "must be a number >= 1, got 0"),
        (["--capacity", "many"], "must be a number >= 1, got many"),
        (["--policy", "best"], "invalid choice: 'best'"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], message: str, trace: Path) -> None:
    done = run(trace, *arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_a_missing_trace_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path / "none.jsonl")
    assert (done.returncode, done.stdout) == (2, "")
    assert "No such file" in done.stderr
    (tmp_path / "empty.jsonl").touch()
    assert "must contain at least one request, got none" in run(tmp_path / "empty.jsonl").stderr


def test_the_curves_are_drawn(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib, the extra [plot]")
    done = run(trace, "--capacity", 4, 7, "--plot", tmp_path / "curve.png")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_error_names_the_extra(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pagewood.radixcache.trace.__main__.can_plot", lambda: False)
    with pytest.raises(SystemExit):
        main([str(trace), "--plot", "curve.png"])
    assert "pip install 'pagewood-radixcache[plot]'" in capsys.readouterr().err


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_rewrites_one_line_of_a_terminal() -> None:
    terminal = Terminal()
    progress = Progress(terminal, 2)
    assert list(progress.track("lru", range(4))) == [0, 1, 2, 3]
    progress.start("bound")
    progress.finish()
    shown = terminal.getvalue().split("\r\x1b[K")
    assert shown == ["", "[1/2] lru", *(f"[1/2] lru: {done}%" for done in (0, 25, 50, 75)), "[2/2] bound", ""]


def test_progress_writes_one_line_per_step_to_a_log() -> None:
    log = StringIO()
    progress = Progress(log, 1)
    assert list(progress.track("lru", range(4))) == [0, 1, 2, 3]
    progress.finish()
    assert log.getvalue() == "[1/1] lru\n"
