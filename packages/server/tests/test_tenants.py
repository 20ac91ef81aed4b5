"""Keys over HTTP, on a whole server: what needs one, what a tenant sees of others, and what a key may use."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers
from starlette.routing import Route

from memory_server import ADMIN_KEY, MemoryServer
from pagewood.engine.text import Tokenizer
from pagewood.server.http.operations import Operation
from pagewood.server.keys.gate import KeyGate
from pagewood.server.keys.key import ApiKey, digest_of
from pagewood.server.messages import wire
from pagewood.server.requests.live import LiveRequests

pytestmark = pytest.mark.anyio

ACME, RIVAL, ADMIN, BUSY, RUN = (f"sk-{name}-0123456789" for name in ("acme", "rival", "admin", "busy", "run"))
KEYS = (
    ApiKey(digest=digest_of(ACME), tenant="acme", name="acme-ci", max_priority=3),
    ApiKey(digest=digest_of(RIVAL), tenant="rival"),
    ApiKey(digest=digest_of(ADMIN), tenant="ops", admin=True),
    ApiKey(digest=digest_of(BUSY), tenant="busy", requests_per_minute=2, tokens_per_minute=60, max_concurrent=1),
)
PROMPT = "The quick brown fox jumps over the lazy dog, and the dog does not mind it at all."
GREEDY = {"temperature": 0, "max_tokens": 2}
ADMINS_ONLY = {
    "CheckWeights", "ContinueGeneration", "DestroyWeightsUpdateGroup", "Drain", "FinishWeightUpdate", "FlushCache",
    "FlushCacheByGet", "InitWeightTransferEngine", "InitWeightsUpdateGroup", "IsPaused", "IsSleeping", "LoadAdapter",
    "LoadLoraAdapter", "Pause", "PauseGeneration", "Profile", "ReleaseMemoryOccupation", "ResetPrefixCache",
    "RestartEngine", "Resume", "ResumeMemoryOccupation", "ServerInfo", "ShutdownWeightTransferEngine", "Sleep",
    "StartDraftWeightUpdate", "StartWeightUpdate", "UnloadAdapter", "UnloadLoraAdapter", "UpdateWeightVersion",
    "UpdateWeights", "UpdateWeightsFromDisk", "UpdateWeightsFromDistributed", "UpdateWeightsFromFiles", "WakeUp",
    "Watch", "WeightVersion", "WorldSize",
}  # fmt: skip
"""Names of operations. An operation that is new belongs here or is for everyone with a key: decide, then add it."""
INCOMPLETE = ("missing_required_parameter", "weights_fixed", "weights_invalid")
"""What an operation without any fields may be refused for."""
NO_KEY = {"Health", "HealthGenerate", "Ready"}


@pytest.fixture
async def server(model_folder: Path, tokenizer: Tokenizer) -> AsyncGenerator[MemoryServer]:
    """A server with the keys of three tenants."""
    async with MemoryServer(model_folder, tokenizer, limit=64, gate=KeyGate(KEYS)) as server:
        yield server
        await server.until_idle()


def key(text: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {text}"}


async def cached(server: MemoryServer, sender: str, salt: str | None = None, **body: Any) -> int:
    """Return how many tokens of a prompt were cached."""
    path, body = "/v1/completions", {"prompt": PROMPT, **GREEDY, **body}
    salted = body if salt is None else {**body, "cache_salt": salt}
    response = await server.client.post(path, json={"model": "echo", **salted}, headers=key(sender))
    assert response.status_code == 200, response.text
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def operations(server: MemoryServer) -> list[Operation]:
    return server.frontend.all_operations()


async def test_every_path_but_health_and_documentation_needs_a_key(server: MemoryServer) -> None:
    open_paths = {"/health", "/live", "/ping", "/ready", "/health/generate", "/health_generate"}
    open_paths |= {"/", "/dashboard", "/docs", "/openapi.json"}
    for one in operations(server):
        for path in one.public_paths:
            path = path.replace("{", "").replace("}", "")
            response = await server.client.request(one.method, path, json={})
            assert (response.status_code == 401) == (path not in open_paths), path
    for path in ("/v1/modelsx", "/dashboardx", "/health/", "/health%0a", "/./health/x", "/docs/x", "/HEALTH"):
        assert (await server.client.get(path)).status_code == 401, path
    for path in sorted(open_paths):
        response = await server.client.get(path, headers={"accept": "text/html"})
        assert response.status_code == 200, path
    assert {one.name for one in operations(server) if one.is_open} == NO_KEY


async def test_admin_operations_need_an_admin_key(server: MemoryServer) -> None:
    assert {one.name for one in operations(server) if one.admin} == ADMINS_ONLY
    for one in operations(server):
        if not one.admin:
            continue
        for path in one.public_paths:
            refused = await server.client.request(one.method, path, content=b"nonsense", headers=key(ACME))
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_key_required"), path
            allowed = await server.client.request(one.method, path, json={}, headers=key(ADMIN))
            is_incomplete = any(code in allowed.text for code in INCOMPLETE)
            assert allowed.status_code == (400 if is_incomplete else 200), (path, allowed.text)


async def test_all_routes_of_an_admin_operation_are_guarded(server: MemoryServer) -> None:
    """Whatever serves the operations, their own routes refuse callers that are not known."""
    for one in operations(server):
        for route in one.routes():
            assert isinstance(route, Route)
            assert (route.endpoint is not one.endpoint) == (one.admin or one.is_overview)


async def test_sums_over_all_tenants_are_open_only_where_there_are_none(
    server: MemoryServer, model_folder: Path, tokenizer: Tokenizer
) -> None:
    assert [one.path for one in operations(server) if one.is_overview] == ["/metrics"]
    for headers, status in (({}, 401), (key(ACME), 403), (key(ADMIN), 200)):
        assert (await server.client.get("/metrics", headers=headers)).status_code == status
    async with MemoryServer(model_folder, tokenizer, limit=64) as without_keys:
        for headers in ({}, key("none")):
            assert (await without_keys.client.get("/metrics", headers=headers)).status_code == 200


@pytest.mark.parametrize("keys", [(), KEYS[:2]], ids=["no keys", "no admin key"])
@pytest.mark.parametrize("run_key", [None, digest_of(RUN)], ids=["unwritten", "written"])
async def test_admin_routes_are_open_to_the_key_of_the_run_only(
    model_folder: Path, tokenizer: Tokenizer, keys: tuple[ApiKey, ...], run_key: bytes | None
) -> None:
    """A server without an admin key has none of its own either if it could not write one."""
    server = MemoryServer(model_folder, tokenizer, limit=64, gate=KeyGate(keys, run_key=run_key))
    await server.start()
    unknown = 401 if keys else 403
    wrong = [{}, key("none"), key(RUN[:-1]), {"x-api-key": f"{RUN}x"}, {"Authorization": f"Basic {RUN}"}]
    senders = [(headers, unknown) for headers in wrong] + [(key(ACME), 403)]
    senders.append((key(RUN), 200 if run_key else unknown))
    try:
        for one in operations(server):
            if not one.admin:
                continue
            for path in one.public_paths:
                for headers, status in senders:
                    response = await server.client.request(one.method, path, json={}, headers=headers)
                    is_incomplete = status == 200 and any(code in response.text for code in INCOMPLETE)
                    assert response.status_code == (400 if is_incomplete else status), (path, headers, response.text)
                    if status == 403:
                        error = response.json()["error"]
                        assert (error["code"], error["type"]) == ("admin_key_required", "invalid_request_error")
                        assert ("its start message names the file" in error["message"]) == (run_key is not None)
        server.service.live.set_draining(False)
        for headers, status in senders:
            response = await server.client.post(
                "/v1/completions", json={"model": "echo", "prompt": "x", **GREEDY}, headers=headers
            )
            assert response.status_code == (401 if status == 401 else 200)
    finally:
        await server.stop()


async def test_without_keys_each_caller_may_abort_and_only_the_run_may_pause(
    model_folder: Path, tokenizer: Tokenizer
) -> None:
    server = MemoryServer(model_folder, tokenizer, limit=64)
    await server.start()
    body = {"rid": "mine", "text": PROMPT, "sampling_params": {"max_new_tokens": 2}, "explain": True}
    try:
        for sender, other in ((server.client, server.admin), (server.admin, server.client)):
            answer = (await sender.post("/generate", json=body)).json()
            assert "timings" in answer["meta_info"]
            server.gate.close()
            running = asyncio.create_task(sender.post("/generate", json=body))
            await server.until(lambda: server.service.live.num_live == 1)
            assert (await other.post("/v1/requests/mine/priority", json={"priority": 1})).status_code == 200
            assert (await server.client.post("/pause", json={"rid": "mine"})).status_code == 403
            assert (await other.post("/abort", json={"rid": "mine"})).json() == {"aborted": 1}
            assert (await running).json()["error"]["code"] == "aborted"
            server.gate.open()
            await server.until_idle()
        cached = (await server.client.post("/generate", json=body)).json()["meta_info"]["cached_tokens"]
        assert cached > 0, "the key of the run is no tenant of its own"
    finally:
        await server.stop()


async def test_the_key_of_the_run_outlives_a_reload_and_is_never_logged(
    model_folder: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with MemoryServer(model_folder, tokenizer, limit=64) as server:
        assert (await server.admin.get("/server_info")).status_code == 200
        assert " key=run" in caplog.text
        assert " tenant=" not in caplog.text
        server.frontend.gate.replace(KEYS[:2])
        assert (await server.admin.get("/server_info")).status_code == 200
        assert (await server.client.get("/server_info", headers=key(ACME))).status_code == 403
        assert (await server.client.get("/server_info")).status_code == 401
    assert ADMIN_KEY not in caplog.text


async def test_errors_have_the_words_of_their_protocol(server: MemoryServer) -> None:
    openai = await server.client.post("/v1/chat/completions", json={})
    assert openai.json()["error"]["code"] == "missing_api_key"
    assert openai.headers["www-authenticate"] == "Bearer"
    anthropic = await server.client.post("/v1/messages", json={}, headers={"x-api-key": "sk-wrong"})
    assert (anthropic.status_code, anthropic.json()["error"]["type"]) == (401, "authentication_error")
    ollama = await server.client.post("/api/chat", json={})
    assert "needs an API key" in ollama.json()["error"]


async def test_the_log_names_the_key_and_never_shows_it(server: MemoryServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    await cached(server, ACME)
    await server.client.get("/v1/models", headers={"x-api-key": "sk-wrong-key-of-a-stranger"})
    assert "key=acme-ci tenant=acme" in caplog.text
    assert "invalid_api_key" in caplog.text
    for secret in (ACME, "stranger", PROMPT, "quick brown"):
        assert secret not in caplog.text


async def test_no_hit_crosses_tenants(server: MemoryServer) -> None:
    assert await cached(server, ACME) == 0
    hit = await cached(server, ACME)
    assert hit > 0, "there must be something to find"
    assert await cached(server, RIVAL) == 0
    assert await cached(server, RIVAL) == hit
    # No salt of another tenant is the namespace of this one, or of its salts.
    assert await cached(server, ACME, "s") == 0
    for salt in ("s", "@4:acme:", "@4:acme:s", "acme", ":acme", "@5:rival:"):
        assert await cached(server, RIVAL, salt) == 0, salt
    assert await cached(server, ACME, "s") == hit


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": PROMPT, **GREEDY}),
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 2, "use_beam_search": True, "n": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}], **GREEDY}),
        ("/v1/responses", {"input": PROMPT, "max_output_tokens": 2}),
        ("/v1/messages", {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2}),
        ("/generate", {"text": PROMPT, "sampling_params": {"max_new_tokens": 2}}),
        ("/api/chat", {"messages": [{"role": "user", "content": PROMPT}], "options": {"num_predict": 2}}),
        ("/api/generate", {"prompt": PROMPT, "options": {"num_predict": 2}, "stream": False}),
        ("/v1/embeddings", {"input": PROMPT}),
        ("/v1/rerank", {"query": PROMPT, "documents": ["x"]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
async def test_every_protocol_sends_the_tenant(
    server: MemoryServer, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    sent: list[wire.NewRequest] = []
    real = LiveRequests._send  # pyright: ignore[reportPrivateUsage]

    def noted(self: LiveRequests, group: Any, prompts: Any, frames: Any) -> None:
        sent.extend(prompts)
        real(self, group, prompts, frames)

    monkeypatch.setattr(LiveRequests, "_send", noted)
    response = await server.client.post(path, json={"model": "echo", **body}, headers=key(ACME))
    assert response.status_code == 200, response.text
    generating = [one for one in sent if isinstance(one, wire.Generate)]
    assert generating
    assert {(one.options.tenant, one.options.namespace) for one in generating} == {("acme", "@4:acme:")}


async def test_a_tenant_reads_and_deletes_only_its_own_responses(server: MemoryServer) -> None:
    async def ask(sender: str, method: str, path: str, **body: Any) -> int:
        response = await server.client.request(method, path, json=body or None, headers=key(sender))
        return response.status_code

    said = {"model": "echo", "input": PROMPT, "max_output_tokens": 2}
    id: str = (await server.client.post("/v1/responses", json=said, headers=key(ACME))).json()["id"]
    kept = f"/v1/responses/{id}"
    for sender in (RIVAL, ADMIN):
        assert await ask(sender, "GET", kept) == 404
        assert await ask(sender, "GET", f"{kept}/input_items") == 404
        assert await ask(sender, "DELETE", kept) == 404
        assert await ask(sender, "POST", "/v1/responses", previous_response_id=id, **said) == 400
    assert await ask(ACME, "POST", "/v1/responses", previous_response_id=id, **said) == 200
    assert await ask(ACME, "GET", kept) == 200
    assert await ask(ACME, "DELETE", kept) == 200


async def test_a_tenant_ends_and_moves_only_its_own_requests(server: MemoryServer) -> None:
    server.gate.close()

    async def begin() -> asyncio.Task[Any]:
        body = {"rid": "mine", "text": PROMPT, "sampling_params": {"max_new_tokens": 2}}
        task = asyncio.create_task(server.client.post("/generate", json=body, headers=key(ACME)))
        await server.until(lambda: server.service.live.num_live == 1)
        return task

    async def post(path: str, body: dict[str, Any], sender: str) -> int:
        return (await server.client.post(path, json=body, headers=key(sender))).status_code

    running = await begin()
    assert await post("/abort", {"rid": "mine"}, RIVAL) == 404
    assert await post("/v1/requests/mine/priority", {"priority": 1}, RIVAL) == 404
    assert await post("/v1/requests/mine/priority", {"priority": 4}, ACME) == 403
    assert await post("/v1/requests/mine/priority", {"priority": 3}, ACME) == 200
    assert await post("/abort", {"rid": "mine"}, ACME) == 200
    assert (await running).json()["error"]["code"] == "aborted"
    running = await begin()
    assert await post("/abort", {"rid": "mine"}, ADMIN) == 200
    assert (await running).json()["error"]["code"] == "aborted"
    server.gate.open()


async def test_a_priority_above_the_ceiling_is_refused(server: MemoryServer) -> None:
    body = {"model": "echo", "prompt": "x", **GREEDY, "priority": 4}
    for extra in ({}, {"use_beam_search": True}):
        response = await server.client.post("/v1/completions", json=body | extra, headers=key(ACME))
        assert response.status_code == 403
        error = response.json()["error"]
        assert (error["param"], error["code"]) == ("priority", "priority_not_allowed")
        assert "highest priority of this API key is 3, but got 4" in error["message"]
    assert (await server.client.post("/v1/completions", json=body | {"priority": 3}, headers=key(ACME))).is_success
    assert (await server.client.post("/v1/completions", json=body, headers=key(RIVAL))).is_success


async def test_rates(server: MemoryServer) -> None:
    body = {"model": "echo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    first = await server.client.post("/v1/chat/completions", json=body, headers=key(BUSY))
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    used = first.json()["usage"]["total_tokens"]
    second = await server.client.post("/v1/messages", json=body, headers={"x-api-key": BUSY})
    assert second.status_code == 200
    assert 60 - used <= int(second.headers["anthropic-ratelimit-tokens-remaining"]) < 60
    third = await server.client.post("/v1/chat/completions", json=body, headers=key(BUSY))
    error = third.json()["error"]
    assert (third.status_code, error["type"], error["code"]) == (429, "rate_limit_error", "rate_limit_exceeded")
    assert 1 <= int(third.headers["retry-after"]) <= 30
    assert third.headers["x-ratelimit-remaining-requests"] == "0"
    anthropic = await server.client.post("/v1/messages", json=body, headers={"x-api-key": BUSY})
    assert (anthropic.status_code, anthropic.json()["error"]["type"]) == (429, "rate_limit_error")
    for sender in (ACME, RIVAL):  # others are not affected, and have no limits to report
        other = await server.client.post("/v1/chat/completions", json=body, headers=key(sender))
        assert other.status_code == 200
        assert not [name for name in other.headers if "ratelimit" in name]
    assert (await server.client.get("/v1/models", headers=key(BUSY))).status_code == 200, "reading costs nothing"


async def test_requests_at_a_time(server: MemoryServer) -> None:
    server.gate.close()
    body = {"model": "echo", "prompt": "x", **GREEDY}
    running = asyncio.create_task(server.client.post("/v1/completions", json=body, headers=key(BUSY)))
    await server.until(lambda: server.service.live.num_live == 1)
    refused = await server.client.post("/v1/completions", json=body, headers=key(BUSY))
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_concurrent")
    server.gate.open()
    assert (await running).status_code == 200
    unsendable: dict[str, Any] = {"model": "echo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    unsendable["chat_template_kwargs"] = {"x": 2**70}  # no message can hold it
    assert (await server.client.post("/v1/chat/completions", json=unsendable, headers=key(BUSY))).status_code == 400
    quota = server.frontend.gate.caller(Headers(key(BUSY)), is_open=False).quota
    assert quota is not None
    assert quota.num_open == 0


async def test_a_browser_may_ask_without_a_key(model_folder: Path, tokenizer: Tokenizer) -> None:
    page = "https://chat.example.com"
    server = MemoryServer(model_folder, tokenizer, limit=64, gate=KeyGate(KEYS), origins=frozenset({page}))
    asked = {"origin": page, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    preflight = await server.client.options("/v1/completions", headers=asked)
    assert (preflight.status_code, preflight.headers["access-control-allow-headers"]) == (204, "authorization")
    refused = await server.client.post("/v1/completions", json={}, headers={"origin": page})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, page)
    await server.client.aclose()


async def test_a_key_is_limited_to_models(server: MemoryServer) -> None:
    other = "sk-other-0123456789"
    server.frontend.gate.replace([*KEYS, ApiKey(digest=digest_of(other), tenant="other", models=("another",))])
    body = {"model": "echo", "prompt": PROMPT, **GREEDY}
    for path in ("/v1/completions", "/api/generate"):
        refused = await server.client.post(path, json=body, headers={"x-api-key": other})
        assert refused.status_code == 403, refused.text
        assert "may not use the model 'echo'" in refused.text
    listed = await server.client.get("/v1/models", headers={"x-api-key": other})
    assert listed.json()["data"] == []
    assert (await server.client.get("/v1/models/echo", headers={"x-api-key": other})).status_code == 403
    answer = await server.client.post("/v1/completions", json=body, headers={"x-api-key": ACME})
    assert answer.status_code == 200
