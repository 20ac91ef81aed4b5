from pathlib import Path

import pytest

from pagewood.engine.assembly.available_memory import available_memory_bytes

GB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = f"MemTotal: {16 << 20} kB\nMemFree: {1 << 20} kB\nMemAvailable: {8 << 20} kB\nBuffers: 0 kB\n"
V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, 8 * GB),
        ({f"{V2}/memory.max": "max\n", f"{V2}/memory.current": str(GB)}, 8 * GB),
        ({f"{V2}/memory.max": f"{4 * GB}\n", f"{V2}/memory.current": f"{GB}\n"}, 3 * GB),
        ({f"{V2}/memory.max": str(64 * GB), f"{V2}/memory.current": str(GB)}, 8 * GB),
        ({f"{V1}/memory.limit_in_bytes": str(2 * GB), f"{V1}/memory.usage_in_bytes": str(GB)}, GB),
        ({f"{V2}/memory.max": str(GB), f"{V2}/memory.current": str(GB + 4096)}, 0),
    ],
)
def test_a_container_may_leave_less_than_the_system(tmp_path: Path, files: dict[str, str], available: int) -> None:
    assert available_memory_bytes(write(tmp_path, {"proc/meminfo": MEMINFO, **files})) == available


def test_without_proc_the_answer_is_positive(tmp_path: Path) -> None:
    assert available_memory_bytes(tmp_path) > 0


def test_this_system_has_memory() -> None:
    assert available_memory_bytes() > 0
