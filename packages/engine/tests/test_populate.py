"""KV memory is provided ahead of its use, and its contents stay what they are."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from pagewood.engine.runner.cpu.populate import Populator
from pagewood.kvpool import MultiHeadLayout
from pagewood.kvpool.memory import PageMemory, allocate

LAYOUT = MultiHeadLayout(num_layers=2, num_kv_heads=2, head_dim=64, page_size=16, order="HND")
NUM_PAGES = 8192  # 268 MB
AHEAD_BYTES = 16 << 20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems provide all of it at start")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def wait_for(populator: Populator, num_pages: int) -> None:
    deadline = time.monotonic() + 60
    while populator.num_populated < num_pages:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def memory() -> PageMemory:
    return allocate(LAYOUT, NUM_PAGES)


def test_memory_is_provided_a_little_ahead_of_the_highest_page() -> None:
    """In a process of its own, where nothing else takes or returns memory."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, __file__], env=environment, check=True, timeout=120)


def check_what_is_provided(memory: PageMemory) -> None:
    before = resident_bytes()
    populator = Populator(memory, num_ahead_bytes=AHEAD_BYTES)
    ahead = AHEAD_BYTES // LAYOUT.bytes_per_page
    wait_for(populator, ahead)
    assert resident_bytes() - before < 4 * AHEAD_BYTES
    populator.reach(NUM_PAGES // 2)
    wait_for(populator, NUM_PAGES // 2 + ahead)
    used = resident_bytes() - before
    assert used > NUM_PAGES // 2 * LAYOUT.bytes_per_page
    assert used < NUM_PAGES * 3 // 4 * LAYOUT.bytes_per_page
    populator.reach(5)  # a lower page asks for nothing
    populator.reach(NUM_PAGES - 1)
    wait_for(populator, NUM_PAGES)
    populator.close()
    populator.close()


def test_what_is_written_meanwhile_stays(memory: PageMemory) -> None:
    populator = Populator(memory, num_ahead_bytes=1)
    arrays = [memory.array(layer, "kv").numpy() for layer in range(2)]
    populator.reach(NUM_PAGES - 1)
    for page in reversed(range(NUM_PAGES)):
        for layer, array in enumerate(arrays):
            array[page] = page + layer
    wait_for(populator, NUM_PAGES)
    populator.close()
    for layer, array in enumerate(arrays):
        assert (array.reshape(NUM_PAGES, -1) == np.arange(NUM_PAGES)[:, None] + layer).all()


def test_a_system_that_cannot_populate_memory_provides_all_of_it_at_once(
    memory: PageMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(start: int, num_bytes: int, advice: int) -> int:
        return -1

    monkeypatch.setattr("pagewood.engine.runner.cpu.populate._populate_function", lambda: cannot)
    num_threads = threading.active_count()
    before = resident_bytes()
    populator = Populator(memory, num_ahead_bytes=1)
    assert populator.num_populated == NUM_PAGES
    assert resident_bytes() - before > 0.9 * NUM_PAGES * LAYOUT.bytes_per_page
    assert threading.active_count() == num_threads
    populator.reach(NUM_PAGES - 1)
    populator.close()


if __name__ == "__main__":
    check_what_is_provided(allocate(LAYOUT, NUM_PAGES))
