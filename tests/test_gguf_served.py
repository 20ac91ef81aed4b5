"""`pagewood serve --model file.gguf`: a conversation with the embedded model, stored as one file."""

# pyright: basic
# The helper that writes the file is loaded by its path.

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from pagewood.engine.model_folder.folder import model_folder

SUPPORT = Path(__file__).parents[1] / "packages" / "engine" / "tests" / "support"
LIMIT_S = 120.0


def write(file: Path) -> None:
    spec = importlib.util.spec_from_file_location("gguf_files", SUPPORT / "gguf_files.py")
    assert spec is not None
    assert spec.loader is not None
    gguf_files = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gguf_files)
    folder = model_folder(None)
    keys = {"tokenizer.chat_template": (folder / "chat_template.jinja").read_text()}
    tokenizer = gguf_files.byte_level_tokenizer(folder / "tokenizer.json", pre="gpt-2")
    gguf_files.write_gguf(folder, file, architecture="llama", kinds=["Q8_0"], tokenizer=tokenizer, keys=keys)


def request(port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers), timeout=LIMIT_S
    ) as response:
        return json.loads(response.read() or b"null")


@pytest.mark.slow
def test_a_conversation_over_http(tmp_path: Path) -> None:
    write(tmp_path / "demo.gguf")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            [
                *(sys.executable, "-m", "pagewood.server", "serve", "--model", str(tmp_path / "demo.gguf")),
                *("--port", str(port), "--max-total-tokens", "4096"),
            ],
            stdout=log,
            stderr=log,
            env={**os.environ, "TMPDIR": str(tmp_path), "PAGEWOOD_CACHE": str(tmp_path / "cache")},
        )
    try:
        deadline_s = time.monotonic() + LIMIT_S
        while True:
            assert server.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline_s
            try:
                request(port, "/ready")
                break
            except urllib.error.URLError:
                time.sleep(0.1)
        assert request(port, "/v1/models")["data"][0]["id"] == "demo"
        question = {"model": "demo", "messages": [{"role": "user", "content": "What is 12 + 7?"}]}
        answer = request(port, "/v1/chat/completions", question)
        assert answer["choices"][0]["message"]["content"] == "12 + 7 = 19"
        assert "29 matrices of gguf Q8_0 as int8group in groups of 32" in (tmp_path / "log").read_text()
    finally:
        server.terminate()
        server.wait(LIMIT_S)
