"""Several models: which of them are loaded for which requests, without processes."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq
from starlette.requests import ClientDisconnect, Request

from pagewood.engine.api import EngineConfig
from pagewood.engine.model_folder.folder import model_folder
from pagewood.server.config import ServeConfig
from pagewood.server.http.errors import ApiError
from pagewood.server.http.exchange import Exchange
from pagewood.server.keys.caller import Caller, set_caller
from pagewood.server.messages import wire
from pagewood.server.metrics.metrics import Metrics
from pagewood.server.models.pool import ModelPool
from pagewood.server.models.pool_config import PoolConfig
from pagewood.server.models.served_model import ServedModel
from pagewood.server.requests.adapters import ServedAdapters
from pagewood.server.requests.live import LiveRequests
from pagewood.server.requests.status import EngineStatus

FOLDER = model_folder(None)

pytestmark = pytest.mark.anyio


class FakeModel:
    """A model whose processes do what the test says; it stands for a `ServedModel` and its group."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.config = ServeConfig(
            engine=EngineConfig(max_running=1), served_model_name=name, model_folder=FOLDER, max_queued=3
        )
        self.metrics, self.adapters, self.started = Metrics(), ServedAdapters(), 0
        self.model: wire.Model | None = None
        self.group: Any = None
        self.service: Any = None
        self.num_loads = self.num_ends = 0

    def template(self) -> None:
        return None

    def begin(self, *, folder: Path, give_up: Callable[[str, int], None], on_news: Callable[[], None], **_: Any) -> Any:
        self.num_loads += 1
        self.give_up, self.on_news = give_up, on_news
        status = EngineStatus()

        async def nothing() -> None:
            return None

        sender = SimpleNamespace(send=no_send)
        self.group = SimpleNamespace(
            status=status,
            folder=folder,
            live=LiveRequests([cast("Any", sender)], limit=4),
            start=lambda: None,
            stop=nothing,
            work=no_work,
            pids=dict,
        )
        return self.group

    def serve(self) -> Any:
        self.service = SimpleNamespace(model_name=self.name, live=self.group.live, status=self.group.status)
        return self.service

    def note(self) -> None:
        self.model = self.group.status.model

    def end(self) -> None:
        self.num_ends += 1
        self.group = self.service = None

    def is_ready(self) -> None:
        """Send the first pulse."""
        self.group.status.take(wire.Pulse(incarnation=0, model=wire.Model(max_length=9, vocab_size=9), counters={}))
        self.on_news()


def no_send(frame: bytes) -> None:
    return None


def no_work(service: Any) -> Sequence[Any]:
    return ()


class Client:
    """A request for a model: it holds the model from its arrival there until `end`."""

    def __init__(self, pool: ModelPool, name: str, **wishes: Any) -> None:
        self.exchange = Exchange(request_id=name, method="POST", path="/", client="-", started_s=0.0)
        self._gone = asyncio.Event()
        scope: dict[str, Any] = {
            "type": "http",
            "query_string": b"",
            "headers": [],
            "pagewood.exchange": self.exchange,
        }
        self.task = asyncio.create_task(pool.serving(name, Request(scope, self._receive), **wishes))

    async def _receive(self) -> Any:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    def leave(self) -> None:
        self._gone.set()

    def end(self) -> None:
        assert self.exchange.on_end is not None
        self.exchange.on_end()


class Fleet:
    """A pool of models of 10 bytes each, but for those named `big`, and a clock."""

    def __init__(self, folder: Path, *names: str, **options: Any) -> None:
        self.now_s, self.step_s = 0.0, 1.0
        options.setdefault("memory_bytes", 20)
        self.fakes = {name: FakeModel(name) for name in names}
        self.pool = ModelPool(
            [(cast("ServedModel", one), 20 if one.name == "big" else 10) for one in self.fakes.values()],
            folder=folder,
            context=cast("zmq.Context[zmq.Socket[bytes]]", None),
            clock=lambda: self.now_s,
            **options,
        )

    def __getitem__(self, name: str) -> FakeModel:
        return self.fakes[name]

    def states(self) -> dict[str, str]:
        return {one.name: one.state.value for one in self.pool.listed() if one.state is not None}

    async def client(self, name: str, **wishes: Any) -> Client:
        """Return a request that has come as far as it can."""
        client = Client(self.pool, name, **wishes)
        await settled()
        return client

    async def used(self, *names: str) -> None:
        """Load models for a request each, one after the other."""
        for name in names:
            self.now_s += self.step_s
            client = await self.client(name)
            if not client.task.done():
                self[name].is_ready()
                await settled()
            await client.task
            client.end()
            await settled()


