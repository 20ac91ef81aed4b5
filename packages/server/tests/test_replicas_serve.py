"""Two real engine processes behind one server: a SIGKILL under streams, and their replacement one by one."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import zmq
from safetensors.numpy import load_file, save_file  # pyright: ignore[reportUnknownVariableType]

from pagewood.engine.model_folder.folder import model_folder
from serving import MODEL, Server, until

NUM_TRIES = 8
"""Fewer than the deaths after which the server ends."""
PROMPTS = [f"What can you do? {number}" for number in range(6)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    server = Server(
        tmp_path_factory.mktemp("replicas"),
        *("--replicas", "2", "--threads", "2", "--max-total-tokens", "16384", "--max-running-requests", "4"),
        *("--log-level", "warning"),
    )
    until(lambda: [one["status"] for one in server.ready()["replicas"]] == ["ready", "ready"])
    yield server
    server.close()
    assert server.process.returncode == 0


@pytest.fixture(scope="module")
def expected(server: Server) -> list[str]:
    """The answers without any death."""
    return together([lambda prompt=prompt: text_of(server, prompt) for prompt in PROMPTS])


def text_of(server: Server, prompt: str) -> str:
    """Return the text of a stream, sampled with a seed."""
    stream = server.openai.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=1000,
        seed=3,
        temperature=0.8,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    return "".join(chunk.choices[0].text for chunk in stream)


def together(
    calls: list[Callable[[], str]], *, meanwhile: Callable[[Callable[[], bool]], Any] = lambda is_over: None
) -> list[str]:
    """Return the results of calls that run at the same time; `meanwhile` can ask whether all have ended."""
    found: dict[int, str] = {}

    def work(index: int) -> None:
        found[index] = calls[index]()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    meanwhile(lambda: len(found) == len(calls))
    for thread in threads:
        thread.join(120)
    return [found.get(index, "it has no answer") for index in range(len(calls))]


def engines(server: Server) -> list[int]:
    """Return the process ids of the engines of a server."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            words = (entry / "cmdline").read_text().split("\0")
        except (OSError, ValueError, IndexError):
            continue
        if parent == server.process.pid and "pagewood.server.processes.engine_process" in words:
            found.append(int(entry.name))
    return sorted(found)


def test_each_engine_has_cores_of_its_own(server: Server) -> None:
    first, second = (os.sched_getaffinity(pid) for pid in engines(server))
    assert not first & second or len(os.sched_getaffinity(0)) < 2


def test_streams_survive_the_death_of_a_replica(server: Server, expected: list[str]) -> None:
    for num_deaths in range(1, NUM_TRIES + 1):
        engine = engines(server)[0]

        def kill(is_over: Callable[[], bool], engine: int = engine, num_deaths: int = num_deaths) -> None:
            until(lambda: is_over() or all(one["requests"] for one in server.ready()["replicas"]))
            os.kill(engine, signal.SIGKILL)
            until(lambda: server.ready()["incidents"]["restarts"] == num_deaths)
            assert server.http.get("/ready").status_code == 200
            assert 'pagewood_replica_up{model_name="pagewood-demo",replica="1"}' in server.http.get("/metrics").text

        found = together([lambda prompt=prompt: text_of(server, prompt) for prompt in PROMPTS], meanwhile=kill)
        assert found == expected
        until(lambda: len(engines(server)) == 2 and all(one["status"] == "ready" for one in server.ready()["replicas"]))
        incidents = server.ready()["incidents"]
        assert (incidents["lost"], incidents["restarts"]) == (0, num_deaths)
        if incidents["retried"]:  # otherwise its streams had ended before it died
            return
    raise AssertionError(f"nothing was sent again after {NUM_TRIES} deaths")


@pytest.mark.slow
def test_streams_survive_a_rolling_restart(server: Server, expected: list[str]) -> None:
    before = engines(server)

    def replace(is_over: Callable[[], bool]) -> None:
        replaced = server.admin.post("/restart_engine", json={})
        assert replaced.status_code == 200, replaced.text

    found = together([lambda prompt=prompt: text_of(server, prompt) for prompt in PROMPTS], meanwhile=replace)
    assert found == expected
    until(lambda: not {*before} & {*engines(server)})
    assert server.ready()["incidents"]["lost"] == 0
    assert server.sockets()  # the folder is still there, for processes that come later
    assert text_of(server, PROMPTS[0]) == expected[0]


@pytest.mark.slow
def test_streams_survive_the_death_of_the_detokenizer(server: Server, expected: list[str]) -> None:
    detokenizer = server.children()["detokenizer_process"]

    def kill(is_over: Callable[[], bool]) -> None:
        until(lambda: is_over() or any(one["requests"] for one in server.ready()["replicas"]))
        os.kill(detokenizer, signal.SIGKILL)

    found = together([lambda prompt=prompt: text_of(server, prompt) for prompt in PROMPTS], meanwhile=kill)
    assert found == expected
    assert server.ready()["incidents"]["lost"] == 0


