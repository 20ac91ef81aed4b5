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


OPTIONS = {"host_cache_gb": 0.05, "remote_cache_gb": 0.05, "max_total_tokens": 2048}


@pytest.fixture(scope="module")
def place():
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
            yield f"mooncake://{place}"
        finally:
            process.terminate()


def test_a_second_engine_finds_the_prompt_of_the_first(place: str) -> None:
    options = {**OPTIONS, "remote_cache": place}
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
    with pytest.raises(ValueError, match="must be a folder, shm:NAME"):
        LLM(**{**options, "remote_cache": "http://127.0.0.1:1"})


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
    sampling = SamplingParams(max_tokens=8, temperature=0.0)
    with (
        LLM(**{**OPTIONS, "remote_cache_gb": None}) as alone,
        LLM(role="decode", remote_cache=place, **OPTIONS) as decode,
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as prefill,
    ):
        expected = [answer.text for answer in alone.generate(prompts, sampling)]
        try:
            assert prefill.stdout is not None
            assert "published\n" in iter(prefill.stdout.readline, "")
            (found,) = decode.generate(prompts[:1], sampling)
            assert (found.text, found.num_cached_tokens > 100) == (expected[0], True)
        finally:
            prefill.kill()
        assert [answer.text for answer in decode.generate(prompts, sampling)] == expected
