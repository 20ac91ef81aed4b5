"""Measures how long the server needs after the death of each process, and what its clients see of it.

python benchmarks/recovery.py                    # each process is killed 5 times; about two minutes on two cores
python benchmarks/recovery.py --rounds 1 --json recovery.json
python benchmarks/recovery.py --replicas 2       # the same with two engines: its streams go on in the other one
python benchmarks/recovery.py --heavy 10         # instead: short requests while a prompt of 10 MB is being tokenized

A real `pagewood serve` with the embedded model, all of whose rows stream, and as many short requests that wait. Then a
process is killed with SIGKILL. Shown are medians and the slowest round, in seconds: the longest pause of a stream, and
from the kill until `/ready` is 200 again, and until a new request has its answer (the ids of a text). And
how many requests were sent again by the server, and how many
of those that it had accepted did not end whole, which must be 0. `tools/survival_check.py` compares the texts, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx

MODEL = "pagewood-demo"
PROCESSES = ("tokenizer", "detokenizer", "engine")
NUM_ROWS = 8
_POST = """
import sys, urllib.request
body = open(sys.argv[2], "rb").read()
urllib.request.urlopen(urllib.request.Request(sys.argv[1], body, {"content-type": "application/json"})).read()
"""
"""Sends a file and reads the answer, in a process of its own."""
LIMIT_S = 300.0
SHORT: dict[str, Any] = {"model": MODEL, "prompt": "The answer is", "max_tokens": 4, "temperature": 0}
LONG: dict[str, Any] = {"model": MODEL, "prompt": "Once", "max_tokens": 1200, "ignore_eos": True, "stream": True}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="deaths of each process")
    parser.add_argument("--replicas", type=int, default=1, help="engines, 1, 2, 4 or 8 (default: %(default)s)")
    parser.add_argument("--heavy", type=float, metavar="MB", help="measure beside a prompt of this length")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    if options.replicas not in (1, 2, 4, 8):
        parser.error(f"--replicas must be 1, 2, 4 or 8, got {options.replicas}")
    with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
        server = Server(Path(folder), num_replicas=options.replicas)
        try:
            if options.heavy is not None:
                results: Any = asyncio.run(heavy(server, options.heavy))
            else:
                results = {
                    name: [asyncio.run(death(server, name)) for _ in range(options.rounds)] for name in PROCESSES
                }
                show(results)
        finally:
            server.close()
    if options.json:
        options.json.write_text(json.dumps(results))


class Server:
    """A server process."""

    def __init__(self, folder: Path, *, num_replicas: int) -> None:
        self._log = (folder / "log").open("w+")
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "pagewood.server", "serve", "--port", "0", "--log-level", "error"),
                *("--max-running-requests", str(NUM_ROWS // num_replicas), "--max-total-tokens", "32768"),
                *("--max-restarts", "99", "--drain-seconds", "1"),
                *(("--replicas", str(num_replicas), "--threads", str(num_replicas)) if num_replicas > 1 else ()),
            ],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        assert self._process.stdout is not None
        line = next(line for line in self._process.stdout if line.startswith("Pagewood serves"))
        self.url = line.split(" at ")[1].split()[0]

    def child(self, name: str) -> int:
        """Return the id of the process of a stage."""
        for entry in Path("/proc").iterdir():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                command = (entry / "cmdline").read_text()
            except (OSError, ValueError, IndexError):
                continue
            if parent == self._process.pid and f"pagewood.server.processes.{name}_process" in command:
                return int(entry.name)
        raise RuntimeError(f"there is no {name} process")

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(60)
        self._log.close()


async def death(server: Server, name: str) -> dict[str, float]:
    """Kill a process under load, and return times in seconds and counts of ends."""
    while (found := await _death(server, name)) is None:
        pass
    return found


async def _death(server: Server, name: str) -> dict[str, float] | None:
    """Return the same; None if a stream ended before all requests were there."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=LIMIT_S, limits=limits) as http:
        begun = asyncio.Semaphore(0)
        pauses: list[float] = []
        streams = [asyncio.create_task(_stream(http, begun, pauses)) for _ in range(NUM_ROWS)]
        for _ in streams:
            await begun.acquire()
        waiting = [asyncio.create_task(_whole(http)) for _ in range(NUM_ROWS)]
        while (await _ready(http))["requests"]["live"] < 2 * NUM_ROWS:  # the streams have all rows
            await asyncio.sleep(0.01)
            if any(stream.done() for stream in streams):
                await asyncio.gather(*streams, *waiting)
                return None
        late = [asyncio.create_task(_whole(http)) for _ in range(2)]
        before = (await _ready(http))["incidents"]
        os.kill(server.child(name), signal.SIGKILL)
        killed_s = time.monotonic()
        if name == "tokenizer":  # the server is ready all the time, and nothing fails
            ready_s = 0.0
        else:  # with several engines the server is ready meanwhile, but one of them is missing
            while (found := await _ready(http))["incidents"]["restarts"] == before["restarts"]:
                await asyncio.sleep(0.005)
            while any(one["status"] != "ready" for one in (found, *found.get("replicas", ()))):
                await asyncio.sleep(0.005)
                found = await _ready(http)
            ready_s = time.monotonic() - killed_s
        (await http.post("/tokenize", json={"text": "a"})).raise_for_status()  # all rows are taken
        answer_s = time.monotonic() - killed_s
        ends = await asyncio.gather(*streams, *waiting)
        late_ends = await asyncio.gather(*late)  # these come at the moment of the death
        after = (await _ready(http))["incidents"]
    return {
        "longest pause": max(pauses),
        "ready": ready_s,
        "answer": answer_s,
        "sent again": after["retried"] - before["retried"],
        "failed": sum(end != "whole" for end in (*ends, *late_ends)),
    }