@pytest.mark.slow
def test_answers_are_those_of_one_engine(tmp_path: Path, expected: list[str]) -> None:
    single = Server(tmp_path, "--threads", "1", "--max-total-tokens", "16384", "--max-running-requests", "4")
    try:
        assert [text_of(single, prompt) for prompt in PROMPTS] == expected
    finally:
        single.close()


@pytest.mark.slow
def test_each_engine_has_its_events_its_disk_cache_and_its_decision_log(tmp_path: Path) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    server = Server(
        tmp_path,
        *("--replicas", "2", "--threads", "2", "--max-total-tokens", "16384", "--max-running-requests", "2"),
        *("--kv-events", f"tcp://127.0.0.1:{port}", "--kv-events-topic", "kv@pod@demo"),
        *("--host-cache-gb", "0.01", "--disk-cache-path", str(tmp_path / "disk"), "--disk-cache-gb", "0.01"),
        *("--decision-log", str(tmp_path / "decisions.log"), "--max-queue-seconds", "60", "--refuse-late"),
        *("--log-level", "warning"),
    )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    events = [context.socket(zmq.SUB) for _ in range(2)]
    try:
        until(lambda: all(one["status"] == "ready" for one in server.ready()["replicas"]))
        for number, one in enumerate(events):
            one.setsockopt(zmq.SUBSCRIBE, b"kv@pod@demo")
            one.setsockopt(zmq.RCVTIMEO, 20_000)
            one.connect(f"tcp://127.0.0.1:{port + number}")
            assert one.recv_multipart()[0] == b"kv@pod@demo"  # each sends something every second
        together([lambda prompt=prompt: text_of(server, prompt) for prompt in PROMPTS])
    finally:
        server.close()
        for one in events:
            one.close(linger=0)
        context.term()
    assert server.process.returncode == 0
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["replica-0", "replica-1"]
    assert all((tmp_path / f"decisions-{number}.log").stat().st_size > 1000 for number in range(2))


@pytest.mark.slow
def test_weights_change_in_all_engines(tmp_path: Path) -> None:
    """From a folder, which an engine that is killed reads again; and from a file, which none can."""
    source, folder = model_folder(None), tmp_path / "updates"
    shutil.copytree(source, folder / "new")
    tensors = load_file(source / "model.safetensors")
    name = next(one for one in sorted(tensors) if one.endswith("down_proj.weight"))
    changed = {**tensors, name: tensors[name] * 0.5}
    save_file(changed, folder / "new" / "model.safetensors")
    save_file({name: tensors[name] * 0.25}, folder / "part.safetensors")
    save_file(tensors, folder / "whole.safetensors")
    server = Server(
        tmp_path,
        *("--replicas", "2", "--threads", "2", "--max-total-tokens", "16384", "--max-running-requests", "2"),
        *("--update-folder", str(folder), "--log-level", "warning"),
    )

    def post(path: str, body: dict[str, Any]) -> Any:
        response = server.admin.post(path, json=body, timeout=100)
        assert response.status_code == 200, response.text
        return response.json()

    def each() -> list[str]:
        """Return the answers of each engine."""
        found: list[str] = []
        for number in (1, 0):
            post("/drain", {"replica": number})
            found.append(text_of(server, PROMPTS[0]))
            post("/drain", {"replica": number, "is_draining": False})
        assert found[0] == found[1]
        return found

    def kill(number: int) -> None:
        before = server.ready()["incidents"]["restarts"]
        os.kill(engines(server)[number], signal.SIGKILL)
        until(lambda: server.ready()["incidents"]["restarts"] > before)

    def statuses() -> list[str]:
        return [one["status"] for one in server.ready()["replicas"]]

    try:
        until(lambda: statuses() == ["ready", "ready"])
        old = each()
        done = post("/update_weights_from_disk", {"model_path": str(folder / "new"), "weight_version": "a"})
        assert done["weight_version"] == "a"
        new = each()
        assert new != old
        checksum = post("/weights_checker", {})["checksum"]
        kill(0)
        until(lambda: statuses() == ["ready", "ready"])
        assert each() == new
        assert post("/weights_checker", {})["checksum"] == checksum
        assert server.admin.post("/restart_engine", json={}).status_code == 200
        assert each() == new
        post("/update_weights_from_files", {"files": [str(folder / "part.safetensors")], "weight_version": "b"})
        assert each() not in (old, new)
        assert server.admin.post("/restart_engine", json={}).status_code == 409
        kill(0)
        until(lambda: "outdated" in statuses())
        post("/update_weights_from_files", {"files": [str(folder / "whole.safetensors")], "weight_version": "c"})
        assert statuses() == ["ready", "ready"]
        assert each() == old
        assert server.admin.get("/weight_version").json() == {"weight_version": "c"}
    finally:
        server.close()
    assert server.process.returncode == 0
