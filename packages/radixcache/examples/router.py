"""A router that sends each request to the replica that will finish computing its prompt first.

It keeps one index per replica, built from the replica's events. In this demo one message in ten is lost.

    pip install pagewood-radixcache
    python router.py
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pagewood.radixcache import RadixCache
from pagewood.radixcache.events import EventLog, Position, RemoteIndex, block_hashes

Int32 = npt.NDArray[np.int32]
BLOCK_SIZE = 16


class Replica:
    """The prefix cache of an engine, without the engine."""

    def __init__(self, num_pages: int) -> None:
        self.cache = RadixCache(BLOCK_SIZE)
        self.log = EventLog(self.cache)
        self.free = np.arange(num_pages, dtype=np.int32)

    def serve(self, prompt: Int32) -> int:
        """Cache a prompt, and return how many of its tokens were cached already."""
        match = self.cache.match(prompt)
        lease = self.cache.lock(match.node)
        rest = prompt[match.num_tokens :]
        num_pages = len(rest) // BLOCK_SIZE
        self.free = np.concatenate((self.free, self.cache.evict(max(0, num_pages - len(self.free)))))
        pages, self.free = np.split(self.free, [num_pages])
        self.cache.insert(rest, pages, after=lease)
        self.cache.unlock(lease)
        return match.num_tokens


@dataclass(slots=True, kw_only=True)
class Route:
    """What the router knows about a replica."""

    index: RemoteIndex = field(default_factory=RemoteIndex)
    num_queued: float = 0  # tokens sent to the replica that it has not computed yet
    published: Position | None = None  # the end of what the replica has sent


class Router:
    """Picks the replica that will finish computing a prompt first."""

    def __init__(self, num_replicas: int) -> None:
        self.routes = [Route() for _ in range(num_replicas)]

    def pick(self, prompt: Int32) -> int:
        """Return the replica with the fewest tokens to compute, including its queue."""
        cached = [0] * len(self.routes)
        candidates = list(range(len(self.routes)))  # replicas that have all blocks up to here
        for end, block_hash in enumerate(block_hashes(prompt, BLOCK_SIZE), 1):
            candidates = [replica for replica in candidates if block_hash in self.routes[replica].index]
            if not candidates:
                break
            for replica in candidates:
                cached[replica] = end * BLOCK_SIZE
        costs = [
            len(prompt) - num_cached + route.num_queued for num_cached, route in zip(cached, self.routes, strict=True)
        ]
        best = costs.index(min(costs))
        self.routes[best].num_queued = costs[best]
        return best

    def listen(self, replica: int, log: EventLog, is_lost: Callable[[], bool]) -> None:
        """Receive what a replica publishes, and request again what was lost."""
        route = self.routes[replica]
        update = log.read(route.published)
        route.published = update.end
        if not is_lost() and not route.index.apply(update):
            route.index.apply(log.read(route.index.position))  # a gap: request what is missing, events or a snapshot


def run(*, by_prefix: bool) -> float:
    """Serve 60 conversations of 6 turns on 4 replicas, and return the share of tokens that were cached."""
    rng, losses = np.random.default_rng(0), random.Random(0)
    systems = rng.integers(0, 32_000, (8, 800), dtype=np.int32)
    chats = [systems[chat % 8] for chat in range(60)]
    replicas, router = [Replica(num_pages=2000) for _ in range(4)], Router(4)
    num_tokens = num_cached = 0
    for turn, chat in enumerate(rng.permutation(np.repeat(np.arange(60), 6)).tolist()):
        prompt = chats[chat] = np.concatenate((chats[chat], rng.integers(0, 32_000, 200, dtype=np.int32)))
        chosen = router.pick(prompt) if by_prefix else turn % 4
        num_cached += replicas[chosen].serve(prompt)
        num_tokens += len(prompt)
        for replica, route in enumerate(router.routes):
            router.listen(replica, replicas[replica].log, lambda: losses.random() < 0.1)
            route.num_queued = max(0, route.num_queued - 150)  # what a replica computes between two requests
    return num_cached / num_tokens


def main() -> None:
    """Compare routing by prefix with round robin."""
    print(f"round robin: {run(by_prefix=False):.0%} of the tokens were cached")
    print(f"by prefix:   {run(by_prefix=True):.0%} of the tokens were cached")


if __name__ == "__main__":
    main()