async def settled() -> None:
    """Let all tasks go on until they wait."""
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Fleet]:
    set_caller(Caller())
    return lambda *names, **options: Fleet(tmp_path, *(names or ("a", "b", "c")), **options)


async def error_of(client: Client) -> ApiError:
    with pytest.raises(ApiError) as raised:
        await client.task
    return raised.value


async def test_requests_share_one_load_and_keep_their_order(make: Callable[..., Fleet]) -> None:
    fleet, order = make(), list[int]()
    clients = [await fleet.client("a") for _ in range(3)]
    for number, client in enumerate(clients):
        client.task.add_done_callback(lambda _, number=number: order.append(number))
    assert fleet.states() == {"a": "loading", "b": "unloaded", "c": "unloaded"}
    assert fleet.pool.listed()[0].state.waiting == 3  # type: ignore[union-attr]
    fleet.now_s += 5
    fleet["a"].is_ready()
    await settled()
    assert order == [0, 1, 2]
    assert [one.exchange.load_s for one in (*clients, await fleet.client("a"))] == [5, 5, 5, 0]
    assert fleet["a"].num_loads == 1
    assert fleet.states()["a"] == "loaded"


async def test_too_many_waiting_requests_are_refused(make: Callable[..., Fleet]) -> None:
    fleet = make()
    clients = [await fleet.client("a") for _ in range(4)]
    assert (await error_of(await fleet.client("a"))).code == "overloaded"
    assert not any(client.task.done() for client in clients)


async def test_a_failed_load_ends_its_requests_and_the_next_one_tries_again(make: Callable[..., Fleet]) -> None:
    fleet = make()
    await fleet.used("b")
    clients = [await fleet.client("a") for _ in range(2)]
    fleet["a"].give_up("the engine process ended with code 1: no such tensor", 1)
    for client in clients:
        error = await error_of(client)
        assert (error.status, error.code) == (500, "model_load_failed")
        assert "no such tensor" in str(error)
        assert error.headers["x-should-retry"] == "false"
    assert fleet.states() == {"a": "unloaded", "b": "loaded", "c": "unloaded"}
    state = fleet.pool.listed()[0].state
    assert state is not None
    assert state.failed
    assert state.reason is not None
    await fleet.used("a")
    assert fleet["a"].num_loads == 2


async def test_the_model_used_least_recently_leaves_when_its_requests_have_ended(make: Callable[..., Fleet]) -> None:
    fleet = make()
    await fleet.used("a", "b")
    busy = await fleet.client("a")  # from now on b is the one
    waiting = await fleet.client("c")
    assert fleet.states() == {"a": "loaded", "b": "unloaded", "c": "loading"}
    fleet["c"].is_ready()
    using = await waiting.task
    assert using.model_name == "c"
    late = await fleet.client("b")  # both others are in use: the one used first leaves, when its request has ended
    assert fleet.states() == {"a": "loaded", "b": "unloaded", "c": "loaded"}
    assert [one.state.draining for one in fleet.pool.listed() if one.state] == [True, False, False]
    behind = await fleet.client("a")  # what leaves takes no new requests
    assert not behind.task.done()
    busy.end()
    await settled()
    assert fleet.states() == {"a": "unloaded", "b": "loading", "c": "loaded"}
    assert fleet["a"].num_ends == 1
    waiting.end()
    fleet["b"].is_ready()
    await settled()
    assert late.task.done()
    assert fleet.states()["a"] == "loading"  # c is idle and leaves for it


