"""Adapters over HTTP: loading and unloading by both routes, names in requests, and what keys and folders allow."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from echo_adapters import write_echo_adapter
from memory_server import MemoryServer
from pagewood.engine.text import Tokenizer
from pagewood.server.cli import serve
from pagewood.server.cli.options.engine import engine_config
from pagewood.server.keys.gate import KeyGate
from pagewood.server.keys.key import ApiKey, digest_of
from pagewood.server.requests.adapters import ServedAdapters

pytestmark = pytest.mark.anyio

PROMPT = "The quick brown fox jumps over the lazy dog."
ADMIN, LIMITED = "sk-admin-0123456789", "sk-limited-0123456789"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(3):
        write_echo_adapter(tmp_path / "allowed" / str(number), 1000 + number)
    write_echo_adapter(tmp_path / "secret", 5)
    return tmp_path


@pytest.fixture
async def server(model_folder: Path, tokenizer: Tokenizer, folder: Path) -> AsyncGenerator[MemoryServer]:
    gate = KeyGate(
        [
            ApiKey(digest=digest_of(ADMIN), tenant="ops", admin=True),
            ApiKey(digest=digest_of(LIMITED), tenant="limited", adapters=("one",)),
        ]
    )
    adapters = ServedAdapters(folders=[folder / "allowed"])
    server = MemoryServer(model_folder, tokenizer, limit=64, gate=gate, adapters=adapters)
    server.client.headers["x-api-key"] = ADMIN
    await server.start()
    yield server
    await server.until_idle()
    await server.stop()


async def complete(server: MemoryServer, model: str, *, max_tokens: int = 8, key: str = ADMIN) -> tuple[int, Any]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0}
    response = await server.client.post("/v1/completions", json=body, headers={"x-api-key": key})
    answer = response.json()
    return response.status_code, answer["choices"][0]["text"] if response.is_success else answer["error"]["code"]


async def load(server: MemoryServer, name: str, folder: Path, **fields: Any) -> str:
    """Load by vLLM's route; return the answer, or the code of the error."""
    body = {"lora_name": name, "lora_path": str(folder), **fields}
    response = await server.client.post("/v1/load_lora_adapter", json=body)
    return response.text if response.is_success else response.json()["error"]["code"]


async def test_the_routes_of_vllm(server: MemoryServer, folder: Path) -> None:
    added = "Success: LoRA adapter 'one' added successfully."
    assert await load(server, "one", folder / "allowed" / "0") == added
    base, adapted = (server.expected_text(PROMPT, max_tokens=8, adapter=content) for content in (0, 1000))
    assert base != adapted
    assert await complete(server, "echo") == (200, base)
    assert await complete(server, "one") == await complete(server, "echo:one") == (200, adapted)
    assert await complete(server, "two") == await complete(server, "other:one") == (404, "model_not_found")
    vectors = [
        (await server.client.post("/v1/embeddings", json={"model": model, "input": PROMPT})).json()["data"][0][
            "embedding"
        ]
        for model in ("echo", "one")
    ]
    assert vectors[0] != vectors[1]
    once = {"prompt": "x" * 50, "max_tokens": 1}
    assert (await server.client.post("/v1/completions", json={"model": "one", **once})).status_code == 200
    dropped = [
        (await server.client.post("/retain", json={"model": model, "text": "x" * 50, "seconds": 0})).json()["tokens"]
        for model in ("echo", "one")
    ]
    assert dropped == [0, 48]
    listed = (await server.client.get("/v1/models")).json()["data"]
    assert [(one["id"], one["parent"]) for one in listed] == [("echo", None), ("one", "echo")]
    assert (await server.client.get("/v1/models/one")).json()["parent"] == "echo"
    assert await load(server, "one", folder / "allowed" / "1") == "adapter_exists"
    assert await load(server, "one", folder / "allowed" / "1", load_inplace=True) == added
    other = server.expected_text(PROMPT, max_tokens=8, adapter=1001)
    assert await complete(server, "one") == (200, other), "the cached prefix of the first version was used"
    removed = await server.client.post("/v1/unload_lora_adapter", json={"lora_name": "one"})
    assert removed.text == "Success: LoRA adapter 'one' removed successfully."
    assert await complete(server, "one") == (404, "model_not_found")
    assert (await server.client.post("/v1/unload_lora_adapter", json={"lora_name": "one"})).status_code == 404


async def test_the_routes_of_sglang(server: MemoryServer, folder: Path) -> None:
    place = folder / "allowed" / "2"
    body = {"lora_name": "two", "lora_path": str(place), "pinned": True}
    response = await server.client.post("/load_lora_adapter", json=body)
    expected: dict[str, Any] = {"success": True, "error_message": "", "loaded_adapters": {"two": str(place)}}
    assert response.json() == expected
    again = await server.client.post("/load_lora_adapter", json=body)
    assert again.status_code == 400
    assert (again.json()["success"], again.json()["loaded_adapters"]) == (False, expected["loaded_adapters"])
    assert "lora_name must not be that of a loaded adapter" in again.json()["error_message"]
    expected_text = server.expected_text(PROMPT, max_tokens=8, adapter=1002)
    assert await complete(server, "two") == (200, expected_text)
    sampling = {"max_new_tokens": 8, "temperature": 0}
    native = {"text": PROMPT, "lora_path": "two", "sampling_params": sampling}
    assert (await server.client.post("/generate", json=native)).json()["text"] == expected_text
    assert (await server.client.post("/generate", json={**native, "lora_path": "none"})).status_code == 404
    response = await server.client.post("/unload_lora_adapter", json={"lora_name": "two"})
    assert response.json() == {"success": True, "error_message": "", "loaded_adapters": {}}


