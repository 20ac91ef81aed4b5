"""Real processes that are killed, stopped and stuck under load: what clients see, and what is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import textwrap
import time
from collections.abc import Generator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest

from lost_requests import LONG, SHORT, Reader, text_of
from serving import LIMIT_S, Server, is_alive, key_files, until

NUM_TRIES = 8
"""Fewer than the deaths after which the server ends."""


def begun(server: Server, body: dict[str, Any]) -> HTTPConnection:
    """Send a request, and return its connection, which the caller closes."""
    address = httpx.URL(server.url)
    connection = HTTPConnection(address.host, address.port)
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    return connection


def ignore_interrupts() -> None:
    """As a shell without job control does for background jobs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short one, for sockets."""
    return tmp_path_factory.mktemp("up")


@pytest.fixture
def server(folder: Path) -> Generator[Server]:
    """A server with few rows, whose SIGINT is ignored by the shell."""
    options = ("--max-running-requests", "4", "--max-total-tokens", "16384", "--drain-seconds", "60")
    server = Server(folder, *options, preexec_fn=ignore_interrupts)
    yield server
    server.close()


def test_kill_9_of_the_engine_under_load_and_a_drain(server: Server) -> None:
    expected = text_of(server.http.post("/v1/completions", json=SHORT).text)
    num_deaths = num_retried = 0
    while num_retried < 10:  # in a death before, some had ended
        assert num_deaths < NUM_TRIES
        # All are queued before any is computed, so that no stream can end before the others have begun.
        until(lambda: server.admin.post("/pause", json={}).status_code == 200)
        streams = [Reader(server, LONG) for _ in range(4)]  # all rows
        until(lambda: server.ready()["engine"]["num_waiting"] == 4)
        waiting = [Reader(server, SHORT) for _ in range(6)]
        until(lambda: server.ready()["engine"]["num_waiting"] == 10)
        server.admin.post("/resume", json={}).raise_for_status()
        until(lambda streams=streams: all(len(stream.lines) > 3 for stream in streams))
        before = server.ready()["incidents"]["retried"]
        server.lose("engine")
        num_deaths += 1
        for one in waiting:
            assert (text_of(one.end()), one.status) == (expected, 200)
        for stream in streams:
            assert stream.end() == "data: [DONE]"
        incidents = server.ready()["incidents"]
        assert incidents | {"restarts": num_deaths, "lost": 0, "stuck": 0} == incidents
        num_retried = incidents["retried"] - before
    assert num_retried == 10
    assert server.http.get("/health/generate").json()["status"] == "ok"
    counters = server.until_idle()
    assert counters["num_free_pages"] + counters["num_cached_pages"] == counters["num_pages"]
    assert counters["num_violations"] == 0
    long = LONG | {"max_tokens": 500, "temperature": 0}
    whole = text_of(server.http.post("/v1/completions", json=long | {"stream": False}).text)
    children = server.children()
    pids = children.values()
    os.kill(children["engine_process"], signal.SIGSTOP)  # so that it does not end before the server has refused another
    last = Reader(server, long)
    until(lambda: server.ready()["requests"]["live"] == 1)
    server.process.send_signal(signal.SIGINT)
    until(lambda: server.http.get("/ready").json()["status"] == "draining")
    assert server.http.post("/v1/completions", json=SHORT).json()["error"]["code"] == "shutting_down"
    os.kill(children["engine_process"], signal.SIGCONT)
    assert last.end() == "data: [DONE]"
    assert "".join(text_of(line) for line in last.lines[:-1]) == whole
    assert server.process.wait(LIMIT_S) == 0
    assert not any(is_alive(pid) for pid in pids)
    assert not server.sockets()


@pytest.mark.slow
def test_requests_that_were_cancelled_in_a_dead_tokenizer_give_their_places_back(folder: Path) -> None:
    server = Server(folder, "--max-running-requests", "2", "--max-queued-requests", "4")
    try:
        tokenizer = server.children()["tokenizer_process"]
        os.kill(tokenizer, signal.SIGSTOP)
        leaving = [begun(server, SHORT) for _ in range(6)]
        until(lambda: server.ready()["requests"]["live"] == 6)
        assert server.http.post("/v1/completions", json=SHORT).status_code == 429
        for client in leaving:
            client.close()
        until(lambda: server.ready()["requests"] == {"live": 0, "ending": 6})
        os.kill(tokenizer, signal.SIGKILL)
        until(lambda: server.ready()["requests"]["ending"] == 0)
        answers = [Reader(server, SHORT) for _ in range(6)]  # every place
        assert len({text_of(one.end()) for one in answers}) == 1
        server.until_idle()
    finally:
        server.close()


def num_generated(server: Server) -> float:
    """Return how many tokens have come from the engine, of all answers."""
    lines = server.admin.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("pagewood_generation_tokens_total"))


WHOLE = [
    SHORT | {"prompt": f"Tale {n}", "max_tokens": 500, "ignore_eos": True, "temperature": n % 2, "seed": n}
    for n in range(20)
]
"""Every second one is drawn."""


@pytest.mark.slow
def test_answers_of_which_no_client_has_got_a_part_survive_kill_9(folder: Path) -> None:
    server = Server(folder, "--max-running-requests", "24", "--max-total-tokens", "16384")
    try:
        quiet = [Reader(server, body) for body in WHOLE]
        expected = [text_of(reader.end()) for reader in quiet]
        num_retried = 0
        for num_killed, name in enumerate(("engine", "detokenizer", "tokenizer"), 1):
            server.admin.post("/pause", json={}).raise_for_status()  # so that they run at the same time
            readers = [Reader(server, body) for body in WHOLE]
            # Its text is held back: until its last character, all of it may be a stop string.
            held = Reader(server, WHOLE[0] | {"stream": True, "stop": [f"{expected[0]}!"]})
            until(lambda: server.ready()["engine"]["num_waiting"] == len(WHOLE) + 1)
            before = num_generated(server)
            server.admin.post("/resume", json={}).raise_for_status()
            until(lambda before=before: num_generated(server) >= before + 200)
            until(lambda held=held: len(held.lines) > 0)
            late: list[Reader] = []
            pid = server.children()[f"{name}_process"]
            server.admin.post("/pause", json={}).raise_for_status()  # so that no more of them ends
            num_live = server.ready()["requests"]["live"]
            if name == "tokenizer":
                os.kill(pid, signal.SIGSTOP)  # what comes now is still in it when it dies
                late = [Reader(server, body) for body in WHOLE]
                until(lambda num=num_live: server.ready()["requests"]["live"] == num + len(WHOLE))
            os.kill(pid, signal.SIGKILL)
            until(lambda num_killed=num_killed: server.ready()["incidents"]["restarts"] == num_killed)
            until(lambda: server.admin.post("/resume", json={}).status_code == 200)
            for reader, text in zip([*readers, *late], expected * 2, strict=False):
                assert (text_of(reader.end()), reader.status) == (text, 200)
            assert held.end() == "data: [DONE]"
            assert "".join(text_of(line) for line in held.lines[:-1]) == expected[0]
            num_retried += len(late) or num_live
            until(lambda: server.http.get("/ready").status_code == 200)
            incidents = server.ready()["incidents"]
            assert (incidents["retried"], incidents["lost"]) == (num_retried, 0)
        server.until_idle()
    finally:
        server.close()


@pytest.mark.slow
def test_pauses_of_one_request_and_of_all_outlast_the_engine(server: Server) -> None:
    expected = text_of(server.http.post("/v1/completions", json=SHORT).text)

    def restarted() -> int:
        server.lose("engine")
        until(lambda: server.http.get("/ready").status_code == 200)
        return server.ready()["incidents"]["restarts"]

    def command(path: str, body: dict[str, Any]) -> None:
        server.admin.post(path, json=body).raise_for_status()

    command("/pause", {"mode": "retract"})
    paused = Reader(server, SHORT, request_id="mine")
    until(lambda: server.ready()["engine"]["num_waiting"] == 1)
    command("/pause", {"rid": "mine"})
    until(lambda: server.ready()["engine"]["num_held"] == 1)
    assert restarted() == 1
    other = Reader(server, SHORT)
    until(lambda: (server.ready()["engine"]["num_held"], server.ready()["engine"]["num_waiting"]) == (1, 1))
    assert server.ready()["engine"]["num_steps"] == 0  # nothing is computed until it is resumed
    command("/resume", {})
    assert text_of(other.end()) == expected
    assert not paused.lines
    assert server.ready()["engine"]["num_held"] == 1
    command("/resume", {"rid": "mine"})
    assert text_of(paused.end()) == expected
    server.until_idle()


STUCK_PROCESSOR = """
    import time
    from pathlib import Path

    def stick(tokens, logits, *, file):
        while Path(file).exists():
            time.sleep(0.05)
