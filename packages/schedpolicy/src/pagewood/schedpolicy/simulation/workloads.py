"""Generated traces: arrivals, lengths and shared prefixes of typical and of hostile traffic."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from random import Random

from pagewood.schedpolicy.counts import require_count, require_real
from pagewood.schedpolicy.simulation.trace import Trace, TraceRequest

BLOCK_SIZE = 64
"""Tokens per key of all generated traces."""

Workload = Callable[[int, float, Random], Trace]
"""(number of requests, requests per second, random numbers) -> trace."""


class Contents:
    """Makes contents with shared prefixes. Invariant: every new block gets a new key."""

    __slots__ = ("_keys",)

    def __init__(self) -> None:
        """Start with no contents."""
        self._keys = count()

    def extend(self, keys: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
        """Return the keys of new contents of `num_tokens` tokens, in whole blocks, that begin with `keys`."""
        return keys + tuple(next(self._keys) for _ in range(num_tokens // BLOCK_SIZE - len(keys)))


def poisson(num_requests: int, rate: float, rng: Random) -> Trace:
    """Independent arrivals, lengths of chats; eight system prompts of 512 to 4,096 tokens, some more popular."""
    times = (index_time for index_time in _poisson_times(num_requests, rate, rng))
    return _chat("poisson", list(times), rng)


def bursty(num_requests: int, rate: float, rng: Random) -> Trace:
    """The same as `poisson`, but in bursts: gaps are Gamma-distributed with a coefficient of variation of 4."""
    variation = 4.0
    shape = 1 / variation**2
    times: list[float] = []
    now_s = 0.0
    for _ in range(num_requests):
        times.append(now_s)
        now_s += rng.gammavariate(shape, 1 / (rate * shape))
    return _chat("bursty", times, rng)


def multi_turn(num_requests: int, rate: float, rng: Random) -> Trace:
    """Conversations of 1 to 10 turns, 30 s apart on average; each turn repeats the conversation so far."""
    contents = Contents()
    system = contents.extend((), 1024)
    requests: list[TraceRequest] = []
    start_s = 0.0
    mean_turns = 5.5
    while len(requests) < num_requests:
        start_s += rng.expovariate(rate / mean_turns)
        now_s, num_so_far, keys = start_s, 1024, system
        for _ in range(rng.randint(1, 10)):
            num_prompt = num_so_far + _lognormal(rng, 200, 1.0, 16, 4_000)
            num_output = _lognormal(rng, 250, 0.8, 8, 2_000)
            num_so_far = num_prompt + num_output
            keys = contents.extend(keys, num_so_far)
            requests.append(_request(now_s, num_prompt, num_output, keys))
            now_s += rng.expovariate(1 / 30)
    return _trace("multi-turn", requests, num_requests)


def heavy_tailed(num_requests: int, rate: float, rng: Random) -> Trace:
    """Prompts of 128 to 64,000 tokens with a Pareto tail (exponent 1.1): a few of them are most of the work."""
    contents = Contents()
    requests: list[TraceRequest] = []
    for now_s in _poisson_times(num_requests, rate, rng):
        num_prompt = min(64_000, int(128 * rng.paretovariate(1.1)))
        num_output = _lognormal(rng, 150, 1.0, 4, 2_000)
        requests.append(_request(now_s, num_prompt, num_output, contents.extend((), num_prompt)))
    return _trace("heavy-tailed", requests, num_requests)


def noisy_tenant(num_requests: int, rate: float, rng: Random) -> Trace:
    """Four tenants with a tenth of the requests each, spread evenly; a fifth tenant sends the rest in three floods."""
    contents = Contents()
    systems = {name: contents.extend((), 1024) for name in ("ada", "bob", "cyd", "dan", "mallory")}
    duration_s = num_requests / rate
    requests: list[TraceRequest] = []
    for index in range(num_requests):
        if index % 10 < 4:
            tenant = ("ada", "bob", "cyd", "dan")[index % 10]
            now_s = rng.uniform(0, duration_s)
        else:
            tenant = "mallory"
            # Each flood lasts a fiftieth of the time.
            now_s = duration_s * (rng.randrange(3) * 0.3 + 0.1 + rng.uniform(0, 0.02))
        num_prompt = 1024 + _lognormal(rng, 400, 0.8, 32, 4_000)
        num_output = _lognormal(rng, 150, 0.7, 8, 1_000)
        keys = contents.extend(systems[tenant], num_prompt)
        requests.append(replace(_request(now_s, num_prompt, num_output, keys), tenant=tenant))
    return _trace("noisy-tenant", requests, num_requests)


def hot_and_cold(num_requests: int, rate: float, rng: Random) -> Trace:
    """Requests with about 96% of their prompt cached, and 5% with nothing cached, in waves of a minute.

    This is the traffic of SGLang's issue #31954 at a smaller scale: twelve contexts of 16,000 to 32,000 tokens, to
    which every call adds some hundred; minutes with 1.6 and 0.4 times the mean rate alternate.
    """
    contents = Contents()
    contexts = [contents.extend((), rng.randint(16_000, 32_000)) for _ in range(12)]
    requests: list[TraceRequest] = []
    now_s = 0.0
    for _ in range(num_requests):
        now_s += rng.expovariate(rate * (1.6 if now_s % 120 < 60 else 0.4))
        num_output = _lognormal(rng, 50, 0.5, 8, 200)
        if rng.random() < 0.05:
            num_prompt = rng.randint(15_000, 20_000)
            keys, tenant = contents.extend((), num_prompt), "cold"
        else:
            context = rng.choice(contexts)
            num_prompt = len(context) * BLOCK_SIZE + _lognormal(rng, 800, 0.5, 64, 4_000)
            keys, tenant = contents.extend(context, num_prompt), "hot"
        requests.append(replace(_request(now_s, num_prompt, num_output, keys), tenant=tenant))
    return _trace("hot-and-cold", requests, num_requests)


def deadlines(num_requests: int, rate: float, rng: Random) -> Trace:
    """The same as `bursty`; a third each of the requests are due within 3 s, 15 s and 60 s."""
    trace = bursty(num_requests, rate, rng)
    requests = [
        replace(request, deadline_s=deadline_s, tag=tag, tenant=tag)
        for request in trace.requests
        for deadline_s, tag in [rng.choice(((3.0, "interactive"), (15.0, "agent"), (60.0, "batch")))]
    ]
    return _trace("deadlines", requests, num_requests)


WORKLOADS: tuple[tuple[str, Workload], ...] = (
    ("poisson", poisson),
    ("bursty", bursty),
    ("multi-turn", multi_turn),
    ("heavy-tailed", heavy_tailed),
    ("noisy-tenant", noisy_tenant),
    ("hot-and-cold", hot_and_cold),
    ("deadlines", deadlines),
)


def generate(name: str, *, num_requests: int, rate: float, seed: int) -> Trace:
    """Generate a trace by name; the same arguments give the same trace.

    Args:
        name: A name in `WORKLOADS`.
        num_requests: Number of requests, >= 1.
        rate: Mean requests per second, > 0 and finite.
        seed: Seed of the random numbers.

    Raises:
        ValueError: An argument is out of range.
    """
    require_count("num_requests", num_requests, least=1)
    require_real("rate", rate)
    if not 0 < rate < math.inf:
        raise ValueError(f"rate must be > 0 and finite, got {rate}")
    for known, workload in WORKLOADS:
        if known == name:
            return workload(num_requests, rate, Random(f"{name}/{seed}"))
    raise ValueError(f"workload must be one of {', '.join(known for known, _ in WORKLOADS)}, got {name!r}")


def _chat(name: str, times: list[float], rng: Random) -> Trace:
    contents = Contents()
    systems = [contents.extend((), 512 * rng.randint(1, 8)) for _ in range(8)]
    requests: list[TraceRequest] = []
    for now_s in times:
        system = systems[min(int(rng.expovariate(0.5)), len(systems) - 1)]
        num_prompt = len(system) * BLOCK_SIZE + _lognormal(rng, 300, 1.0, 16, 8_000)
        num_output = _lognormal(rng, 200, 0.8, 4, 2_000)
        requests.append(_request(now_s, num_prompt, num_output, contents.extend(system, num_prompt)))
    return _trace(name, requests, len(requests))


def _poisson_times(num_requests: int, rate: float, rng: Random) -> list[float]:
    times: list[float] = []
    now_s = 0.0
    for _ in range(num_requests):
        times.append(now_s)
        now_s += rng.expovariate(rate)
    return times


def _lognormal(rng: Random, median: float, sigma: float, least: int, most: int) -> int:
    return min(most, max(least, int(rng.lognormvariate(math.log(median), sigma))))


def _request(arrived_s: float, num_prompt: int, num_output: int, keys: tuple[int, ...]) -> TraceRequest:
    # Clients ask for a round number, and requests rarely generate that many.
    max_new_tokens = max(256, 1 << (num_output - 1).bit_length())
    return TraceRequest(
        arrived_s=arrived_s, num_prompt=num_prompt, num_output=num_output, max_new_tokens=max_new_tokens, keys=keys
    )


def _trace(name: str, requests: list[TraceRequest], num_requests: int) -> Trace:
    requests.sort(key=lambda request: request.arrived_s)
    return Trace(name=name, requests=tuple(requests[:num_requests]), block_size=BLOCK_SIZE)