async def test_requests_of_a_load_come_before_the_model_leaves_for_others(make: Callable[..., Fleet]) -> None:
    fleet = make(max_loaded=1)
    first, other = await fleet.client("a"), await fleet.client("b")
    fleet["a"].is_ready()
    await settled()
    assert first.task.done()
    assert not other.task.done()
    first.end()
    await settled()
    assert fleet.states() == {"a": "unloaded", "b": "loading", "c": "unloaded"}
    assert fleet["a"].num_loads == 1


async def test_a_model_that_needs_much_is_not_passed_over(make: Callable[..., Fleet]) -> None:
    fleet = make("a", "big", "c")
    await fleet.used("a")
    busy = await fleet.client("a")
    await fleet.client("big")
    await fleet.client("c")  # it would fit beside a
    assert fleet.states() == {"a": "loaded", "big": "unloaded", "c": "unloaded"}
    busy.end()
    await settled()
    assert fleet.states() == {"a": "unloaded", "big": "loading", "c": "unloaded"}


async def test_a_pinned_model_stays_although_it_was_used_least_recently(make: Callable[..., Fleet]) -> None:
    fleet = make(pinned=("a",))
    await fleet.used("a", "b")
    await fleet.client("c")
    assert fleet.states() == {"a": "loaded", "b": "unloaded", "c": "loading"}


async def test_a_client_that_leaves_needs_no_room(make: Callable[..., Fleet]) -> None:
    fleet = make(max_loaded=1)
    await fleet.used("a")
    busy = await fleet.client("a")
    waiting = await fleet.client("b")
    behind = await fleet.client("a")
    assert not behind.task.done()
    waiting.leave()
    with pytest.raises(ClientDisconnect):
        await waiting.task
    await settled()
    assert behind.task.done()  # a stays
    busy.end()
    behind.end()
    await settled()
    assert fleet.states() == {"a": "loaded", "b": "unloaded", "c": "unloaded"}


async def test_a_deadline_holds_while_a_request_waits(make: Callable[..., Fleet]) -> None:
    fleet = make()
    client = await fleet.client("a", deadline_s=0.0)
    assert (await error_of(client)).code == "deadline_exceeded"
    assert fleet.pool.num_live == 0


async def test_a_model_that_can_never_fit_is_refused_with_numbers_and_harms_none(make: Callable[..., Fleet]) -> None:
    fleet = make(memory_bytes=10, pinned=("a",))
    await fleet.pool.start()
    await settled()
    fleet["a"].is_ready()
    await settled()
    error = await error_of(await fleet.client("b"))
    assert (error.status, error.code) == (507, "insufficient_memory")
    assert re.search(r"needs 0.00 GB of memory, and this server has 0.00 GB .* pinned models take 0.00 GB", str(error))
    assert fleet.states() == {"a": "loaded", "b": "unloaded", "c": "unloaded"}
    await asyncio.wait_for(fleet.pool.unload("a"), 5)  # nothing uses it
    fleet = make(max_loaded=1, pinned=("a",))
    assert (await error_of(await fleet.client("b"))).code == "insufficient_memory"


async def test_idle_models_are_unloaded_and_busy_or_pinned_ones_are_not(make: Callable[..., Fleet]) -> None:
    fleet = make(idle_s=0.01, pinned=("b",), memory_bytes=30)
    fleet.step_s = 0.0  # no model is idle for any time
    await fleet.used("a", "b")
    busy = await fleet.client("a")
    fleet.now_s += 100
    await asyncio.sleep(0.05)
    assert fleet.states()["a"] == "loaded"
    busy.end()
    fleet.now_s += 100
    end_s = time.monotonic() + 60
    while fleet.states()["a"] != "unloaded":
        assert time.monotonic() < end_s
        await asyncio.sleep(0.01)
    assert fleet.states() == {"a": "unloaded", "b": "loaded", "c": "unloaded"}
    assert fleet.pool.listed()[0].loads.unloaded == {"idle": 1}


async def test_clients_say_how_long_a_model_stays_unless_there_are_keys(make: Callable[..., Fleet]) -> None:
    fleet = make()
    await fleet.used("a")
    set_caller(Caller(tenant="someone"))
    kept = await fleet.client("a", keep_s=0.0)
    kept.end()
    await settled()
    assert fleet.states()["a"] == "loaded"
    set_caller(Caller(tenant="someone", is_admin=True))
    gone = await fleet.client("a", keep_s=0.0)
    assert fleet.states()["a"] == "loaded"
    gone.end()
    await settled()
    assert fleet.states()["a"] == "unloaded"
    await fleet.used("a")  # the wish was for one load
    await settled()
    assert fleet.states()["a"] == "loaded"


