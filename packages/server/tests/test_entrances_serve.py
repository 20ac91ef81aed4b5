"""A server with several HTTP processes: it is one server, whichever of them a client has reached."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Generator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from http_processes import client_of, entrances
from pagewood.server.cli import main
from serving import LIMIT_S, MODEL, Server, is_alive, until

NUM = 3
OPTIONS = ("--http-processes", str(NUM), "--max-total-tokens", "16384", "--threads", "1", "--tokenizer-workers", "1")
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is 12 + 7?"}],
    "temperature": 0,
    "max_tokens": 24,
}
LONG: dict[str, Any] = {"model": MODEL, "prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "seed": 5}
STREAM = {**LONG, "max_tokens": 400, "stream": True}
ADMIN = {"authorization": "Bearer sk-of-the-admin-0123456789"}
USER = {"authorization": "Bearer sk-of-a-user-0123456789ab"}
THREE = {"authorization": "Bearer sk-with-three-requests-0123"}
ONE = {"authorization": "Bearer sk-with-one-at-a-time-01234"}


def bearer(headers: dict[str, str]) -> str:
    return headers["authorization"].removeprefix("Bearer ")


def pids(server: Server) -> list[int]:
    """Return the first HTTP process, and the others when all of them run."""
    until(lambda: len(entrances(server)) == NUM - 1)
    return [server.process.pid, *entrances(server)]


def text_of(stream: httpx.Response) -> str:
    """Read a stream of a completion, and return its text."""
    events = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    assert events[-1] == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


class Reading:
    """A thread that reads a stream; `end` returns its text, or the error that ended it."""

    def __init__(self, stream: httpx.Response) -> None:
        self._found: list[str | httpx.HTTPError] = []
        self._stream = stream
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            self._found.append(text_of(self._stream))
        except httpx.HTTPError as error:
            self._found.append(error)

    def end(self) -> str | httpx.HTTPError:
        self._thread.join(LIMIT_S)
        return self._found[0]


def is_live(client: httpx.Client, num: int) -> bool:
    """Return whether the server has that many requests."""
    return client.get("/ready").json()["requests"]["live"] == num


def sample(client: httpx.Client, name: str, **labels: str) -> float:
    """Return a value of `/metrics`, the sum of those with these labels."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    samples = [one for family in families for one in family.samples if one.name == name]
    return sum(one.value for one in samples if labels.items() <= one.labels.items())


def paused_streams(clients: list[httpx.Client], admin: httpx.Client, stack: ExitStack) -> list[Reading]:
    """Begin a stream with each client, and pause the engine while all of them are under way."""
    while True:
        streams = [stack.enter_context(one.stream("POST", "/v1/completions", json=STREAM)) for one in clients]
        readings = [Reading(stream) for stream in streams]
        assert admin.post("/pause", json={}).status_code == 200
        if is_live(admin, len(clients)):
            return readings
        assert admin.post("/resume", json={}).status_code == 200
        for reading in readings:
            reading.end()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    """With keys and a store of batches."""
    folder = tmp_path_factory.mktemp("http")
    keys: list[dict[str, Any]] = [
        {"key": bearer(ADMIN), "admin": True},
        {"key": bearer(USER), "tenant": "user"},
        {"key": bearer(THREE), "tenant": "three", "requests_per_minute": 3},
        {"key": bearer(ONE), "tenant": "one", "max_concurrent": 1},
    ]
    file = folder / "keys"
    file.touch(mode=0o600)
    file.write_text(json.dumps(keys))
    store = str(folder / "store")
    with closing(Server(folder, *OPTIONS, "--api-key-file", str(file), "--batch-store", store)) as server:
        yield server


@pytest.fixture
def clients(server: Server) -> Generator[list[httpx.Client]]:
    """A client of each process, with the key of a user."""
    with ExitStack() as stack:
        yield [stack.enter_context(client_of(server, pid, headers=USER)) for pid in pids(server)]


def test_answers_are_the_same(clients: list[httpx.Client]) -> None:
    bodies: list[Any] = []
    for client in clients:
        body = client.post("/v1/chat/completions", json=CHAT).json()
        bodies.append((body["choices"], body["usage"]["completion_tokens"]))
        with client.stream("POST", "/v1/completions", json={**LONG, "stream": True, "max_tokens": 200}) as stream:
            bodies.append(text_of(stream))
        wrong = client.post("/v1/chat/completions", json={**CHAT, "max_tokens": -1})
        bodies.append((wrong.status_code, wrong.json()))
        bodies.append(client.get("/v1/models", headers={"authorization": "Bearer wrong"}).status_code)
        bodies.append(client.get("/server_info").status_code)
        bodies.append(client.get("/server_info", headers=ADMIN).status_code)
        big = client.post("/v1/completions", json={**LONG, "max_tokens": 1, "stop": ["x" * 2_000_000]})
        bodies.append((big.status_code, big.json()["error"]["code"]))
    num = len(bodies) // NUM
    assert bodies[:num] == bodies[num : 2 * num] == bodies[2 * num :]
    assert bodies[3:6] == [401, 403, 200]


def test_limits_of_a_key_are_counted_once(clients: list[httpx.Client]) -> None:
    left: list[int] = []
    for client in clients:
        answer = client.post("/v1/chat/completions", json=CHAT, headers=THREE)
        assert answer.status_code == 200
        left.append(int(answer.headers["x-ratelimit-remaining-requests"]))
    assert left == [2, 1, 0]
    for client in clients:
        assert client.post("/v1/chat/completions", json=CHAT, headers=THREE).status_code == 429


