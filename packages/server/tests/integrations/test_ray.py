# pyright: basic, reportMissingImports=false
# (Ray is a dependency of the extra only)
"""Engines on a local cluster of Ray: which one gets a request, and what happens to streams when a process ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

pytest.importorskip("ray.serve", exc_type=ImportError)  # Ray alone, as verl needs it, lacks what serve imports

import ray
from ray import serve

from pagewood.server.ray.application import app
from pagewood.server.ray.arguments import Arguments

OPTIONS = "--max-total-tokens 16384 --max-running-requests 4 --log-level warning"
INGRESS = "ray::ServeReplica:default:Ingress"
REPLICA, ENGINE_PROCESS = "ray::ServeReplica:default:Engine", "pagewood.server.processes.engine_process"
FAILED = "the stream has failed"
PROMPTS = [f"What can you do? {number}" for number in range(6)]


class Cluster:
    def __init__(self) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False)
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120)

    def run(self, arguments: Arguments) -> None:
        serve.run(app(arguments))
        until(lambda: self.http.get("/ready").status_code == 200, limit_s=60)

    def ready(self) -> dict[str, Any]:
        return self.http.get("/ready").json()

    def engines(self) -> list[dict[str, Any]]:
        return [one for one in self.ready()["replicas"] if one["status"] == "ready"]

    def text(self, prompt: str, **fields: Any) -> str:
        body = {"model": "pagewood-demo", "prompt": prompt, "max_tokens": 1000, "stream": True, "ignore_eos": True}
        body |= {"seed": 3, "temperature": 0.8, **fields}
        parts: list[str] = []
        with self.http.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    return "".join(parts)
                if line:
                    chunk = json.loads(line.removeprefix("data: "))
                    parts.append(chunk["choices"][0]["text"] if "choices" in chunk else f"{FAILED}: {chunk}")
        return FAILED

    def outcome(self, prompt: str) -> str:
        """Return the text of a stream, or that it has failed, in whatever way."""
        try:
            return self.text(prompt)
        except (httpx.HTTPError, json.JSONDecodeError):
            return FAILED


def until(condition: Callable[[], bool], *, limit_s: float = 60) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.05)


def together(calls: list[Callable[[], str]], *, meanwhile: Callable[[], Any] = lambda: None) -> list[str]:
    with ThreadPoolExecutor(len(calls)) as pool:
        found = [pool.submit(call) for call in calls]
        meanwhile()
        return [one.result(240) for one in found]


def processes(name: str) -> list[int]:
    found: list[int] = []
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if name in " ".join(one.cmdline()):
                found.append(one.pid)
    return sorted(found)


@pytest.fixture(scope="module")
def cluster() -> Generator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        for what in ("REPLICA", "HANDLE"):  # both take seconds otherwise
            patch.setenv(f"RAY_SERVE_{what}_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "0.5")
        cluster = Cluster()
    cluster.run(Arguments(options=OPTIONS, num_replicas=3))
    until(lambda: len(cluster.engines()) == 3, limit_s=120)
    yield cluster
    cluster.http.close()
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> list[str]:
    """The answers without any death."""
    return together([lambda prompt=prompt: cluster.text(prompt) for prompt in PROMPTS])


def test_requests_are_spread_and_come_back_to_their_prefix(cluster: Cluster, expected: list[str]) -> None:
    assert len({*expected}) == len(PROMPTS)
    assert not any(FAILED in text for text in expected)
    assert all(one["engine"]["num_tokens"] for one in cluster.engines())
    steps = {one["replica"]: one["engine"]["num_steps"] for one in cluster.engines()}
    for number in range(4):
        cluster.text(f"{'A long beginning that all of these have. ' * 20}{number}", max_tokens=4)
        time.sleep(1.5)  # a pulse comes
    assert sum(one["engine"]["num_steps"] > steps[one["replica"]] for one in cluster.engines()) == 1


@pytest.mark.parametrize("name", [REPLICA, ENGINE_PROCESS])
def test_streams_survive_a_killed_process(cluster: Cluster, expected: list[str], name: str) -> None:
    victim, _, _ = processes(name)
    num_retried = cluster.ready()["incidents"]["retried"]

    def kill() -> None:
        until(lambda: all(one["requests"] for one in cluster.engines()))
        os.kill(victim, signal.SIGKILL)

    found = together([lambda prompt=prompt: cluster.text(prompt) for prompt in PROMPTS], meanwhile=kill)
    assert found == expected
    incidents = cluster.ready()["incidents"]
    assert incidents["lost"] == 0
    assert incidents["retried"] > num_retried
    until(lambda: len(cluster.engines()) == len(processes(ENGINE_PROCESS)) == 3, limit_s=180)


def test_streams_survive_a_rolling_update(cluster: Cluster, expected: list[str]) -> None:
    before = {*processes(REPLICA)}

    def update() -> None:
        until(lambda: all(one["requests"] for one in cluster.engines()))
        cluster.run(Arguments(options=OPTIONS, num_replicas=3))

    found = together([lambda prompt=prompt: cluster.text(prompt) for prompt in PROMPTS], meanwhile=update)
    assert found == expected
    until(lambda: not before & {*processes(REPLICA)}, limit_s=180)
    until(lambda: len(cluster.engines()) == 3, limit_s=180)
    assert cluster.text(PROMPTS[0]) == expected[0]


def test_engines_follow_the_work_to_zero_and_back(cluster: Cluster, expected: list[str]) -> None:
    cluster.run(
        Arguments(
            options=OPTIONS, min_replicas=0, max_replicas=3, upscale_delay_s=0, downscale_delay_s=3, look_back_s=2
        )
    )
    until(lambda: not cluster.engines(), limit_s=120)
    ready = cluster.ready()
    assert ready["status"] == "ready"
    assert ready["detail"] == "no engine works at the moment; requests wait for one"

    enough = threading.Event()

    def repeated(index: int) -> str:  # one engine has four places, so eight of these wait
        texts = {cluster.text(PROMPTS[index])}
        while not enough.is_set():
            texts.add(cluster.text(PROMPTS[index]))
        return " or ".join(texts)

    def more() -> None:
        try:
            until(lambda: len(cluster.engines()) >= 2, limit_s=150)
        finally:
            enough.set()

    indices = [*range(len(PROMPTS))] * 2
    assert together([lambda index=index: repeated(index) for index in indices], meanwhile=more) == expected * 2
    assert cluster.ready()["incidents"]["lost"] == 0
    until(lambda: not cluster.engines(), limit_s=120)
    until(lambda: not processes(ENGINE_PROCESS))


def test_several_ingresses_use_the_same_engines_and_the_death_of_one_cuts_its_own_streams_only(
    cluster: Cluster, expected: list[str]
) -> None:
    cluster.run(Arguments(options=OPTIONS, num_replicas=2, num_ingress=2))
    until(lambda: len(processes(INGRESS)) == 2 and len(cluster.engines()) == 2, limit_s=180)
    kept = cluster.http.post("/v1/responses", json={"model": "pagewood-demo", "input": "Hi", "max_output_tokens": 4})
    assert kept.json()["store"] is False
    enough = threading.Event()

    def repeated(index: int) -> str:
        texts = {cluster.text(PROMPTS[index])}
        while not enough.is_set():
            texts.add(cluster.text(PROMPTS[index]))
        return " or ".join(texts)

    def some_are_of_another_ingress() -> bool:
        engines = cluster.engines()
        return 0 < sum(one["requests"] for one in engines) < sum(one["engine"]["num_running"] for one in engines)

    def meet() -> None:
        try:
            until(some_are_of_another_ingress, limit_s=150)
        finally:
            enough.set()

    indices = [*range(len(PROMPTS))]
    assert together([lambda index=index: repeated(index) for index in indices], meanwhile=meet) == expected

    for _ in range(10):  # until the one that dies had some of the streams, and not all
        victim = processes(INGRESS)[0]

        def kill(victim: int = victim) -> None:
            until(lambda: any(one["engine"]["num_running"] for one in cluster.engines()))
            os.kill(victim, signal.SIGKILL)

        found = together([lambda prompt=prompt: cluster.outcome(prompt) for prompt in PROMPTS], meanwhile=kill)
        assert all(text in (FAILED, whole) for text, whole in zip(found, expected, strict=True))
        until(lambda victim=victim: len({*processes(INGRESS)} - {victim}) == 2, limit_s=120)
        for index, text in enumerate(found):
            if text == FAILED:  # its client asks again
                until(lambda index=index: cluster.outcome(PROMPTS[index]) == expected[index])
        if 0 < found.count(FAILED) < len(found):
            break
    else:
        raise AssertionError(f"no death met some of the streams: {found}")
    until(lambda: not any(one["engine"]["num_running"] for one in cluster.engines()))
