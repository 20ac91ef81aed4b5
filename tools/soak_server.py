"""Sends many requests to a real server, with aborts, errors and clients that leave, and judges whether memory is flat.

python tools/soak_server.py                                  # 20,000 requests
python tools/soak_server.py --requests 2000 --json rss.json --plot rss.png

The resident memory of every process is sampled. After the warm-up (a part of the requests), a straight line is fitted
to the samples of each process; memory is flat if the line rises by less than `--tolerance` megabytes over all requests
after it. At the end the server must be idle: no request in any process, every page of KV memory free or cached, no
violation found by the engine, and no traceback in the log. The exit code is 1 if anything of this fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

MODEL = "pagewood-demo"
WORDS = ("river", "stone", "cloud", "night", "paper", "green", "seven", "window", "morning", "answer", "number")
KINDS = {"whole": 50, "stream": 20, "leave": 10, "leave early": 5, "abort": 5, "error": 10}
"""Kinds of requests, and how often they come."""
EXPECTED: dict[str, tuple[int | str, ...]] = {"error": (400, 404), "abort": (200, 400)}
"""Kinds of requests -> how they may end, where that is not a whole answer."""
ERRORS: tuple[dict[str, Any], ...] = (
    {"model": "another"},
    {"max_tokens": -1},
    {"prompt": "word " * 20_000},
    {"temperature": "hot"},
    {"stop_regex": "("},
    {"structured_outputs": {"regex": "("}},
)
LIMIT_S = 120.0


def main() -> int:
    """Run, write the curves, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--clients", type=int, default=32, help="requests at a time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--warm-up", type=float, default=0.3, help="part of the requests that does not count")
    parser.add_argument("--tolerance", type=float, default=10.0, help="megabytes that a process may grow")
    parser.add_argument("--json", type=Path, help="file for the samples and the verdict")
    parser.add_argument("--plot", type=Path, help="file for a picture of the curves; needs matplotlib")
    options = parser.parse_args()
    if not 0 < options.warm_up < 1:
        parser.error(f"--warm-up must be between 0 and 1, got {options.warm_up}")
    with tempfile.TemporaryDirectory(prefix="soak-") as folder, Server(Path(folder)) as server:
        soak = Soak(server, num_requests=options.requests, seed=options.seed)
        asyncio.run(soak.run(options.clients))
        faults = soak.faults_at_the_end()
    growth = {name: grown_mb(soak.samples, name, warm_up=options.warm_up) for name in soak.samples[-1]["rss_mb"]}
    faults += [f"{name} grew by {mb:.1f} MB" for name, mb in growth.items() if mb > options.tolerance]
    record = {"kinds": soak.kinds, "statuses": soak.statuses, "grown_mb": growth, "faults": faults}
    print(json.dumps(record, indent=1))
    if options.json:
        options.json.write_text(json.dumps({**record, "samples": soak.samples}))
    if options.plot:
        plot(soak.samples, options.plot)
    return 1 if faults else 0


