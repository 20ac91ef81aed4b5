"""Compares two engines of which one computes prompts for the other with two that do both: pauses of chats.

python benchmarks/prefill_apart.py                       # 110M random weights; some minutes on two cores
python benchmarks/prefill_apart.py --rate 0.4 --rounds 1
python benchmarks/prefill_apart.py --smoke               # a tiny model for seconds, only to test the script

Long prompts arrive among streaming chats, at times that do not depend on answers, the same in both set-ups, which take
turns. Each engine is a process with half of the cores, and both share KV in memory. `apart`: a long prompt goes to the
prefill engine, and then, when its first token has come, to the decode engine, as do all chats. `mixed`: requests go to
both engines in turn. The gaps are those between the tokens of chats, the waits those until the first token that the
client of a request sees; percentiles are by nearest rank.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import select
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from end_to_end.model import FULL, QUICK, write_model
from pagewood.engine.api import Delta, EngineConfig, SamplingParams, Submit
from pagewood.engine.build import build_engine

SET_UPS = {"apart": ("prefill", "decode"), "mixed": ("both", "both")}
PERCENTS = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What arrives."""

    seconds: float
    chats_per_s: float
    longs_per_s: float
    chat: tuple[int, int]
    """Tokens of the prompt and of the answer of a chat."""
    long: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request."""

    at_s: float
    name: str
    tokens: list[int]
    num_output: int

    @property
    def is_chat(self) -> bool:
        return self.name.startswith("chat")


@dataclass(slots=True, kw_only=True)
class Seen:
    """What the clients of one set-up have seen, over all rounds."""

    gaps_s: list[float] = field(default_factory=list[float])
    chats_s: list[float] = field(default_factory=list[float])
    longs_s: list[float] = field(default_factory=list[float])


class Commands:
    """The inbox of an engine in a child process: requests as lines of JSON on its standard input."""

    def __init__(self) -> None:
        self._buffer = b""
        self.has_ended = False
        os.set_blocking(0, False)

    def receive(self, *, timeout_s: float | None) -> Sequence[Submit]:
        if not select.select([0], [], [], timeout_s)[0]:
            return []
        data = os.read(0, 2**20)
        self.has_ended = not data
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [_submit(json.loads(line)) for line in lines]


def _submit(said: dict[str, Any]) -> Submit:
    sampling = SamplingParams(max_tokens=said["num_output"], temperature=0.0, ignore_eos=True)
    return Submit(request_id=said["name"], tokens=np.array(said["tokens"], "<i4").tobytes(), sampling=sampling)


class Answers:
    """Its outbox: for each request of a step a line with the time, the name, the number of tokens, and the end."""

    def send(self, deltas: Sequence[Delta]) -> None:
        now_s = time.monotonic()
        for one in deltas:
            end = "" if one.finish is None else one.finish.value
            print(json.dumps([now_s, one.request_id, len(one.tokens), end]), flush=True)


def run_engine(options: dict[str, Any], cores: Sequence[int]) -> None:
    """Serve until the standard input ends; the main function of a child process."""
    os.sched_setaffinity(0, cores)
    inbox = Commands()
    engine = build_engine(EngineConfig(num_threads=len(cores), **options), inbox=inbox, outbox=Answers())
    print(json.dumps([0, "", 0, "ready"]), flush=True)
    engine.run(lambda: inbox.has_ended)
    engine.close()


class Child:
    """An engine in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._waiting: dict[str, asyncio.Queue[tuple[float, int, str]]] = {"": asyncio.Queue()}
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, options: dict[str, Any], cores: Sequence[int]) -> Child:
        arguments = (__file__, "--engine", json.dumps(options), "--cores", ",".join(map(str, cores)))
        pipe = asyncio.subprocess.PIPE
        child = cls(await asyncio.create_subprocess_exec(sys.executable, *arguments, stdin=pipe, stdout=pipe))
        end = (await child._waiting[""].get())[2]
        if end != "ready":
            raise RuntimeError("an engine could not be started")
        return child

    async def times(self, arrival: Arrival, num_output: int) -> list[float]:
        """Answer a request; return the time of each token."""
        assert self._process.stdin is not None
        queue = self._waiting[arrival.name] = asyncio.Queue()
        said = {"name": arrival.name, "tokens": arrival.tokens, "num_output": num_output}
        self._process.stdin.write(json.dumps(said).encode() + b"\n")
        found: list[float] = []
        while True:
            at_s, num_tokens, end = await queue.get()
            found += [at_s] * num_tokens
            if end:
                if end not in ("length", "stop"):
                    raise RuntimeError(f"request {arrival.name} has ended with {end}")
                return found

    async def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()
        await self._reader

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            at_s, name, num_tokens, end = json.loads(line)
            await self._waiting[name].put((at_s, num_tokens, end))
        for queue in self._waiting.values():
            await queue.put((0.0, 0, "error"))


