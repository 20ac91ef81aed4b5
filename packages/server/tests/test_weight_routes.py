"""Weights over HTTP: updates, versions and pauses by the routes of SGLang and vLLM, and what aborted requests get."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from echo_weights import write_echo_weights
from memory_server import MemoryServer
from pagewood.engine.weight_commands import Sleep, WakeUp, sleep_at
from pagewood.server.messages.sleep_state import SleepState

pytestmark = pytest.mark.anyio

TEXT = "b" * 64
GREEDY = {"max_new_tokens": 20, "temperature": 0}
RUNNING = {"text": TEXT, "rid": "mine", "sampling_params": GREEDY, "return_logprob": True}


@pytest.fixture
def server(server: MemoryServer, tmp_path: Path) -> MemoryServer:
    """A server that may read updates from a folder."""
    server.service.weights.folders = [tmp_path / "allowed"]
    for content in (700, 800):
        write_echo_weights(tmp_path / "allowed" / str(content), str(content))
    write_echo_weights(tmp_path / "allowed" / "broken", "nonsense")
    write_echo_weights(tmp_path / "secret", "5")
    return server


def expected(server: MemoryServer, weights: int, *, max_tokens: int = 20) -> list[int]:
    tokens = server.tokenizer.encode(TEXT).tolist()
    return server.expected_tokens(tokens, max_tokens=max_tokens, weights=weights)


async def send(server: MemoryServer, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    """Send a request to an admin route."""
    response = await (server.admin.get(path) if body is None else server.admin.post(path, json=body))
    return response.status_code, response.json()


async def generated(server: MemoryServer) -> Any:
    response = await server.client.post("/generate", json=RUNNING)
    assert response.status_code == 200, response.text
    return response.json()


async def test_updates_by_the_routes_of_sglang(server: MemoryServer, tmp_path: Path) -> None:
    assert await send(server, "/get_weight_version") == (200, {"weight_version": "default"})
    before = await generated(server)
    assert before["output_ids"] == expected(server, 0)
    assert before["meta_info"]["weight_versions"] == [["default", 0, 20]]
    body = {"model_path": str(tmp_path / "allowed" / "700"), "weight_version": "50", "load_format": "auto"}
    done = {"success": True, "message": "", "weight_version": "50"}
    assert await send(server, "/update_weights_from_disk", body) == (200, done)
    after = await generated(server)
    assert after["output_ids"] == expected(server, 700)
    assert after["meta_info"]["weight_version"] == "50"
    assert after["meta_info"]["weight_versions"] == [["50", 0, 20]]
    assert after["meta_info"]["cached_tokens"] == 0
    assert (await generated(server))["meta_info"]["cached_tokens"] > 0
    files = {"files": [str(tmp_path / "allowed" / "800" / "model.safetensors")]}
    assert await send(server, "/update_weights_from_files", files) == (200, {**done, "weight_version": "2"})
    assert (await generated(server))["output_ids"] == expected(server, 800)
    assert await send(server, "/update_weight_version", {"new_version": "b"}) == (200, {**done, "weight_version": "b"})
    assert await send(server, "/weight_info") == (200, {"weight_version": "b"})
    assert (await generated(server))["meta_info"]["weight_version"] == "b"
    for path, body in (
        ("/v1/completions", {"prompt": TEXT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "b"}]}),
    ):
        answer = (await server.client.post(path, json={"model": server.service.model_name, **body})).json()
        assert answer["metadata"] == {"weight_version": "b"}
    await server.until(lambda: server.service.status.weight_version == "b")
    metrics = (await server.client.get("/metrics")).text
    assert 'weights_info{version="b"' in metrics or 'version="b"} 1' in metrics


async def test_what_cannot_be_read_changes_nothing(server: MemoryServer, tmp_path: Path) -> None:
    for place, status, code in (
        (tmp_path / "secret", 404, "weights_missing"),
        (tmp_path / "allowed" / "none", 404, "weights_missing"),
        (tmp_path / "allowed" / "broken", 400, "weights_invalid"),
    ):
        found, answer = await send(server, "/update_weights_from_disk", {"model_path": str(place)})
        assert (found, answer["success"], answer["error"]["code"]) == (status, False, code)
        assert answer["weight_version"] == "default"
    assert (await generated(server))["output_ids"] == expected(server, 0)
    body = {"model_path": str(tmp_path / "allowed" / "700"), "flush_cache": False, "old_kv": "drop"}
    assert (await send(server, "/update_weights_from_disk", body))[1]["error"]["param"] == "old_kv"
    pickled = {"serialized_named_tensors": ["x"], "files": ["y"]}
    assert (await send(server, "/update_weights_from_files", pickled))[0] == 400
    server.service.weights.folders = []
    body = {"model_path": str(tmp_path / "allowed" / "700")}
    assert (await send(server, "/update_weights_from_disk", body))[1]["error"]["code"] == "updates_not_allowed"


async def test_an_answer_with_tokens_of_two_versions(server: MemoryServer, tmp_path: Path) -> None:
    """Paused, updated and resumed, as trainers do; nothing ends."""
    server.gate.allow(8)
    running = asyncio.create_task(generated(server))
    await server.until(lambda: server.gate.is_held)
    pausing = asyncio.create_task(send(server, "/pause_generation", {}))
    await server.until(lambda: server.has_command_at_gate)
    server.gate.open()
    assert (await pausing)[1]["success"]
    assert await send(server, "/is_paused") == (200, {"is_paused": True})
    body = {"model_path": str(tmp_path / "allowed" / "700"), "weight_version": "7"}
    assert (await send(server, "/update_weights_from_disk", body))[0] == 200
    assert not running.done()
    assert (await send(server, "/continue_generation", {}))[1]["success"]
    answer = await running
    (first, zero, border), (second, again, end) = answer["meta_info"]["weight_versions"]
    assert (first, zero, second, again, end) == ("default", 0, "7", border, 20)
    assert answer["output_ids"][:border] == expected(server, 0)[:border]
    assert 0 < border < 20


async def test_an_aborted_request_gives_what_there_is_and_can_be_continued(server: MemoryServer) -> None:
    server.gate.allow(8)
    running = asyncio.create_task(generated(server))
    await server.until(lambda: server.gate.is_held)
    pausing = asyncio.create_task(send(server, "/pause_generation", {"mode": "abort"}))
    await server.until(lambda: server.has_command_at_gate)
    server.gate.open()
    assert (await pausing)[0] == 200
    part = await running
    assert part["meta_info"]["finish_reason"] == {"type": "abort"}
    ids = part["output_ids"]
    assert 0 < len(ids) < 20
    assert ids == expected(server, 0)[: len(ids)]
    assert [token for _, token, _ in part["meta_info"]["output_token_logprobs"]] == ids
    assert (await send(server, "/continue_generation", {}))[0] == 200
    rest = {
        "input_ids": [*server.tokenizer.encode(TEXT).tolist(), *ids],
        "sampling_params": {**GREEDY, "max_new_tokens": 20 - len(ids)},
    }
    response = await server.client.post("/generate", json=rest)
    assert [*ids, *response.json()["output_ids"]] == expected(server, 0)


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_pauses_in_the_words_of_vllm(server: MemoryServer, mode: str) -> None:
    server.gate.allow(8)
    running = asyncio.create_task(generated(server))
    await server.until(lambda: server.gate.is_held)
    pausing = asyncio.create_task(send(server, f"/pause?mode={mode}&clear_cache=true", {}))
    await server.until(lambda: server.has_command_at_gate)
    server.gate.open()
    later = None
    if mode == "wait":
        later = asyncio.create_task(generated(server))
    assert await pausing == (200, {"paused": True, "status": "paused"})
    assert await send(server, "/is_paused") == (200, {"is_paused": True})
    if mode == "keep":
        assert not running.done()
    else:
        answer = await running
        assert answer["meta_info"]["finish_reason"]["type"] == ("abort" if mode == "abort" else "length")
    assert later is None or not later.done()
    assert (await send(server, "/resume", {}))[1]["paused"] is False
    answers = [await one for one in (running, later) if one is not None]
    for answer in answers[mode == "abort" :]:
        assert answer["output_ids"] == expected(server, 0)
    assert (await send(server, "/pause?mode=drop", {}))[1]["error"]["param"] == "mode"


async def test_updates_from_a_trainer(server: MemoryServer) -> None:
    """In the words of SGLang at once, and in those of vLLM in parts; tensors are counted by the model of this test."""
    group = {"master_address": "127.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 2}
    status, answer = await send(server, "/init_weights_update_group", group)
    assert (status, answer["success"], "backend must be gloo" in answer["message"]) == (400, False, True)
    assert (await send(server, "/init_weights_update_group", {**group, "rank_offset": 2}))[0] == 400
    assert (await send(server, "/init_weights_update_group", {**group, "backend": "gloo"}))[1]["success"]
    tensors = {"names": ["a", "b"], "dtypes": ["float32", "bfloat16"], "shapes": [[2, 3], []]}
    done = (200, {"success": True, "message": "", "weight_version": "x"})
    assert await send(server, "/update_weights_from_distributed", {**tensors, "weight_version": "x"}) == done
    assert (await generated(server))["output_ids"] == expected(server, 2)
    wrong = {**tensors, "shapes": [[2, 3]]}
    assert (await send(server, "/update_weights_from_distributed", wrong))[1]["error"]["param"] == "names"
    assert (await send(server, "/destroy_weights_update_group", {}))[1]["success"]
    packed = {**group, "packed": True, "packed_buffer_size_bytes": 64, "packed_num_buffers": 2}
    status, answer = await send(server, "/init_weight_transfer_engine", {"init_info": packed})
    assert (status, answer["success"], "backend must be gloo" in answer["message"]) == (400, False, True)
    for wrong in (
        {"nccl_unique_id_b64": "A" * 172},  # beside a store
        {"master_address": None, "nccl_unique_id_b64": "A" * 172},
        {"master_address": None, "master_port": None, "nccl_unique_id_b64": "AAAA"},
        {"master_address": None, "master_port": None},
    ):
        status, answer = await send(server, "/init_weight_transfer_engine", {"init_info": {**packed, **wrong}})
        assert (status, answer["error"]["param"]) == (400, "init_info")
    by_id = {**packed, "master_address": None, "master_port": None, "nccl_unique_id_b64": "A" * 170 + "A="}
    assert (await send(server, "/init_weight_transfer_engine", {"init_info": by_id}))[1]["message"].startswith(
        "backend"
    )
    own = {"init_info": {**packed, "backend": "gloo"}}
    assert (await send(server, "/init_weight_transfer_engine", own))[1]["success"]
    assert await send(server, "/start_weight_update", {}) == done
    info = {"update_info": {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]]}}
    for _ in range(3):
        assert await send(server, "/update_weights", info) == done
    different = {"update_info": [info["update_info"], {}]}
    assert (await send(server, "/update_weights", different))[1]["error"]["param"] == "update_info"
    assert (await send(server, "/start_draft_weight_update", {}))[1]["error"]["code"] == "weights_fixed"
    assert await send(server, "/update_weights", {"update_info": {}}) == done  # as before; this model counts none of it
    assert (await generated(server))["output_ids"] == expected(server, 2)
    assert (await send(server, "/finish_weight_update", {"weight_version": "y"}))[1]["weight_version"] == "y"
    assert (await generated(server))["output_ids"] == expected(server, 5)
    assert (await send(server, "/shutdown_weight_transfer_engine", {}))[1]["success"]


async def test_sleep_by_the_routes_of_vllm(server: MemoryServer, tmp_path: Path) -> None:
    """A running request and one that comes meanwhile wait; prefixes are forgotten, and dropped weights awaited."""
    assert await send(server, "/is_sleeping") == (200, {"is_sleeping": False})
    server.gate.allow(8)
    running = asyncio.create_task(generated(server))
    await server.until(lambda: server.gate.is_held)
    sleeping = asyncio.create_task(send(server, "/sleep?level=1", {}))
    await server.until(lambda: server.has_command_at_gate)
    server.gate.open()
    everything = ["weights", "kv_cache", "scheduling"]
    assert await sleeping == (200, {"status": "sleeping", "tags": everything})
    assert await send(server, "/is_sleeping") == (200, {"is_sleeping": True})
    later = asyncio.create_task(server.client.post("/generate", json={**RUNNING, "rid": "later"}))
    assert (await send(server, "/resume", {}))[0] == 200  # of a pause, which there is not
    assert await send(server, "/wake_up?tags=weights", {}) == (200, {"status": "sleeping", "tags": everything[1:]})
    assert not running.done()
    assert not later.done()
    assert await send(server, "/wake_up?tags=kv_cache", {}) == (200, {"status": "awake", "tags": []})
    assert (await running)["output_ids"] == (await later).json()["output_ids"] == expected(server, 0)

    assert (await send(server, "/sleep?level=2&mode=wait", {}))[1]["tags"] == everything
    assert (await send(server, "/wake_up", {}))[1] == {"status": "sleeping", "tags": ["weights"]}
    waiting = asyncio.create_task(generated(server))
    body = {"model_path": str(tmp_path / "allowed" / "700")}
    assert (await send(server, "/update_weights_from_disk", body))[0] == 200
    assert await send(server, "/is_sleeping") == (200, {"is_sleeping": False})
    answer = await waiting
    assert answer["output_ids"] == expected(server, 700)
    assert answer["meta_info"]["cached_tokens"] == 0
    for query, param in (("level=3", "level"), ("mode=no", "mode"), ("tags=kv", "tags")):
        status, answer = await send(server, f"/sleep?{query}", {})
        assert (status, answer["error"]["param"]) == (400, param)


async def test_sleep_by_the_routes_of_sglang(server: MemoryServer) -> None:
    """In parts, beside a pause; and with an engine process that is replaced meanwhile."""
    before = await generated(server)
    assert (await send(server, "/pause_generation", {}))[1]["success"]
    assert (await send(server, "/release_memory_occupation", {"tags": ["kv_cache"]}))[1]["success"]
    assert (await send(server, "/release_memory_occupation", {"tags": ["weights", "cuda_graph"]}))[1]["success"]
    assert server.service.status.sleep.tags == ("weights", "kv_cache")
    assert (await send(server, "/resume_memory_occupation", {"tags": ["weights"]}))[1]["success"]
    running = asyncio.create_task(generated(server))
    assert (await send(server, "/resume_memory_occupation"))[0] == 405
    assert (await send(server, "/resume_memory_occupation", {}))[1]["success"]
    assert await send(server, "/is_sleeping") == (200, {"is_sleeping": False})
    assert not running.done()
    assert (await send(server, "/continue_generation", {}))[1]["success"]
    after = await running
    assert after["output_ids"] == before["output_ids"]
    assert after["meta_info"]["cached_tokens"] == 0
    assert (await send(server, "/release_memory_occupation", {"tags": ["all"]}))[0] == 400


@pytest.mark.parametrize("drops", [False, True])
def test_a_new_engine_process_sleeps_as_the_one_before_it(drops: bool) -> None:
    """What the server notes of its commands becomes the command that the next process begins with."""
    sleep = sleep_at(2 if drops else 1, "a")
    state = SleepState().slept(sleep)
    assert state.command("b") == msgspec.structs.replace(sleep, request_id="b")
    woken = state.woken(WakeUp(request_id="c", tags=("kv_cache",)))
    if drops:
        assert woken.command("d") == Sleep(request_id="d", tags=("weights",), drops_weights=True)
        assert woken.updated().command("e") is None
    else:
        assert woken.command("d") == Sleep(request_id="d", tags=("weights", "scheduling"))
        assert woken.woken(WakeUp(request_id="e", tags=("weights",))).command("f") is None


async def test_checks_by_the_routes_of_sglang(server: MemoryServer, tmp_path: Path) -> None:
    for body in ({}, {"action": "snapshot"}, {"action": "compare", "allow_quant_error": False, "selector": "all"}):
        status, answer = await send(server, "/weights_checker", body)
        assert (status, answer["success"], answer["checksum"]) == (200, True, "sum 0")
    assert (await send(server, "/weight_checker", {"action": "compare", "selector": "draft"}))[0] == 400
    assert (await send(server, "/weights_checker", {"action": "reset_tensors"}))[1]["success"]
    assert await send(server, "/is_sleeping") == (200, {"is_sleeping": True})
    status, answer = await send(server, "/weights_checker", {"action": "compare"})
    assert (status, answer["error"]["code"]) == (400, "asleep")
    await send(server, "/update_weights_from_disk", {"model_path": str(tmp_path / "allowed" / "700")})
    assert (await generated(server))["output_ids"] == expected(server, 700)