class Server:
    """A server with a small pool, so that its prefix cache is full soon."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = (folder / "log").open("w+")
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "pagewood.server", "serve", "--port", "0", "--log-level", "error"),
                *("--max-total-tokens", "16384", "--max-running-requests", "16", "--max-queued-requests", "48"),
            ],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "TMPDIR": str(folder)},
        )
        assert self._process.stdout is not None
        line = next((line for line in self._process.stdout if line.startswith("Pagewood serves")), None)
        if line is None:
            raise RuntimeError(self.log())
        self.url = line.split(" at ")[1].split()[0]

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(LIMIT_S)
        self._log.close()

    def log(self) -> str:
        """Return what all processes have logged."""
        return Path(self._log.name).read_text()

    def rss_mb(self) -> dict[str, float]:
        """Return the resident memory of each process."""
        found = {"http": _rss_mb(self._process.pid)}
        for entry in Path("/proc").iterdir():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                words = (entry / "cmdline").read_text().split("\0")
            except (OSError, ValueError, IndexError):
                continue
            if parent == self._process.pid and "-m" in words:
                found[words[words.index("-m") + 1].rpartition(".")[2]] = _rss_mb(int(entry.name))
        return found


class Soak:
    """The requests, and what was seen of them."""

    def __init__(self, server: Server, *, num_requests: int, seed: int) -> None:
        self.samples: list[dict[str, Any]] = []  # written by: _sample
        self.kinds: Counter[str] = Counter()  # written by: _client
        self.statuses: Counter[str] = Counter()  # written by: _client
        self._server = server
        self._num_left = num_requests  # written by: _client
        self._num_requests = num_requests
        self._random = random.Random(seed)
        self._unexpected: list[str] = []  # written by: _client

    async def run(self, num_clients: int) -> None:
        """Send all requests."""
        sampling = asyncio.create_task(self._sample())
        limits = httpx.Limits(max_connections=num_clients, max_keepalive_connections=num_clients)
        async with httpx.AsyncClient(base_url=self._server.url, timeout=LIMIT_S, limits=limits) as http:
            await asyncio.gather(*[self._client(http) for _ in range(num_clients)])
        sampling.cancel()

    def faults_at_the_end(self) -> list[str]:
        """Wait until the server is idle, and return what is wrong."""
        end_s = time.monotonic() + LIMIT_S
        while True:
            ready = httpx.get(f"{self._server.url}/ready").json()
            engine = ready["engine"]
            busy = [
                *ready["requests"].values(),
                *(engine[f"num_{name}"] for name in ("waiting", "running", "draining")),
            ]
            if not any(busy):
                break
            if time.monotonic() > end_s:
                return [f"the server is not idle: {ready}"]
            time.sleep(0.2)
        faults = [*self._unexpected]
        if engine["num_free_pages"] + engine["num_cached_pages"] != engine["num_pages"] or engine["num_violations"]:
            faults.append(f"pages are missing: {engine}")
        if any(ready["incidents"][name] for name in ("restarts", "lost", "stuck")):
            faults.append(f"incidents: {ready['incidents']}")
        if "Traceback" in self._server.log():
            faults.append(self._server.log()[-3000:])
        return faults

    async def _sample(self) -> None:
        start_s = time.monotonic()
        while True:
            num_done = self._num_requests - self._num_left
            seconds = round(time.monotonic() - start_s, 2)
            self.samples.append({"seconds": seconds, "requests": num_done, "rss_mb": self._server.rss_mb()})
            await asyncio.sleep(0.5)

    async def _client(self, http: httpx.AsyncClient) -> None:
        while self._num_left > 0:
            self._num_left -= 1
            (kind,) = self._random.choices([*KINDS], [*KINDS.values()])
            self.kinds[kind] += 1
            try:
                status = await self._request(http, kind)
            except httpx.HTTPError as error:
                status = type(error).__name__
            self.statuses[f"{kind}: {status}"] += 1
            if status not in EXPECTED.get(kind, (200, "left")) and len(self._unexpected) < 5:
                self._unexpected.append(f"{kind}: {status}")

    async def _request(self, http: httpx.AsyncClient, kind: str) -> int | str:
        choose = self._random
        prompt = " ".join(choose.choices(WORDS, k=choose.choice((4, 16, 64, 200))))
        name = f"soak-{choose.getrandbits(64):x}"
        body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": choose.randint(1, 12)}
        if choose.random() < 0.3:
            body |= {"temperature": 1.0, "seed": choose.randint(0, 9), "stop": ["e"]}
        if choose.random() < 0.1:
            body |= {"logprobs": 2, "n": 2}
        headers = {"X-Client-Request-Id": name}
        long = {"max_tokens": 300, "ignore_eos": True, "stream": True}
        match kind:
            case "whole":
                return (await http.post("/v1/completions", json=body)).status_code
            case "error":
                return (await http.post("/v1/completions", json=body | choose.choice(ERRORS))).status_code
            case "leave early":
                try:
                    await http.post("/v1/completions", json=body | {"max_tokens": 300}, timeout=0.02)
                except httpx.TimeoutException:
                    return "left"
                return 200
            case "stream":
                async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
                    lines = [line async for line in response.aiter_lines() if line]
                return response.status_code if lines[-1] == "data: [DONE]" else lines[-1]
            case _:
                async with http.stream("POST", "/v1/completions", json=body | long, headers=headers) as response:
                    num_lines = 0
                    async for line in response.aiter_lines():
                        num_lines += bool(line)
                        if num_lines == 3 and kind == "leave":
                            return "left"
                        if num_lines == 3:
                            await http.post("/abort", json={"rid": name})
                        if '"code":"aborted"' in line:
                            return 400
                return response.status_code


def grown_mb(samples: list[dict[str, Any]], name: str, *, warm_up: float) -> float:
    """Return by how much the line through a process's samples rises from the end of the warm-up to the last request.

    Args:
        samples: in their order.
        name: of the process.
        warm_up: part of all requests whose samples do not count.
    """
    last = samples[-1]["requests"]
    points = [
        (one["requests"], one["rss_mb"][name])
        for one in samples
        if one["requests"] >= warm_up * last and name in one["rss_mb"]
    ]
    if len(points) < 3:
        raise ValueError(f"samples must hold at least 3 after the warm-up, got {len(points)}")
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    return round(slope * (points[-1][0] - points[0][0]), 3)


def plot(samples: list[dict[str, Any]], file: Path) -> None:
    """Draw the resident memory of each process over the requests."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for name in samples[-1]["rss_mb"]:
        points = [(one["requests"], one["rss_mb"][name]) for one in samples if name in one["rss_mb"]]
        axes.plot(*zip(*points, strict=True), label=name)
    axes.set_xlabel("requests")
    axes.set_ylabel("resident memory, MB")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.tight_layout()
    figure.savefig(file)


def _rss_mb(pid: int) -> float:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 2)


if __name__ == "__main__":
    sys.exit(main())
