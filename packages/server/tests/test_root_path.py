"""The server behind a path prefix: a proxy that removes it, one that keeps it, nginx, and an ASGI host."""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import subprocess
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from memory_server import ADMIN_KEY, MemoryServer
from pagewood.server.cli.main import main
from reverse_proxy import proxying
from scripted import listening

pytestmark = pytest.mark.anyio

INNER = b'{"model": "echo", "prompt": "x", "max_tokens": 1}'
HIDDEN = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%b"
) % (len(INNER), INNER)
NGINX = shutil.which("nginx")


@contextmanager
def nginx(folder: Path, port: int) -> Generator[str]:
    """Run nginx before a server, with a prefix that it removes and the connection headers of its WebSocket guide."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        own = found.getsockname()[1]
    (folder / "nginx.conf").write_text(f"""
daemon off; pid {folder}/pid; error_log {folder}/error.log; events {{}}
http {{ access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream pagewood {{ server 127.0.0.1:{port}; keepalive 1; }}
  server {{ listen 127.0.0.1:{own};
    location /llm/ {{ proxy_pass http://pagewood/; proxy_http_version 1.1; proxy_buffering off;
      proxy_set_header Host $http_host; proxy_set_header Upgrade $http_upgrade;
      proxy_set_header Connection "upgrade"; }} }} }}
""")
    process = subprocess.Popen([str(NGINX), "-c", str(folder / "nginx.conf"), "-p", str(folder)])
    try:
        yield f"http://127.0.0.1:{own}/llm"
    finally:
        process.terminate()
        process.wait(60)


@asynccontextmanager
async def behind(server: MemoryServer, way: str, folder: Path) -> AsyncGenerator[httpx.AsyncClient]:
    """Yield a client of a server behind a proxy."""
    server.frontend = replace(server.frontend, root_path="/llm")
    async with listening(server) as url:
        port = int(url.rpartition(":")[2])
        run = nginx(folder, port) if way == "nginx" else proxying(port, "/llm", strips=way == "strip")
        with run as address:
            async with httpx.AsyncClient(base_url=address, timeout=60) as client:
                for _ in range(200):
                    try:
                        await client.get("/health")
                        break
                    except httpx.ConnectError:
                        await asyncio.sleep(0.05)
                yield client


WAYS = ["strip", "keep", pytest.param("nginx", marks=pytest.mark.skipif(NGINX is None, reason="needs nginx"))]


@pytest.mark.parametrize("way", WAYS)
async def test_pages_and_documents_lead_to_the_server_behind_the_prefix(
    server: MemoryServer, tmp_path: Path, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    body: dict[str, Any] = {"model": "echo", "prompt": "Hi", "max_tokens": 2}
    async with behind(server, way, tmp_path) as client:
        document = (await client.get("/openapi.json")).json()
        assert document["servers"] == [{"url": "/llm"}]
        for path in ("/", "/dashboard", "/docs"):
            page = await client.get(path, headers={"accept": "text/html"})
            assert page.status_code == 200
            links = re.findall(r'href="([^"]*)"', page.text)
            for link in links:
                found = page.url.join(link)
                assert found.path.startswith("/llm/")
                assert (await client.get(found, headers={"accept": "text/html"})).status_code == 200, link
            assert links
            assert not re.search(r'(fetch|send|allowed)\("/', page.text)
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
            assert [line async for line in stream.aiter_lines()][-2] == "data: [DONE]"
        assert (await client.post("/v1/messages", json={})).json()["type"] == "error"  # the form of its protocol
        assert "error" in (await client.post("/api/chat", json={})).json()
        url = str(client.base_url)
        assert await asyncio.to_thread(main, ["top", url, "--once", "--api-key", ADMIN_KEY]) == 0
        assert "echo: " in capsys.readouterr().out
    await server.until(lambda: server.service.watchers.num_watching == 0)


@pytest.mark.parametrize("way", WAYS)
async def test_behind_a_proxy_a_body_with_upgrade_is_no_request_of_its_own(
    server: MemoryServer, tmp_path: Path, way: str
) -> None:
    async with behind(server, way, tmp_path) as client:
        headers = {"Connection": "Upgrade", "Upgrade": "foo", "Content-Type": "application/json"}
        for _ in range(3):
            poison = await client.post("/v1/completions", content=HIDDEN, headers=headers)
            assert (poison.status_code, poison.json()["error"]["code"]) == (400, "invalid_json")
            assert (await client.get("/health")).json() == {"status": "ok"}


async def test_without_a_proxy_both_forms_of_a_path_work(server: MemoryServer) -> None:
    server.frontend = replace(server.frontend, root_path="/llm/a")
    async with listening(server) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        for path, status in {
            "/health": 200, "/llm/a/health": 200, "/llm/a/": 200, "/llm/a/llm/a/health": 404, "/llm/health": 404,
            "/llm/ahealth": 404, "/llm/a//health": 404,
        }.items():  # fmt: skip
            assert (await client.get(path)).status_code == status, path
        moved = await client.get("/llm/a")
        assert (moved.status_code, moved.headers["location"]) == (308, "a/")
        found = await client.get("/openapi.json", headers={"x-forwarded-prefix": "/evil"})
        assert found.json()["servers"] == [{"url": "/llm/a"}]


async def test_a_prefix_that_paths_of_the_server_have_must_be_removed_by_the_proxy(server: MemoryServer) -> None:
    server.frontend = replace(server.frontend, root_path="/api")
    async with listening(server) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        assert (await client.get("/api/version")).status_code == 200  # Ollama's
        assert (await client.get("/api/health")).status_code == 404


async def test_an_asgi_host_names_the_prefix(server: MemoryServer) -> None:
    app = server.frontend.app()

    async def host(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "root_path": "/serve"}, receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(host), base_url="http://memory") as client:
        assert (await client.get("/serve/health")).status_code == 200
        assert (await client.get("/serve/openapi.json")).json()["servers"] == [{"url": "/serve"}]
    assert (await server.client.get("/openapi.json")).json()["servers"] == [{"url": "/"}]
