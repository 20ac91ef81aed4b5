"""The benchmarks of forms of weights, of kinds of models and of ranks run, without other engines."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("weights_peers.py", "--quick", "--threads", "1"), "| pagewood int4 | "),
        (("models.py", "--quick", "--threads", "1", "--only", "experts"), "- pagewood: "),
        (("ranks.py", "--quick"), "rank 1: Rss: "),
        (("weight_updates.py", "--quick"), "lost: none"),
        (("weights_quality.py", "--count", "1", "--tokens", "200"), "| int4 by GPTQ (training) | "),
    ],
)
def test_a_benchmark_runs(arguments: tuple[str, ...], shown: str) -> None:
    script, *options = arguments
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout
