"""HTTPS with keys: real clients over a real socket, and a whole server whose keys change."""

from __future__ import annotations

import asyncio
import io
import json
import shlex
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from anthropic import Anthropic, DefaultHttpxClient
from openai import APIStatusError, AuthenticationError, OpenAI, RateLimitError
from openai import DefaultHttpxClient as OpenAIHttpxClient

from memory_server import MemoryServer
from pagewood.engine.text import Tokenizer
from pagewood.server.cli.main import main
from pagewood.server.http.http_server import http_server
from pagewood.server.http.listening import bind
from pagewood.server.keys.gate import KeyGate
from pagewood.server.keys.key import ApiKey, digest_of
from pagewood.server.observe.console import Console
from pagewood.server.serve import check_certificate
from serving import MODEL, Server, until

KEY, ADMIN = "sk-0123456789-user", "sk-0123456789-admin"
KEYS = (
    ApiKey(digest=digest_of(KEY), tenant="acme", requests_per_minute=1000),
    ApiKey(digest=digest_of(ADMIN), admin=True),
    ApiKey(digest=digest_of(f"{KEY}-slow"), requests_per_minute=1),
)
CHAT: dict[str, Any] = {"model": "echo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}


def certificate(folder: Path, name: str = "server") -> tuple[Path, Path]:
    """Write a certificate for 127.0.0.1 that is its own authority, and its key."""
    paths = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"),
            *("-out", str(paths[0]), "-keyout", str(paths[1])),
        ],
        check=True,
        capture_output=True,
    )
    return paths


@asynccontextmanager
async def listening(server: MemoryServer, tls: tuple[Path, Path]) -> AsyncGenerator[int]:
    """Serve over TLS; yield the port."""
    socket = bind("127.0.0.1", 0)
    http = http_server(server.frontend.site(), stop_grace_s=5, tls_cert=tls[0], tls_key=tls[1])
    serving = asyncio.create_task(http.serve(sockets=[socket]))
    await server.until(lambda: http.started)
    try:
        yield socket.getsockname()[1]
    finally:
        http.should_exit = True  # not ours
        await serving
        socket.close()