async def test_keys_are_limited_to_models(make: Callable[..., Fleet]) -> None:
    fleet = make()
    set_caller(Caller(tenant="someone", models=("b",)))
    error = await error_of(await fleet.client("a"))
    assert (error.status, error.code) == (403, "model_not_allowed")
    assert fleet["a"].num_loads == 0
    error = await error_of(await fleet.client("z"))
    assert (error.status, error.code) == (404, "model_not_found")
    assert "'b'" in str(error)
    assert "'a'" not in str(error)


async def test_admins_load_and_unload(make: Callable[..., Fleet]) -> None:
    fleet = make(loads_on_demand=False)
    assert (await error_of(await fleet.client("a"))).code == "model_not_loaded"
    loading = asyncio.create_task(fleet.pool.load("a"))
    await settled()
    fleet["a"].is_ready()
    await loading
    busy = await fleet.client("a")
    unloading = asyncio.create_task(fleet.pool.unload("a"))
    await settled()
    assert not unloading.done()
    busy.end()
    await asyncio.wait_for(unloading, 5)
    assert fleet.states()["a"] == "unloaded"
    loading = asyncio.create_task(fleet.pool.load("a"))
    await settled()
    await asyncio.wait_for(fleet.pool.unload("a"), 5)  # it stops the load
    with pytest.raises(ApiError, match="unloaded by request"):
        await loading


async def test_a_model_that_keeps_dying_is_unloaded_and_the_others_go_on(make: Callable[..., Fleet]) -> None:
    fleet = make()
    await fleet.used("a", "b")
    busy = await fleet.client("a")
    fleet["a"].give_up("the engine process of a died 10 times in a row", 3)
    await settled()
    assert fleet.states() == {"a": "unloaded", "b": "loaded", "c": "unloaded"}
    busy.end()
    await fleet.used("a")
    assert fleet.states()["a"] == "loaded"


async def test_the_end_of_the_server_ends_waiting_requests(make: Callable[..., Fleet]) -> None:
    fleet = make()
    client = await fleet.client("a")
    fleet.pool.close_door()
    assert (await error_of(client)).code == "shutting_down"
    await fleet.pool.stop()
    assert fleet["a"].num_ends == 1
    assert (await error_of(await fleet.client("a"))).code == "shutting_down"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"replicas": 2, "engine": EngineConfig(num_threads=2)}, "replicas must be 1 with several models, got 2"),
        ({"engine": EngineConfig(adapters=(("x", "/x"),), max_adapters=1)}, "adapters must not be given with several"),
        ({"engine": EngineConfig(decision_log="/x")}, "decision_log must not be given with several models"),
        ({"kv_events": "tcp://*:5557"}, "kv_events must not be given with several models"),
        ({"engine": EngineConfig(device="cuda")}, "max_loaded must be 1 with device cuda, got 0"),
    ],
)
def test_what_does_not_go_with_several_models(change: dict[str, Any], message: str) -> None:
    configs = tuple(ServeConfig(served_model_name=name, model_folder=FOLDER, **change) for name in ("a", "b"))
    with pytest.raises(ValueError, match=re.escape(message)):
        PoolConfig(models=configs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pinned": ("z",)}, "pinned must hold names of models (a, b), got 'z'"),
        ({"pinned": ("a", "b"), "max_loaded": 1}, "max_loaded must be at least the 2 pinned, got 1"),
        ({"idle_s": 0.0}, "idle_s must be > 0, got 0.0"),
        ({"max_loaded": -1}, "max_loaded must be >= 0, got -1"),
    ],
)
def test_settings_out_of_their_range(change: dict[str, Any], message: str) -> None:
    configs = tuple(ServeConfig(served_model_name=name, model_folder=FOLDER) for name in ("a", "b"))
    with pytest.raises(ValueError, match=re.escape(message)):
        PoolConfig(models=configs, **change)
