"""The process of a rank on a stand-in for a CUDA device: `cuda_rank.py RANK DESCRIPTOR FREE_BYTES`.

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

from pagewood.engine.assembly import build_cuda, rank_process
from pagewood.engine.runner.ranks.group import RankProcess
from stand_ins import flashinfer_torch
from stand_ins.recording_device import RecordingDevice


def spawn(label: str, connection: int, descriptors: Sequence[int], *, free_bytes: int = 1 << 30) -> RankProcess:
    """Start the process of a rank, whose device has this much memory; see `group.spawn`."""
    return subprocess.Popen(
        [sys.executable, __file__, label, str(connection), str(free_bytes)],
        stdin=subprocess.DEVNULL,
        pass_fds=(connection, *descriptors),
        start_new_session=True,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    device = RecordingDevice(free_bytes=int(sys.argv[3]))
    build_cuda.open_cuda = lambda: (device, flashinfer_torch)  # pyright: ignore[reportAttributeAccessIssue]  # not ours
    rank_process.main(int(sys.argv[2]))
    os._exit(0)
