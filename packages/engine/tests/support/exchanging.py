"""A process that is one rank of a group and only exchanges: `exchanging.py RANK COUNT DESCRIPTOR THREADS SUMS`.

It makes the same random matrices as all others, one of each rank, sums and gathers its own, and writes what differs
from the sum in the order of ranks, or from all columns side by side; then a digest of all results.
"""

# pyright: basic
# numba's kernels have no types.

from __future__ import annotations

import random
import sys
import time
from functools import partial
from hashlib import sha256

import numpy as np

from pagewood.engine.runner.cpu.compiled.exchange import EXCHANGE
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.ranks.segment import Segment, mapped
from stand_ins.tapes import write_down

SHAPES = [(1, 1024), (40, 1000), (7, 20_000), (2, 16_384), (1, 300_001)]


def main(rank: int, count: int, descriptor: int, num_threads: int, num_sums: int) -> None:
    exchange = Segment.in_memory(mapped(descriptor), count).exchange(rank)
    kernel, digest = warm_up(16, others=[EXCHANGE]), sha256()
    sleeps = random.Random(rank)
    for shape in SHAPES:
        made = np.random.default_rng(shape[0])
        own = np.empty(shape, np.float32)
        add = write_down(exchange.sum_ranks, own, kernel=kernel, num_threads=num_threads)
        size = count * shape[1] - shape[1] // 3  # the last columns are left out
        gather = write_down(partial(exchange.gather_ranks, size=size), own, kernel=kernel, num_threads=num_threads)
        for _ in range(max(3, num_sums * 1024 // (shape[0] * shape[1]))):
            parts = made.standard_normal((count, *shape), np.float32)
            own[:] = parts[rank]
            if sleeps.random() < 0.01:
                time.sleep(sleeps.random() * 0.003)
            expected = parts[0]
            for part in parts[1:]:
                expected = expected + part
            found, side_by_side = add(), gather()
            if not np.array_equal(found, expected):
                print(f"rank {rank}: the sum of {shape} differs")
            if not np.array_equal(side_by_side, np.concatenate(list(parts), axis=1)[:, :size]):
                print(f"rank {rank}: the columns of {shape} differ")
            digest.update(found.tobytes())
    print(digest.hexdigest())


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
