"""Ranks exchange values through shared memory: right, with the same bits everywhere, and never waiting for ever."""

# pyright: basic
# numba's kernels have no types.

from __future__ import annotations

import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from pagewood.engine.runner.cpu.compiled.exchange import EXCHANGE
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.ranks.segment import Segment, mapped, segment_bytes, shared_memory
from stand_ins.tapes import write_down

SCRIPT = Path(__file__).parent / "support" / "exchanging.py"


@pytest.mark.parametrize(
    ("count", "num_threads", "num_sums"),
    [
        (2, 1, 200),
        *(pytest.param(*case, marks=pytest.mark.slow)
          for case in ((3, 1, 100), (2, 1, 10_000), (2, 3, 1000), (3, 2, 1000))),
    ],
)  # fmt: skip
def test_processes_get_the_same_sums_whenever_they_arrive(count: int, num_threads: int, num_sums: int) -> None:
    warm_up(16, others=[EXCHANGE])  # so that no process compiles while the others wait
    descriptor = shared_memory(segment_bytes(count))
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parent)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), *map(str, (rank, count, descriptor, num_threads, num_sums))],
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=(descriptor,),
            env=environment,
        )
        for rank in range(count)
    ]
    os.close(descriptor)
    outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * count
    assert len(outputs[0].splitlines()) == 1, outputs[0]  # nothing differs
    assert len(set(outputs)) == 1


@pytest.mark.parametrize("is_sum", [True, False])
def test_an_exchange_ends_with_its_group(is_sum: bool) -> None:
    descriptor = shared_memory(segment_bytes(2))
    segment = Segment.in_memory(mapped(descriptor), 2)
    os.close(descriptor)
    kernel = warm_up(16, others=[EXCHANGE])
    exchange = segment.exchange(0)
    operation = exchange.sum_ranks if is_sum else partial(exchange.gather_ranks, size=80_000)
    run = write_down(operation, np.ones((2, 40_000), np.float32), kernel=kernel, num_threads=1)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()  # the other rank never comes
    segment.ended[0] = 2
    thread.join(60)
    assert not thread.is_alive()
