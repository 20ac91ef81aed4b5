"""`pagewood bench` against a server whose times are known, and against ours."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest

from memory_server import MemoryServer
from pagewood.engine.text import Tokenizer
from pagewood.server.bench import workloads
from pagewood.server.bench.client import Sender
from pagewood.server.bench.http_client import HttpClient, HttpError
from pagewood.server.bench.records import Record
from pagewood.server.bench.run import run
from pagewood.server.bench.workloads import Conversation, History, Lengths, Turn, Words, ids_below, words_of
from pagewood.server.http.http_server import http_server
from pagewood.server.http.listening import bind

pytestmark = pytest.mark.anyio
Senders = Callable[[str], Sender]


class FakeServer:
    """Answers every request with pieces of bytes, at given times; notes what it was asked."""

    def __init__(self) -> None:
        self.pieces: list[tuple[float, bytes]] = []
        self.asked: list[dict[str, Any]] = []
        self.num_awaited = 0
        """Requests that must have come before the first is answered."""
        self.num_connections = 0
        self.url = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                self.asked.append(json.loads(await reader.readexactly(length)))
                while len(self.asked) < self.num_awaited:
                    await asyncio.sleep(0.005)
                for wait_s, piece in self.pieces:
                    await asyncio.sleep(wait_s)
                    writer.write(piece)
                if b"Connection: close" in self.pieces[0][1]:
                    break
        except asyncio.IncompleteReadError:
            pass
        writer.close()


@pytest.fixture
async def fake() -> AsyncGenerator[FakeServer]:
    server = FakeServer()
    listening = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    yield server
    listening.close()


def streamed(*events: str, length: int | None = None) -> list[bytes]:
    """Return the head and the events of a stream, each as a chunk of HTTP."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    bodies = [f"data: {event}\n\n".encode() for event in events]
    return [head, *(f"{len(body):x}\r\n".encode() + body + b"\r\n" for body in bodies), b"0\r\n\r\n"]


def content(text: str) -> str:
    return json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]})


USAGE = json.dumps(
    {
        "choices": [],
        "usage": {"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}},
    }
)
ROLE = json.dumps({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
END = json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})


@pytest.fixture
async def sender() -> AsyncGenerator[Callable[[str], Sender]]:
    """Returns senders to a URL; their connections are closed at the end."""
    clients: list[HttpClient] = []

    def to(url: str) -> Sender:
        clients.append(HttpClient(url))
        return Sender(clients[-1], endpoint="chat", model="m", fields={"seed": 1}, limit_s=3.0)

    yield to
    for client in clients:
        client.close()
    await asyncio.sleep(0.01)  # for what closing leaves to the loop


async def ask(sender: Sender, *, keeps_text: bool = False) -> Record:
    history, record = History(), Record(planned_s=0.0)
    history.say(Turn(prompt="Hi", max_tokens=5))
    await sender.send(history, 5, record, keeps_text=keeps_text)
    return record


async def test_times_and_counts(fake: FakeServer, sender: Senders) -> None:
    head, role, one, two, three, end, usage, done, last = streamed(
        ROLE, content("a"), content("b"), content("c d"), END, USAGE, "[DONE]"
    )
    fake.pieces = [(0, head + role), (0.1, one), (0.05, two), (0.15, three + end + usage + done + last)]
    client, times_s = sender(fake.url), list[float]()
    for _ in range(50):
        found = await ask(client, keeps_text=True)
        assert found.error is None
        assert (found.num_prompt, found.num_cached, found.num_output, found.text) == (7, 4, 5, "abc d")
        times_s = (found.ttft_s, *found.itl_s, found.tpot_s)
        if times_s == tuple(
            pytest.approx(s, abs=a) for s, a in ((0.1, 0.04), (0.05, 0.04), (0.15, 0.04), (0.05, 0.015))
        ):
            break  # otherwise the machine was busy with something else
    else:
        raise AssertionError(times_s)
    asked = fake.asked[0]
    assert asked["messages"] == [{"role": "user", "content": "Hi"}]
    assert (asked["model"], asked["max_tokens"], asked["seed"], asked["stream"]) == ("m", 5, 1, True)


async def test_any_cut_of_the_bytes(fake: FakeServer, sender: Senders) -> None:
    whole = b"".join(streamed(content("\u00e9"), content("b"), USAGE, "[DONE]"))
    one = sender(fake.url)
    for size in (1, 3, 17):
        fake.pieces = [(0, whole[start : start + size]) for start in range(0, len(whole), size)]
        found = await ask(one, keeps_text=True)
        assert (found.error, found.text, len(found.chunks_s)) == (None, "\u00e9b", 2)
    assert fake.num_connections == 1


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ([b"HTTP/1.1 429 Too Many\r\nContent-Length: 2\r\n\r\n{}"], "429"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\nConnection: close\r\n\r\ndata"], "connection"),
        (streamed(content("a")), "cut off"),
        (streamed(content("a"), '{"error": {"message": "x"}}', "[DONE]"), "error in stream"),
        (streamed("{nonsense", "[DONE]"), "bad event"),
        ([b"SSH-2.0\r\n\r\n"], "protocol"),
        (streamed(content("a"))[:2], "timeout"),
    ],
)
async def test_errors(fake: FakeServer, sender: Senders, pieces: list[bytes], error: str) -> None:
    fake.pieces = [(0, b"".join(pieces))]
    one = sender(fake.url)
    assert (await ask(one)).error == error
    fake.pieces = [(0, b"".join(streamed(content("a"), "[DONE]")))]
    assert (await ask(one)).error is None  # the next request is not disturbed


