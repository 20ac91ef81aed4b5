"""What batches cost other requests: their latencies with and without a batch that runs below them, in turns.

One server has requests at random times, and a batch is created and cancelled every few seconds, so that what changes
slowly is in both kinds of turns. Prints percentiles of the time to the first token and of the whole answer, the ratio
of each, and how many lines of batches were answered meanwhile. Run it on a quiet machine:

    python benchmarks/batch_cost.py --rate 1 --seconds 30 --rounds 5
    python benchmarks/batch_cost.py --large --rate 0.3        # a model of 110M random weights, as `models_on_demand.py`

With a server of your own: `--url`, started with `--batch-store`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import httpx

from end_to_end.model import FULL, write_served

ENDED = ("completed", "failed", "expired", "cancelled")
WARM_UP_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of the requests of one kind of turn."""

    first: list[float] = field(default_factory=list[float])
    whole: list[float] = field(default_factory=list[float])


async def ask(client: httpx.AsyncClient, model: str, number: int, tokens: int, times: Times) -> None:
    """Send one request, and note its times."""
    began_s, first_s = monotonic(), None
    body = {
        "model": model, "prompt": f"Customer {number} asks: what does shelf {number % 97} cost?", "max_tokens": tokens,
        "ignore_eos": True, "stream": True,
    }  # fmt: skip
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if first_s is None and line.startswith("data: "):
                first_s = monotonic()
    assert first_s is not None
    times.first.append(first_s - began_s)
    times.whole.append(monotonic() - began_s)


async def load(client: httpx.AsyncClient, model: str, options: argparse.Namespace, seed: int, times: Times) -> None:
    """Send requests at random times, the same ones for the same seed, and wait for their ends."""
    rng, end_s = random.Random(seed), monotonic() + options.seconds
    async with asyncio.TaskGroup() as group:
        while (wait_s := rng.expovariate(options.rate)) < end_s - monotonic():
            await asyncio.sleep(wait_s)
            group.create_task(ask(client, model, rng.randrange(10**6), options.tokens, times))


async def create(client: httpx.AsyncClient, model: str, seed: int, options: argparse.Namespace) -> str:
    """Create a batch with more lines than can be answered, and return its id when lines are sent."""
    lines = [
        json.dumps({
            "custom_id": str(number), "method": "POST", "url": "/v1/completions",
            "body": {
                "model": model, "prompt": f"Line {seed}.{number}: " + "wood shop " * options.line_words,
                "max_tokens": options.line_tokens, "ignore_eos": True,
            },
        })
        for number in range(options.lines)
    ]  # fmt: skip
    files = {"file": ("in.jsonl", "\n".join(lines).encode()), "purpose": (None, "batch")}
    file = (await client.post("/v1/files", files=files)).raise_for_status().json()["id"]
    body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    id = (await client.post("/v1/batches", json=body)).raise_for_status().json()["id"]
    while (await state(client, id))["status"] == "validating":
        await asyncio.sleep(0.05)
    return id


async def state(client: httpx.AsyncClient, id: str) -> dict[str, Any]:
    """Return a batch."""
    return (await client.get(f"/v1/batches/{id}")).raise_for_status().json()


async def cancel(client: httpx.AsyncClient, id: str) -> int:
    """End a batch, and return how many of its lines were answered."""
    found = await state(client, id)
    if found["status"] not in ENDED:
        await client.post(f"/v1/batches/{id}/cancel")
    while (found := await state(client, id))["status"] not in ENDED:
        await asyncio.sleep(0.05)
    if found["status"] == "failed" or found["request_counts"]["failed"]:
        raise RuntimeError(f"lines of the batch failed: {found}")
    return found["request_counts"]["completed"]


async def measure(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the times of both kinds of turns and the number of lines that were answered."""
    times, num_lines = {"alone": Times(), "beside": Times()}, 0
    headers = {} if options.key is None else {"authorization": f"Bearer {options.key}"}
    async with httpx.AsyncClient(base_url=url, timeout=600, headers=headers) as client:
        model = (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        await ask(client, model, 0, options.tokens, Times())
        for turn in range(options.rounds):
            for kind in ("alone", "beside") if turn % 2 else ("beside", "alone"):
                id = await create(client, model, turn, options) if kind == "beside" else None
                await asyncio.sleep(min(WARM_UP_S, options.seconds))
                await load(client, model, options, turn, times[kind])
                if id is not None:
                    num_lines += await cancel(client, id)
    return {"times": times, "num_lines": num_lines}


def percentile(values: list[float], percent: int) -> float:
    """Return a percentile of at least one value."""
    return statistics.quantiles([*values, *values], n=100, method="inclusive")[percent - 1]


def report(found: dict[str, Any], options: argparse.Namespace) -> None:
    """Print a table."""
    alone, beside = found["times"]["alone"], found["times"]["beside"]
    print(f"{len(alone.whole)} requests alone, {len(beside.whole)} beside a batch; {found['num_lines']} lines answered")
    print("| time | percentile | alone, ms | beside a batch, ms | ratio |\n|---|---:|---:|---:|---:|")
    for name in ("first", "whole"):
        for percent in (50, 90, 99):
            one, other = (percentile(getattr(times, name), percent) * 1e3 for times in (alone, beside))
            print(f"| {name} | {percent} | {one:.1f} | {other:.1f} | {other / one:.3f} |")


@contextlib.contextmanager
def server(options: argparse.Namespace) -> Generator[str]:
    """Provide the address of a server."""
    if options.url is not None:
        yield options.url
        return
    with tempfile.TemporaryDirectory() as folder:
        store, model = Path(folder) / "store", Path(folder) / "model"
        if options.large:
            write_served(FULL, model, seed=0)
            options.options += ["--model", str(model)]
        command = [sys.executable, "-m", "pagewood.server", "serve", "--port", "0", "--log-level", "warning"]
        command += ["--batch-store", str(store), "--batch-lines-beside", str(options.beside), *options.options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            yield (
                next(line for line in process.stdout if line.startswith("Pagewood serves")).split(" at ")[1].split()[0]
            )
        finally:
            process.terminate()
            process.wait()
            process.stdout.close()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a server that runs (default: one is started, with the embedded model)")
    parser.add_argument("--key", help="API key of that server")
    parser.add_argument("--large", action="store_true", help="start it with a model of 110M random weights")
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=100, help="of an answer (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=25.0, help="of a turn (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each kind (default: %(default)s)")
    parser.add_argument("--lines", type=int, default=5000, help="lines of a batch (default: %(default)s)")
    parser.add_argument("--line-words", type=int, default=20, help="words of the prompt of a line, twice")
    parser.add_argument("--line-tokens", type=int, default=100, help="of the answer to a line")
    parser.add_argument("--beside", type=int, default=0, help="--batch-lines-beside of the server that is started")
    parser.add_argument("options", nargs="*", help="more options of `pagewood serve`, after --")
    options = parser.parse_args()
    with server(options) as url:
        report(asyncio.run(measure(url, options)), options)


if __name__ == "__main__":
    main()
