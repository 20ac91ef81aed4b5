"""Which hosts, origins and content types are allowed, alone and through the whole application."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.datastructures import Headers

from memory_server import MemoryServer
from pagewood.engine.text import Tokenizer
from pagewood.server.http.access import AccessRules, access_rules, check_json
from pagewood.server.http.errors import ApiError

pytestmark = pytest.mark.anyio

RULES = AccessRules(hosts=frozenset({"gpu-box", "*.example.com"}), origins=frozenset({"https://chat.example.org"}))
CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}


def headers(**values: str) -> Headers:
    return Headers({name.replace("_", "-"): value for name, value in values.items()})


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "localhost:8000", "LocalHost:8000", "app.localhost", "localhost."),
        *("127.0.0.1:8000", "10.1.2.3", "[::1]:8000", "[fe80::1]", "0.0.0.0:8000"),
        *("gpu-box", "GPU-Box:8000", "a.example.com", "a.b.example.com:443"),
    ],
)
def test_allowed_hosts(host: str) -> None:
    RULES.check_host(headers(host=host), http_version="1.1")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *[(host, 403) for host in ("evil.com", "evil.com:8000", "127.0.0.1.evil.com", "notlocalhost", "example.com")],
        *[(host, 403) for host in ("gpu-box.evil.com", "1.2.3", "2130706433", "xexample.com")],
        *[(host, 400) for host in ("", "a b", "localhost:port", "user@localhost", "[::1", "a/b", "localhost\x00")],
    ],
)
def test_hosts_that_are_not_allowed(host: str, status: int) -> None:
    with pytest.raises(ApiError) as error:
        RULES.check_host(headers(host=host), http_version="1.1")
    assert error.value.status == status


def test_missing_and_repeated_hosts() -> None:
    RULES.check_host(headers(), http_version="1.0")
    twice = Headers(raw=[(b"host", b"localhost"), (b"host", b"localhost")])
    for wrong in (headers(), twice):
        with pytest.raises(ApiError, match="exactly one"):
            RULES.check_host(wrong, http_version="1.1")


def test_the_bound_name_the_machine_and_options_are_allowed() -> None:
    rules = access_rules("gpu-box", ["Chat.Example.com"], ["https://Chat.example.com/"])
    rules.check_host(headers(host="gpu-box:1"), http_version="1.1")
    rules.check_host(headers(host="chat.example.com"), http_version="1.1")
    assert rules.allows_origin("https://chat.example.com")
    AccessRules(hosts=frozenset("*")).check_host(headers(host="any.thing"), http_version="1.1")
    assert AccessRules(origins=frozenset("*")).allows_origin("null")


def test_origins() -> None:
    own = headers(host="127.0.0.1:8000", origin="http://127.0.0.1:8000")
    behind_tls = headers(host="a.example.com", origin="https://a.example.com")
    allowed = headers(host="127.0.0.1:8000", origin="https://chat.example.org")
    for right in (own, behind_tls, allowed, headers(host="127.0.0.1:8000")):
        RULES.check_origin(right, method="POST", scheme="http")
    for origin in (
        "http://evil.com",
        "null",
        "http://127.0.0.1:3000",
        "http://localhost:8000",
        "",
        "file://",
        "ftp://127.0.0.1:8000",
    ):
        foreign = headers(host="127.0.0.1:8000", origin=origin)
        RULES.check_origin(foreign, method="GET", scheme="http")
        with pytest.raises(ApiError, match="not allowed") as error:
            RULES.check_origin(foreign, method="POST", scheme="http")
        assert error.value.status == 403


def test_a_page_without_tls_may_not_use_a_server_with_tls() -> None:
    page = headers(host="a.example.com", origin="http://a.example.com")
    with pytest.raises(ApiError, match="not allowed"):
        RULES.check_origin(page, method="POST", scheme="https")
    RULES.check_origin(headers(host="A.example.com", origin="https://a.example.com"), method="POST", scheme="https")


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/health", "/v1/models", "/nothing", "/metrics"])
async def test_no_answer_is_taken_for_another_type(server: MemoryServer, path: str) -> None:
    assert (await server.client.get(path)).headers["x-content-type-options"] == "nosniff"


def test_content_types() -> None:
    for right in ("application/json", "Application/JSON; charset=utf-8"):
        check_json(headers(content_type=right))
    for wrong in ("text/plain", "application/x-www-form-urlencoded", "text/plain; application/json", ""):
        with pytest.raises(ApiError, match="must be 'application/json'") as error:
            check_json(headers(content_type=wrong))
        assert error.value.status == 415


async def test_a_web_page_cannot_drive_the_server(server: MemoryServer) -> None:
    rebound = await server.client.get("/v1/models", headers={"Host": "evil.com:8000"})
    assert (rebound.status_code, rebound.json()["error"]["code"]) == (403, "host_not_allowed")
    assert "--allowed-host evil.com" in rebound.json()["error"]["message"]
    for path in (CHAT, "/v1/completions", "/v1/requests/x/priority"):
        foreign = await server.client.post(path, json=BODY, headers={"Origin": "https://evil.com"})
        assert (foreign.status_code, foreign.json()["error"]["code"]) == (403, "origin_not_allowed")
        simple = await server.client.post(path, content=b"{}", headers={"Content-Type": "text/plain"})
        assert (simple.status_code, simple.json()["error"]["code"]) == (415, "unsupported_media_type")
        untyped = await server.client.post(path, content=b"{}")
        assert untyped.status_code == 415
        preflight = {"Origin": "https://evil.com", "Access-Control-Request-Method": "POST"}
        refused = await server.client.options(path, headers=preflight)
        assert refused.status_code == 405
        assert "access-control-allow-origin" not in refused.headers
    assert server.service.status.counters["num_tokens"] == 0


async def test_an_allowed_origin_may_use_the_server_from_a_browser(model_folder: Path, tokenizer: Tokenizer) -> None:
    page = "https://chat.example.org"
    server = MemoryServer(model_folder, tokenizer, limit=64, origins=frozenset({page}))
    await server.start()
    preflight = {
        "Origin": page,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type,authorization",
    }
    asked = await server.client.options(CHAT, headers=preflight)
    assert asked.status_code == 204
    assert asked.headers["access-control-allow-origin"] == page
    assert asked.headers["access-control-allow-headers"] == "content-type,authorization"
    answer = await server.client.post(CHAT, json={"model": "echo", **BODY}, headers={"Origin": page})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == page
    assert answer.headers["vary"] == "Origin"
    await server.until_idle()
    await server.stop()


async def test_the_id_of_a_request(server: MemoryServer) -> None:
    kept = await server.client.get("/health", headers={"X-Request-Id": "Trace:1/a+b=@.-_"})
    assert kept.headers["x-request-id"] == "Trace:1/a+b=@.-_"
    for wrong in ("", "x" * 129, "two words", 'quoted"', "é"):
        new = await server.client.get("/none", headers=[(b"X-Request-Id", wrong.encode())])
        assert len(new.headers["x-request-id"]) == 32
        assert new.status_code == 404
