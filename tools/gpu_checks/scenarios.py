"""Random traffic over the echo model, through the CUDA runner's staging, tables, graphs and copies."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import random

from gpu_checks.host import Failed, Host
from pagewood.engine.testing import Scenario, random_scenario, run_scenario
from pagewood.engine.testing.echo_cuda import WatchedCUDARunner
from pagewood.engine.testing.scenario import VOCAB_SIZE

NUM_SCENARIOS = 60


def check_echo(host: Host) -> str:
    """Random arrivals, aborts, priorities, page and chunk sizes: the output is the sequential oracle's."""
    found: list[str] = []
    for seed in range(NUM_SCENARIOS if host.is_gpu else 12):

        def make_runner(scenario: Scenario, with_graphs: bool = seed % 3 > 0) -> WatchedCUDARunner:
            return WatchedCUDARunner(
                host.device, num_rows=scenario.config.max_running, max_length=scenario.max_length,
                num_pages=scenario.num_pages, page_size=scenario.config.page_size, vocab_size=VOCAB_SIZE,
                with_graphs=with_graphs,
            )  # fmt: skip

        try:
            run_scenario(random_scenario(random.Random(seed), overlap=seed % 4 > 0), make_runner=make_runner)
        except Exception as error:  # the other scenarios are told, too
            found.append(f"scenario {seed}: {type(error).__name__}: {error}")
    if found:
        raise Failed(f"{len(found)} of {NUM_SCENARIOS}: " + "; ".join(found[:3]))
    return f"{NUM_SCENARIOS if host.is_gpu else 12} scenarios"
