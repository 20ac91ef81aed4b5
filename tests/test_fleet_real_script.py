"""The comparison of three real replicas with three simulated ones.

First, engines wait for each step as long as a model of steps says, which the simulator knows, too: everything else is
real, and the comparison holds on any machine. Then they compute: a trace of random chats goes to
`pagewood serve --replicas 3` with a model whose steps are long beside the work of HTTP, and the simulator, with steps
as they were measured on another trace of the same kind, predicts what clients see of it: output tokens per second and
percentiles of the time to the first token and of the whole answer. The script explains it. All must be within 15%,
which then only holds on a machine that does nothing else.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "fleet_real.py"
QUIET = "PAGEWOOD_QUIET_MACHINE"
"""Environment variable that is set where nothing else runs, so that times mean something."""


def run_script(*arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True, text=True, env=environment, timeout=1500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_it_compares_throughput_and_percentiles() -> None:
    rows = [line.split(" | ") for line in run_script("--smoke").splitlines() if line.endswith("% |")]
    assert len(rows) == 7
    assert all(float(real) > 0 and float(simulated) > 0 for _, real, simulated, _ in rows)


@pytest.mark.slow
def test_three_real_replicas_with_steps_of_known_length_are_as_the_simulator_says() -> None:
    rows = [line for line in run_script("--modelled", "--limit", "0.15").splitlines() if line.endswith("% |")]
    assert len(rows) == 7


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.skipif(QUIET not in os.environ, reason=f"{QUIET} is not set: other programs may run")
def test_three_real_replicas_are_as_the_simulator_says() -> None:
    run_script("--limit", "0.15")
