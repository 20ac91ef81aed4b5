"""Measures what a streamed token costs in each process of the server, and what the server adds to a first token.

python benchmarks/server_cpu.py                         # 48, 256 and 512 streams; about five minutes on two cores
python benchmarks/server_cpu.py --streams 256 --rounds 1
python benchmarks/server_cpu.py --streams 256 --against ../other --first 0  # the server of another checkout, in turns

A real `pagewood serve` with the embedded model; the clients are in this process, with plain sockets. The cost is the
processor time of a process (all its threads, from `/proc`) while the streams run, divided by their tokens. The variants
take turns: plain chats; chats that offer a function, so that answers are read by the response template; chats with the
log probabilities of two alternatives.

The added time is that of a request for one token over HTTP, less that of the same request to an engine in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

VARIANTS: dict[str, dict[str, Any]] = {
    "chat": {},
    "chat, functions offered": {
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "get_weather",
                    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
                },
            }
        ]
    },
    "chat, 2 log probabilities": {"logprobs": True, "top_logprobs": 2},
}
PROCESSES = ("http", "detokenizer_process", "tokenizer_process", "engine_process")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[48, 256, 512], help="streams at a time")
    parser.add_argument("--tokens", type=int, default=120, help="tokens of each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--first", type=int, default=60, help="requests for one token; 0: none")
    parser.add_argument("--against", type=Path, help="another checkout, whose server is measured in turn with this one")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(Server(max(options.streams)))
        servers = {"": server}
        if options.against is not None:
            servers[" (other)"] = stack.enter_context(Server(max(options.streams), checkout=options.against))
        for one in servers.values():
            asyncio.run(streams(one, 4, 20, {}))  # imports and kernels
        for num in options.streams:
            found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
            for _ in range(options.rounds):
                for name, fields in VARIANTS.items():
                    for which, one in servers.items():
                        for process, cost in cost_of(one, num, options.tokens, fields).items():
                            found[name + which][process].append(cost)
            print(f"\n{num} streams, us of processor time per token (median, least to most)\n")
            print("| | " + " | ".join((*PROCESSES, "tokens/s")) + " |\n|---|" + "---:|" * (len(PROCESSES) + 1))
            for name, costs in found.items():
                cells = [f"{median(v):.1f} ({min(v):.1f} to {max(v):.1f})" for v in costs.values()]
                print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
        over_http = [asyncio.run(first_token(server)) for _ in range(options.first)]
    if over_http:
        within = in_process(options.first)
        served_ms, within_ms = 1e3 * median(over_http), 1e3 * median(within)
        print(f"\nfirst token at idle: {served_ms:.2f} ms over HTTP, {within_ms:.2f} ms in one process")
        print(f"the server adds {served_ms - within_ms:.2f} ms")


class Server:
    """A server process with the embedded model."""

    def __init__(self, num_streams: int, *, checkout: Path | None = None, arguments: Sequence[str] = ()) -> None:
        """Start the server of a checkout, with more arguments; None: of the packages that Python finds."""
        sources = [] if checkout is None else [str(path.resolve()) for path in checkout.glob("packages/*/src")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sources)} if sources else None
        command = [sys.executable, "-m", "pagewood.server", "serve", "--port", "0", "--log-level", "warning"]
        command += [
            "--max-running-requests",
            str(num_streams),
            "--max-total-tokens",
            str(num_streams * 384),
            *arguments,
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self._process.stdout is not None
        line = next(line for line in self._process.stdout if line.startswith("Pagewood serves"))
        host, _, port = line.split(" at ")[1].split()[0].removeprefix("http://").rpartition(":")
        self.address = (host, int(port))
        self.pids = {"http": self._process.pid, **_children(self._process.pid)}

    def __enter__(self) -> Server:
        """Wait until it is ready."""
        while b"200" not in asyncio.run(exchange(self.address, b"GET /ready HTTP/1.1\r\nHost: localhost\r\n", b"")):
            time.sleep(0.1)
        return self

    def __exit__(self, *exception: object) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(60)

    def cpu_s(self) -> dict[str, float]:
        """Return the processor time of each process so far, seconds."""
        return {name: _cpu_s(pid) for name, pid in self.pids.items()}


def _children(pid: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for entry in Path("/proc").iterdir():
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            words = (entry / "cmdline").read_text().split("\0")
        except (OSError, ValueError, IndexError):
            continue
        if parent == pid and "-m" in words:
            found[words[words.index("-m") + 1].rpartition(".")[2]] = int(entry.name)
    return found


def _cpu_s(pid: int) -> float:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) * 1e-9


async def exchange(address: tuple[str, int], head: bytes, body: bytes) -> bytes:
    """Send a request on a connection of its own, and return what comes until the server closes it."""
    reader, writer = await asyncio.open_connection(*address)
    length = b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(body) if body else b""
    writer.write(head + b"Connection: close\r\n" + length + b"\r\n" + body)
    data = await reader.read()
    writer.close()
    return data


def _body(number: int, num_tokens: int, fields: dict[str, Any]) -> bytes:
    message = {"role": "user", "content": f"What is {number} + {number % 7}?"}
    said = {"model": "pagewood-demo", "messages": [message], "max_tokens": num_tokens, "ignore_eos": True}
    return json.dumps({**said, "stream": num_tokens > 1, "temperature": 1.0, "seed": number, **fields}).encode()


async def streams(server: Server, num: int, num_tokens: int, fields: dict[str, Any]) -> None:
    """Read that many streams at once."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    bodies = [_body(number, num_tokens, fields) for number in range(num)]
    answers = await asyncio.gather(*[exchange(server.address, head, body) for body in bodies])
    assert all(b"data: [DONE]" in answer for answer in answers), answers[0][:500]


def cost_of(server: Server, num: int, num_tokens: int, fields: dict[str, Any]) -> dict[str, float]:
    """Return the processor time of each process per token, microseconds, and the tokens per second."""
    before, start_s = server.cpu_s(), time.perf_counter()
    asyncio.run(streams(server, num, num_tokens, fields))
    wall_s, after = time.perf_counter() - start_s, server.cpu_s()
    total = num * num_tokens
    found = {
        name: 1e6 * sum(after[pid] - before[pid] for pid in after if pid.startswith(name)) / total for name in PROCESSES
    }
    return {**found, "tokens/s": total / wall_s}


async def first_token(server: Server) -> float:
    """Return the time of a request for one token, seconds."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    body = _body(time.monotonic_ns() % 10_000, 1, {})
    start_s = time.perf_counter()
    await exchange(server.address, head, body)
    return time.perf_counter() - start_s


def in_process(num: int) -> list[float]:
    """Return the times of the same requests to an engine in this process, seconds."""
    from pagewood.engine import LLM, SamplingParams

    times: list[float] = []
    with LLM() as llm:
        for i in range(num + 3):
            messages = [{"role": "user", "content": f"What is {i} + {i % 7}?"}]
            start_s = time.perf_counter()
            llm.chat(messages, SamplingParams(max_tokens=1, temperature=1.0, seed=i))
            times.append(time.perf_counter() - start_s)
    return times[3:]


if __name__ == "__main__":
    os.environ.setdefault("PYTHONHASHSEED", "0")
    main()
