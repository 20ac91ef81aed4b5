"""Weights of three engines behind one server: all change or none, also if one of them fails, dies, or begins anew."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from echo_weights import WHOLE, write_echo_weights
from memory_server import MemoryServer
from pagewood.engine.text import Tokenizer
from pagewood.engine.weight_commands import DropUpdate, JoinGroup, LeaveGroup, UpdateWeights, WeightCommand
from pagewood.server.metrics.endpoint import MetricsEndpoint, text_of
from replica_server import NUM, close_gates, dispatcher_of, open_gates, running

pytestmark = pytest.mark.anyio

TEXT = "a conversation: " + "word " * 12
LENGTH = 12
OTHERS_ONLY = "are in other processes only"


@pytest.fixture
async def server(model_folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> AsyncGenerator[MemoryServer]:
    """Three engines that may read updates from a folder."""
    for content in ("700", "800", "+5", "broken"):
        write_echo_weights(tmp_path / content, content)
    async for server in running(model_folder, tokenizer):
        server.service.weights.folders = [tmp_path]
        yield server


async def send(server: MemoryServer, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    """Send a request to an admin route."""
    response = await (server.admin.get(path) if body is None else server.admin.post(path, json=body))
    return response.status_code, response.json()


def from_folder(server: MemoryServer, content: str, **fields: Any) -> Coroutine[Any, Any, tuple[int, Any]]:
    folder = server.service.weights.folders[0] / content
    return send(server, "/update_weights_from_disk", {"model_path": str(folder), **fields})


def from_file(server: MemoryServer, content: str, **fields: Any) -> Coroutine[Any, Any, tuple[int, Any]]:
    file = server.service.weights.folders[0] / content / "model.safetensors"
    return send(server, "/update_weights_from_files", {"files": [str(file)], **fields})


async def generated(server: MemoryServer, text: str = TEXT) -> Any:
    sampling = {"max_new_tokens": LENGTH, "temperature": 0}
    response = await server.client.post("/generate", json={"text": text, "sampling_params": sampling})
    assert response.status_code == 200, response.text
    return response.json()


async def check(server: MemoryServer, weights: int, version: str, *, at: tuple[int, ...] = (0, 1, 2)) -> None:
    """Check that each of these replicas, and no other one, answers, with those weights and that version."""
    assert (await send(server, "/get_weight_version"))[1] == {"weight_version": version}
    counts = [one.counters["num_steps"] for one in statuses(server)]
    asks = [asyncio.create_task(generated(server, f"{TEXT} {number}")) for number in range(9)]
    for number, ask in enumerate(asks):
        tokens = server.tokenizer.encode(f"{TEXT} {number}").tolist()
        answer = await ask
        assert answer["output_ids"] == server.expected_tokens(tokens, max_tokens=LENGTH, weights=weights)
        assert answer["meta_info"]["weight_versions"] == [[version, 0, len(answer["output_ids"])]]
    await server.until_idle()

    def worked() -> tuple[int, ...]:
        return tuple(one for one in range(NUM) if statuses(server)[one].counters["num_steps"] > counts[one])

    await server.until(lambda: set(worked()) >= set(at))  # pulses bring the counts
    assert worked() == at


def statuses(server: MemoryServer) -> Any:
    status: Any = server.service.status
    return status.replicas


async def until_all_work(server: MemoryServer) -> None:
    await server.until(lambda: all(one.takes_requests for one in dispatcher_of(server).replicas))


def refuse(server: MemoryServer, number: int, kind: type[Any] | str, *, times: int = 1) -> None:
    """Let the weights of a replica refuse commands of a kind, or to be exchanged."""
    left = [times]

    def fault(sent: WeightCommand | str) -> str:
        is_meant = sent == kind if isinstance(kind, str) else isinstance(sent, kind)
        if not is_meant or not left[0]:
            return ""
        left[0] -= 1
        return "there is a fault"

    server.replicas[number].fault = fault


def hold(server: MemoryServer, number: int, kind: type[Any]) -> tuple[threading.Event, threading.Event]:
    """Let a replica stop at its next command of a kind; return what says that it has, and what lets it go on."""
    has_come, may_go = threading.Event(), threading.Event()

    def fault(sent: WeightCommand | str) -> str:
        if isinstance(sent, kind):
            has_come.set()
            assert may_go.wait(60)
        return ""

    server.replicas[number].fault = fault
    return has_come, may_go


async def test_all_change_and_a_later_process_reads_the_folder_first(server: MemoryServer) -> None:
    await check(server, 0, "default")
    done = {"success": True, "message": "", "weight_version": "1"}
    assert await from_folder(server, "700") == (200, done)
    await check(server, 700, "1")
    assert (await send(server, "/update_weight_version", {"new_version": "b"}))[1]["weight_version"] == "b"
    has_come, may_go = hold(server, 1, UpdateWeights)
    server.kill(1)
    await asyncio.to_thread(has_come.wait, 60)
    ready = (await server.client.get("/ready")).json()
    assert [one["status"] for one in ready["replicas"]] == ["ready", "outdated", "ready"]
    assert "replica 1: it reads the weights of version 'b'" in ready["detail"]
    assert 'replica_outdated{model_name="echo",replica="1"} 1' in metrics(server)
    assert 'replica_up{model_name="echo",replica="1"} 0' in metrics(server)
    asks = [asyncio.create_task(generated(server)) for _ in range(4)]
    for ask in asks:
        assert (await ask)["meta_info"]["weight_version"] == "b"
    may_go.set()
    await until_all_work(server)
    await check(server, 700, "b")
    await server.until(lambda: [one.weight_version for one in statuses(server)] == ["b"] * NUM)
    assert await from_file(server, "+5") == (200, {**done, "weight_version": "2"})
    await check(server, 705, "2")
    status, answer = await send(server, "/weights_checker", {})
    assert (status, answer["checksum"]) == (200, "sum 705")


def metrics(server: MemoryServer) -> str:
    return text_of(list(MetricsEndpoint(metrics=server.metrics, models=server.frontend.models).collect())).decode()


async def test_no_replica_changes_if_one_cannot(server: MemoryServer) -> None:
    for number in range(NUM):
        refuse(server, number, UpdateWeights)
        status, answer = await from_folder(server, "700", weight_version="x")
        assert (status, answer["error"]["code"], answer["weight_version"]) == (400, "weights_invalid", "default")
        assert answer["message"] == f"replica {number}: there is a fault"
    await check(server, 0, "default")
    object.__setattr__(server.service, "replace_engine", None)  # as where Ray starts the engines
    status, answer = await from_folder(server, "700")
    assert (status, answer["error"]["code"]) == (400, "weights_fixed")
    object.__setattr__(server.service, "replace_engine", server._replace_engine)  # pyright: ignore[reportPrivateUsage]
    status, answer = await from_folder(server, "broken")
    assert answer["message"].startswith("weights must be a number")
    assert (await from_folder(server, "700", weight_version="x"))[0] == 200
    await check(server, 700, "x")


async def test_a_death_between_the_phases_leaves_the_old_weights(server: MemoryServer) -> None:
    """Replica 0 has made the update ready, replica 2 still reads it, and replica 1 dies."""
    (is_read, may_answer), (has_come, may_go) = hold(server, 1, UpdateWeights), hold(server, 2, UpdateWeights)
    updating = asyncio.create_task(from_folder(server, "700"))
    assert await asyncio.to_thread(is_read.wait, 60)
    assert await asyncio.to_thread(has_come.wait, 60)
    for path, body in (("/sleep", {}), ("/update_weights_from_disk", {"model_path": str(folder_of(server))})):
        assert (await send(server, path, body))[1]["error"]["code"] == "weights_busy"
    server.kill(1)
    may_answer.set()
    await server.until(lambda: statuses(server)[1].outdated == "it waits for the end of an update")
    may_go.set()
    status, answer = await updating
    assert (status, answer["error"]["code"]) == (503, "engine_lost")
    await until_all_work(server)
    await check(server, 0, "default")
    assert (await from_folder(server, "800"))[1]["weight_version"] == "1"
    await check(server, 800, "1")


def folder_of(server: MemoryServer) -> Path:
    return server.service.weights.folders[0] / "700"


async def test_a_replica_that_cannot_change_at_the_end_gets_no_requests(server: MemoryServer) -> None:
    """From a folder it may read them again; from a file only the next update with all tensors brings it back."""
    refuse(server, 1, "exchange")
    assert (await from_folder(server, "700"))[0] == 200
    await until_all_work(server)
    await check(server, 700, "1")
    refuse(server, 1, "exchange")
    assert (await from_file(server, "800"))[1]["weight_version"] == "2"
    assert OTHERS_ONLY in statuses(server)[1].detail
    await check(server, 800, "2", at=(0, 2))
    assert (await from_file(server, "800"))[0] == 200
    await check(server, 800, "3")
    for number in range(NUM):
        refuse(server, number, "exchange")
    status, answer = await from_file(server, "700")
    assert (status, answer["error"]["code"], answer["weight_version"]) == (400, "weights_failed", "3")
    await check(server, 800, "3")


async def test_a_process_without_the_weights_waits_for_all_tensors(server: MemoryServer) -> None:
    assert (await from_file(server, "700", weight_version="x"))[0] == 200
    server.kill(2)
    await server.until(lambda: OTHERS_ONLY in statuses(server)[2].outdated)
    await check(server, 700, "x", at=(0, 1))
    assert (await from_file(server, "+5", weight_version="y"))[0] == 200
    await check(server, 705, "y", at=(0, 1))
    assert dispatcher_of(server).weights.why_kept  # `Succession` replaces no process
    last = [await send(server, "/drain", {"replica": number}) for number in (0, 1)]
    assert [status for status, _ in last] == [200, 503]
    await send(server, "/drain", {"replica": 0, "is_draining": False})
    for number in (0, 1):
        server.kill(number)
    await server.until(lambda: all(one.outdated for one in statuses(server)))
    response = await server.client.get("/ready")
    assert (response.status_code, response.json()["status"]) == (503, "outdated")
    asked = asyncio.create_task(generated(server))
    await server.until(lambda: dispatcher_of(server).num_waiting == 1)
    status, answer = await from_file(server, "+5")
    assert (status, "all tensors" in answer["message"]) == (400, True)
    assert not asked.done()
    assert (await from_file(server, "800", weight_version="z"))[0] == 200
    assert (await asked)["meta_info"]["weight_version"] == "z"
    await check(server, 800, "z")
    assert (await from_folder(server, "700"))[0] == 200
    assert not dispatcher_of(server).weights.why_kept


async def test_answers_say_which_weights_have_computed_them(server: MemoryServer) -> None:
    """They run on all replicas during the update, and go on behind it; one of these dies with some of them."""
    close_gates(server)
    asks = [asyncio.create_task(generated(server, f"{TEXT} {number}")) for number in range(6)]
    await server.until(lambda: all(one.gate.is_held for one in server.replicas))
    for one in server.replicas:
        one.gate.allow(6)
    await server.until(lambda: all(one.gate.is_held for one in server.replicas))
    before = [one.link.num_queued for one in server.replicas]
    updating = asyncio.create_task(from_folder(server, "700"))
    await server.until(lambda: all(one.link.num_queued > num for one, num in zip(server.replicas, before, strict=True)))
    server.kill(0)
    open_gates(server)
    assert (await updating)[0] == 503
    assert (await from_folder(server, "700"))[0] == 200
    for number, ask in enumerate(asks):
        answer, tokens = await ask, server.tokenizer.encode(f"{TEXT} {number}").tolist()
        spans = answer["meta_info"]["weight_versions"]
        assert spans[0][:2] == ["default", 0]
        assert spans[-1][2] == len(answer["output_ids"])
        assert [one[0] for one in spans] in (["default"], ["default", "1"])
        border = spans[0][2]
        assert answer["output_ids"][:border] == server.expected_tokens(tokens, max_tokens=LENGTH)[:border]
    await until_all_work(server)


async def test_a_prefix_of_new_weights_is_found_where_it_is(server: MemoryServer) -> None:
    """Also if the router would choose another replica. And nothing is found that the old weights have computed."""
    assert (await generated(server))["meta_info"]["cached_tokens"] == 0
    await server.until(lambda: any(one.counters["num_cached_pages"] for one in statuses(server)))
    [favourite] = [number for number, one in enumerate(statuses(server)) if one.counters["num_cached_pages"]]
    assert (await from_folder(server, "700"))[0] == 200
    await server.until(lambda: {one.weights_digest for one in statuses(server)} == {"700"})
    await server.until(lambda: dispatcher_of(server).num_cached_blocks == 0)
    assert (await send(server, "/drain", {"replica": favourite}))[0] == 200
    assert (await generated(server))["meta_info"]["cached_tokens"] == 0
    await server.until(lambda: dispatcher_of(server).num_cached_blocks > 0)
    assert (await send(server, "/drain", {"replica": favourite, "is_draining": False}))[0] == 200
    assert (await generated(server))["meta_info"]["cached_tokens"] > 0


async def test_a_trainer_sends_tensors_to_all_replicas(server: MemoryServer) -> None:
    """In parts by vLLM's words, with ranks one behind the other; and a replica that dies behind a part."""
    joined: dict[int, tuple[int, int]] = {}
    left: list[int] = []

    def note(number: int) -> Callable[[WeightCommand | str], str]:
        def fault(sent: WeightCommand | str) -> str:
            if isinstance(sent, JoinGroup):
                joined[number] = sent.first_rank, sent.world_size
                return "it cannot join" if sent.port == 29501 and number == 1 else ""
            if isinstance(sent, LeaveGroup | DropUpdate):
                left.append(number)
            return ""

        return fault

    for number in range(NUM):
        server.replicas[number].fault = note(number)
    assert (await send(server, "/get_world_size"))[1] == {"world_size": NUM}
    info = {"master_address": "127.0.0.1", "master_port": 29500, "rank_offset": 2, "backend": "gloo"}
    status, answer = await send(server, "/init_weight_transfer_engine", {"init_info": {**info, "world_size": 4}})
    assert (status, answer["error"]["param"]) == (400, "world_size")
    assert not joined
    wrong = {"init_info": {**info, "world_size": 5, "master_port": 29501}}
    assert (await send(server, "/init_weight_transfer_engine", wrong))[1]["message"] == "replica 1: it cannot join"
    assert sorted(left) == [0, 2]
    begin = {"init_info": {**info, "world_size": 5}}
    assert (await send(server, "/init_weight_transfer_engine", begin))[1]["success"]
    assert joined == {0: (2, 5), 1: (3, 5), 2: (4, 5)}

    part = {"update_info": {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]]}}
    done = {"success": True, "message": "", "weight_version": "default"}
    assert await send(server, "/update_weights", part) == (200, done)
    assert await send(server, "/update_weights", {"update_info": [part["update_info"]] * NUM}) == (200, done)
    await check(server, 0, "default")
    assert (await send(server, "/finish_weight_update", {"weight_version": "x"}))[1]["weight_version"] == "x"
    await check(server, 2, "x")

    assert (await send(server, "/update_weights", part))[0] == 200
    left.clear()
    server.kill(1)
    await server.until(lambda: OTHERS_ONLY in statuses(server)[1].outdated)
    status, answer = await send(server, "/update_weights", part)
    assert (status, answer["error"]["code"]) == (400, "group_failed")
    assert sorted(left) == [0, 1, 2]
    assert (await send(server, "/init_weight_transfer_engine", begin))[1]["success"]
    whole = {"update_info": {"names": [WHOLE, "a"], "dtype_names": ["float32"] * 2, "shapes": [[1]] * 2}}
    assert (await send(server, "/start_weight_update", {}))[0] == 200
    assert (await send(server, "/update_weights", whole))[0] == 200
    assert (await send(server, "/finish_weight_update", {"weight_version": "y"}))[0] == 200
    await check(server, 2, "y")


async def test_an_update_in_parts_is_lost_with_a_replica(server: MemoryServer) -> None:
    """The next process would lack the first part."""
    group = {"master_address": "127.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 4}
    assert (await send(server, "/init_weight_transfer_engine", {"init_info": {**group, "backend": "gloo"}}))[0] == 200
    part = {"update_info": {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]]}}
    assert (await send(server, "/update_weights", part))[0] == 200
    server.kill(2)
    await until_all_work(server)
    status, answer = await send(server, "/finish_weight_update", {})
    assert (status, answer["error"]["code"], answer["weight_version"]) == (503, "weights_lost", "default")
    assert (await send(server, "/finish_weight_update", {}))[1]["message"] == "an update must have tensors, got none"
    await check(server, 0, "default")


async def test_dropped_weights_and_a_process_that_begins_meanwhile(server: MemoryServer) -> None:
    assert (await send(server, "/sleep?level=2", {}))[1]["status"] == "sleeping"
    server.kill(0)
    await server.until(lambda: statuses(server)[0].asleep != () and dispatcher_of(server).replicas[0].is_joined)
    assert (await send(server, "/wake_up", {}))[1] == {"status": "sleeping", "tags": ["weights"]}
    asked = asyncio.create_task(generated(server))
    assert (await from_file(server, "700", weight_version="x"))[0] == 200
    assert await send(server, "/is_sleeping") == (200, {"is_sleeping": False})
    assert (await asked)["meta_info"]["weight_version"] == "x"
    await check(server, 700, "x")
