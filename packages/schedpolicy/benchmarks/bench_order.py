# pyright: basic
# pytest-benchmark has no types.
"""One scheduling pass over 128, 1,000 and 10,000 waiting; `nox -s "bench(package='schedpolicy')"`.

Prompts of 2,000 tokens in families of 16 that share 1,500; eight tenants. What is timed is one pass: 64 requests are
taken from the front and admitted. Between passes, untimed, they stop, 64 new ones arrive, and 32 live matches change: a
prompt was published and another evicted. `notified`: the cache reports changes; `read`: the order reads all matches.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from pagewood.schedpolicy import ORDERS, Ageing, order_named

_NUM_TOKENS = 2000
_NUM_SHARED = 1504
_NUM_ADMITTED = 64
_NUM_CHANGED = 32


@dataclass(slots=True)
class Watch:
    num_tokens: int


@dataclass(slots=True, eq=False)
class Queued:
    arrival: int
    arrived_s: float
    text: bytes
    watch: Watch
    tenant: str
    tag: str
    deadline_s: float
    service_class: str
    priority: int = 0
    num_tokens: int = _NUM_TOKENS
    num_generated: int = 0
    max_new_tokens: int = 256

    @property
    def num_matched(self) -> int:
        return self.watch.num_tokens

    def prefix(self, num_tokens: int) -> bytes:
        return self.text[: 4 * num_tokens]


class Queue:
    """A queue of constant length, and the step between two passes."""

    def __init__(self, order: Any, num_waiting: int, notified: bool) -> None:
        self.order = order
        self.notified = notified
        self.rng = Random(0)
        self.families = [self.rng.randbytes(4 * _NUM_SHARED) for _ in range(max(1, num_waiting // 16))]
        self.waiting: dict[int, Queued] = {}
        self.num_arrivals = 0
        self.taken: list[Queued] = []
        while len(self.waiting) < num_waiting:
            self.arrive()

    def arrive(self) -> None:
        rng = self.rng
        request = Queued(
            arrival=self.num_arrivals,
            arrived_s=self.num_arrivals / 1000,
            text=rng.choice(self.families) + rng.randbytes(4 * (_NUM_TOKENS - _NUM_SHARED)),
            watch=Watch(rng.choice((0, 512, 1024, _NUM_SHARED))),
            tenant=f"tenant-{rng.randrange(8)}",
            tag=f"adapter-{rng.randrange(32)}",
            deadline_s=self.num_arrivals / 1000 + rng.random() * 30,
            service_class=rng.choice(("gold", "silver", "bronze")),
        )
        self.num_arrivals += 1
        self.waiting[request.arrival] = request
        self.order.add(request)

    def between(self) -> None:
        for request in self.taken:
            del self.waiting[request.arrival]
            self.order.stop(request)
            self.arrive()
        for arrival in self.rng.sample(list(self.waiting), min(_NUM_CHANGED, len(self.waiting))):
            request = self.waiting[arrival]
            request.watch.num_tokens = self.rng.choice((0, 512, 1024, _NUM_SHARED))
            if self.notified:
                self.order.update(request)

    def one_pass(self) -> None:
        self.taken = list(islice(self.order.ordered(self.num_arrivals / 1000), _NUM_ADMITTED))
        for request in self.taken:
            self.order.admit(request)


def measure(benchmark: BenchmarkFixture, make_order: Callable[[], Any], num_waiting: int, notified: bool) -> None:
    queue = Queue(make_order(), num_waiting, notified)
    queue.one_pass()  # the first pass is not counted
    benchmark.pedantic(queue.one_pass, setup=queue.between, rounds=50)


@pytest.mark.parametrize("notified", [True, False], ids=["notified", "read"])
@pytest.mark.parametrize("num_waiting", [128, 1000, 10_000])
@pytest.mark.parametrize("name", ORDERS)
def test_order(benchmark: BenchmarkFixture, name: str, num_waiting: int, notified: bool):
    measure(benchmark, lambda: order_named(name, notified=notified), num_waiting, notified)


@pytest.mark.parametrize("num_waiting", [128, 1000, 10_000])
def test_ageing(benchmark: BenchmarkFixture, num_waiting: int):
    measure(benchmark, lambda: Ageing[Any](order_named("lpm", notified=True), after_s=1.0), num_waiting, True)
