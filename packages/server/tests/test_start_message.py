"""What `pagewood serve` says and does by its address, its output's encoding and SIGHUP; as processes."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from serving import LIMIT_S, Server, command, is_alive, key_files, top, until


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as one:
            one.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.skipif(not has_ipv6(), reason="needs IPv6")
def test_a_server_on_all_addresses_names_one_that_can_be_opened_and_is_found_by_top(tmp_path: Path) -> None:
    """Of IPv6; `test_run_key_serve` has one on all addresses of IPv4."""
    with closing(Server(tmp_path, "--host", "::", "--insecure-no-keys")) as server:
        port = server.url.rpartition(":")[2]
        assert server.url == f"http://[::1]:{port}"
        assert server.http.get("/health").status_code == 200
        assert server.http.get("/health", headers={"host": f"[::ffff:127.0.0.1]:{port}"}).status_code == 200
        for name in ("127.0.0.1", "localhost", "[::1]", "[::]"):
            found = top(f"http://{name}:{port}", tmp_path, HTTP_PROXY="http://127.0.0.1:9")
            assert (found.returncode, found.stderr) == (0, ""), name
        chat = command("chat", "--url", server.url, "--max-tokens", "2", stdin="Hi\n")
        assert chat.returncode == 0, chat.stderr
    assert not key_files(tmp_path)


@pytest.mark.slow
def test_sighup_without_a_key_file_replaces_the_engine_and_an_ascii_terminal_gets_the_start_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    with closing(Server(tmp_path, "--served-model-name", "größe")) as server:
        assert server.process.stdout is not None
        lines = iter(server.process.stdout.readline, "")
        assert any(r"gr\xf6\xdfe" in line for line in lines)
        engine = server.children()["engine_process"]
        server.process.send_signal(signal.SIGHUP)
        until(lambda: not is_alive(engine))
        until(lambda: server.ready()["status"] == "ready")
        assert httpx.get(f"{server.url}/health", timeout=LIMIT_S).status_code == 200
        assert "Traceback" not in server.stderr()
        chat = subprocess.run(
            [sys.executable, "-m", "pagewood.server", "chat", "--url", server.url, "--max-tokens", "2"],
            input="Hi\n", capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip
        assert (chat.returncode, chat.stderr) == (0, "")