async def test_no_server(sender: Senders) -> None:
    with bind("127.0.0.1", 0) as socket:
        url = f"http://127.0.0.1:{socket.getsockname()[1]}"
    assert (await ask(sender(url))).error == "connection"
    with pytest.raises(ValueError, match="url must be"):
        HttpClient("ftp://x")
    with pytest.raises(HttpError, match="cannot connect"):
        await HttpClient(url).json("GET", "/v1/models")


def turns(number: int) -> Conversation:
    return Conversation(turns=tuple(Turn(prompt=f"q{index}", max_tokens=1) for index in range(number)))


async def test_closed_loop_and_conversations(fake: FakeServer, sender: Senders) -> None:
    fake.pieces = [(0.02, b"".join(streamed(content("a"), "[DONE]")))]
    one = await run(sender(fake.url), iter([turns(3)] * 6), concurrency=2)
    assert (one.num_ended, one.num_failed, fake.num_connections) == (18, 0, 2)
    assert max(len(asked["messages"]) for asked in fake.asked) == 5
    last = next(asked["messages"] for asked in fake.asked if len(asked["messages"]) == 5)
    assert [message["content"] for message in last] == ["q0", "a", "q1", "a", "q2"]


async def test_open_loop_does_not_wait(fake: FakeServer, sender: Senders) -> None:
    fake.pieces = [(0, b"".join(streamed(content("a"), "[DONE]")))]
    fake.num_awaited = 10
    found = await run(sender(fake.url), iter([turns(1)] * 10), gaps=iter([0.01] * 10))
    assert fake.num_connections == 10
    planned = [record.planned_s - found.records[0].planned_s for record in found.records]
    assert planned == pytest.approx([0.01 * index for index in range(10)])
    with pytest.raises(ValueError, match="concurrency must be given"):
        await run(sender(fake.url), iter([turns(1)]))


async def test_words_are_calibrated() -> None:
    short, long = (10, 27), (50, 107)  # 2 tokens a word and 7 more
    words = Words.calibrated(short, long)
    assert (words.tokens_per_word, words.overhead) == (2.0, 7.0)
    text = words.text(107, workloads.random.Random(0))
    assert len(text.split()) == 50
    assert len(words_of(300).split()) == 300


