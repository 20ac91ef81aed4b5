"""Measures the first token of a resumed conversation of 8k tokens: KV on the device, on the host, on disk, or computed.

python benchmarks/resumed_conversation.py            # about three minutes on two cores
python benchmarks/resumed_conversation.py --quick    # a tiny model, only to test the script
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from end_to_end.model import FULL, QUICK, ModelShape, write_model
from pagewood.engine.api import EngineConfig, SamplingParams, Submit
from pagewood.engine.build import build_engine
from pagewood.engine.core.loop import Pending
from pagewood.engine.links import MemoryInbox, MemoryOutbox

NUM_NEW = 32
"""Tokens that the user adds."""
NUM_OTHER = 256
"""Tokens of each request in between."""


class System:
    """An engine that gets one request at a time."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self._inbox, self._outbox = MemoryInbox(), MemoryOutbox()
        self._engine = build_engine(
            EngineConfig(model=str(folder), max_running=2, **options), inbox=self._inbox, outbox=self._outbox
        )

    def first_token_s(self, prompt: list[int]) -> tuple[float, int]:
        """Return the seconds from the request to its first token, and the number of positions computed for it."""
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        before, start_s = self._engine.counters().num_tokens, perf_counter()
        self._inbox.put(Submit(request_id="x", tokens=np.array(prompt, "<i4").tobytes(), sampling=sampling))
        pending: Pending | None = None
        while not (deltas := self._outbox.take()):
            pending = self._engine.advance(pending)
        elapsed_s = perf_counter() - start_s
        assert deltas[-1].refusal is None, deltas[-1].refusal
        while pending is not None:
            pending = self._engine.advance(pending)
        return elapsed_s, self._engine.counters().num_tokens - before

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model and few tokens; its numbers mean nothing")
    parser.add_argument("--tokens", type=int, default=None, help="length of the conversation (default 8192)")
    arguments = parser.parse_args()
    shape, length = (QUICK, 512) if arguments.quick else (FULL, 8192)
    length = arguments.tokens or length
    with tempfile.TemporaryDirectory() as folder:
        for name, elapsed_s, num_computed in measure(Path(folder), shape, length):
            print(f"| {name} | {elapsed_s * 1e3:,.0f} ms | {num_computed:,} |", flush=True)


def measure(folder: Path, shape: ModelShape, length: int) -> list[tuple[str, float, int]]:
    """Return a list of (place of the KV, seconds to the first token, positions computed)."""
    model = folder / "model"
    write_model(shape, model, seed=0)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2 * length}))
    rng = np.random.default_rng(0)
    conversation = rng.integers(5, shape.vocab_size, length).tolist()
    resumed = [conversation + rng.integers(5, shape.vocab_size, NUM_NEW).tolist() for _ in range(3)]
    options = {
        "max_total_tokens": length + 2 * NUM_OTHER, "host_cache_gb": 2.0, "disk_cache_path": str(folder / "kv"),
        "disk_cache_gb": 2.0, "cache_write_policy": "write_through",
    }  # fmt: skip
    found: list[tuple[str, float, int]] = []

    def other() -> list[int]:
        return rng.integers(5, shape.vocab_size, NUM_OTHER).tolist()

    system = System(model, **options)
    system.first_token_s(other())  # warms up
    found.append(("computed", *system.first_token_s(conversation)))
    found.append(("on the device", *system.first_token_s(resumed[0])))
    for _ in range(0, length + NUM_OTHER, NUM_OTHER):  # evict the conversation from the device
        system.first_token_s(other())
    found.append(("on the host", *system.first_token_s(resumed[1])))
    system.close()
    system = System(model, **options)
    system.first_token_s(other())
    found.append(("on the disk, after a restart", *system.first_token_s(resumed[2])))
    system.close()
    return found


if __name__ == "__main__":
    main()
