"""Compares three real replicas with three simulated ones on one trace: throughput and percentiles.

    python benchmarks/fleet_real.py             # some minutes on two cores, on which nothing else may run
    python benchmarks/fleet_real.py --modelled  # engines that wait instead of computing: half a minute, on any machine
    python benchmarks/fleet_real.py --smoke     # a few requests, only to see that the script works

With `--modelled` each step of the engines takes the time that `modelled_steps.engine.STEPS` says, which the simulator
knows, too. So what is compared is everything else: HTTP, the router, the planner and the memory of the engines, and
moves between them. Nothing is measured before, and step 1 is left out:

1. `pagewood serve --replicas 3` with a model of random weights, whose steps are long beside the work of HTTP, answers a
   first trace whose requests arrive all at once. Its dashboard tells how long each step of one replica took, while all
   three share the cores of this machine; the simulator's step model is fitted to these. What a request takes beside its
   steps is the median time of `/tokenize`, which goes the same way through all processes and computes nothing.
2. A second trace, other prompts and lengths of the same kind, with prefixes that some share, arrives at random times at
   1.5 times the rate at which the first was answered (or is in the simulator): so requests wait, in the router, and
   all replicas work.
3. The simulator runs the second trace with the same router, places, memory and limits of steps.

The table has output tokens per second, and percentiles of the time to the first token and of the whole time. The exit
code is 1 if a value of the simulator is off by more than `--limit`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from end_to_end.model import FULL, QUICK, ModelShape, write_model
from modelled_steps.engine import STEPS
from pagewood.engine.model_folder.folder import model_folder
from pagewood.schedpolicy import StepModel, StepSample, budget_named
from pagewood.schedpolicy.simulation import (
    Fleet,
    Machine,
    Operations,
    Trace,
    TraceRequest,
    policies_named,
    simulate_routed,
)
from pagewood.schedpolicy.simulation.report import records_of, spread_of
from pagewood.server.bench.http_client import HttpClient

NUM_REPLICAS = 3
NUM_PLACES = 8
PAGE_SIZE = 16
NUM_PAGES = 512
OVERLOAD = 1.5
"""Requests come this much faster than they are answered, so times to first tokens are mostly waits for a place."""
VOCABULARY = (10, 250)
"""Token ids of prompts."""
NAME = "measured"
KEY = "key-of-this-benchmark-only"
LIMIT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What clients saw of a run, or would have seen."""

    tokens_per_s: float
    first_s: tuple[float, ...]
    whole_s: tuple[float, ...]

    def rows(self) -> dict[str, float]:
        """Return what is compared, by name."""
        found = {"output tokens/s": self.tokens_per_s}
        for name, values in (("first token", self.first_s), ("whole answer", self.whole_s)):
            spread = spread_of(values)
            found |= {f"{name}, p50, s": spread.p50, f"{name}, p90, s": spread.p90, f"{name}, p99, s": spread.p99}
        return found