def arrivals(load: Load, vocab_size: int, *, seed: int) -> list[Arrival]:
    """Return the requests of a round, in the order of their times."""
    rng = random.Random(seed)
    found: list[Arrival] = []
    for kind, rate, (num_prompt, num_output) in (
        ("chat", load.chats_per_s, load.chat),
        ("long", load.longs_per_s, load.long),
    ):
        at_s = rng.expovariate(rate)
        while at_s < load.seconds:
            tokens = [rng.randrange(5, vocab_size) for _ in range(num_prompt)]
            name = f"{kind} {seed} {len(found)}"
            found.append(Arrival(at_s=at_s, name=name, tokens=tokens, num_output=num_output))
            at_s += rng.expovariate(rate)
    return sorted(found, key=lambda one: one.at_s)


async def measure(
    set_up: str, model: Path, requests: Sequence[Arrival], seen: Seen, *, cores: Sequence[int], place: str
) -> None:
    """Answer the requests of a round with two engines."""
    options = {
        "model": str(model), "host_cache_gb": 1.0, "remote_cache": place, "remote_cache_gb": 1.0,
        "max_total_tokens": 32_768,
    }  # fmt: skip
    half = max(1, len(cores) // 2)
    parts = cores[:half], cores[half:] or cores[:half]
    first, second = [
        await Child.start({**options, "role": role}, part) for role, part in zip(SET_UPS[set_up], parts, strict=True)
    ]
    begun_s = time.monotonic()

    async def answer(arrival: Arrival, index: int) -> None:
        await asyncio.sleep(max(0.0, begun_s + arrival.at_s - time.monotonic()))
        sent_s = time.monotonic()
        if set_up == "mixed":
            times = await (first, second)[index % 2].times(arrival, arrival.num_output)
        else:
            if not arrival.is_chat:
                await first.times(arrival, 1)
            times = await second.times(arrival, arrival.num_output)
        (seen.chats_s if arrival.is_chat else seen.longs_s).append(times[0] - sent_s)
        if arrival.is_chat:
            seen.gaps_s += [after - before for before, after in pairwise(times)]

    await asyncio.gather(*(answer(arrival, index) for index, arrival in enumerate(requests)))
    await asyncio.gather(first.close(), second.close())


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile by nearest rank, in milliseconds."""
    ordered = sorted(values)
    return 1000 * ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)] if ordered else math.nan


def report(seen: dict[str, Seen]) -> str:
    """Return the table of results."""
    heads = [f"{name} p{percent}" for name in ("gap", "chat", "long") for percent in PERCENTS]
    lines = [f"| set-up | {' | '.join(heads)} |", f"|---|{'--:|' * len(heads)}"]
    for name, one in seen.items():
        values = [percentile(part, p) for part in (one.gaps_s, one.chats_s, one.longs_s) for p in PERCENTS]
        lines.append(f"| {name} | {' | '.join(f'{value:.1f}' for value in values)} |")
    return "\n".join([*lines, "", "Milliseconds: gaps between tokens of chats, and times to the first token."])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals in a round (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=0.3, help="long prompts per second (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="a tiny model and a short round")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--cores", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine is not None:
        run_engine(json.loads(arguments.engine), [int(core) for core in arguments.cores.split(",")])
        return
    for name in ("seconds", "rate", "rounds"):
        if not getattr(arguments, name) > 0:
            parser.error(f"--{name} must be > 0, got {getattr(arguments, name)}")
    if arguments.smoke:
        load, shape, rounds = Load(seconds=1.0, chats_per_s=6, longs_per_s=3, chat=(20, 8), long=(200, 8)), QUICK, 1
    else:
        rate = arguments.rate
        load = Load(seconds=arguments.seconds, chats_per_s=4 * rate, longs_per_s=rate, chat=(100, 80), long=(2000, 40))
        shape, rounds = FULL, arguments.rounds
    cores = sorted(os.sched_getaffinity(0))
    name = f"prefill-apart-{os.getpid()}"
    seen = {set_up: Seen() for set_up in SET_UPS}
    with tempfile.TemporaryDirectory() as folder:
        write_model(shape, Path(folder), seed=0)
        try:
            for number in range(rounds):
                for set_up, one in seen.items():
                    requests = arrivals(load, shape.vocab_size, seed=number)
                    place = f"shm:{name}-{number}-{set_up}"
                    asyncio.run(measure(set_up, Path(folder), requests, one, cores=cores, place=place))
        finally:
            for left in Path("/dev/shm").glob(f"pagewood-{os.geteuid()}-{name}-*"):
                shutil.rmtree(left)
    print(report(seen))


if __name__ == "__main__":
    main()
