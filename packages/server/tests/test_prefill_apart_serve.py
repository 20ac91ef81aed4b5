"""A server that computes prompts and one that goes on with them; either is killed at random moments under load."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving import LIMIT_S, MODEL, Server, until

pytestmark = pytest.mark.slow

NAME = f"serve-{os.getpid()}"
SHARED = (
    "--host-cache-gb", "0.02", "--remote-cache", f"shm:{NAME}", "--remote-cache-gb", "0.03",
    "--max-total-tokens", "8192", "--threads", "1", "--chunked-prefill-size", "64",
)  # fmt: skip
STORE = Path("/dev/shm") / f"pagewood-{os.geteuid()}-{NAME}"
ANSWER: dict[str, Any] = {"model": MODEL, "max_tokens": 24, "temperature": 0.8, "seed": 3, "ignore_eos": True}


def prompt(number: int) -> str:
    return f"Story {number}. " + "Once upon a time there was a house in a wood. " * (1 + number % 5)


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Generator[tuple[Server, Server]]:
    made = [Server(tmp_path_factory.mktemp(role), "--role", role, *SHARED) for role in ("prefill", "decode")]
    yield made[0], made[1]
    for server in made:
        server.close()
    shutil.rmtree(STORE, ignore_errors=True)


def post(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=LIMIT_S)
    response.raise_for_status()
    return response.json()


def pair(prefill: Server, decode: Server, number: int) -> dict[str, Any]:
    """Answer as a router for shared storage does: ask the decode side first, and then let the other compute."""
    body = ANSWER | {"prompt": prompt(number)}
    first = post(decode, body | {"cache_hit_threshold": 0.9})
    if first["choices"][0]["finish_reason"] != "cache_threshold":
        return first
    asked = {"max_tokens": 1, "cache_hit_threshold": 0, "kv_transfer_params": {"do_remote_decode": True}}
    with contextlib.suppress(httpx.HTTPError):  # it was lost: the other computes what is missing
        post(prefill, body | asked)
    return post(decode, body | {"cache_hit_threshold": 0})


def text(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["text"]


def test_a_router_for_shared_storage_is_served(sides: tuple[Server, Server]) -> None:
    prefill, decode = sides
    body = ANSWER | {"prompt": prompt(4)}
    first = post(decode, body | {"cache_hit_threshold": 0.9})
    assert (first["choices"][0]["finish_reason"], text(first)) == ("cache_threshold", "")
    done = post(prefill, body)  # it ends early whatever the request says
    assert done["usage"]["completion_tokens"] == 1
    found = post(decode, body | {"cache_hit_threshold": 0.9})
    assert found["choices"][0]["finish_reason"] == "length"
    num_prompt = found["usage"]["prompt_tokens"]
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == (num_prompt - 1) // 16 * 16
    awaited = ANSWER | {"prompt": prompt(9), "kv_transfer_params": {"do_remote_prefill": True}}
    answers: list[dict[str, Any]] = []
    waiting = threading.Thread(target=lambda: answers.append(post(decode, awaited)))
    waiting.start()
    until(lambda: decode.ready()["engine"]["num_waiting"] == 1)
    post(prefill, ANSWER | {"prompt": prompt(9)})
    waiting.join(LIMIT_S)
    assert answers[0]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    modes = {path.stat().st_mode & 0o777 for path in STORE.rglob("*.pages")}
    assert modes == {0o600}


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_the_engine_of_either_side_may_be_killed_under_load(sides: tuple[Server, Server], victim: str) -> None:
    """No request fails on the other side, none hangs, and all texts are those of one engine alone."""
    prefill, decode = sides
    expected = {number: text(post(decode, ANSWER | {"prompt": prompt(number)})) for number in range(60)}
    for server in sides:
        server.admin.post("/flush_cache", json={}).raise_for_status()
    for folder in STORE.iterdir():
        shutil.rmtree(folder)
    killed = prefill if victim == "prefill" else decode
    failures: list[str] = []
    num_right = [0]
    ends = threading.Event()

    def client(seed: int) -> None:
        rng = random.Random(seed)
        while not ends.is_set():
            number = rng.randrange(60)
            try:
                found = text(pair(prefill, decode, number))
            except httpx.HTTPError as error:
                if victim == "prefill":
                    failures.append(repr(error))
                continue
            if found != expected[number]:
                failures.append(f"prompt {number}: {found!r} instead of {expected[number]!r}")
            num_right[0] += 1

    clients = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
    for one in clients:
        one.start()
    rng = random.Random(7)
    for _ in range(6):
        num_before = num_right[0]
        time.sleep(rng.random() * 2)
        pid = killed.children().get("engine_process")
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        until(lambda: killed.ready()["status"] == "ready")
        until(lambda num_before=num_before: num_right[0] > num_before + 4)
    ends.set()
    for one in clients:
        one.join(LIMIT_S)
        assert not one.is_alive(), "a request hangs"
    assert failures == []
    assert sum(path.stat().st_size for path in STORE.rglob("*") if path.is_file()) <= 0.03e9 * (1 + 3 / 16)
    for server in sides:
        counters = server.until_idle()
        assert counters["num_free_pages"] + counters["num_cached_pages"] == counters["num_pages"]


def long_prompt(number: int) -> str:
    """Return a prompt that is longer than what an engine that decodes computes itself."""
    return f"Story {number}. " + "Once upon a time there was a house in a wood. " * (16 + number % 5)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The answers of one engine."""
    single = Server(tmp_path_factory.mktemp("single"), "--max-total-tokens", "8192", "--threads", "1")
    try:
        return [text(post(single, ANSWER | {"prompt": long_prompt(number)})) for number in range(40)]
    finally:
        single.close()


