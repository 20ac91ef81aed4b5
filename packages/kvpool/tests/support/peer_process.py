"""Another process with a store, which has put pages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager

_CODE = """
import sys
import numpy as np
from pagewood.kvpool.integrations.mooncake import MooncakePlace, MooncakeStore
from pagewood.kvpool.integrations.nixl import NixlStore
from pagewood.kvpool.tiers import RedisPlace
store = {store}
rows = list(np.random.default_rng(0).integers(0, 256, ({num_pages}, {page_bytes}), np.uint8))
keys = [index.to_bytes(32, "big") for index in range(len(rows))]
while not all(store.exists(keys)):
    store.put(keys, rows)
print("ready", flush=True)
sys.stdin.read()
store.close()
"""


@contextmanager
def peer_process(store: str, *, num_pages: int, page_bytes: int) -> Generator[subprocess.Popen[str]]:
    """Run a process; yield it when its store has pages.

    Their keys are the numbers from 0 on, and their bytes the rows of the random generator with the seed 0. The process
    leaves in good order when its input ends, as it does at the end.

    Args:
        store: expression that makes the store, with `page_bytes`.
        num_pages: number of pages.
        page_bytes: size of each.
    """
    code = _CODE.format(store=store, num_pages=num_pages, page_bytes=page_bytes)
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            assert "ready\n" in iter(process.stdout.readline, ""), "the peer has ended"
            yield process
            process.communicate(timeout=60)
        finally:
            process.kill()
