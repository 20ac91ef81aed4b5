"""Where images of requests come from: data URLs, and hosts that the operator allows, within limits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from memory_server import MemoryServer
from pagewood.engine.images.limits import ImageLimits
from pagewood.server.http.errors import ApiError
from pagewood.server.images.sources import ImageSources
from pagewood.server.messages import wire

pytestmark = pytest.mark.anyio
DATA = "data:image/png;base64,aGVsbG8="


class _Site(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/slow":
            time.sleep(30)  # longer than the client waits
        self.send_response({"/moved": 302, "/gone": 404}.get(self.path, 200))
        if self.path == "/moved":
            self.send_header("Location", "/image")
        body = b"x" * (100 if self.path == "/large" else 9)
        if self.path != "/large":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Site)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def conversation(*urls: str) -> wire.ChatPrompt:
    parts = [{"type": "image", "image": url} for url in urls]
    return wire.ChatPrompt(messages=({"role": "user", "content": [*parts, {"type": "text", "text": "hi"}]},))


async def test_images_are_taken_out_of_conversations(site: str) -> None:
    sources = ImageSources(hosts=(site,))
    found = await sources.filled(conversation(DATA, f"http://{site}/image"))
    assert found.images == (b"hello", b"xxxxxxxxx")
    assert found.messages[0]["content"] == [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "hi"}]
    plain = wire.ChatPrompt(messages=({"role": "user", "content": "hi"},))
    assert await sources.filled(plain) is plain


async def test_what_may_not_be_fetched_is_refused(site: str) -> None:
    sources = ImageSources(limits=ImageLimits(max_images=2, max_bytes=50), hosts=(site, "*.example.com"), timeout_s=0.5)
    port = site.rpartition(":")[2]
    for url, words in (
        (f"http://{site}/moved", "status 200, got 302"),
        (f"http://{site}/gone", "status 200, got 404"),
        (f"http://{site}/large", "at most 50 bytes"),
        (f"http://{site}/slow", "within 0.5 s"),
        (f"http://localhost:{port}/image", "allowed host"),
        ("http://127.0.0.1:1/image", "allowed host"),
        (f"http://user@{site}/image", "allowed host"),
        ("http://example.com/image", "allowed host"),
        ("http://a.example.com:8080/image", "allowed host"),
        ("http://a.example.com.evil.org/image", "allowed host"),
        ("http://[::1]/image", "allowed host"),
        ("http://:/image", "allowed host"),
        ("ftp://a.example.com/image", "data URL"),
        ("data:;base64," + "A" * 200, "at most 50 bytes"),
    ):
        with pytest.raises(ApiError) as error:
            await sources.filled(conversation(url))
        assert words in str(error.value), url
    with pytest.raises(ApiError, match="at most 2 images"):
        await sources.filled(conversation(DATA, DATA, DATA))


async def test_a_model_of_text_says_that_it_takes_no_images(server: MemoryServer) -> None:
    parts = [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": DATA}}]
    body = {"model": "echo", "messages": [{"role": "user", "content": parts}]}
    answer = await server.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "images_not_supported"
    assert "takes text only" in answer.json()["error"]["message"]
