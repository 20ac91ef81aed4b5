"""`pagewood serve` as a process, with the real OpenAI client."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from pagewood.server.cli import main
from pagewood.server.keys.run_key import FOLDER_VARIABLE

MODEL = "pagewood-demo"
LIMIT_S = 150.0


def until(holds: Callable[[], bool], *, limit_s: float = LIMIT_S) -> None:
    """Wait until `holds`."""
    deadline_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline_s, "timed out"
        time.sleep(0.01)


def children(pid: int) -> dict[str, int]:
    """Return module -> process id of the children of a process."""
    found: dict[str, int] = {}
    for entry in Path("/proc").iterdir():
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            words = (entry / "cmdline").read_text().split("\0")
        except (OSError, ValueError, IndexError):
            continue
        if parent == pid and "-m" in words:
            found[words[words.index("-m") + 1].rpartition(".")[2]] = int(entry.name)
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def key_files(folder: Path) -> list[Path]:
    """Return the files of keys that servers with this folder have made for their runs."""
    return list((folder / "runtime").rglob("*.key"))


def admin_headers(folder: Path, url: str) -> dict[str, str]:
    """Return the header with the key that a server has made for its run; none if it has made none."""
    ending = f"-{url.rpartition(':')[2]}.key"
    found = [path.read_text().strip() for path in key_files(folder) if path.name.endswith(ending)]
    return {"x-api-key": found[0]} if found else {}


def command(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `pagewood` in this process, which has imported what it needs already."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "stdin", io.StringIO(stdin))
        for name, value in environment.items():
            patch.setenv(name, value)
        code = main(arguments)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def top(url: str, folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Look at a server once, as a user with this folder."""
    return command("top", url, "--once", *arguments, **{FOLDER_VARIABLE: str(folder / "runtime"), **environment})


class Server:
    """A server process, its URL, its folder of sockets, and clients without a key and with the key of its run."""

    def __init__(self, folder: Path, *arguments: str, preexec_fn: Callable[[], None] | None = None) -> None:
        self.folder = folder
        self._stderr = (folder / "stderr").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pagewood.server", "serve", "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env={**os.environ, "TMPDIR": str(folder), FOLDER_VARIABLE: str(folder / "runtime")},
            preexec_fn=preexec_fn,
        )
        assert self.process.stdout is not None
        line = next((line for line in self.process.stdout if line.startswith("Pagewood serves")), None)
        assert line is not None, self.stderr()
        self.url = line.split(" at ")[1].split()[0]
        self.http = httpx.Client(base_url=self.url, timeout=LIMIT_S)
        self.admin = httpx.Client(base_url=self.url, timeout=LIMIT_S, headers=admin_headers(folder, self.url))
        self.openai = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=LIMIT_S)

    def stderr(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read()

    def children(self) -> dict[str, int]:
        return children(self.process.pid)

    def sockets(self) -> list[Path]:
        """Folders of sockets that exist."""
        return list(self.folder.glob("pagewood-*"))

    def ready(self) -> dict[str, Any]:
        return self.http.get("/ready").json()

    def lose(self, process: str) -> None:
        """Kill a process, and wait until the server has noticed; it is not ready then, if it needs the process."""
        before = self.ready()["incidents"]["restarts"]
        os.kill(self.children()[f"{process}_process"], signal.SIGKILL)
        until(lambda: self.ready()["incidents"]["restarts"] > before)

    def until_idle(self) -> dict[str, int]:
        """Wait until no process holds a request, and return the counters."""

        def idle() -> bool:
            ready = self.ready()
            engine = ready["engine"]
            names = ("num_waiting", "num_running", "num_draining", "num_held")
            return ready["status"] == "ready" and not any([*ready["requests"].values(), *(engine[n] for n in names)])

        until(idle)
        return self.ready()["engine"]

    def close(self) -> None:
        """End the server, by SIGTERM if it still runs."""
        self.openai.close()
        self.http.close()
        self.admin.close()
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(LIMIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._stderr.close()
