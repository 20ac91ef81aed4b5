import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pagewood.engine.api import EngineConfig
from pagewood.engine.assembly.available_memory import available_memory_bytes
from pagewood.engine.build import build_engine
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.model_folder.folder import model_folder


def build(**options: object) -> tuple[int, int]:
    """Build an engine with the embedded model; return (pages, longest request)."""
    config = EngineConfig(**options)  # pyright: ignore[reportArgumentType]
    engine = build_engine(config, inbox=MemoryInbox(), outbox=MemoryOutbox())
    engine.close()
    return engine.info.num_pages, engine.info.max_length


def test_memory_is_as_configured_and_bounds_the_longest_request() -> None:
    assert build(max_total_tokens=1000, page_size=16) == (62, 992)
    assert build(max_total_tokens=1000, page_size=16, max_length=100) == (62, 100)


def test_memory_is_at_most_what_all_rows_can_use() -> None:
    num_pages, max_length = build(max_running=2, page_size=16)
    assert num_pages == 2 * max_length // 16


def test_memory_has_room_for_typical_requests_and_for_the_longest(tmp_path: Path) -> None:
    folder = tmp_path / "long"
    shutil.copytree(model_folder(None), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 10_000}))
    assert build(model=str(folder), max_running=3, page_size=16) == (625, 10_000)
    assert build(model=str(folder), max_running=8, page_size=16) == (8 * 128, 10_000)
    assert build(model=str(folder), max_running=8, page_size=16, max_length=100) == (8 * 7, 100)


def test_a_stretched_rope_gives_longer_requests(tmp_path: Path) -> None:
    folder = tmp_path / "yarn"
    shutil.copytree(model_folder(None), folder)
    config = json.loads((folder / "config.json").read_text())
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 500, "rope_theta": 10000.0}
    config |= {"max_position_embeddings": 500, "rope_parameters": rope, "rope_scaling": None}
    (folder / "config.json").write_text(json.dumps(config))
    assert build(model=str(folder), max_total_tokens=4000)[1] == 2000


RESIDENT = """
from pagewood.engine import LLM

def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

with LLM(max_total_tokens=1_000_000, max_running=64) as llm:
    llm.generate("Hello")
    print(resident())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux' /proc")
def test_memory_is_not_resident_before_it_is_used() -> None:
    layout_bytes = 1_000_000 * 4 * 2 * 2 * 64 * 4  # tokens, layers, keys and values, heads, elements, bytes
    if layout_bytes > available_memory_bytes():
        pytest.skip("needs address space that the test would not use")
    output = subprocess.run([sys.executable, "-c", RESIDENT], check=True, capture_output=True, text=True).stdout
    assert int(output.splitlines()[-1]) < 1.5e9


def test_a_length_that_does_not_fit_is_an_error_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"max_length must be at most 96 .* got 200"):
        build(max_total_tokens=100, max_length=200)


def test_more_memory_than_is_available_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"max_total_tokens must be at most \d+, .* GB of memory, got 1000000000000"):
        build(max_total_tokens=10**12)


def test_weights_that_do_not_fit_into_memory_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagewood.engine.assembly.cpu.build.available_memory_bytes", lambda: 1_000_000)
    with pytest.raises(ValueError, match=r"model must fit into the 0\.0 GB of memory .*, got 0\.0 GB of weights"):
        build(max_total_tokens=256)


def test_progress_counts_up_to_its_total() -> None:
    seen: list[tuple[str, int, int]] = []
    engine = build_engine(
        EngineConfig(max_total_tokens=256),
        inbox=MemoryInbox(),
        outbox=MemoryOutbox(),
        progress=lambda what, done, total: seen.append((what, done, total)),
    )
    engine.close()
    assert seen
    assert all(0 <= done <= total for _, done, total in seen)
    assert seen[-1][1] == seen[-1][2]


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match=r"schedule_policy must be one of fcfs, .*, tag, got 'first'"):
        build(max_total_tokens=256, schedule_policy="first")
