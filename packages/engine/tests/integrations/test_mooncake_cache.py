# pyright: basic
"""Two engines share KV through Mooncake: a real master and real clients over TCP."""

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

pytest.importorskip("mooncake.store", exc_type=ImportError)
from pagewood.engine import LLM, SamplingParams

MASTER = shutil.which("mooncake_master") or str(Path(sys.executable).parent / "mooncake_master")


OPTIONS = {"host_cache_gb": 0.05, "remote_cache_gb": 0.05, "max_total_tokens": 2048}
SAMPLING = SamplingParams(max_tokens=8, temperature=0.0)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextmanager
def master(port: int) -> Iterator[subprocess.Popen]:
    command = [MASTER, "--rpc_address", "127.0.0.1", "--rpc_port", f"{port}", "--enable_metric_reporting=false"]
    metrics = ["--metrics_host", "127.0.0.1", "--metrics_port", f"{free_port()}"]
    with subprocess.Popen([*command, *metrics], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            deadline_s = time.monotonic() + 60
            while True:
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                assert process.poll() is None
                assert time.monotonic() < deadline_s
                time.sleep(0.05)
            yield process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def place() -> Iterator[str]:
    with master(port := free_port()):
        yield f"mooncake://127.0.0.1:{port}"


class Engines:
    """One that computes prompts for another, and one alone that says what is right."""

    def __init__(self, place: str, opened: ExitStack) -> None:
        self.prefill = opened.enter_context(LLM(role="prefill", remote_cache=place, **OPTIONS))
        self.decode = opened.enter_context(LLM(role="decode", remote_cache=place, **OPTIONS))
        self.alone = opened.enter_context(LLM(max_total_tokens=2048))
        self.num_prompts = 0

    def finds(self) -> bool:
        """Send a new prompt through both engines; return whether the second has found what the first has stored."""
        self.num_prompts += 1
        prompt = f"Count from {self.num_prompts} to twenty. " * 20
        (begun,), (found,), (expected,) = (
            llm.generate([prompt], SAMPLING) for llm in (self.prefill, self.decode, self.alone)
        )
        assert (list(begun.tokens), found.text) == (list(expected.tokens)[:1], expected.text)
        return found.num_cached_tokens > 100

    def until_found(self) -> None:
        """A store that has failed is left alone for a while."""
        deadline_s = time.monotonic() + 300
        while not self.finds():
            assert time.monotonic() < deadline_s
            time.sleep(0.2)


def test_a_second_engine_finds_the_prompt_of_the_first(place: str) -> None:
    with ExitStack() as opened:
        Engines(place, opened).until_found()


def test_a_master_that_dies_is_a_miss() -> None:
    with ExitStack() as opened:
        port = free_port()
        with master(port) as process:
            engines = Engines(f"mooncake://127.0.0.1:{port}", opened)
            engines.until_found()
            process.kill()
            process.wait()
            for _ in range(3):
                assert not engines.finds()
        with master(port):
            engines.until_found()


def test_a_master_that_is_away_at_the_start_is_a_miss() -> None:
    with ExitStack() as opened:
        port = free_port()
        engines = Engines(f"mooncake://127.0.0.1:{port}", opened)
        assert not engines.finds()
        with master(port):
            engines.until_found()


def test_wrong_places_are_errors() -> None:
    for place, message in (
        ("mooncake://h?devices=x", "devices of a mooncake URL must come with protocol=rdma"),
        ("http://127.0.0.1:1", "must be a folder, shm:NAME"),
    ):
        with pytest.raises(ValueError, match=message):
            LLM(remote_cache=place, **OPTIONS)


def test_a_prefill_engine_that_is_killed_is_a_miss(place: str) -> None:
    """Its pages are in its own memory: they are found while it lives, and are computed again afterwards."""
    prompts = [f"Tell of {index}. " * 30 for index in range(6)]
    code = f"""
import time
from pagewood.engine import LLM, SamplingParams
llm = LLM(role="prefill", remote_cache={place!r}, **{OPTIONS!r})
for answer in llm.generate({prompts!r}, SamplingParams(max_tokens=8, temperature=0.0)):
    assert len(answer.tokens) == 1
print("published", flush=True)
time.sleep(300)
"""
    with (
        LLM(max_total_tokens=2048) as alone,
        LLM(role="decode", remote_cache=place, **OPTIONS) as decode,
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as prefill,
    ):
        expected = [answer.text for answer in alone.generate(prompts, SAMPLING)]
        try:
            assert prefill.stdout is not None
            assert "published\n" in iter(prefill.stdout.readline, "")
            (found,) = decode.generate(prompts[:1], SAMPLING)
            assert (found.text, found.num_cached_tokens > 100) == (expected[0], True)
        finally:
            prefill.kill()
        assert [answer.text for answer in decode.generate(prompts, SAMPLING)] == expected