def make_trace(num_requests: int, *, rate: float | None, seed: int) -> Trace:
    """Return chats; half of them begin with one of four system prompts. Without rate they arrive at once."""
    rng = Random(f"fleet/{seed}")
    systems = [tuple(range(100 * number, 100 * number + 12)) for number in range(4)]
    requests: list[TraceRequest] = []
    now_s = 0.0
    for number in range(num_requests):
        keys = rng.choice(systems) if rng.random() < 0.5 else ()
        num_prompt = len(keys) * PAGE_SIZE + rng.randint(20, 300)
        own = range(1000 * (number + 1), 1000 * (number + 1) + num_prompt // PAGE_SIZE - len(keys))
        num_output = rng.randint(20, 120)
        requests.append(
            TraceRequest(
                arrived_s=now_s, num_prompt=num_prompt, num_output=num_output, max_new_tokens=num_output,
                keys=(*keys, *own),
            )
        )  # fmt: skip
        now_s += 0.0 if rate is None else rng.expovariate(rate)
    return Trace(name=f"chat {seed}", requests=tuple(requests), block_size=PAGE_SIZE)


def tokens_of(request: TraceRequest) -> list[int]:
    """Return the ids of a prompt: those of a page follow from its key."""
    tokens: list[int] = []
    for key in (*request.keys, ("end", request.keys, request.num_prompt)):
        rng = Random(f"tokens/{key}")
        tokens += [rng.randrange(*VOCABULARY) for _ in range(PAGE_SIZE)]
    return tokens[: request.num_prompt]


class Server:
    """Three real replicas."""

    def __init__(self, folder: Path, model: Path | None) -> None:
        """Start it; with the embedded model's tokenizer and engines that wait instead of computing if `model` is None.

        Raises:
            RuntimeError: it does not start.
        """
        module, of_model = ("modelled_steps.server", []) if model is None else ("pagewood.server", [str(model)])
        paths = [str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        self._log = (folder / "log").open("w+")
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", module, "serve", *of_model, "--port", "0"),
                *("--log-level", "error", "--served-model-name", NAME),
                *("--replicas", str(NUM_REPLICAS), "--threads", str(NUM_REPLICAS), "--speculative", "off"),
                *("--max-running-requests", str(NUM_PLACES), "--page-size", str(PAGE_SIZE)),
                *("--max-total-tokens", str(NUM_PAGES * PAGE_SIZE), "--max-queued-requests", "100000"),
            ],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ
            | {"TMPDIR": str(folder), "PAGEWOOD_ADMIN_KEY": KEY, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
        assert self._process.stdout is not None
        line = next((line for line in self._process.stdout if line.startswith("Pagewood serves")), None)
        if line is None:
            self._log.seek(0)
            raise RuntimeError(self._log.read())
        self.client = HttpClient(line.split(" at ")[1].split()[0], api_key=KEY)

    async def json(self, path: str) -> Any:
        return json.loads((await self.client.json("GET", path))[1])

    async def until_ready(self) -> None:
        while [one["status"] for one in (await self.json("/ready"))["replicas"]] != ["ready"] * NUM_REPLICAS:
            await asyncio.sleep(0.2)

    async def answer(self, request: TraceRequest) -> tuple[float, float]:
        """Return when the first token of an answer came, and when it ended."""
        body = {
            "model": NAME, "prompt": tokens_of(request), "max_tokens": request.num_output, "ignore_eos": True,
            "stream": True, "temperature": 0,
        }  # fmt: skip
        times: list[float] = []
        said: list[bytes] = []
        status = await self.client.send(
            "POST", "/v1/completions", json.dumps(body).encode(),
            lambda data: times.append(time.perf_counter()) if data.startswith(b"data:") else said.append(data),
            limit_s=LIMIT_S,
        )  # fmt: skip
        if status != 200 or not times:
            raise RuntimeError(f"a request was answered with {status}: {b''.join(said).decode()}")
        return times[0], times[-1]

    async def run(self, trace: Trace) -> Seen:
        """Send the requests of a trace at their times."""
        began_s = time.perf_counter()

        async def one(request: TraceRequest) -> tuple[float, float]:
            due_s = began_s + request.arrived_s
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            first_s, end_s = await self.answer(request)
            return first_s - due_s, end_s - due_s

        found = await asyncio.gather(*map(one, trace.requests))
        return _seen(trace, [first_s for first_s, _ in found], [whole_s for _, whole_s in found])

    async def watched_steps(self, samples: list[StepSample]) -> None:
        """Collect the steps of the replica that the dashboard shows, until cancelled."""
        rest = b""

        def take(data: bytes) -> None:
            nonlocal rest
            *events, rest = (rest + data).split(b"\n\n")
            for event in events:
                view: dict[str, Any] | None = json.loads(event.removeprefix(b"data: "))["engine"]
                steps: list[dict[str, Any]] = [] if view is None else view["steps"]
                for step in steps:
                    samples.append(
                        StepSample(step["num_prompt_tokens"], step["num_decodes"], 0, max(1e-6, step["took_s"]))
                    )

        watching = HttpClient(f"http://{self.client._host}:{self.client._port}", api_key=KEY)  # pyright: ignore[reportPrivateUsage]
        watching._fields = watching._fields.replace("*/*", "text/event-stream")  # pyright: ignore[reportPrivateUsage]
        await watching.send("GET", "/dashboard/events", b"", take, limit_s=LIMIT_S)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)
        self._log.close()


def _seen(trace: Trace, first_s: Sequence[float], whole_s: Sequence[float]) -> Seen:
    ends_s = [request.arrived_s + took_s for request, took_s in zip(trace.requests, whole_s, strict=True)]
    num_tokens = sum(request.num_output for request in trace.requests)
    return Seen(tokens_per_s=num_tokens / max(ends_s), first_s=tuple(first_s), whole_s=tuple(whole_s))


def simulated(trace: Trace, model: StepModel, config: dict[str, Any], *, overhead_s: float) -> Seen:
    """Return what clients would see of simulated replicas; `overhead_s` is added to each of their times."""
    budget = budget_named(
        config["schedule_preset"] or "decode-first",
        max_running=NUM_PLACES,
        max_prefill_tokens=config["chunked_prefill_size"],
        max_prefills=config["max_prefills"],
        joint_prefill_tokens=config["joint_prefill_tokens"],
    )
    fleet = Fleet(
        machine=Machine(name="this machine", source="measured", model=model),
        num_pages=NUM_PAGES, page_size=PAGE_SIZE, num_replicas=NUM_REPLICAS, overlaps=True,
    )  # fmt: skip
    observed = simulate_routed(
        trace,
        fleet,
        Operations(num_places=NUM_PLACES),
        make_policies=lambda _: policies_named("fcfs+defer", page_size=PAGE_SIZE, budget=budget),
    )
    records = records_of(observed.replicas)
    return _seen(
        trace,
        [one.first_token_after_s + overhead_s for one in records],
        [one.after_s + overhead_s for one in records],
    )


def _write_model(folder: Path, shape: ModelShape) -> None:
    """Write a model with random weights, and the tokenizer of the embedded model."""
    embedded = model_folder(None)
    vocab_size = json.loads((embedded / "config.json").read_text())["vocab_size"]
    write_model(replace(shape, vocab_size=vocab_size), folder, seed=0)
    for path in embedded.glob("tokenizer*"):
        shutil.copy(path, folder)


async def compare(server: Server, *, num_requests: int, model: StepModel | None) -> tuple[Seen, Seen]:
    """Return what clients saw of the real replicas, and what they would see of simulated ones.

    `model` says how long the steps of the real ones take; None: that is measured.
    """
    try:
        return await _compare(server, num_requests=num_requests, model=model)
    finally:
        server.client.close()


async def _compare(server: Server, *, num_requests: int, model: StepModel | None) -> tuple[Seen, Seen]:
    await server.until_ready()
    config = (await server.json("/server_info"))["config"]
    await server.run(make_trace(12, rate=None, seed=7))  # kernels are warm, and the pool has touched its memory
    first = make_trace(num_requests, rate=None, seed=0)
    if model is None:
        model, capacity = await _measure(server, first)
    else:
        capacity = simulated(first, model, config, overhead_s=0.0)
    beside_s: list[float] = []
    for _ in range(30):
        began_s = time.perf_counter()
        await server.client.json("POST", "/tokenize", json.dumps({"model": NAME, "prompt": "short"}).encode())
        beside_s.append(time.perf_counter() - began_s)
    num_tokens = sum(request.num_output for request in first.requests)
    rate = OVERLOAD * capacity.tokens_per_s * num_requests / num_tokens
    second = make_trace(num_requests, rate=rate, seed=1)
    await server.client.json("POST", "/flush_cache", b"{}")
    real = await server.run(second)
    print(f"{model}; {1e3 * median(beside_s):.1f} ms beside steps; {rate:.1f} requests/s")
    return real, simulated(second, model, config, overhead_s=median(beside_s))


async def _measure(server: Server, trace: Trace) -> tuple[StepModel, Seen]:
    """Return how long steps take while the server answers a trace, and what its clients saw."""
    samples: list[StepSample] = []
    watching = asyncio.create_task(server.watched_steps(samples))
    await asyncio.sleep(0.5)
    seen = await server.run(trace)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    print(f"{len(samples)} steps were measured")
    return StepModel.fitted(samples), seen


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, help="of each trace (default: 300, 120 with --modelled)")
    parser.add_argument("--modelled", action="store_true", help="engines wait for each step instead of computing it")
    parser.add_argument("--limit", type=float, default=0.15, help="largest relative difference (default: %(default)s)")
    parser.add_argument("--smoke", action="store_true", help="a few requests; differences do not count")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fleet-") as folder:
        model = None if options.modelled else Path(folder) / "model"
        if model is not None:
            _write_model(model, QUICK if options.smoke else FULL)
        num_requests = options.requests or (40 if options.smoke else 120 if options.modelled else 300)
        server = Server(Path(folder), model)
        steps = STEPS if options.modelled else None
        try:
            real, expected = asyncio.run(compare(server, num_requests=num_requests, model=steps))
        finally:
            server.close()
    print("\n| | real | simulated | difference |\n|---|--:|--:|--:|")
    worst = 0.0
    for name, value in real.rows().items():
        other = expected.rows()[name]
        difference = other / value - 1
        worst = max(worst, abs(difference))
        print(f"| {name} | {value:.3f} | {other:.3f} | {difference:+.1%} |")
    if worst > options.limit and not options.smoke:
        raise SystemExit(f"the largest difference must be at most {options.limit:.0%}, got {worst:.1%}")


if __name__ == "__main__":
    main()