async def heavy(server: Server, size_mb: float) -> dict[str, list[float]]:
    """Return the times of short requests, one after the other: alone, and while a long prompt is on its way."""
    text = "stone river cloud " * int(size_mb * 1e6 / 18)
    results: dict[str, list[float]] = {"alone": [], "beside": []}
    async with httpx.AsyncClient(base_url=server.url, timeout=LIMIT_S) as http:
        for _ in range(50):
            results["alone"].append(await _timed(http))
        # The native endpoint tokenizes it without a limit of its length. Its answer is long too, so another process
        # reads it: here it would hold up the clock of the short ones.
        with tempfile.NamedTemporaryFile("w", suffix=".json") as body:
            json.dump({"text": text}, body)
            body.flush()
            long = await asyncio.create_subprocess_exec(
                sys.executable, "-c", _POST, f"{server.url}/tokenize", body.name
            )
            ended = asyncio.create_task(long.wait())
            started_s = time.monotonic()
            while not ended.done():
                results["beside"].append(await _timed(http))
            took_s = time.monotonic() - started_s
        if await ended:
            raise RuntimeError("the long prompt was not tokenized")
    print(f"a prompt of {size_mb:g} MB took {took_s:.2f} s\n")
    print("| short requests | number | median ms | slowest ms |\n|---|---:|---:|---:|")
    for name, times in results.items():
        print(f"| {name} | {len(times)} | {1e3 * median(times):.1f} | {1e3 * max(times):.1f} |")
    return results


def show(results: dict[str, list[dict[str, float]]]) -> None:
    """Print a table: medians, with the slowest round in brackets; counts are sums."""
    columns = list(next(iter(results.values()))[0])
    print("| killed | " + " | ".join(columns) + " |\n|---|" + "---:|" * len(columns))
    for name, rounds in results.items():
        cells = [
            f"{median(found):.2f} s ({max(found):.2f})" if column in columns[:3] else f"{sum(found):.0f}"
            for column in columns
            for found in [[one[column] for one in rounds]]
        ]
        print(f"| {name} | " + " | ".join(cells) + " |")


async def _ready(http: httpx.AsyncClient) -> dict[str, Any]:
    return (await http.get("/ready")).json()


async def _timed(http: httpx.AsyncClient) -> float:
    start_s = time.monotonic()
    assert await _whole(http) == "whole"
    return time.monotonic() - start_s


async def _whole(http: httpx.AsyncClient) -> str:
    response = await http.post("/v1/completions", json=SHORT)
    return "whole" if response.status_code == 200 else response.json()["error"]["code"]


async def _stream(http: httpx.AsyncClient, begun: asyncio.Semaphore, pauses: list[float]) -> str:
    """Return `whole`, or the code of the error that ended the stream; append its longest time between two lines."""
    last, last_s, pause_s = "", time.monotonic(), 0.0
    async with http.stream("POST", "/v1/completions", json=LONG) as response:
        async for line in response.aiter_lines():
            if line and not last:
                begun.release()
            elif line:
                pause_s = max(pause_s, time.monotonic() - last_s)
            last_s = time.monotonic()
            last = line or last
    pauses.append(pause_s)
    return "whole" if last == "data: [DONE]" else json.loads(last.removeprefix("data: "))["error"]["code"]


if __name__ == "__main__":
    main()
