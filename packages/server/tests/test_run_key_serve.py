"""The admin key of a run with real servers: what it opens, who finds it, and what is left of it."""

from __future__ import annotations

import socket
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from pagewood.server.keys.file import ADMIN_VARIABLE, KEY_VARIABLE
from pagewood.server.keys.run_key import FOLDER_VARIABLE, make_run_key
from serving import Server, children, key_files, top

ORDINARY = "sk-of-an-ordinary-caller"


def rest_of_welcome(server: Server) -> str:
    assert server.process.stdout is not None
    lines: list[str] = []
    while not lines or not lines[-1].startswith("Ctrl-C"):
        lines.append(next(server.process.stdout))
    return "".join(lines)


def status(server: Server, key: str | None) -> int:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return server.http.get("/server_info", headers=headers).status_code


def test_a_server_without_keys_has_one_for_its_run(tmp_path: Path) -> None:
    with closing(Server(tmp_path)) as server:
        [path] = key_files(tmp_path)
        key = path.read_text().strip()
        welcome = rest_of_welcome(server)
        assert str(path) in welcome
        assert path.stat().st_mode & 0o777 == 0o600
        assert [status(server, sent) for sent in (None, "none", key)] == [403, 403, 200]
        server.openai.models.list()  # sends "none"
        port = server.url.rpartition(":")[2]
        for url in (server.url, f"http://localhost:{port}"):
            shown = top(url, tmp_path, HTTP_PROXY="http://127.0.0.1:9")
            assert (shown.returncode, shown.stderr) == (0, "")
            assert "serving" in shown.stdout
        given = top(server.url, tmp_path, "--api-key", key, **{ADMIN_VARIABLE: "another-key-0123456"})
        assert given.returncode == 0
        refused = top(server.url, tmp_path, **{ADMIN_VARIABLE: "another-key-0123456"})
        assert refused.returncode == 2
        for way in ("--api-key", ADMIN_VARIABLE, "its start message names the file"):
            assert way in refused.stderr
        assert top(server.url, tmp_path / "of another user").returncode == 2
        with closing(Server(tmp_path, "--host", "0.0.0.0", "--insecure-no-keys")) as other:
            assert len(key_files(tmp_path)) == 2
            assert [status(other, sent) for sent in (None, key)] == [403, 403]
            assert other.admin.get("/server_info").status_code == 200
            port = other.url.rpartition(":")[2]
            assert other.url == f"http://127.0.0.1:{port}"
            assert other.http.get("/health", headers={"host": f"[::ffff:127.0.0.1]:{port}"}).status_code == 200
            found = top(f"http://0.0.0.0:{port}", tmp_path, HTTP_PROXY="http://127.0.0.1:9")
            assert (found.returncode, found.stderr) == (0, "")
        assert key_files(tmp_path) == [path]
        for pid in (server.process.pid, *children(server.process.pid).values()):
            for file in ("environ", "cmdline"):
                assert key.encode() not in Path(f"/proc/{pid}/{file}").read_bytes()
        assert key not in welcome + server.stderr()
    assert not key_files(tmp_path)


@pytest.mark.slow
def test_the_file_of_a_killed_server_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays, as `test_serve::test_nothing_is_left_behind_of_a_killed_server` finds; here no server makes it."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "runtime"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    path = make_run_key("127.0.0.1", port).path
    stale = path.read_text().strip()
    monkeypatch.setenv(KEY_VARIABLE, ORDINARY)  # ordinary keys, and none of an admin
    with closing(Server(tmp_path, "--port", str(port))) as server:
        assert key_files(tmp_path) == [path]
        assert [status(server, sent) for sent in (None, stale, ORDINARY)] == [401, 401, 403]
        assert server.admin.get("/server_info").status_code == 200
        assert httpx.get(f"{server.url}/v1/models", headers={"x-api-key": ORDINARY}, timeout=60).status_code == 200
        assert top(server.url, tmp_path).returncode == 0
    assert not key_files(tmp_path)


@pytest.mark.slow
def test_a_server_that_cannot_write_its_key_has_closed_admin_routes(tmp_path: Path) -> None:
    (tmp_path / "runtime").touch()
    with closing(Server(tmp_path)) as server:
        assert "/dashboard" not in rest_of_welcome(server)
        assert [status(server, sent) for sent in (None, "none")] == [403, 403]
        assert server.http.get("/v1/models").status_code == 200
        assert "admin routes stay closed" in server.stderr()
        assert FOLDER_VARIABLE in server.stderr()


@pytest.mark.slow
def test_a_server_with_an_admin_key_makes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADMIN_VARIABLE, ORDINARY)
    with closing(Server(tmp_path)) as server:
        assert not key_files(tmp_path)
        assert "/dashboard" not in rest_of_welcome(server)
        assert [status(server, sent) for sent in (None, ORDINARY)] == [401, 200]
        assert top(server.url, tmp_path).returncode == 0