async def test_folders_outside_of_the_allowed_ones_are_not_read(server: MemoryServer, folder: Path) -> None:
    (folder / "allowed" / "link").symlink_to(folder / "secret")
    half = folder / "allowed" / "half"
    half.mkdir()
    (half / "adapter_config.json").write_text("{}")
    (half / "adapter_model.safetensors").symlink_to(folder / "secret" / "adapter_model.safetensors")
    outside = [folder / "secret", folder / "allowed" / ".." / "secret", folder / "allowed" / "link", half]
    for place in (*outside, folder / "allowed" / "none", Path("/"), Path("x" * 4000), Path("a\0b")):
        assert await load(server, "evil", place) == "adapter_missing", place
    server.service.adapters.folders = ()
    assert await load(server, "evil", folder / "allowed" / "0") == "adapters_not_allowed"
    for name in ("echo", "a:b", "a,b", "é"):
        server.service.adapters.folders = (folder / "allowed",)
        assert await load(server, name, folder / "allowed" / "0") == "invalid_value", name


async def test_a_broken_folder_is_an_error_and_the_old_adapter_stays(server: MemoryServer, folder: Path) -> None:
    await load(server, "one", folder / "allowed" / "0")
    (folder / "allowed" / "0" / "adapter_model.safetensors").write_text("broken")
    assert await load(server, "one", folder / "allowed" / "0", load_inplace=True) == "adapter_invalid"
    assert await complete(server, "one") == (200, server.expected_text(PROMPT, max_tokens=8, adapter=1000))


async def test_a_key_may_be_limited_to_adapters(server: MemoryServer, folder: Path) -> None:
    for number, name in enumerate(("one", "two")):
        await load(server, name, folder / "allowed" / str(number))
    assert (await complete(server, "one", key=LIMITED))[0] == 200
    assert (await complete(server, "echo", key=LIMITED))[0] == 200
    assert await complete(server, "two", key=LIMITED) == (403, "adapter_not_allowed")
    response = await server.client.post(
        "/v1/unload_lora_adapter", json={"lora_name": "one"}, headers={"x-api-key": LIMITED}
    )
    assert response.status_code == 403


async def test_a_running_request_ends_with_its_adapter_and_metrics_name_it(server: MemoryServer, folder: Path) -> None:
    await load(server, "one", folder / "allowed" / "0")
    server.gate.close()
    asked = asyncio.create_task(complete(server, "one", max_tokens=300))
    await server.until(lambda: server.has_command_at_gate or server.gate.is_held)
    replacing = asyncio.create_task(load(server, "one", folder / "allowed" / "1", load_inplace=True))
    await server.until(lambda: server.has_command_at_gate)
    server.gate.allow(3)
    await replacing

    allowed_s = 0.0

    def is_used() -> bool:
        nonlocal allowed_s
        if time.monotonic() > allowed_s + 0.05:  # pulses are sent between steps, of which the request has 300
            server.gate.allow(1)
            allowed_s = time.monotonic()
        found = server.service.status.measurement
        return found is not None and found.adapters is not None and found.adapters.running == ("one",)

    await server.until(is_used)
    text = (await server.client.get("/metrics")).text
    [line] = [line for line in text.splitlines() if line.startswith("vllm:lora_requests_info{")]
    assert 'running_lora_adapters="one"' in line
    assert 'max_lora="2"' in line
    found = {name.partition("{")[0]: value for name, _, value in (one.rpartition(" ") for one in text.splitlines())}
    assert float(found["sglang:lora_pool_slots_used"]) == float(found["pagewood_adapter_slots_used"]) == 1
    assert float(found["sglang:lora_pool_slots_total"]) == float(found["pagewood_adapter_slots"]) == 2
    assert float(found["sglang:lora_pool_utilization"]) == 0.5
    [line] = [line for line in text.splitlines() if line.startswith("pagewood_adapters{")]
    assert 'adapter="one"' in line
    assert 'state="running"' in line
    server.gate.open()
    status, text = await asked
    assert status == 200
    assert text.startswith(server.expected_text(PROMPT, max_tokens=8, adapter=1000))
    assert await complete(server, "one") == (200, server.expected_text(PROMPT, max_tokens=8, adapter=1001))


def test_options() -> None:
    top = argparse.ArgumentParser()
    serve.add_parser(top.add_subparsers())
    options = top.parse_args(["serve", "--adapter", "a=/x", "--adapter", "b=y=z", "--max-adapters", "3"])
    assert engine_config(options, model=None).adapters == (("a", "/x"), ("b", "y=z"))
    for wrong in ("a:b=/x", "a", "=x", "a="):
        with pytest.raises(SystemExit):
            top.parse_args(["serve", "--adapter", wrong])
    with pytest.raises(ValueError, match="max_adapters must be >= 1 with adapters, got 0"):
        engine_config(top.parse_args(["serve", "--adapter", "a=/x"]), model=None)