def test_workloads() -> None:
    rng_free = Words(tokens_per_word=1.0)
    lengths = Lengths(num_prompt=20, num_output=8, spread=0.5)
    shared = workloads.shared_prefixes(ids_below(1000), lengths, num_groups=2, num_prefix=30, seed=3)
    prompts = [next(shared).turns[0].prompt for _ in range(20)]
    assert len({prompt[:30] for prompt in prompts}) == 2
    assert len(set(prompts)) == 20
    again = workloads.shared_prefixes(ids_below(1000), lengths, num_groups=2, num_prefix=30, seed=3)
    assert prompts == [next(again).turns[0].prompt for _ in range(20)]
    drawn = [
        next(one).turns[0] for one in [workloads.random_prompts(rng_free.text, lengths, seed=1)] for _ in range(99)
    ]
    sizes = [len(str(turn.prompt).split()) for turn in drawn]
    assert (min(sizes), max(sizes)) == (10, 30)
    assert {turn.max_tokens for turn in drawn} == set(range(4, 13))
    with pytest.raises(ValueError, match="spread must be"):
        Lengths(spread=1.0)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines: list[dict[str, Any]] = [
        {"timestamp": 500, "input_length": 700, "output_length": 3, "hash_ids": [1, 2]},
        {"timestamp": 2500, "input_length": 512, "output_length": 4, "hash_ids": [1]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    first, second = workloads.from_file(path, ids_below(500), num_output=9, speed=2.0)
    assert (first.turns[0].after_s, second.turns[0].after_s) == (0.0, 1.0)
    assert (len(first.turns[0].prompt), second.turns[0].max_tokens) == (700, 4)
    assert first.turns[0].prompt[:512] == second.turns[0].prompt
    path.write_text('{"prompt": "a b"}\n\n{"prompt": [1, 2], "max_tokens": 5}\n{"prompt": {}}')
    found = workloads.from_file(path, ids_below(500), num_output=9)
    assert next(found).turns == (Turn(prompt="a b", max_tokens=9),)
    assert next(found).turns == (Turn(prompt=(1, 2), max_tokens=5),)
    with pytest.raises(ValueError, match=r"trace\.jsonl:4: a request must have a prompt"):
        next(found)


async def test_our_server(model_folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The command as a user runs it; the server counts as many tokens as are reported."""
    server = MemoryServer(model_folder, tokenizer, limit=64, max_length=2000, host="127.0.0.1")
    await server.start()
    server.gate.open()
    file = tmp_path / "out.json"
    words = ["--endpoint", "completions", "--requests", "12", "--concurrency", "3", "--input-tokens", "40"]
    words += ["--output-tokens", "9", "--slo", "ttft=60s", "--json", str(file), "--quiet"]
    with bind("127.0.0.1", 0) as socket:
        serving = http_server(server.frontend.site(), stop_grace_s=5)
        task = asyncio.create_task(serving.serve(sockets=[socket]))
        try:
            url = f"http://127.0.0.1:{socket.getsockname()[1]}"
            command = [sys.executable, "-m", "pagewood.server", "bench", url, *words]
            process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            said = (await process.communicate())[0].decode()
        finally:
            serving.should_exit = True
            await task
            await server.stop()
    assert process.returncode == 0
    assert "12 complete, 0 failed" in said
    found = json.loads(file.read_text())
    assert found["summary"]["num_output_tokens"] == 12 * 9
    assert found["summary"]["good_requests_per_s"] == found["summary"]["requests_per_s"]
    assert found["settings"]["input_tokens"] == 40
    assert {request["num_output"] for request in found["requests"]} == {9}
    prompts = [request["num_prompt"] for request in found["requests"]]
    assert sum(prompts) / len(prompts) == pytest.approx(40, rel=0.2)
