"""What caches of hybrid models find, at equal memory: pages with states apart, against blocks that hold both.

    python benchmarks/hybrid_cache.py                   # agents with many short turns; some minutes
    python benchmarks/hybrid_cache.py TRACE.jsonl --memory 915456     # a trace of Mooncake's form instead
    python benchmarks/hybrid_cache.py --smoke           # only to see that the script works

A hybrid model can go on behind a prefix only from a state that was kept at its end. A state takes as much memory as the
keys and values of some hundred tokens (`--state-tokens`). Three ways, and none:

pages and states   pages of 16 tokens in `radixcache`, and states in places of their own at the ends of prompts and
                   turns, where prompts part, and every so many tokens of a long prompt, as in pagewood-engine
blocks of N        each block of N tokens has their keys and values and the state behind it, and hits whole

The simulator runs one replica; all get the same bytes, given as the tokens of keys and values that would fill them.
Results do not depend on the machine. Mooncake's trace knows prompts in blocks of 512 tokens, which a page must divide
or be a multiple of: there, blocks of 512 stand for those of 528, and the state at the end of a prompt is also kept at
the end of its last whole block, since what continues the prompt shares no more in this trace.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray

from pagewood.radixcache import RadixCache
from pagewood.schedpolicy.simulation import (
    H100_8B,
    BlockCache,
    Fleet,
    Objective,
    OverTokens,
    Trace,
    TraceRequest,
    load_trace,
    policies_named,
    simulate,
    summarise,
)
from pagewood.schedpolicy.simulation.cache import PrefixCache
from pagewood.schedpolicy.simulation.policies import DEFAULT_BUDGET
from pagewood.schedpolicy.simulation.trace import scaled

PAGE_SIZE = 16
NUM_ROWS = 32
LEAST_INTERVAL = 256
OBJECTIVE = Objective()


class PagesAndStates:
    """A cache of the simulator over `RadixCache`: a prefix is found as far as one of its ends has a state.

    Pages are tokens of the tree.

    Invariant: every place is free or owned by the tree.
    """

    def __init__(self, *, num_places: int, interval: int) -> None:
        """Start empty.

        Args:
            num_places: states that it may keep, >= 1.
            interval: pages between states within a prompt.
        """
        self._cache = RadixCache(page_size=1)
        self._pages = OverTokens(self._cache, array=_tokens)
        self._free = list(range(num_places))  # written by: PagesAndStates
        self._interval = interval

    @property
    def num_pages(self) -> int:
        """Cached pages."""
        return self._pages.num_pages

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` can free now."""
        return self._pages.num_evictable

    def match(self, keys: Sequence[int]) -> int:
        """Return how many of the leading pages end with a state."""
        return self._cache.peek(_tokens(keys), needs_snapshot=True).num_tokens

    def insert(self, keys: Sequence[int], num_pages: int) -> int:
        """Adopt pages, and keep states at their end, where they part from others, and every `interval` between."""
        tokens, known = _tokens(keys[:num_pages]), num_pages - self._pages.insert(keys, num_pages)
        if known:
            self._attach(tokens[:known], is_spare=False)
        for end in range((known // self._interval + 1) * self._interval, num_pages, self._interval):
            self._attach(tokens[:end], is_spare=True)
        named = sum(key >= 0 for key in keys[:num_pages])
        for end in sorted({named, num_pages}):
            if end > known:
                self._attach(tokens[:end], is_spare=False)
        return num_pages - known

    def lock(self, keys: Sequence[int], num_pages: int) -> None:
        """Lock the first `num_pages` pages, which are cached, against eviction; their state counts as used."""
        self._cache.match(_tokens(keys[:num_pages]), needs_snapshot=True)
        self._pages.lock(keys, num_pages)

    def unlock(self, keys: Sequence[int], num_pages: int) -> None:
        """Undo one lock; the pages count as used now."""
        self._pages.unlock(keys, num_pages)

    def evict(self, num_pages: int) -> int:
        """Evict up to `num_pages` unlocked pages, and return how many."""
        return self._pages.evict(num_pages)

    def _attach(self, tokens: NDArray[np.int32], *, is_spare: bool) -> None:
        if not self._free:
            self._free += self._cache.evict_snapshots(0 if is_spare else 1).tolist()
        if self._free and not self._cache.attach(self._cache.peek(tokens).node, self._free[-1]):
            return
        del self._free[-1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to keep what a prefix needs.

    Attributes:
        name: for the table.
        page_size: tokens.
        num_pages: pages, or blocks, that fit.
        make_cache: makes the empty cache.
        shares: False if no request finds what another has computed.
    """

    name: str
    page_size: int
    num_pages: int
    make_cache: Callable[[], PrefixCache]
    shares: bool = True


def ways(memory: int, state_tokens: int, blocks: Sequence[int], *, share: float) -> Iterator[Way]:
    """Yield the ways that have `memory` tokens' worth of bytes, of which a state takes `state_tokens`.

    The states of the running requests come out of the same memory in all of them; `share` of the rest is for states.
    """
    memory -= NUM_ROWS * state_tokens
    num_places = max(1, int(memory * share) // state_tokens)
    interval = max(state_tokens, LEAST_INTERVAL) // PAGE_SIZE
    num_pages = (memory - num_places * state_tokens) // PAGE_SIZE

    def apart() -> PagesAndStates:
        return PagesAndStates(num_places=num_places, interval=interval)

    yield Way(name="pages and states", page_size=PAGE_SIZE, num_pages=num_pages, make_cache=apart)
    for block in blocks:
        num_blocks = memory // (block + state_tokens)
        yield Way(name=f"blocks of {block:,}", page_size=block, num_pages=num_blocks, make_cache=BlockCache)
    yield Way(name="no cache", page_size=PAGE_SIZE, num_pages=memory // PAGE_SIZE, make_cache=BlockCache, shares=False)


def agents(num_requests: int, *, rate: float, seed: int) -> Trace:
    """Agents with long instructions and many short turns: 50 to 400 tokens each, a few seconds apart."""
    rng, next_key = Random(seed), iter(range(2**31))
    systems = [[next(next_key) for _ in range(rng.randint(1500, 5000) // PAGE_SIZE)] for _ in range(8)]
    requests: list[TraceRequest] = []
    start_s = 0.0
    while len(requests) < num_requests:
        start_s += rng.expovariate(rate / 20)
        keys, now_s = list(rng.choice(systems)), start_s
        length = len(keys) * PAGE_SIZE + rng.randint(1, PAGE_SIZE - 1)
        for _ in range(rng.randint(5, 35)):
            num_prompt = length + rng.randint(30, 250)
            num_output = rng.randint(20, 150)
            length = num_prompt + num_output
            keys += [next(next_key) for _ in range(length // PAGE_SIZE - len(keys))]
            requests.append(
                TraceRequest(arrived_s=now_s, num_prompt=num_prompt, num_output=num_output, max_new_tokens=num_output,
                             keys=tuple(keys))
            )  # fmt: skip
            now_s += num_output * 0.02 + rng.expovariate(1 / 4)
    requests.sort(key=lambda request: request.arrived_s)
    return Trace(name="agents", requests=tuple(requests[:num_requests]), block_size=PAGE_SIZE)


def rows(trace: Trace, memory: int, state_tokens: int, blocks: Sequence[int], *, share: float) -> Iterator[str]:
    """Yield a row of the table for each way."""
    num_prompt = sum(request.num_prompt for request in trace.requests)
    alone = replace(trace, requests=tuple(replace(request, keys=()) for request in trace.requests))
    for way in ways(memory, state_tokens, blocks, share=share):
        fleet = Fleet(machine=H100_8B, num_pages=way.num_pages, page_size=way.page_size, num_replicas=1, overlaps=True)
        policies = policies_named("fcfs", page_size=way.page_size, budget=replace(DEFAULT_BUDGET, max_running=NUM_ROWS))
        observed = simulate(
            trace if way.shares else alone,
            fleet,
            make_policies=lambda replica, policies=policies: policies,
            make_cache=way.make_cache,
        )
        hits = sum(record.num_hit for one in observed for record in one.records)
        again = sum(record.num_recomputed for one in observed for record in one.records)
        summary = summarise(observed, OBJECTIVE)
        yield (
            f"| {trace.name} | {state_tokens:,} | {way.name} | {hits / 1e6:.2f} | {hits / num_prompt:.1%} | "
            f"{(num_prompt - hits + again) / 1e6:.2f} | {summary.ttft.p50 * 1e3:.0f} | {summary.ttft.p99 * 1e3:.0f} |"
        )


def _tokens(keys: Sequence[int]) -> NDArray[np.int32]:
    return np.array(keys, np.int32)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", type=Path, help="a trace of Mooncake's form")
    parser.add_argument("--memory", type=int, default=500_000, help="in tokens of keys and values")
    parser.add_argument("--state-tokens", type=int, nargs="+", default=[528, 2048], help="size of a state, in these")
    parser.add_argument("--state-share", type=float, default=0.25, help="part of memory for states that are apart")
    parser.add_argument("--requests", type=int, default=5_000, help="of the agents")
    parser.add_argument("--rate", type=float, default=0.125, help="of the trace from a file, as a factor")
    parser.add_argument("--smoke", action="store_true", help="a few requests, only to see that the script works")
    options = parser.parse_args(arguments)
    print("| trace | state | way | M tokens found | of prompts | M computed | first token p50, ms | p99 |")
    print("|---|--:|---|--:|--:|--:|--:|--:|")
    num_requests = 60 if options.smoke else options.requests
    traces = [(agents(num_requests, rate=4.0, seed=1), (528, 2048))]
    if options.trace is not None:
        traces = [(scaled(load_trace(options.trace), rate=options.rate), (512, 2048))]
    for trace, blocks in traces:
        for state_tokens in options.state_tokens:
            for row in rows(trace, options.memory, state_tokens, blocks, share=options.state_share):
                print(row, flush=True)


if __name__ == "__main__":
    main()
