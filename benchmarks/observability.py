"""Measures what it costs to watch a server: metrics, scrapes, traces and logs, on against off, in turns.

python benchmarks/observability.py                              # about four minutes on two quiet cores
python benchmarks/observability.py --streams 256 --rounds 9     # more of everything
python benchmarks/observability.py --only metrics traces        # some variants

One real `pagewood serve` with the embedded model for each variant, all started before anything is measured; a round
lets each serve the same streams once, in an order that changes from round to round. The first variant has everything
off. Printed are tokens per second and the processor time of the server's processes per token, and how much more than in
the same round of the first variant that is. Expected: metrics and logs below 1%, traces below 3%, both of the
throughput; an interval that holds 0 shows no difference.

--dashboard PATH reads a stream of events from PATH of a server of its own meanwhile, as an open dashboard does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from math import comb
from statistics import median

import httpx

from pagewood.server.keys.run_key import find_run_key
from server_cpu import PROCESSES, Server, cost_of, streams

OFF = "off"
SINK = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()
    def log_message(self, *arguments):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""
"""A receiver of traces that keeps nothing."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64, help="streams at a time")
    parser.add_argument("--tokens", type=int, default=150, help="tokens of each")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", default=[], metavar="VARIANT", help="variants beside the first")
    parser.add_argument("--dashboard", metavar="PATH", help="add a variant with a reader of this stream of events")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(sink())
        variants: dict[str, tuple[str, ...]] = {
            OFF: ("--no-metrics",),
            "metrics": (),
            "metrics, scraped every second": ("--metrics-compat", "vllm", "--metrics-compat", "sglang"),
            "traces": ("--otlp-endpoint", f"http://127.0.0.1:{port}"),
            "log": ("--no-metrics", "--log-level", "info"),
            "log as JSON": ("--no-metrics", "--log-level", "info", "--log-format", "json"),
        }
        if options.dashboard:
            variants["dashboard"] = ()
        if options.only:
            variants = {name: words for name, words in variants.items() if name == OFF or name in options.only}
        servers = {
            name: stack.enter_context(Server(options.streams, arguments=words)) for name, words in variants.items()
        }
        for server in servers.values():
            asyncio.run(streams(server, 8, 40, {}))
        found: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
        for number in range(options.rounds):
            order = list(variants)
            random.Random(number).shuffle(order)
            for name in order:
                with watching(name, servers[name], options.dashboard):
                    found[name].append(cost_of(servers[name], options.streams, options.tokens, {}))
            print(f"round {number + 1} of {options.rounds}", file=sys.stdout, flush=True)
    print(f"\n{options.streams} streams of {options.tokens} tokens, {options.rounds} rounds, medians (95% intervals)\n")
    print("| | tokens/s | against off | us per token, all processes | against off |\n|---|---:|---:|---:|---:|")
    for name, rounds in found.items():
        speed, cost = (
            [one["tokens/s"] for one in rounds],
            [sum(one[process] for process in PROCESSES) for one in rounds],
        )
        base = found[OFF]
        slower = [100 * (1 - one / other["tokens/s"]) for one, other in zip(speed, base, strict=True)]
        dearer = [
            100 * (one / sum(other[process] for process in PROCESSES) - 1)
            for one, other in zip(cost, base, strict=True)
        ]
        cells = [shown(speed, "{:.0f}"), shown(slower, "{:+.1f}%"), shown(cost, "{:.1f}"), shown(dearer, "{:+.1f}%")]
        print(f"| {name} | " + " | ".join(cells) + " |")


def shown(values: list[float], form: str) -> str:
    """Return the median of some values, and the interval that holds the median of all such values with 95%."""
    ordered, num = sorted(values), len(values)
    # As many of the values are below that median as heads fall in `num` throws of a coin.
    least = next(k for k in range(num) if sum(comb(num, heads) for heads in range(k + 1)) > 0.025 * 2**num)
    low, high = ordered[least], ordered[num - 1 - least]
    return f"{form.format(median(values))} ({form.format(low)} to {form.format(high)})"


@contextlib.contextmanager
def sink() -> Generator[int]:
    """Provide the port of a receiver of traces, in a process of its own."""
    process = subprocess.Popen([sys.executable, "-c", SINK], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def watching(name: str, server: Server, dashboard: str | None) -> Generator[None]:
    """Watch a server as its variant says."""
    url = "http://{}:{}".format(*server.address)
    admin = find_run_key(url)
    assert admin is not None  # the server was given none
    headers = {"authorization": f"Bearer {admin.key}"}
    stopping = threading.Event()

    def scrape() -> None:
        with httpx.Client(base_url=url) as client:
            while not stopping.wait(1.0):
                client.get("/metrics").raise_for_status()

    def read() -> None:
        reading = httpx.Client(base_url=url, timeout=60, headers=headers)
        with reading as client, client.stream("GET", dashboard or "") as response:
            response.raise_for_status()
            for _ in response.iter_raw():
                if stopping.is_set():
                    return

    jobs: dict[str, Callable[[], None]] = {"metrics, scraped every second": scrape, "dashboard": read}
    thread = threading.Thread(target=jobs[name], daemon=True) if name in jobs else None
    if thread is not None:
        thread.start()
        time.sleep(0.2)
    try:
        yield
    finally:
        stopping.set()
        if thread is not None:
            thread.join(5)


if __name__ == "__main__":
    main()
