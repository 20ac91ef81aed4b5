"""What 128, 1,000 and 10,000 waiting requests cost a scheduling pass, with live matches from a real prefix cache.

    python benchmarks/waiting_queue.py                    # about a minute on one core
    python benchmarks/waiting_queue.py --quick            # only to see that the script works

Prompts of 2,000 tokens in families of 16 that share 1,504; a pass takes 64 from the front. Two tables: the orders alone
over the watches of a cache, and the engine's planner.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from pagewood.engine.api import EngineConfig, SamplingParams, Submit
from pagewood.engine.assemble import assemble
from pagewood.engine.core.loop import EngineInfo
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.result import StepResult
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.radixcache import RadixCache
from pagewood.schedpolicy import order_named

NUM_TOKENS = 2000
NUM_SHARED = 1504
NUM_ADMITTED = 64
FAMILY = 16
PAGE_SIZE = 16
ORDERS = ("fcfs", "lpm", "dfs-weight", "fair")


@dataclass(slots=True, eq=False, kw_only=True)
class Queued:
    """A waiting request, as the orders read it."""

    arrival: int
    arrived_s: float
    tokens: Int32
    tenant: str
    watch: Any = None
    priority: int = 0
    num_tokens: int = NUM_TOKENS
    num_generated: int = 0
    max_new_tokens: int = 256

    @property
    def num_matched(self) -> int:
        """Tokens that are cached now."""
        return self.watch.num_tokens

    def prefix(self, num_tokens: int) -> bytes:
        """Return the first tokens as bytes."""
        return self.tokens[:num_tokens].tobytes()


class Prompts:
    """Prompts of random families."""

    def __init__(self, num_waiting: int) -> None:
        self.rng = np.random.default_rng(0)
        num_families = max(1, num_waiting // FAMILY)
        self.families = self.rng.integers(0, 32_000, (num_families, NUM_SHARED), dtype=np.int32)

    def next(self) -> Int32:
        """[NUM_TOKENS] int32."""
        own = self.rng.integers(0, 32_000, NUM_TOKENS - NUM_SHARED, dtype=np.int32)
        return np.concatenate((self.rng.choice(self.families), own))


class Orders:
    """An order over the watches of a cache; between two passes one family is cached, and another evicted."""

    def __init__(self, name: str, num_waiting: int, *, notified: bool) -> None:
        self.order: Any = order_named(name, notified=notified)
        self.notified = notified
        self.cache = RadixCache(PAGE_SIZE)
        self.group = self.cache.watch_group()
        self.prompts = Prompts(num_waiting)
        self.num_arrivals = 0
        self.num_pages = 0
        self.taken: list[Queued] = []
        for family in self.prompts.families[::2]:
            self.store(family)
        for _ in range(num_waiting):
            self.arrive()

    def arrive(self) -> None:
        """Add a new request to the queue."""
        tokens = self.prompts.next()
        request = Queued(
            arrival=self.num_arrivals,
            arrived_s=self.num_arrivals / 1000,
            tokens=tokens,
            tenant=f"tenant-{self.num_arrivals % 8}",
        )
        request.watch = self.group.watch(request, tokens)
        self.num_arrivals += 1
        self.order.add(request)

    def store(self, family: Int32) -> None:
        """Cache the shared prefix of a family."""
        pages = np.arange(self.num_pages, self.num_pages + NUM_SHARED // PAGE_SIZE, dtype=np.int32)
        if self.cache.peek(family).num_tokens == 0:
            self.cache.insert(family, pages)
            self.num_pages += len(pages)

    def between(self) -> None:
        """End the admitted requests, add as many new ones, and change some matches."""
        for request in self.taken:
            self.order.stop(request)
            request.watch.close()
            self.arrive()
        self.store(self.prompts.rng.choice(self.prompts.families))
        self.cache.evict(NUM_SHARED // PAGE_SIZE)

    def one_pass(self) -> None:
        """Admit the first requests of the order."""
        if self.notified:
            for request in self.group.changed():
                self.order.update(request)
        self.taken = list(islice(self.order.ordered(self.num_arrivals / 1000), NUM_ADMITTED))
        for request in self.taken:
            self.order.admit(request)


class NoStep:
    """A launched step whose result is available at once."""

    def __init__(self, num_sampled: int) -> None:
        self._result = StepResult.of_one_each(np.full(num_sampled, 5, np.int32))

    def wait(self) -> StepResult:
        """Return one token for each sampled grant."""
        return self._result


class NoDevice:
    """A runner that computes nothing."""

    def launch(self, batch: Batch) -> NoStep:
        """Return a finished step."""
        return NoStep(len(batch.sampled))

    def close(self) -> None:
        """Do nothing."""


class Timed:
    """Adds up the time that is spent in some methods of an object, and in steps of its iterators."""

    def __init__(self, inner: Any, methods: Sequence[str]) -> None:
        self._inner = inner
        self.seconds = 0.0
        self.num_changed = 0
        for name in methods:
            setattr(self, name, self._timed(getattr(inner, name)))

    def ordered(self, now_s: float) -> Iterator[Any]:
        """Yield the requests of an order."""
        passing = self._timed(self._inner.ordered)(now_s)
        step = self._timed(lambda: next(passing, None))
        while (request := step()) is not None:
            yield request

    def changed(self) -> list[Any]:
        """Return the requests of a group of watches that have changed, and count them."""
        requests = self._timed(self._inner.changed)()
        self.num_changed += len(requests)
        return requests

    def __getattr__(self, name: str) -> Any:
        """Return what is not timed."""
        return getattr(self._inner, name)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            start_s = perf_counter()
            result = call(*arguments)
            self.seconds += perf_counter() - start_s
            return result

        return wrapped


class TimedPlanner:
    """A planner with a clock around it: every other plan is timed as a whole, the others by the time in the queue."""

    def __init__(self, planner: Any) -> None:
        self._planner = planner
        self.plan_s: list[float] = []
        self.queue_s: list[float] = []
        self.num_changed: list[int] = []
        self.num_admitted: list[int] = []

    def plan(self, state: Any, now_s: float) -> Any:
        """Plan, and note how long it took."""
        if len(self.plan_s) <= len(self.queue_s):
            start_s = perf_counter()
            planned = self._planner.plan(state, now_s)
            self.plan_s.append(perf_counter() - start_s)
        else:
            queue = state.waiting
            order, group = queue._order, queue._group
            queue._order = timed_order = Timed(order, ("add", "remove", "update", "admit", "stop"))
            timed_group = None if group is None else Timed(group, ())
            queue._group = timed_group
            planned = self._planner.plan(state, now_s)
            queue._order, queue._group = order, group
            self.queue_s.append(timed_order.seconds + (0.0 if timed_group is None else timed_group.seconds))
            self.num_changed.append(0 if timed_group is None else timed_group.num_changed)
        self.num_admitted.append(len(planned.grants))
        return planned


def planning(name: str, num_waiting: int, num_rounds: int) -> TimedPlanner:
    """Let an engine admit 64 requests of one output token in each step, over and over; as many come as go."""
    inbox, outbox, prompts = MemoryInbox(), MemoryOutbox(), Prompts(num_waiting)
    engine: Any = assemble(
        EngineConfig(
            schedule_policy=name,
            page_size=PAGE_SIZE,
            max_running=NUM_ADMITTED,
            max_prefills=NUM_ADMITTED,
            chunked_prefill_size=NUM_ADMITTED * NUM_TOKENS,
            overlap=False,
        ),
        info=EngineInfo(
            model_name="none",
            max_length=NUM_TOKENS + 1,
            vocab_size=32_000,
            eos_token_ids=(),
            num_pages=8 * NUM_ADMITTED * NUM_TOKENS // PAGE_SIZE,
            page_size=PAGE_SIZE,
        ),
        make_runner=lambda kv: NoDevice(),
        inbox=inbox,
        outbox=outbox,
    )
    timed = engine._planner = TimedPlanner(engine._planner)
    num_missing, num_arrivals = num_waiting, 0
    while len(timed.queue_s) <= num_rounds:
        for _ in range(num_missing):
            tokens, namespace = prompts.next().tobytes(), None
            sampling = SamplingParams(max_tokens=1, ignore_eos=True)
            inbox.put(Submit(request_id=str(num_arrivals), tokens=tokens, sampling=sampling, namespace=namespace))
            num_arrivals += 1
        engine.step()
        num_missing = sum(delta.finish is not None for delta in outbox.take())
    del timed.plan_s[0], timed.queue_s[0]  # the first pass is not counted
    return timed


def ordering_us(name: str, num_waiting: int, num_rounds: int, *, notified: bool) -> float:
    """Return the median microseconds of a pass, without the first."""
    orders, seconds = Orders(name, num_waiting, notified=notified), list[float]()
    orders.one_pass()
    for _ in range(num_rounds):
        orders.between()
        start_s = perf_counter()
        orders.one_pass()
        seconds.append(perf_counter() - start_s)
    return 1e6 * median(seconds)


def main() -> None:
    """Measure, and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only 128 waiting, two rounds")
    quick: bool = parser.parse_args().quick
    sizes, num_rounds = ((128,), 2) if quick else ((128, 1000, 10_000), 30)
    print("Orders over watches, microseconds of a pass:\n")
    print("| order | waiting | notified | read |\n|---|--:|--:|--:|")
    for name in ORDERS:
        for num_waiting in sizes:
            notified, read = (ordering_us(name, num_waiting, num_rounds, notified=n) for n in (True, False))
            print(f"| {name} | {num_waiting:,} | {notified:.0f} | {read:.0f} |", flush=True)
    print("\nThe engine's planner, microseconds of a pass:\n")
    print("| order | waiting | queue | whole plan | matches changed | admitted |\n|---|--:|--:|--:|--:|--:|")
    for name in ORDERS:
        for num_waiting in sizes:
            timed = planning(name, num_waiting, num_rounds)
            queue_us, plan_us = 1e6 * median(timed.queue_s), 1e6 * median(timed.plan_s)
            counts = f"{median(timed.num_changed):.0f} | {median(timed.num_admitted):.0f}"
            print(f"| {name} | {num_waiting:,} | {queue_us:.0f} | {plan_us:.0f} | {counts} |", flush=True)


if __name__ == "__main__":
    main()
