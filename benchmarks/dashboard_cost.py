"""What it costs a server to be watched: throughput with and without readers of the live data, in turns.

One server is kept under load, and the readers come and go every few seconds, so that what changes slowly (the machine,
the length of the sequences) is in both. Each pair of neighbouring turns gives one ratio. Run it on a quiet machine:

    python benchmarks/dashboard_cost.py --streams 64 --seconds 8 --rounds 10

The readers do not parse what they read: on one machine with the server, a browser would measure itself.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import AsyncGenerator
from typing import Any

import httpx

from pagewood.server.keys.run_key import find_run_key


async def keep_busy(client: httpx.AsyncClient, number: int) -> None:
    """Send one request after another, with answers of 200 to 400 tokens."""
    turn = 0
    while True:
        turn += 1
        body = {
            "text": f"Customer {number} asks the wood shop for shelf {turn}: what does it cost?",
            "sampling_params": {"max_new_tokens": 200 + (37 * number + 61 * turn) % 200, "ignore_eos": True},
        }
        (await client.post("/generate", json=body)).raise_for_status()


async def read(client: httpx.AsyncClient, key: str, sizes: list[int]) -> None:
    """Read the live data as a page does, and note the size of each piece."""
    headers = {"accept": "text/event-stream", "authorization": f"Bearer {key}"}
    async with client.stream("GET", "/dashboard/events", headers=headers) as response:
        response.raise_for_status()
        async for piece in response.aiter_raw():
            sizes.append(len(piece))


async def num_tokens(client: httpx.AsyncClient) -> int:
    """Return how many positions the engine has computed."""
    return (await client.get("/ready")).json()["engine"]["num_tokens"]


@contextlib.asynccontextmanager
async def running(*works: Any) -> AsyncGenerator[None]:
    """Run coroutines meanwhile."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def measure(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the rates of all turns, tokens per second, and the size of the live data."""
    rates: dict[str, list[float]] = {"off": [], "on": []}
    sizes: list[int] = []
    admin = find_run_key(url)
    assert admin is not None  # the server was given none
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        while (await client.get("/ready")).status_code != 200:
            await asyncio.sleep(0.2)
        async with running(*(keep_busy(client, number) for number in range(options.streams))):
            await asyncio.sleep(options.warmup)
            for turn in range(2 * options.rounds):
                name = ("off", "on", "on", "off")[turn % 4]
                viewers = [read(client, admin.key, sizes) for _ in range(options.viewers if name == "on" else 0)]
                async with running(*viewers):
                    await asyncio.sleep(4.0)  # the engine sends for three seconds after the last reader has left
                    clock = asyncio.get_running_loop().time
                    began_s, before = clock(), await num_tokens(client)
                    await asyncio.sleep(options.seconds)
                    rates[name].append((await num_tokens(client) - before) / (clock() - began_s))
                print(f"{name:>4} {rates[name][-1]:10.1f} tokens/s", file=sys.stderr)
    return {"rates": rates, "bytes_per_second": sum(sizes) / (options.rounds * (options.seconds + 4))}


def main() -> None:
    """Start a server, measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64, help="requests at once (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of a turn (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each kind (default: %(default)s)")
    parser.add_argument("--viewers", type=int, default=1, help="readers in the turns with some (default: %(default)s)")
    parser.add_argument(
        "--warmup", type=float, default=5.0, help="seconds before the first turn (default: %(default)s)"
    )
    parser.add_argument("serve", nargs="*", help="further options of `pagewood serve`, after --")
    options = parser.parse_args()
    rows = ["--max-running-requests", str(options.streams)]
    server = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "pagewood.server",
            "serve",
            "--port",
            "0",
            "--log-level",
            "error",
            *rows,
            *options.serve,
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        url = next(line for line in server.stdout if " at http" in line).split(" at ")[1].split()[0]
        found = asyncio.run(measure(url, options))
    finally:
        server.terminate()
        server.wait(30)
    rates = found["rates"]
    ratios = [on / off for on, off in zip(rates["on"], rates["off"], strict=True)]
    error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
    summary = {
        "off_tokens_per_second": round(statistics.median(rates["off"]), 1),
        "on_tokens_per_second": round(statistics.median(rates["on"]), 1),
        "cost_percent": round(100 * (1 - statistics.mean(ratios)), 2),
        "standard_error_percent": round(100 * error, 2),
        "live_kilobytes_per_second": round(found["bytes_per_second"] / 1000, 1),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
