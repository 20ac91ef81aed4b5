"""The command line: hit rates of a trace by policy and capacity, compared with upper bounds."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pagewood.radixcache.arrays import Int32
from pagewood.radixcache.cache import RadixCache
from pagewood.radixcache.trace.bound import num_best_hits, num_unbounded_hits
from pagewood.radixcache.trace.contenders import POLICIES, uses_queue
from pagewood.radixcache.trace.plot import can_plot, save_plot
from pagewood.radixcache.trace.progress import Progress
from pagewood.radixcache.trace.recording import num_blocks_of, read_trace
from pagewood.radixcache.trace.replay import replay
from pagewood.radixcache.trace.report import Report


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; invalid arguments or an invalid trace end it with a message and exit status 2."""
    parser = _parser()
    options = parser.parse_args(arguments)
    trace: Path = options.trace
    plot: Path | None = options.plot
    if plot is not None and not can_plot():
        parser.error("--plot needs matplotlib: pip install 'pagewood-radixcache[plot]'")
    try:
        requests = read_trace(trace)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if not num_blocks_of(requests):
        parser.error(f"{trace} must have at least one block, got none in {len(requests)} requests")
    report = _measure(
        trace.name,
        requests,
        policies=options.policy,
        capacities=sorted(set(options.capacity)),
        num_waiting=options.waiting,
    )
    print(report.to_table())
    if plot is not None:
        save_plot(report, plot)


def _measure(
    name: str,
    requests: Sequence[Int32],
    *,
    policies: Sequence[str],
    capacities: Sequence[int],
    num_waiting: int,
) -> Report:
    """Replay the trace once per policy and capacity, and report progress on stderr."""
    num_blocks = num_blocks_of(requests)
    progress = Progress(sys.stderr, (len(policies) + 1) * len(capacities))
    hit_rates: dict[str, list[float]] = {policy: [] for policy in policies}
    bound: list[float] = []
    for capacity in capacities:
        for name_of_policy, rates in hit_rates.items():
            tracked = progress.track(f"{name_of_policy}, {capacity:,} blocks", requests)
            policy = POLICIES[name_of_policy]()
            num_watched = num_waiting if uses_queue(policy) else 0
            num_hits = replay(tracked, RadixCache(1, policy=policy), num_blocks=capacity, num_waiting=num_watched)
            rates.append(num_hits / num_blocks)
        progress.start(f"farthest next use, {capacity:,} blocks")
        bound.append(num_best_hits(requests, num_blocks=capacity) / num_blocks)
    progress.finish()
    return Report(
        title=f"{name}, {len(requests):,} requests, {num_blocks:,} blocks",
        capacities=capacities,
        hit_rates=hit_rates,
        bound=bound,
        unbounded=num_unbounded_hits(requests) / num_blocks,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pagewood.radixcache.trace",
        description="Replay a trace into the cache, for each policy and capacity, and print the hit rates of blocks.",
        epilog="The last two rows of the table are upper bounds for every policy: evicting the block whose next use is "
        "farthest in the future, and a cache that never evicts.",
    )
    parser.add_argument("trace", type=Path, metavar="TRACE.jsonl", help="one JSON object per line: timestamp, hash_ids")
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=list(POLICIES), help="default: all")
    parser.add_argument(
        "--capacity", nargs="+", type=_number, default=[1000, 5000, 10_000, 20_000], metavar="BLOCKS",
        help="blocks of memory for the running request and the cache; default: 1000 5000 10000 20000",
    )  # fmt: skip
    parser.add_argument(
        "--waiting", type=_number, default=32, metavar="REQUESTS",
        help="number of requests that wait while one is served, for policies that use the queue; default: 32",
    )  # fmt: skip
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="also draw the curves; needs the extra [plot]")
    return parser


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number >= 1, got {text}")
    return int(text)


if __name__ == "__main__":
    main()