"""


@pytest.mark.slow
def test_the_watchdog_ends_a_stuck_device_and_a_stopped_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "sticky.py").write_text(textwrap.dedent(STUCK_PROCESSOR))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    server = Server(folder, "--watchdog-seconds", "4", "--logits-processor", "stick=sticky:stick")
    try:
        marker = folder / "marker"
        marker.touch()
        processor = {"name": "stick", "arguments": {"file": str(marker)}}
        stuck = Reader(server, SHORT | {"logits_processors": [processor]})
        until(lambda: server.ready()["incidents"]["kills"] == 1)
        marker.unlink()
        assert stuck.end()
        until(lambda: server.http.get("/ready").status_code == 200)
        assert server.http.post("/v1/completions", json=SHORT).status_code == 200
        log = server.stderr()
        assert "the device is stuck" in log
        for name in ("http", "engine", "detokenizer", "tokenizer-0"):
            assert f"stacks of the {name} process" in log
        assert re.search(r"File .*sticky.py\", line \d+ in stick", log)
        os.kill(server.children()["engine_process"], signal.SIGSTOP)
        until(lambda: "the engine is silent" in server.stderr())
        until(lambda: server.ready()["incidents"]["kills"] == 3)  # the detokenizer first, then the engine
        until(lambda: server.http.get("/ready").status_code == 200)
        os.kill(server.children()["detokenizer_process"], signal.SIGSTOP)
        until(lambda: server.ready()["incidents"]["kills"] == 4)
        until(lambda: server.http.get("/health/generate").status_code == 200)
        assert server.ready()["incidents"]["stuck"] == 3
    finally:
        server.close()


@pytest.mark.slow
def test_a_machine_that_stood_still_loses_no_process_and_no_request(folder: Path) -> None:
    server = Server(folder, "--watchdog-seconds", "3", "--tokenizer-workers", "2")
    try:
        whole = text_of(server.http.post("/v1/completions", json=LONG | {"temperature": 0, "stream": False}).text)
        for _ in range(3):
            reader = Reader(server, LONG | {"temperature": 0})
            until(lambda reader=reader: len(reader.lines) > 3)
            pids = [server.process.pid, *server.children().values()]
            num_before = server.stderr().count("stood still")
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(5.0)  # longer than the limit
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            until(lambda num=num_before: server.stderr().count("stood still") > num)
            assert reader.end() == "data: [DONE]"
            assert "".join(text_of(line) for line in reader.lines[:-1]) == whole
        incidents = server.ready()["incidents"]
        assert (incidents["stuck"], incidents["kills"], incidents["restarts"], incidents["lost"]) == (0, 0, 0, 0)
    finally:
        server.close()


@pytest.mark.slow
def test_a_crash_loop_ends_the_server_with_its_own_exit_code(folder: Path) -> None:
    server = Server(folder, "--max-restarts", "3")
    try:
        last: int | None = None
        for _ in range(3):
            until(lambda last=last: server.children().get("detokenizer_process") not in (None, last))
            last = server.children()["detokenizer_process"]
            os.kill(last, signal.SIGKILL)
        assert server.process.wait(LIMIT_S) == 3
        assert "the detokenizer process died 3 times in a row" in server.stderr()
        assert not server.sockets()
    finally:
        server.close()


@pytest.mark.slow
@pytest.mark.parametrize("kill_parent", [False, True])
def test_nothing_is_left_of_a_server_that_ends_at_once_under_load(folder: Path, kill_parent: bool) -> None:
    before = set(os.listdir("/dev/shm"))
    server = Server(folder, "--drain-seconds", "600")
    try:
        readers = [Reader(server, LONG) for _ in range(8)]
        until(lambda: all(len(reader.lines) > 3 for reader in readers))
        pids = list(server.children().values())
        assert len(pids) >= 3
        if kill_parent:
            os.kill(server.children()["tokenizer_process"], signal.SIGSTOP)  # it cannot notice by itself
            server.process.kill()
        else:
            server.process.send_signal(signal.SIGTERM)
            until(lambda: server.http.get("/ready").json()["status"] == "draining")
            server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(LIMIT_S) == (-signal.SIGKILL if kill_parent else 128 + signal.SIGTERM)
        for reader in readers:
            reader.end()
        until(lambda: not any(is_alive(pid) for pid in pids) and not server.sockets())
        assert len(key_files(folder)) == kill_parent
        assert set(os.listdir("/dev/shm")) <= before
    finally:
        server.close()
