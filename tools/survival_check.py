"""Kills a random process behind a loaded server again and again, and compares every answer with one of quiet times.

python tools/survival_check.py                                        # 512 streams, ten minutes, a death every 20 s
python tools/survival_check.py --streams 64 --minutes 1 --every 10 --json survival.json

A real `pagewood serve` with the embedded model. First each of the requests is answered while nothing dies: sampled and
greedy completions with penalties and stop strings, chats with log probabilities, schemas and functions. Then so many
streams run at a time, each with one of these requests, and a new one when it ends. The engine, the detokenizer or a
tokenizer is killed by SIGKILL in between, or the engine is replaced (`--moves`). Requests that come while the server
is not ready wait, as those that were there.

Printed are the requests that failed, the texts that were wrong, and the longest pause that a client saw between two
parts of its answer. The exit code is 1 if a request failed, a text was wrong, or no process was killed.
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
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from pagewood.server.bench.http_client import HttpClient, HttpError

MODEL = "pagewood-demo"
PROCESSES = ("engine", "detokenizer", "tokenizer")
LIMIT_S = 900.0
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 200}, "parts": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "parts"],
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"where": {"type": "string"}}}}}]  # fmt: skip  # noqa: E501


def main() -> int:
    """Run, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=512, help="requests at a time (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=10.0, help="time with deaths (default: %(default)s)")
    parser.add_argument("--every", type=float, default=20.0, metavar="S", help="seconds between two deaths")
    parser.add_argument("--kinds", type=int, default=96, help="different requests (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=160, help="longest answer (default: %(default)s)")
    parser.add_argument("--moves", action="store_true", help="also replace the engine as a rolling restart does")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of processes (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="survival-") as folder:
        server = Server(Path(folder), options.streams)
        try:
            found = asyncio.run(check(server, options))
        finally:
            server.close()
        found["tracebacks"] = server.log().count("Traceback")
    for name, value in found.items():
        print(f"{name:24} {value}")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))
    return int(bool(found["failed"] or found["wrong texts"] or found["tracebacks"] or not found["kills"]))


class Server:
    """A server process."""

    def __init__(self, folder: Path, num_streams: int) -> None:
        self._path = folder / "log"
        self._log = self._path.open("w+")
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "pagewood.server", "serve", "--port", "0", "--log-level", "warning"),
                *("--tokenizer-workers", "2", "--max-restarts", "100000", "--drain-seconds", "1"),
                *("--max-queued-requests", str(2 * num_streams)),
            ],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        assert self._process.stdout is not None
        line = next(line for line in self._process.stdout if line.startswith("Pagewood serves"))
        self.url = line.split(" at ")[1].split()[0]

    def children(self, name: str) -> list[int]:
        """Return the ids of the processes of a stage."""
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                command = (entry / "cmdline").read_text()
            except (OSError, ValueError, IndexError):
                continue
            if parent == self._process.pid and f"pagewood.server.processes.{name}_process" in command:
                found.append(int(entry.name))
        return found

    def move(self) -> None:
        """Replace the engine."""
        self._process.send_signal(signal.SIGHUP)

    def log(self) -> str:
        """Return what it has written to standard error."""
        return self._path.read_text()

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(60)
        self._log.close()


