# pyright: basic
"""Two engines share KV through LMCache's real server."""

import socket
import subprocess
import sys
import time

import pytest

pytest.importorskip("lmcache.v1.storage_backend.connector", exc_type=ImportError)
from pagewood.engine import LLM, SamplingParams


def test_a_second_engine_finds_the_prompt_of_the_first() -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    command = [sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            for _ in range(1200):
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.05)
            check(f"lmcache+lm://127.0.0.1:{port}", server)
        finally:
            server.kill()


def check(place: str, server: subprocess.Popen) -> None:
    options = {"host_cache_gb": 0.05, "remote_cache": place, "max_total_tokens": 2048}
    prompts = [f"Count from {index} to twenty. " * 20 for index in range(20)]
    sampling = SamplingParams(max_tokens=8, temperature=0.0)
    with LLM(**options) as first, LLM(**options) as second:
        expected = first.generate(prompts, sampling)
        for prompt, one in zip(prompts, expected, strict=True):  # pages are written behind
            (found,) = second.generate([prompt], sampling)
            assert found.tokens == one.tokens
            if found.num_cached_tokens > 100:
                break
            time.sleep(0.2)
        else:
            raise AssertionError("nothing was shared")
        server.kill()
        for one, found in zip(expected, second.generate(prompts, sampling), strict=True):
            assert found.tokens == one.tokens
    with pytest.raises(ValueError, match="cannot be used"):
        LLM(**{**options, "remote_cache": "lmcache+lm://127.0.0.1:1"})
    with pytest.raises(ValueError, match="cannot be used"):
        LLM(**{**options, "remote_cache": "lmcache+unknown://127.0.0.1:1"})