def test_requests_are_reached_from_everywhere(server: Server, clients: list[httpx.Client]) -> None:
    for starts, (pid, other) in enumerate(zip(pids(server), [*clients[1:], clients[0]], strict=True)):
        name = f"the request {starts}"
        with client_of(server, pid, headers={**ONE, "x-client-request-id": name}) as starting:
            assert other.post("/pause", json={}, headers=ADMIN).status_code == 200
            ends: list[httpx.Response] = []

            def ask(to: httpx.Client = starting, ends: list[httpx.Response] = ends) -> None:
                ends.append(to.post("/v1/completions", json=LONG))

            waiting = threading.Thread(target=ask)
            waiting.start()
            until(partial(is_live, other, 1))
            busy = other.post("/v1/completions", json=LONG, headers=ONE)
            assert busy.json()["error"]["code"] == "too_many_concurrent"
            path = f"/v1/requests/{name}/priority"
            assert other.post(path, json={"priority": 3}).status_code == 404  # it is another tenant's
            assert other.post(path, json={"priority": 3}, headers=ADMIN).status_code == 200
            assert other.post("/abort", json={"rid": name}, headers=ONE).json() == {"aborted": 1}
            waiting.join(LIMIT_S)
            assert ends[0].json()["error"]["code"] == "aborted"
            assert other.post("/resume", json={}, headers=ADMIN).status_code == 200
            until(partial(is_live, other, 0))


def test_responses_go_on_elsewhere(clients: list[httpx.Client]) -> None:
    before: str | None = None
    first: str | None = None
    for client in [*clients, *clients]:
        said = {"model": MODEL, "input": "And 3 more?", "max_output_tokens": 8, "previous_response_id": before}
        answer = client.post("/v1/responses", json=said)
        assert answer.status_code == 200, answer.text
        before = answer.json()["id"]
        first = first or before
    items = clients[1].get(f"/v1/responses/{before}/input_items").json()["data"]
    assert len(items) == 6 + 5
    assert clients[2].get(f"/v1/responses/{before}").json()["id"] == before
    assert clients[1].delete(f"/v1/responses/{first}").status_code == 200
    assert {client.get(f"/v1/responses/{first}").status_code for client in clients} == {404}


def test_a_batch_is_one_batch(clients: list[httpx.Client]) -> None:
    lines = [
        json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": CHAT})
        for number in range(4)
    ]
    file = (
        clients[1].post("/v1/files", files={"file": ("in", "\n".join(lines))}, data={"purpose": "batch"}).json()["id"]
    )
    asked = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = clients[2].post("/v1/batches", json=asked).json()["id"]
    until(lambda: clients[0].get(f"/v1/batches/{batch}").json()["status"] == "completed")
    output = clients[1].get(f"/v1/batches/{batch}").json()["output_file_id"]
    contents = {client.get(f"/v1/files/{output}/content").text for client in clients}
    assert len(contents) == 1
    assert sorted(json.loads(line)["custom_id"] for line in contents.pop().splitlines()) == ["0", "1", "2", "3"]


def test_metrics_are_of_the_whole_server(server: Server, clients: list[httpx.Client]) -> None:
    def num_chats(client: httpx.Client) -> float:
        client.headers.update(ADMIN)
        return sample(client, "pagewood_http_requests_total", path="/v1/chat/completions", status="200")

    before = num_chats(clients[0])
    for client in clients:
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
    until(lambda: num_chats(clients[0]) == before + NUM)  # they are counted when they are over
    assert {num_chats(client) for client in clients} == {before + NUM}
    until(lambda: sample(clients[0], "pagewood_http_connections") >= NUM)
    for number in range(1, NUM):
        assert sample(clients[0], "pagewood_process_resident_memory_bytes", process=f"http-{number}") > 0
    assert {client.get("/ready").json()["incidents"]["restarts"] for client in clients} == {0}


@pytest.mark.slow
def test_a_killed_process_takes_its_own_connections_with_it(tmp_path: Path) -> None:
    with closing(Server(tmp_path, *OPTIONS, "--drain-seconds", "60")) as server, ExitStack() as stack:
        first, victim, _ = running = pids(server)
        admin = stack.enter_context(client_of(server, first, headers=server.admin.headers))  # with the key of the run
        clients = [stack.enter_context(client_of(server, pid)) for pid in running]
        expected = admin.post("/v1/completions", json={**STREAM, "stream": False}).json()["choices"][0]["text"]
        streams = paused_streams(clients, admin, stack)
        os.kill(victim, signal.SIGKILL)
        until(partial(is_live, admin, NUM - 1))
        assert admin.post("/resume", json={}).status_code == 200
        assert isinstance(streams.pop(1).end(), httpx.HTTPError)
        assert [one.end() for one in streams] == [expected] * (NUM - 1)
        (restarted,) = {*pids(server)} - {*running}
        with client_of(server, restarted) as client, client.stream("POST", "/v1/completions", json=STREAM) as stream:
            assert text_of(stream) == expected
        assert sample(admin, "pagewood_incidents_total", kind="restart") == 1
        with client_of(server, restarted) as client, client.stream("POST", "/v1/completions", json=STREAM) as stream:
            server.process.terminate()
            assert text_of(stream) == expected
        assert server.process.wait(LIMIT_S) == 0
        assert not any(map(is_alive, [*running, restarted]))
        assert not server.sockets()


@pytest.mark.slow
def test_a_server_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    with closing(Server(tmp_path, *OPTIONS)) as server:
        running = pids(server)
        os.kill(running[0], signal.SIGKILL)
        until(lambda: not any(map(is_alive, running)))
        until(lambda: not server.sockets())


def test_an_address_that_is_taken(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    port = server.url.rpartition(":")[2]
    assert main(["serve", "--http-processes", "2", "--port", port]) == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in capsys.readouterr().err
