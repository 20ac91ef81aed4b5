"""`/v1/files` and `/v1/batches`: their life with OpenAI's client, turns, restarts, ends, tenants and limits."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from openai.types import Batch

from memory_server import ADMIN_KEY, MemoryServer
from pagewood.engine.text import Tokenizer
from pagewood.server.config import LEAST_PRIORITY
from pagewood.server.jobs import worker
from pagewood.server.jobs.store import JobStore
from pagewood.server.keys.gate import KeyGate
from pagewood.server.keys.key import ApiKey, digest_of
from pagewood.server.protocols.batches import endpoints
from pagewood.server.requests import resting_jobs

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
WINDOW: Any = {"completion_window": "24h"}
WHOLE: dict[str, Any] = {"ignore_eos": True}
ENDED = ("completed", "failed", "expired", "cancelled")


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> str:
    question: dict[str, Any] = {"prompt": custom_id} if url == "/v1/completions" else {}
    body = {"model": "echo", "max_tokens": 4, **question, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}) + "\n"


class Clock:
    """Unix time that a test can move on."""

    def __init__(self) -> None:
        self.passed_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.passed_s


@asynccontextmanager
async def serving(
    folder: Path, store: Path, *, clock: Callable[[], float] = time.time, max_bytes: int = 10**9, **settings: Any
) -> AsyncGenerator[tuple[MemoryServer, AsyncOpenAI]]:
    jobs = JobStore(store, max_bytes=max_bytes, clock=clock)
    async with MemoryServer(
        folder, Tokenizer.from_folder(folder), limit=64, store=jobs, max_retries=3, **settings
    ) as server:
        async with client_of(server) as client:
            yield server, client
        jobs.close()


def client_of(server: MemoryServer, key: str = "none") -> AsyncOpenAI:
    inner: Any = httpx.AsyncClient(transport=httpx.ASGITransport(server.app), base_url="http://memory")
    return AsyncOpenAI(base_url="http://memory/v1", api_key=key, http_client=inner, max_retries=0)


async def create(client: AsyncOpenAI, text: str, endpoint: Any = "/v1/completions", **more: Any) -> Batch:
    file = await client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, **WINDOW, **more)


async def until(client: AsyncOpenAI, batch: Batch, *states: str) -> Batch:
    """Wait until a batch has one of these states."""
    while (found := await client.batches.retrieve(batch.id)).status not in states:
        await asyncio.sleep(0.001)
    return found


async def results(client: AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    if file_id is None:
        return {}
    text = (await client.files.content(file_id)).text
    return {one["custom_id"]: one for one in map(json.loads, text.splitlines())}


async def test_the_life_of_a_batch(model_folder: Path, tmp_path: Path) -> None:
    async with serving(model_folder, tmp_path / "store") as (server, client):
        text = line("a") + line("b") + "\n" + line("wrong", temperature=-1) + line("long", prompt="x" * 999)
        batch = await create(client, text, metadata={"owner": "me"})
        assert (batch.status, batch.metadata, batch.completion_window) == ("validating", {"owner": "me"}, "24h")
        assert batch.expires_at == batch.created_at + 86400
        done = await until(client, batch, *ENDED)
        assert done.status == "completed"
        assert done.model == "echo"
        assert done.request_counts is not None
        assert done.request_counts.to_dict() == {"total": 4, "completed": 2, "failed": 2}
        times = (done.created_at, done.in_progress_at, done.finalizing_at, done.completed_at)
        assert all(times)
        assert sorted(times, key=lambda one: one or 0) == list(times)
        good, bad = await results(client, done.output_file_id), await results(client, done.error_file_id)
        for name in "ab":
            body = good[name]["response"]["body"]
            tokens = server.expected_tokens(server.tokenizer.encode(name).tolist(), max_tokens=4)
            assert body["usage"]["completion_tokens"] == len(tokens) == 4
            again = await client.completions.create(model="echo", prompt=name, max_tokens=4)
            assert body["choices"][0]["text"] == again.choices[0].text
            assert good[name]["response"]["request_id"]
            assert good[name]["error"] is None
        assert good.keys() == {"a", "b"}
        assert {name: one["response"]["status_code"] for name, one in bad.items()} == {"wrong": 400, "long": 400}
        assert done.usage is not None
        assert (done.usage.output_tokens, done.usage.total_tokens) == (8, 8 + done.usage.input_tokens)
        assert not (tmp_path / "store" / "batches" / batch.id / "results").exists()
        shown = (await server.admin.get("/metrics")).text
        assert 'pagewood_batches{model_name="echo",state="completed"} 1.0' in shown
        assert 'pagewood_batch_lines_total{model_name="echo",outcome="failed"} 2.0' in shown
        files = {one.id: one for one in (await client.files.list()).data}
        assert {one.purpose for one in files.values()} == {"batch", "batch_output"}
        assert [one.id async for one in client.files.list(limit=1)] == list(files)
        assert [one.id async for one in client.files.list(order="asc", purpose="batch")] == [done.input_file_id]
        assert (await client.files.retrieve(done.input_file_id)).filename == "in.jsonl"
        assert (await client.files.content(done.input_file_id)).text == text
        second = await until(client, await create(client, line("c")), *ENDED)
        assert [one.id async for one in client.batches.list(limit=1)] == [second.id, done.id]
        assert (await client.files.delete(done.input_file_id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(done.input_file_id)
        with pytest.raises(openai.BadRequestError, match="Cannot cancel a batch with status 'completed'"):
            await client.batches.cancel(done.id)


async def test_every_endpoint(model_folder: Path, tmp_path: Path) -> None:
    asked: dict[str, dict[str, Any]] = {
        CHAT: {"messages": [{"role": "user", "content": "hi"}]},
        "/v1/responses": {"input": "hi", "max_tokens": None, "max_output_tokens": 4},
        "/v1/embeddings": {"input": ["hi", "you"], "max_tokens": None},
    }
    async with serving(model_folder, tmp_path / "store") as (_, client):
        for url, body in asked.items():
            given = {name: value for name, value in body.items() if value is not None}
            text = json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": {"model": "echo", **given}})
            done = await until(client, await create(client, text, url), *ENDED)
            found = await results(client, done.output_file_id)
            assert found["a"]["response"]["status_code"] == 200, (url, await results(client, done.error_file_id))


async def test_all_lines_are_checked_before_one_is_sent(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "MAX_LINES", 3)
    wrong = {
        line("a") + "{\n" + line("b"): [("invalid_request_line", 2)],
        line("a") + line("a"): [("duplicate_custom_id", 2)],
        line("a", CHAT) + line("b", stream=True): [("mismatched_endpoint", 1), ("invalid_value", 2)],
        "\n": [("empty_file", 0)],
        "".join(map(line, "abcd")): [("too_many_requests", 4)],
    }
    async with serving(model_folder, tmp_path / "store") as (server, client):
        for text, expected in wrong.items():
            done = await until(client, await create(client, text), *ENDED)
            assert done.status == "failed"
            assert done.errors is not None
            assert [(one.code, one.line) for one in done.errors.data or ()] == expected
            assert (done.failed_at is None, done.in_progress_at, done.output_file_id) == (False, None, None)
        assert not server.metrics.requests.accounts


async def test_others_come_first(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resting_jobs, "REST_S", 3600.0)
    async with serving(model_folder, tmp_path / "store", batch_lines=3) as (server, client):
        server.gate.close()
        batch = await create(client, "".join(line(name, max_tokens=30, priority=9, **WHOLE) for name in "abcde"))
        await server.until(lambda: server.service.live.num_live == 3 and server.gate.is_held)
        other = asyncio.create_task(
            client.completions.create(model="echo", prompt="other", max_tokens=90, extra_body=WHOLE)
        )
        await server.until(lambda: server.service.live.num_live == 4 and server.num_queued_commands >= 4)
        server.gate.open()
        answer = await other
        counts = (await client.batches.retrieve(batch.id)).request_counts
        assert counts is not None
        assert counts.completed == 0  # those that ran would have ended before it
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 90
        await server.until(lambda: server.service.status.counters["num_held"] == 3)
        monkeypatch.setattr(resting_jobs, "REST_S", 0.0)
        await client.completions.create(model="echo", prompt="another", max_tokens=1)
        done = await until(client, batch, *ENDED)
        found = await results(client, done.output_file_id)
        assert {one["response"]["body"]["usage"]["completion_tokens"] for one in found.values()} == {30}
        assert len(found) == 5
        priorities = {account.priority for account in server.metrics.requests.accounts}
        assert priorities == {"0", str(LEAST_PRIORITY)}


async def test_lines_that_may_go_on_beside_others(model_folder: Path, tmp_path: Path) -> None:
    async with serving(model_folder, tmp_path / "store", batch_lines=3, batch_lines_beside=1) as (server, client):
        server.gate.close()
        asked = {"text": "other", "rid": "other", "sampling_params": {"max_new_tokens": 9}}
        other = asyncio.create_task(server.client.post("/generate", json=asked))
        await server.until(lambda: server.gate.is_held)
        await server.admin.post("/pause", json={"rid": "other", "mode": "in_place"})
        await server.until(lambda: server.has_command_at_gate)
        server.gate.open()
        batch = await create(client, "".join(line(name, max_tokens=30, **WHOLE) for name in "abcde"))
        assert (await until(client, batch, *ENDED)).status == "completed"
        assert not other.done()
        await server.admin.post("/resume", json={"rid": "other"})
        assert (await other).status_code == 200


async def test_a_batch_that_is_cancelled_keeps_what_was_answered(model_folder: Path, tmp_path: Path) -> None:
    async with serving(model_folder, tmp_path / "store", batch_lines=1) as (server, client):
        server.gate.close()
        batch = await create(client, line("a") + line("b", max_tokens=200) + line("c"))
        await server.until(lambda: server.service.live.num_live == 1)
        server.gate.allow(12)
        for _ in range(60_000):
            counts = (await client.batches.retrieve(batch.id)).request_counts
            if counts is not None and counts.completed == 1 and server.gate.is_held:
                break
            await asyncio.sleep(0.001)
        cancelled = await client.batches.cancel(batch.id)
        assert cancelled.status == "cancelling"
        done = await until(client, batch, *ENDED)
        assert (done.status, done.cancelled_at is None, done.completed_at) == ("cancelled", False, None)
        assert (await results(client, done.output_file_id)).keys() == {"a"}
        assert done.error_file_id is None
        server.gate.open()
        await server.until_idle()
        server.gate.close()
        waiting = [await create(client, line("a")) for _ in range(2)]  # one at a time of each tenant
        await client.batches.cancel(waiting[1].id)
        assert (await until(client, waiting[1], *ENDED)).status == "cancelled"


async def test_a_batch_expires(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "WINDOW_S", 1)
    async with serving(model_folder, tmp_path / "store") as (server, client):
        server.gate.close()
        batch = await create(
            client, line("a") + line("b"), output_expires_after={"anchor": "created_at", "seconds": 3600}
        )
        done = await until(client, batch, *ENDED)
        assert (done.status, done.expired_at is None, done.output_file_id) == ("expired", False, None)
        errors = await results(client, done.error_file_id)
        assert {name: one["error"]["code"] for name, one in errors.items()} == dict.fromkeys("ab", "batch_expired")
        assert done.error_file_id is not None
        assert ((await client.files.retrieve(done.error_file_id)).expires_at or 0) >= done.created_at + 3600


async def test_files_expire(model_folder: Path, tmp_path: Path) -> None:
    clock = Clock()
    async with serving(model_folder, tmp_path / "store", clock=clock) as (_, client):
        kept: Any = {"anchor": "created_at", "seconds": 3600}
        file = await client.files.create(file=b"x", purpose="batch", expires_after=kept)
        assert file.expires_at == file.created_at + 3600
        clock.passed_s = 3601
        assert (await client.files.list()).data == []
        assert not list((tmp_path / "store" / "files").iterdir())


async def test_a_batch_goes_on_after_a_restart(model_folder: Path, tmp_path: Path) -> None:
    names = [f"n{number}" for number in range(12)]
    async with serving(model_folder, tmp_path / "store", batch_lines=2) as (server, client):
        server.gate.close()
        batch = await create(client, "".join(map(line, names)))
        await server.until(lambda: server.service.live.num_live == 2)
        server.gate.allow(18)
        file = tmp_path / "store" / "batches" / batch.id / "results"
        await server.until(lambda: server.gate.is_held)
        await server.until(lambda: file.exists() and file.read_bytes().count(b"\n") >= 2)
        with pytest.raises(ValueError, match="batch_store must be a folder that no other server uses"):
            JobStore(tmp_path / "store", max_bytes=1)
        await client.files.delete(batch.input_file_id)
    before = dict.fromkeys(file.read_text().splitlines())
    assert 2 <= len(before) < 12
    file.write_text("".join(f"{one}\n" for one in before) + '{"id": "cut')
    async with serving(model_folder, tmp_path / "store", batch_lines=2) as (server, client):
        done = await until(client, batch, *ENDED)
        assert done.status == "completed"
        assert done.output_file_id is not None
        text = (await client.files.content(done.output_file_id)).text.splitlines()
        assert before.keys() <= {*text}
        assert sorted(json.loads(one)["custom_id"] for one in text) == sorted(names)
        num_sent = sum(account.num_ended.total() for account in server.metrics.requests.accounts)
        assert num_sent == 12 - len(before)


async def test_lines_move_to_another_replica(model_folder: Path, tmp_path: Path) -> None:
    async with serving(model_folder, tmp_path / "store", num_replicas=2) as (server, client):
        for replica in server.replicas:
            replica.gate.close()
        batch = await create(client, "".join(line(name, max_tokens=30, **WHOLE) for name in "abcdef"))
        await server.until(lambda: server.service.live.num_live == 4)
        await server.until(lambda: any(replica.gate.is_held for replica in server.replicas))
        server.kill(next(number for number, replica in enumerate(server.replicas) if replica.gate.is_held))
        for replica in server.replicas:
            replica.gate.open()
        done = await until(client, batch, *ENDED)
        assert done.status == "completed"
        assert (await results(client, done.output_file_id)).keys() == {*"abcdef"}
        assert server.metrics.incidents.num_retried > 0


async def test_tenants_see_their_own(model_folder: Path, tmp_path: Path) -> None:
    keys = {name: f"key-of-{name}-{'x' * 16}" for name in ("one", "two")}
    made = [ApiKey(digest=digest_of(key), tenant=name, name=name, max_concurrent=1) for name, key in keys.items()]
    gate = KeyGate(made, run_key=digest_of(ADMIN_KEY))
    async with serving(model_folder, tmp_path / "store", gate=gate) as (server, _):
        one, two = client_of(server, keys["one"]), client_of(server, keys["two"])
        server.gate.close()
        first, second = await create(one, line("a") + line("b")), await create(two, line("a"))
        await server.until(lambda: server.service.live.num_live == 3)  # both run, beyond the limit of their keys
        for wrong in (two.files.retrieve, two.files.content, two.files.delete):
            with pytest.raises(openai.NotFoundError):
                await wrong(first.input_file_id)
        for hidden in (two.batches.retrieve, two.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                await hidden(first.id)
        with pytest.raises(openai.BadRequestError, match="input_file_id"):
            await two.batches.create(input_file_id=first.input_file_id, endpoint="/v1/completions", **WINDOW)
        assert [found.id async for found in two.batches.list()] == [second.id]
        assert [found.id async for found in two.files.list()] == [second.input_file_id]
        server.gate.open()
        for client, batch in ((one, first), (two, second)):
            assert (await until(client, batch, *ENDED)).status == "completed"
        assert {account.tenant for account in server.metrics.requests.accounts} == {"one", "two"}


async def test_a_batch_whose_key_was_removed_fails(model_folder: Path, tmp_path: Path) -> None:
    keys = {name: f"key-of-{name}-{'x' * 16}" for name in ("one", "two")}
    made = {name: ApiKey(digest=digest_of(key), tenant="t", name=name) for name, key in keys.items()}
    async with serving(model_folder, tmp_path / "store", gate=KeyGate([*made.values()])) as (server, _):
        server.gate.close()
        batch = await create(client_of(server, keys["one"]), line("a"))
        await server.until(lambda: server.service.live.num_live == 1)
    async with serving(model_folder, tmp_path / "store", gate=KeyGate([made["two"]])) as (server, _):
        done = await until(client_of(server, keys["two"]), batch, *ENDED)  # of the same tenant
        assert done.status == "failed"
        assert done.errors is not None
        assert [one.code for one in done.errors.data or ()] == ["invalid_api_key"]


async def test_limits(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "MAX_FILE_BYTES", 100)
    async with serving(model_folder, tmp_path / "store", max_bytes=160) as (server, client):
        for size in (101, 10**6):
            with pytest.raises(openai.APIStatusError) as found:
                await client.files.create(file=b"x" * size, purpose="batch")
            assert found.value.status_code == 413
        with pytest.raises(openai.BadRequestError, match="purpose"):
            await client.files.create(file=b"x", purpose="assistants")
        assert not list((tmp_path / "store" / "uploads").iterdir())
        json_body = await server.client.post("/v1/files", json={"purpose": "batch"})
        assert json_body.status_code == 415
        empty = await server.client.post("/v1/files", files={"purpose": (None, "batch")})
        assert (empty.status_code, empty.json()["error"]["param"]) == (400, "file")
        for size in (100, 60):
            await client.files.create(file=b"x" * size, purpose="batch")
        with pytest.raises(openai.APIStatusError) as full:
            await client.files.create(file=b"x", purpose="batch")
        assert full.value.status_code == 507


async def test_the_store_is_off_by_default(server: MemoryServer) -> None:
    for method, path in (
        ("GET", "/v1/files"),
        ("GET", "/v1/batches/x"),
        ("POST", "/v1/batches"),
        ("POST", "/v1/files"),
    ):
        answer = await server.client.request(method, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_available")
