# pyright: basic
"""An engine reads the prompts that another one has computed from its memory, over NIXL."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("nixl_cu12._api", exc_type=ImportError)
from pagewood.engine import LLM, SamplingParams

if shutil.which("redis-server") is None:
    pytest.skip("redis-server is not installed", allow_module_level=True)

OPTIONS = {"host_cache_gb": 0.05, "remote_cache_gb": 0.05, "max_total_tokens": 2048}
SAMPLING = SamplingParams(max_tokens=8, temperature=0.0)
os.environ["UCX_TLS"] = "tcp,self"


@pytest.fixture
def place() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ("--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", "/", "--loglevel", "warning")
    with subprocess.Popen(["redis-server", "--port", str(port), *options], stdout=subprocess.DEVNULL) as process:
        try:
            deadline_s = time.monotonic() + 60
            while True:
                with socket.socket() as probe:
                    if not probe.connect_ex(("127.0.0.1", port)):
                        break
                assert process.poll() is None
                assert time.monotonic() < deadline_s
                time.sleep(0.02)
            yield f"nixl+redis://127.0.0.1:{port}?timeout_s=30"
        finally:
            process.kill()


def test_a_prefill_engine_that_is_killed_is_a_miss(place: str) -> None:
    """Its pages are in its own memory: they are found while it lives, and are computed again afterwards."""
    prompts = [f"Tell of {index}. " * 30 for index in range(6)]
    code = f"""
import sys
from pagewood.engine import LLM, SamplingParams
llm = LLM(role="prefill", remote_cache={place!r}, **{OPTIONS!r})
for answer in llm.generate({prompts!r}, SamplingParams(max_tokens=8, temperature=0.0)):
    assert len(answer.tokens) == 1
print("published", flush=True)
sys.stdin.read()
"""
    with (
        LLM(max_total_tokens=2048) as alone,
        LLM(role="decode", remote_cache=place, **OPTIONS) as decode,
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as prefill,
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
