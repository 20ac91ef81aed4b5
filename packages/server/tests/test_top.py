"""`pagewood top` shows what the live data says, with and without rich, and ends with q."""

from __future__ import annotations

import asyncio
import io
import os
import pty
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from rich.console import Console

from memory_server import ADMIN_KEY, MemoryServer
from pagewood.engine.observe.view import EngineView, PoolView, RequestView
from pagewood.server.cli.main import main
from pagewood.server.cli.top_rich import drawn
from pagewood.server.cli.top_screen import Screen, duration, plain, shortened, size
from pagewood.server.dashboard.live_data import Live
from pagewood.server.dashboard.processes import ProcessLoad
from pagewood.server.dashboard.rates import Percentiles, Rates
from pagewood.server.keys.file import ADMIN_VARIABLE
from scripted import listening, paced

pytestmark = pytest.mark.anyio

RATES = Rates(
    output_tokens=1234.0, prompt_tokens=5000.0, steps=40.0, admitted=3.0, busy=0.87, cached_share=0.63,
    first_token=Percentiles(0.05, 0.2, 0.5), between_tokens=Percentiles(0.031, 0.04, 0.05), step=None,
)  # fmt: skip


def request(name: str, stage: str, why: str = "", **fields: object) -> RequestView:
    given: dict[str, object] = {
        "priority": 0, "tenant": "acme", "service_class": "", "tag": "", "age_s": 3.25, "left_s": None,
        "num_prompt": 100, "num_output": 17, "max_output": 50, "num_cached": 64, "num_computed": 100, "num_pages": 8,
    }  # fmt: skip
    return RequestView(request_id=name, stage=stage, why=why, **{**given, **fields})  # type: ignore[arg-type]


def message(**fields: object) -> Live:
    engine = EngineView(
        now_s=0.0, paused="no", num_rows=8, num_steps=0, num_preempted=0, num_requests=3,
        requests=(request("r1", "running"), request("r2", "waiting", "All rows\x1b[31m are taken.", num_cached=None)),
        pool=PoolView(
            num_pages=100, page_size=16, num_free=50, num_cached=30, num_locked=15, num_private=5, pages_per_cell=1,
            cells=b"",
        ),
    )  # fmt: skip
    given: dict[str, object] = {
        "number": 1, "model": "oak", "status": "ready", "detail": "serving", "num_live": 3, "names": ["gen-a", "[b]x"],
        "rates": RATES, "shows_text": False, "engine": engine,
        "processes": (ProcessLoad(name="http", pid=7, cpu=0.42, rss_bytes=95 << 20),),
    }  # fmt: skip
    return Live(**{**given, **fields})  # type: ignore[arg-type]


def test_the_plain_form_has_the_numbers_and_no_control_characters() -> None:
    screen = Screen()
    screen.take(message())
    screen.take(message(engine=None, names=[], rates=None, processes=None))  # what is left out stays
    lines = plain(screen, width=110)
    text = "\n".join(lines)
    for part in ("oak: serving", "running 1 of 8", "waiting 2", "KV used 20%, 30% more cached", "1,234 tokens/s",
                 "from cache 63%", "first token 50 ms, p99 0.50 s", "between tokens 31 ms", "87% busy"):  # fmt: skip
        assert part in text, part
    assert lines[7].split() == ["gen-a", "running", "17", "64%", "3.25", "s", "acme"]
    assert lines[8].split()[:4] == ["[b]x", "waiting", "17", "-"]
    assert "All rows?[31m are taken." in lines[8]
    assert lines[-1].split() == ["http", "7", "42%", "95", "MB"]
    assert max(map(len, plain(screen, width=40))) <= 40


def test_the_form_with_rich_has_the_same_numbers_and_reads_no_markup() -> None:
    screen = Screen()
    screen.take(message())
    console = Console(file=io.StringIO(), width=120)
    console.print(drawn(screen))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("oak", "serving", "1,234 tokens/s", "20%, 30% more cached", "gen-a", "[b]x", "95 MB"):
        assert part in text, part


def test_units() -> None:
    assert [duration(value) for value in (0.0042, 0.05, 3.14159, 42.0, 600.0)] == [
        "4.2 ms", "50 ms", "3.14 s", "42.0 s", "10.0 min",
    ]  # fmt: skip
    assert (size(3 << 30), shortened("chatcmpl-0123456789abcdef", 20)) == ("3.00 GB", "chatcmpl-012..abcdef")


@asynccontextmanager
async def served(server: MemoryServer) -> AsyncGenerator[str]:
    """Yield the URL of a server that computes one request."""
    body = {"text": "Hi", "rid": "mine", "sampling_params": {"max_new_tokens": 300, "ignore_eos": True}}
    async with listening(server) as url, paced(server):
        sending = asyncio.create_task(server.client.post("/generate", json=body))
        await server.until(lambda: server.service.status.counters["num_running"] == 1)
        yield url
        await server.client.post("/abort", json={"rid": "mine"})
        await sending


async def test_it_is_printed_once_where_there_is_no_terminal(
    server: MemoryServer, capsys: pytest.CaptureFixture[str]
) -> None:
    async with served(server) as url:
        assert await asyncio.to_thread(main, ["top", url, "--api-key", ADMIN_KEY]) == 0
        await server.until(lambda: server.service.watchers.num_watching == 0)
    assert "mine" in capsys.readouterr().out
    assert await asyncio.to_thread(main, ["top", "http://127.0.0.1:9", "--once"]) == 2
    assert "no server answers at http://127.0.0.1:9" in capsys.readouterr().err


async def test_q_ends_it(server: MemoryServer) -> None:
    ours, theirs = pty.openpty()
    async with served(server) as url:
        process = subprocess.Popen(
            [sys.executable, "-m", "pagewood.server", "top", url],
            stdin=theirs, stdout=theirs, stderr=theirs,
            env={**os.environ, ADMIN_VARIABLE: ADMIN_KEY, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"},
        )  # fmt: skip
        os.close(theirs)

        def until_shown() -> bytes:
            shown, end_s = b"", time.monotonic() + 30
            while b"mine" not in shown and time.monotonic() < end_s:
                shown += os.read(ours, 65536)
            os.write(ours, b"q")
            return shown

        shown = await asyncio.to_thread(until_shown)
        assert b"mine" in shown
        assert await asyncio.to_thread(process.wait, 20) == 0
        await server.until(lambda: server.service.watchers.num_watching == 0)
    os.close(ours)
