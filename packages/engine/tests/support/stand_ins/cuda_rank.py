"""The process of a rank on a stand-in for a CUDA device: `cuda_rank.py RANK DESCRIPTOR FREE_BYTES FAULT`.

Otherwise it is `assembly.rank_process`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # not ours

import torch

from pagewood.engine.assembly import rank_process
from pagewood.engine.assembly.cuda import build as build_cuda
from pagewood.engine.runner.ranks import following
from pagewood.engine.runner.ranks.group import RankProcess
from stand_ins import flashinfer_torch
from stand_ins.recording_device import RecordingDevice

FAULTS = {
    "skips": (
        "number += 1",
        """number += 1
                if number == 9:
                    continue""",
    ),
    "old tables": (
        "assert isinstance(batch, Batch)",
        """assert isinstance(batch, Batch)
                batch.page_ids[:] = 0""",
    ),
    "other pages": (
        "assert isinstance(batch, Batch)",
        """assert isinstance(batch, Batch)
                batch.page_ids[batch.page_columns > 0] -= 1""",
    ),
    "other seed": (
        "assert isinstance(batch, Batch)",
        """assert isinstance(batch, Batch)
                batch.sampling.words[:, 0] += 1""",
    ),
}
"""What ranks other than 0 do wrong: a piece of `following._follow`, and what stands there instead."""


def spawn(
    label: str, connection: int, descriptors: Sequence[int], *, free_bytes: int = 1 << 30, fault: str = ""
) -> RankProcess:
    """Start the process of a rank, whose device has this much memory; see `group.spawn`.

    `fault` is one of `FAULTS`, or nothing; "RANK:FAULT": that rank only.
    """
    return subprocess.Popen(
        [sys.executable, __file__, label, str(connection), str(free_bytes), fault],
        stdin=subprocess.DEVNULL,
        pass_fds=(connection, *descriptors),
        start_new_session=True,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    which, _, name = sys.argv[4].rpartition(":")
    if name and (not which or which == sys.argv[1].partition("-")[0]):
        import pytest  # neither is there where a packed check runs

        from seeded_faults import seed_fault

        seed_fault([(following, "_follow", *FAULTS[name])], pytest.MonkeyPatch())
    device = RecordingDevice(free_bytes=int(sys.argv[3]))
    build_cuda.open_cuda = lambda: (device, flashinfer_torch)  # pyright: ignore[reportAttributeAccessIssue]  # not ours
    build_cuda.compile_for = lambda config, progress: None  # pyright: ignore[reportAttributeAccessIssue]  # not ours
    rank_process.main(int(sys.argv[2]))
    os._exit(0)