def requests_of(options: argparse.Namespace) -> list[tuple[str, bytes]]:
    """Return the requests, each with a path and a body."""
    rng = random.Random(1)
    words = ["stone", "river", "cloud", "moon", "wind", "seven", "twelve", "answer", "question", "letter", "reverse"]
    found: list[tuple[str, bytes]] = []
    for number in range(options.kinds):
        text = " ".join(rng.choices(words, k=rng.randint(3, 120)))
        drawn: dict[str, Any] = {"temperature": 1.0, "seed": number}
        chat: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
        completion: dict[str, Any] = {"prompt": text, "ignore_eos": True}
        path, body = [
            (COMPLETIONS, {**completion, **drawn}),
            (COMPLETIONS, {**completion, "temperature": 0, "frequency_penalty": 1.5, "presence_penalty": 0.5}),
            (COMPLETIONS, {**completion, **drawn, "stop": ["e e", "the river", "zz"], "repetition_penalty": 1.2}),
            (CHAT, {**chat, **drawn, "logprobs": True, "top_logprobs": 2, "ignore_eos": True}),
            (
                CHAT,
                {
                    **chat,
                    **drawn,
                    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
                },
            ),
            (CHAT, {**chat, **drawn, "tools": TOOLS, "tool_choice": "required"}),
        ][number % 6]
        max_tokens = rng.randint(options.tokens // 2, options.tokens)
        found.append((path, json.dumps({"model": MODEL, "max_tokens": max_tokens, "stream": True, **body}).encode()))
    return found


@dataclass(slots=True)
class Stream:
    """An answer that is being read."""

    last_s: float = field(default_factory=time.monotonic)
    pause_s: float = 0.0
    """The longest time between two parts of it."""
    parts: list[bytes] = field(default_factory=list[bytes])

    def take(self, data: bytes) -> None:
        """Read a part of the body."""
        now_s = time.monotonic()
        self.pause_s = max(self.pause_s, now_s - self.last_s)
        self.last_s = now_s
        self.parts.append(data)

    def said(self) -> str:
        """Return what the answer says, or its error."""
        content: list[str] = []
        has_ended = False
        for line in b"".join(self.parts).decode().split("\n"):
            if line == "data: [DONE]":
                has_ended = True
            elif line.startswith("data: "):
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    return f"error: {chunk['error']['code']}"
                for choice in chunk["choices"]:
                    content += _said_by(choice)
        return "".join(content) if has_ended else "error: cut off"


def _said_by(choice: dict[str, Any]) -> list[str]:
    delta: dict[str, Any] = choice.get("delta") or {"content": choice.get("text")}
    texts = [delta.get("content") or "", delta.get("reasoning_content") or ""]
    for call in delta.get("tool_calls") or ():
        function: dict[str, Any] = call.get("function") or {}
        texts.append(f"{function.get('name') or ''}{function.get('arguments') or ''}")
    logprobs: dict[str, Any] = choice.get("logprobs") or {}
    entries: list[dict[str, Any]] = logprobs.get("content") or []
    texts += [f"<{entry['token']}:{entry['logprob']:.6g}>" for entry in entries]
    return [*texts, f"<{choice['finish_reason']}>" if choice.get("finish_reason") else ""]


async def ask(client: HttpClient, path: str, body: bytes) -> Stream:
    """Send a request, and read its answer."""
    stream = Stream()
    try:
        status = await client.send("POST", path, body, stream.take, limit_s=LIMIT_S)
    except HttpError as error:
        stream.parts.append(f'data: {{"error": {{"code": "{error.kind}"}}}}\n'.encode())
        return stream
    if status != 200:
        stream.parts.append(f'\ndata: {{"error": {{"code": "status {status}"}}}}\n'.encode())
    return stream


async def check(server: Server, options: argparse.Namespace) -> dict[str, Any]:
    """Ask while processes die, and return what was found."""
    client = HttpClient(server.url)
    requests = requests_of(options)
    counts: Counter[str] = Counter()
    kills: Counter[str] = Counter()
    expected = [stream.said() for stream in await asyncio.gather(*[ask(client, *one) for one in requests])]
    assert not [text for text in expected if text.startswith("error")], expected
    pauses: list[float] = []
    failures: Counter[str] = Counter()
    wrong: list[dict[str, Any]] = []
    end_s = time.monotonic() + 60 * options.minutes

    async def work(number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < end_s:
            kind = rng.randrange(len(requests))
            stream = await ask(client, *requests[kind])
            said = stream.said()
            counts["requests"] += 1
            pauses.append(stream.pause_s)
            if said.startswith("error"):
                failures[said] += 1
            elif said != expected[kind]:
                wrong.append({"kind": kind, "expected": expected[kind], "got": said})

    async def kill() -> None:
        rng = random.Random(options.seed)
        names = [*PROCESSES, *(["move"] if options.moves else [])]
        while time.monotonic() + options.every < end_s:
            await asyncio.sleep(options.every)
            name = rng.choice(names)
            if name == "move":
                server.move()
            elif pids := server.children(name):
                os.kill(rng.choice(pids), signal.SIGKILL)
            else:
                continue
            kills[name] += 1

    began_s = time.monotonic()
    await asyncio.gather(kill(), *[work(number) for number in range(options.streams)])
    took_s = time.monotonic() - began_s
    _, ready = await client.json("GET", "/ready")
    client.close()
    for one in wrong[:3]:
        print(json.dumps(one))
    return {
        "streams": options.streams,
        "seconds": round(took_s, 1),
        "requests": counts["requests"],
        "kills": dict(kills),
        "failed": sum(failures.values()),
        "failures": dict(failures),
        "wrong texts": len(wrong),
        "longest pause s": round(max(pauses), 2),
        "median longest pause s": round(median(pauses), 2),
        "incidents": json.loads(ready)["incidents"],
    }


if __name__ == "__main__":
    sys.exit(main())