@pytest.fixture
def paired(tmp_path: Path) -> Generator[Server]:
    """One server: an engine that computes prompts, and two that decode."""
    place = f"{NAME}-paired"
    shared = [f"shm:{place}" if one.startswith("shm:") else "3" if one == "1" else one for one in SHARED]
    server = Server(tmp_path, "--replicas", "3", "--prefill-replicas", "1", *shared, "--log-level", "warning")
    try:
        until(lambda: all(one["status"] == "ready" for one in server.ready()["replicas"]))
        yield server
    finally:
        server.close()
        shutil.rmtree(STORE.with_name(f"pagewood-{os.geteuid()}-{place}"), ignore_errors=True)
    assert server.process.returncode == 0


def engine_pids(server: Server) -> list[int]:
    """Return the process ids of the engines of a server, in the order of their starts."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            words = (entry / "cmdline").read_text().split("\0")
            if parent == server.process.pid and "pagewood.server.processes.engine_process" in words:
                found.append(int(entry.name))
    return sorted(found)


def test_one_server_pairs_its_engines(paired: Server, expected: list[str]) -> None:
    assert [one["role"] for one in paired.ready()["replicas"]] == ["prefill", "decode", "decode"]
    for number in range(4):
        answer = post(paired, ANSWER | {"prompt": long_prompt(number)})
        assert text(answer) == expected[number]
        # The engine that decodes had nothing of it, and has recalled all whole pages.
        num_prompt = answer["usage"]["prompt_tokens"]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == (num_prompt - 1) // 16 * 16
    first, *others = (one["engine"] for one in paired.ready()["replicas"])
    assert first["num_cached_pages"] > 0
    assert sum(one["num_cached_pages"] for one in others) > 0


def test_any_engine_of_a_pair_may_be_killed_under_load(paired: Server, expected: list[str]) -> None:
    """No request fails, whichever engine is killed and however often, and all texts are those of one engine."""
    failures: list[str] = []
    num_right = [0]
    ends = threading.Event()

    def client(seed: int) -> None:
        rng = random.Random(seed)
        while not ends.is_set():
            number = rng.randrange(len(expected))
            try:
                found = text(post(paired, ANSWER | {"prompt": long_prompt(number)}))
            except httpx.HTTPError as error:
                failures.append(repr(error))
                continue
            if found != expected[number]:
                failures.append(f"prompt {number}: {found!r} instead of {expected[number]!r}")
            num_right[0] += 1

    clients = [threading.Thread(target=client, args=(seed,)) for seed in range(6)]
    for one in clients:
        one.start()
    rng = random.Random(11)
    (first, *others) = engine_pids(paired)
    for victim in (first, others[0], None, None, None, None):  # the one for prompts, one that decodes, and any
        num_before = num_right[0]
        time.sleep(rng.random() * 1.5)
        os.kill(victim or rng.choice(engine_pids(paired)), signal.SIGKILL)
        until(lambda: len(engine_pids(paired)) == 3 and all(o["status"] == "ready" for o in paired.ready()["replicas"]))
        until(lambda num_before=num_before: num_right[0] > num_before + 4)
        if failures:
            break
    ends.set()
    for one in clients:
        one.join(LIMIT_S)
        assert not one.is_alive(), "a request hangs"
    assert failures == []
    incidents = paired.ready()["incidents"]
    assert incidents["lost"] == 0
    assert incidents["restarts"] == 6
    counters = paired.until_idle()
    assert counters["num_free_pages"] + counters["num_cached_pages"] == counters["num_pages"]
