import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "shared_kv.py"


def test_the_second_process_finds_the_kv_of_the_first(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLE), str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "first: 0 tokens found, 160 computed, KV right: True",
        "second: 160 tokens found, 0 computed, KV right: True",
    ]
