# pyright: basic
"""Two engines share KV through Mooncake: a real master and real clients over TCP."""

import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("mooncake.store", exc_type=ImportError)
from pagewood.engine import LLM, SamplingParams

MASTER = shutil.which("mooncake_master") or str(Path(sys.executable).parent / "mooncake_master")


def test_a_second_engine_finds_the_prompt_of_the_first() -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{one.getsockname()[1]}"
    command = [MASTER, "--port", place.partition(":")[2], "--enable_metric_reporting=false"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            for _ in range(300):
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", int(place.partition(":")[2]))) == 0:
                        break
                time.sleep(0.05)
            check(f"mooncake://{place}")
        finally:
            process.terminate()


def check(place: str) -> None:
    options = {"host_cache_gb": 0.05, "remote_cache": place, "remote_cache_gb": 0.05, "max_total_tokens": 2048}
    prompts = [f"Count from {index} to twenty. " * 20 for index in range(20)]
    sampling = SamplingParams(max_tokens=8, temperature=0.0)
    with LLM(**options) as first, LLM(**options) as second:
        expected = first.generate(prompts, sampling)
        for prompt, one in zip(prompts, expected, strict=True):  # pages are written behind
            (found,) = second.generate([prompt], sampling)
            assert found.text == one.text
            if found.num_cached_tokens > 100:
                break
            time.sleep(0.2)
        else:
            raise AssertionError("nothing was shared")
    with pytest.raises(ValueError, match="cannot be used"):
        LLM(**{**options, "remote_cache": "mooncake://127.0.0.1:1"})
    with pytest.raises(ValueError, match="must be a folder, lmcache"):
        LLM(**{**options, "remote_cache": "redis://127.0.0.1:1"})
