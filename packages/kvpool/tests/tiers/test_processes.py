"""Real processes that share a folder, or are killed during a write."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from pagewood.kvpool.tiers import DiskTier, PageStore, SharedFolder, shared_memory
from pagewood.kvpool.tiers.pages.arrays import Bytes

PAGE_BYTES = 50_000
NUM_KEYS = 200


def key(index: int) -> bytes:
    return index.to_bytes(32, "big")


def page(index: int) -> Bytes:
    return np.random.default_rng(index).integers(0, 256, PAGE_BYTES, np.uint8)


def store(kind: str, folder: Path) -> PageStore:
    """Open a store with room for half of the pages."""
    if kind == "memory":
        return shared_memory("a", page_bytes=PAGE_BYTES, num_bytes=PAGE_BYTES * NUM_KEYS // 2, memory=folder)
    make = {"disk": DiskTier, "folder": SharedFolder}[kind]
    return make(folder / "store", page_bytes=PAGE_BYTES, num_bytes=PAGE_BYTES * NUM_KEYS // 2)


def check(pages: PageStore, indices: list[int]) -> int:
    """Fetch pages, fail if one is wrong, and return how many were found."""
    rows = np.zeros((len(indices), PAGE_BYTES), np.uint8)
    found = pages.get([key(index) for index in indices], list(rows))
    for index, row, is_there in zip(indices, rows, found, strict=True):
        assert not is_there or np.array_equal(row, page(index)), f"page {index} has the wrong contents"
    return sum(found)


def use(kind: str, folder: Path, *, seed: int, seconds: float) -> None:
    """Put and fetch pages at random; the main function of a process."""
    rng = random.Random(seed)
    pages = store(kind, folder)
    pages.put([key(0)], [page(0)])
    print("open", flush=True)
    end_s, num_found = time.monotonic() + seconds, 0
    while time.monotonic() < end_s or not num_found:
        indices = rng.sample(range(NUM_KEYS), rng.randint(1, 20))
        pages.put([key(index) for index in indices], [page(index) for index in indices])
        num_found += check(pages, rng.sample(range(NUM_KEYS), 20))
    pages.close()
    print(num_found, flush=True)


def start(kind: str, folder: Path, *, seed: int, seconds: float) -> "subprocess.Popen[str]":
    code = f"import test_processes as t; t.use({kind!r}, t.Path({str(folder)!r}), seed={seed}, seconds={seconds})"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"  # it has put a page
    return process


def test_processes_can_share_a_folder_while_one_is_killed(tmp_path: Path) -> None:
    victim = start("folder", tmp_path, seed=1, seconds=100)
    others = [start("folder", tmp_path, seed=seed, seconds=1.0) for seed in (2, 3)]
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    for process in others:
        num_found, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        assert int(num_found) > 0
    pages = store("folder", tmp_path)
    assert check(pages, list(range(NUM_KEYS))) > 0
    pages.close()


def test_processes_share_memory_while_others_are_killed_again_and_again(tmp_path: Path) -> None:
    rng = random.Random(5)
    others = [start("memory", tmp_path, seed=seed, seconds=3.0) for seed in (2, 3)]
    while all(process.poll() is None for process in others):
        victim = start("memory", tmp_path, seed=rng.randrange(1000), seconds=100)
        time.sleep(rng.random() / 4)
        victim.send_signal(signal.SIGKILL)
        victim.communicate()
    for process in others:
        num_found, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        assert int(num_found) > 0
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    limit = PAGE_BYTES * NUM_KEYS // 2
    assert sum(path.stat().st_size for path in left) <= limit + 4 * limit // 16  # a sixteenth for each user at a time
    assert {path.suffix for path in left} <= {".pages", ".tmp"}
    pages = store("memory", tmp_path)
    assert check(pages, list(range(NUM_KEYS))) > 0
    pages.close()


@pytest.mark.parametrize("seed", range(3))
def test_pages_on_the_disk_of_a_killed_process_are_right_or_absent(tmp_path: Path, seed: int) -> None:
    process = start("disk", tmp_path, seed=seed, seconds=100)
    time.sleep(0.1 + 0.05 * seed)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    pages = store("disk", tmp_path)
    assert check(pages, list(range(NUM_KEYS))) > 0
    pages.close()
