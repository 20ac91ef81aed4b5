# pyright: basic, reportMissingImports=false
"""What SGLang's own trees and ours cost its scheduler: CPU time of all tree calls of a request, on the same chats.

    nox -s integrations --install-only
    .nox/integrations/bin/python benchmarks/sglang_backend.py

Chats of several turns over one system prompt, in a memory that holds about half of them, between SGLang's real
requests, rows and allocators, with tensors on the CPU. Each round runs all trees in turn; compare only within one run.
`UnifiedRadixCache` with its Rust core is SGLang's default. On a GPU, SGLang's free list and slots are tensors there:
the same calls are then kernel launches.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

warnings.simplefilter("ignore")
sys.path.insert(0, str(Path(__file__).parents[1] / "packages/radixcache/tests/integrations"))
import conftest  # noqa: E402, F401  # makes SGLang importable without a GPU

# isort: split
import test_sglang  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixCache  # noqa: E402
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402

from pagewood.radixcache.integrations.sglang import PagewoodRadixCache  # noqa: E402

CALLS = ("match_prefix", "lock", "unlock", "checkpoint", "evict", "prefix_device_indices")


def unified(params):
    """Return SGLang's default tree."""
    params.tree_components, params.tree_core_backend = (ComponentType.FULL,), "rust"
    return UnifiedRadixCache(params)


TREES = {"RadixCache": RadixCache, "UnifiedRadixCache": unified, "PagewoodRadixCache": PagewoodRadixCache}


class Clock:
    """Adds up the CPU time of the outermost calls of a cache."""

    def __init__(self, cache) -> None:
        self.total_ns = 0
        self.is_inside = False
        for name in CALLS:
            setattr(cache, name, self.timed(getattr(cache, name)))

    def timed(self, call):
        def wrapped(*args, **kwargs):
            if self.is_inside:
                return call(*args, **kwargs)
            self.is_inside, started = True, time.process_time_ns()
            try:
                return call(*args, **kwargs)
            finally:
                self.total_ns += time.process_time_ns() - started
                self.is_inside = False

        return wrapped


class Server(test_sglang.Server):
    """Without a record of what the slots hold, and with longer rows."""

    max_length = 8192
    is_recording = False


def chats(tree, page_size: int, num_chats: int, num_turns: int) -> float:
    """Return the CPU microseconds of the tree calls of a request."""
    rng = random.Random(1)
    system = [rng.randrange(30_000) for _ in range(1000)]
    texts = [list(system) for _ in range(num_chats)]
    server = Server(tree, page_size, (1000 + num_chats * num_turns * 150) // page_size * page_size)
    clock, num_requests = Clock(server.cache), 0
    for _ in range(num_turns):
        for text in rng.sample(texts, num_chats):
            text += [rng.randrange(30_000) for _ in range(100)]
            req = server.start(text)
            if req is None:
                continue
            server.checkpoint(req)  # after the prompt
            for token in [rng.randrange(30_000) for _ in range(200)]:
                req.output_ids.append(token)
                text.append(token)
            server.extend(req, len(text) - 200, len(text))
            server.finish(req)
            num_requests += 1
    return clock.total_ns / 1000 / num_requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--chats", type=int, default=40, help="(default: %(default)s)")
    parser.add_argument("--turns", type=int, default=6, help="(default: %(default)s)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        test_sglang.publish_server_args(Path(folder))
        compare(arguments)


def compare(arguments: argparse.Namespace) -> None:
    """Print the times of the trees in turn, for each page size."""
    print("CPU microseconds of the tree calls of a request: median (least to most)")
    for page_size in (1, 16, 64):
        all_times: dict[str, list[float]] = {name: [] for name in TREES}
        for _ in range(arguments.rounds):
            for name, times in all_times.items():
                times.append(chats(TREES[name], page_size, arguments.chats, arguments.turns))
        for name, times in all_times.items():
            median = statistics.median(times)
            print(f"page {page_size:2}, {name:18}: {median:7.0f} ({min(times):.0f} to {max(times):.0f})")


if __name__ == "__main__":
    main()