@pytest.mark.anyio
async def test_clients_over_tls(model_folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    tls = certificate(tmp_path)
    trust = ssl.create_default_context(cafile=tls[0])
    server = MemoryServer(model_folder, tokenizer, limit=64, gate=KeyGate(KEYS))
    await server.start()
    try:
        async with listening(server, tls) as port:
            url = f"https://127.0.0.1:{port}"
            await asyncio.to_thread(_check_openai, url, trust)
            await asyncio.to_thread(_check_anthropic, url, trust)
            await _check_http(url, port, trust)
            await _check_streams(url, trust)
        await server.until_idle()
    finally:
        await server.stop()


def _check_openai(url: str, trust: ssl.SSLContext) -> None:
    def client(key: str) -> OpenAI:
        return OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, http_client=OpenAIHttpxClient(verify=trust))

    with client(KEY) as openai:
        raw = cast("Any", openai.chat.completions.with_raw_response).create(**CHAT)
        assert raw.headers["x-ratelimit-limit-requests"] == "1000"
        whole = raw.parse().choices[0].message.content
        chunks = openai.chat.completions.create(**CHAT, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    with client("sk-wrong-0123456789") as openai, pytest.raises(AuthenticationError) as wrong:
        openai.models.list()
    assert wrong.value.code == "invalid_api_key"
    with client(f"{KEY}-slow") as openai:
        openai.chat.completions.create(**CHAT)
        with pytest.raises(RateLimitError) as limited:
            openai.chat.completions.create(**CHAT)
    assert limited.value.code == "rate_limit_exceeded"
    assert int(limited.value.response.headers["retry-after"]) <= 60


def _check_anthropic(url: str, trust: ssl.SSLContext) -> None:
    with Anthropic(base_url=url, api_key=KEY, http_client=DefaultHttpxClient(verify=trust)) as anthropic:
        answer = cast("Any", anthropic.messages.with_raw_response).create(**CHAT)
        assert answer.headers["anthropic-ratelimit-requests-limit"] == "1000"
        assert answer.parse().usage.output_tokens == 5


async def _check_http(url: str, port: int, trust: ssl.SSLContext) -> None:
    async with httpx.AsyncClient(timeout=60) as stranger:
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await stranger.get(f"{url}/health")
        with pytest.raises(httpx.HTTPError):
            await stranger.get(f"http://127.0.0.1:{port}/health")
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
    writer.write(b"nonsense\r\n\r\n")
    answer = await asyncio.wait_for(reader.readuntil(b"}}"), 60)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"invalid_http" in answer
    writer.close()


async def _check_streams(url: str, trust: ssl.SSLContext) -> None:
    """Many streams at a time give the same text as one."""
    headers = {"x-api-key": KEY}
    async with httpx.AsyncClient(base_url=url, verify=trust, headers=headers, timeout=60) as client:
        body = {**CHAT, "max_tokens": 40, "stream": True}

        async def text() -> str:
            response = await client.post("/v1/chat/completions", json=body)
            events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
            return "".join(event["choices"][0]["delta"].get("content") or "" for event in events)

        alone = await text()
        assert alone
        assert await asyncio.gather(*[text() for _ in range(8)]) == [alone] * 8


def test_certificates_that_cannot_be_used(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    check_certificate(None, None)
    check_certificate(cert, key)
    other = certificate(tmp_path, "other")[1]
    locked = tmp_path / "locked.key"
    subprocess.run(
        ["openssl", "ec", "-in", str(key), "-aes256", "-passout", "pass:word", "-out", str(locked)],
        check=True,
        capture_output=True,
    )
    for wrong_key, words in [
        (other, "tls_cert and tls_key cannot be used"),
        (tmp_path / "absent", "No such file"),
        (cert, "cannot be used"),
        (locked, "no passphrase"),
    ]:
        with pytest.raises(ValueError, match=words):
            check_certificate(cert, wrong_key)


@pytest.mark.slow
def test_a_server_with_keys_and_a_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As processes: the key of the environment does not reach the children, and SIGHUP reads the file again."""
    monkeypatch.setenv("PAGEWOOD_ADMIN_KEY", ADMIN)
    cert, tls_key = certificate(tmp_path)
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY}\n")
    keys.chmod(0o600)
    options = ("--api-key-file", str(keys), "--tls-cert", str(cert), "--tls-key", str(tls_key))
    server = Server(tmp_path, "--host", "0.0.0.0", *options)
    try:
        url = f"https://127.0.0.1:{server.url.rpartition(':')[2]}"
        trust = ssl.create_default_context(cafile=cert)
        for pid in server.children().values():
            assert ADMIN.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
        trusting = OpenAIHttpxClient(verify=trust)
        with (
            httpx.Client(base_url=url, verify=trust, timeout=60) as client,
            OpenAI(base_url=f"{url}/v1", api_key=KEY, http_client=trusting) as openai,
        ):

            def status(path: str, key: str) -> int:
                return client.get(path, headers={"x-api-key": key}).status_code

            assert [status("/v1/models", key) for key in (KEY, ADMIN, "no")] == [200, 200, 401]
            assert [status("/server_info", key) for key in (KEY, ADMIN)] == [403, 200]
            said = openai.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "What is 2 + 3?"}], max_tokens=20
            )
            assert "5" in (said.choices[0].message.content or "")
            keys.write_text(f"{KEY}-new\n")
            server.process.send_signal(signal.SIGHUP)
            until(lambda: status("/v1/models", f"{KEY}-new") == 200)
            with pytest.raises(APIStatusError):
                openai.models.list()
        assert KEY not in server.stderr()
    finally:
        server.close()


def code_of(message: str) -> str:
    """Return the Python code of a start message."""
    lines = [line[2:] for line in message.splitlines()]
    start = next(i for i, line in enumerate(lines) if line.startswith(("import os", "import ssl", "from openai")))
    return "\n".join(lines[start : lines.index("", start)])


@pytest.mark.anyio
@pytest.mark.parametrize("has_keys", [True, False])
async def test_the_commands_of_the_start_message_and_the_programs_reach_the_server(
    model_folder: Path,
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    has_keys: bool,
) -> None:
    tls = certificate(tmp_path)
    for name in ("PAGEWOOD_API_KEY", "PAGEWOOD_ADMIN_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    keys = [ApiKey(digest=digest_of(KEY), tenant="a", name="a", admin=True)] if has_keys else []
    gate = KeyGate(keys) if has_keys else KeyGate(run_key=digest_of(KEY))
    server = MemoryServer(model_folder, tokenizer, limit=64, gate=gate)
    await server.start()
    try:
        async with listening(server, tls) as port:
            url = f"https://127.0.0.1:{port}"
            console = Console(url=url, model_names=("echo",), has_keys=has_keys, certificate=tls[0])
            console.show(server.service.status)
            shown = capsys.readouterr().out
            if has_keys:
                bench = ["bench", url, "--ca-file", str(tls[0]), "--requests", "1"]
                assert await asyncio.to_thread(main, bench) == 1
                assert (
                    "refuses the key (status 401); give one with --api-key or PAGEWOOD_API_KEY"
                    in capsys.readouterr().err
                )
            monkeypatch.setenv("PAGEWOOD_API_KEY", KEY)
            await asyncio.to_thread(exec, code_of(shown), {})
            assert capsys.readouterr().out
            curl = next(line.strip() for line in shown.splitlines() if line.strip().startswith("curl"))
            assert f"curl --cacert {tls[0]} {url}/v1/chat/completions" in curl
            assert ('-H "Authorization: Bearer $PAGEWOOD_API_KEY"' in curl) == has_keys
            chat = next(line.strip() for line in shown.splitlines() if line.strip().startswith("pagewood chat"))
            monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))
            assert await asyncio.to_thread(main, [*shlex.split(chat)[1:], "--max-tokens", "2"]) == 0
            assert await asyncio.to_thread(main, ["top", url, "--once", "--ca-file", str(tls[0])]) == 0
            bench = ["bench", url, "--ca-file", str(tls[0]), "--requests", "1", "--output-tokens", "2"]
            bench += ["--endpoint", "completions", "--vocab-size", "100", "--input-tokens", "8"]
            command = [sys.executable, "-m", "pagewood.server", *bench]
            measured = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
            assert measured.returncode == 0, measured.stderr
            assert await asyncio.to_thread(main, ["top", url, "--once", "--ca-file", str(tls[1])]) != 0
            assert "--ca-file cannot be used" in capsys.readouterr().err
    finally:
        await server.stop()
