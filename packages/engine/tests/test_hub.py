"""Models by name: huggingface_hub itself, in processes of its own, over a server that speaks the hub's HTTP."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from pagewood.engine.model_folder.folder import model_folder, model_name
from pagewood.engine.model_folder.hub import is_hub_name

constants = pytest.importorskip("huggingface_hub.constants")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SCRIPT = "import sys; from pagewood.engine.model_folder.folder import *; print(model_folder(sys.argv[1]))"


class Hub(BaseHTTPRequestHandler):
    """Repositories in memory; some are gated."""

    protocol_version = "HTTP/1.1"
    files: ClassVar[dict[str, dict[str, bytes]]] = {}
    asked: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(path)
        parts = path.strip("/").split("/")
        name = "/".join(parts[2:4] if parts[:2] == ["api", "models"] else parts[:2])
        status, headers, body = 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        if name == "org/gated":
            status, headers = 403, {"X-Error-Code": "GatedRepo"}
        elif name in self.files and parts[0] == "api":
            known = self.files[name]
            found: object = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": one} for one in known]}
            if "tree" in parts:
                found = [
                    {"type": "file", "path": one, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for one, data in known.items()
                ]
            status, headers, body = 200, {"Content-Type": "application/json"}, json.dumps(found).encode()
        elif name in self.files:
            body = self.files[name]["/".join(parts[4:])]
            etag = f'"{hashlib.sha1(body).hexdigest()}"'
            status, headers = 200, {"X-Repo-Commit": COMMIT, "ETag": etag, "Accept-Ranges": "bytes"}
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def endpoint() -> Generator[str]:
    files = {one.name: one.read_bytes() for one in model_folder(None).iterdir() if one.is_file()}
    Hub.files.update({
        "org/tiny": {**files, "README.md": b"not needed", "original/consolidated.safetensors": b"a second copy"},
        "org/quantised": {"tiny-Q4_K_M.gguf": b"GGUF", "config.json": b"{}"},
        "org/gated": {},
    })  # fmt: skip
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def hub(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Make `huggingface_hub` of this process use that server and an empty cache."""
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    Hub.asked.clear()
    return monkeypatch


def test_a_model_is_downloaded_once(endpoint: str, tmp_path: Path) -> None:
    """In processes that read the variables of `huggingface_hub`; the second one has no network."""
    own = {"PYTHONPATH": ":".join(sys.path), "HF_HOME": str(tmp_path), "HF_ENDPOINT": endpoint}
    found: list[Path] = []
    for environment in (own, own | {"HF_HUB_OFFLINE": "1"}):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, "org/tiny"], env=environment, capture_output=True, text=True, check=True
        )
        found.append(Path(done.stdout.strip()))
    assert found[0] == found[1]
    assert found[0].is_relative_to(tmp_path / "hub" / "models--org--tiny")
    assert model_name(found[0]) == "org/tiny"
    names = {one.name for one in found[0].rglob("*") if one.is_file()}
    assert names == {
        one.name for one in model_folder(None).iterdir() if one.suffix in (".json", ".safetensors", ".jinja")
    }
    for name in names:
        assert (found[0] / name).read_bytes() == (model_folder(None) / name).read_bytes()


@pytest.mark.usefixtures("hub")
def test_a_download_that_was_cut_goes_on() -> None:
    folder = model_folder("org/tiny")
    Hub.asked.clear()
    assert model_folder("org/tiny") == folder
    assert not Hub.asked  # what is whole in the cache is taken as it is
    (folder / "model.safetensors").unlink()
    assert model_folder("org/tiny") == folder
    assert (folder / "model.safetensors").read_bytes() == (model_folder(None) / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("org/none", {}, "the hub has no such repository, or it is private"),
        ("org/gated", {}, "its owner must give you access"),
        ("org/quantised", {}, "`hf download org/quantised FILE.gguf`"),
        ("org/tiny", {"HF_HUB_OFFLINE": True}, "`hf download org/tiny`"),
        ("org/tiny", {"ENDPOINT": "http://127.0.0.1:9"}, "cannot be downloaded now"),
    ],
)
def test_what_cannot_be_had_says_what_to_do(
    name: str, settings: dict[str, object], message: str, hub: pytest.MonkeyPatch
) -> None:
    for setting, value in settings.items():
        hub.setattr(constants, setting, value)
    with pytest.raises(FileNotFoundError, match=f"^model must .*{re.escape(message)}"):
        model_folder(name)


def test_what_is_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_hub_name("Qwen/Qwen3-0.6B")
    assert model_name("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    for other in (None, "qwen", "./qwen/model", "/qwen/model", "a/b/c", "qwen/", "~/model", "../model", "org/na me"):
        assert not is_hub_name(other)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "mine").mkdir(parents=True)
    assert not is_hub_name("org/mine")  # a folder comes first
    assert model_folder("org/mine") == Path("org/mine")
