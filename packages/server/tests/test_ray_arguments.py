"""The arguments of the application of Ray Serve, and the number of engines that it wants; Ray is not needed."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
from pydantic import ValidationError
from starlette.responses import Response
from starlette.types import Message

from pagewood.server.keys.key import ApiKey
from pagewood.server.ray.arguments import DRAIN_S, Arguments, config_of
from pagewood.server.ray.ingress import LocalOnly, check_limits
from pagewood.server.ray.scaling import KV_USE, PLACES, RUNNING, WAITING, WorkPolicy
from pagewood.server.ray.served_engine import reachable, with_port


def test_options_are_those_of_the_command_line_and_engines_have_their_processors() -> None:
    config = config_of(
        Arguments.model_validate({"options": "--max-running-requests 4 --max-retries 7", "num_cpus": "3"})
    )
    assert (config.engine.num_rows, config.max_retries, config.engine.num_threads) == (4, 7, 3)
    assert config.drain_s == DRAIN_S
    assert config.served_model_name == "pagewood-demo"
    assert config_of(Arguments(options="--threads 2", num_cpus=3)).engine.num_threads == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--port 9000", "options must not set port, got 9000: Ray Serve does this"),
        ("other", "options must not set path"),
        ("--model-idle-seconds 5", "options must not set idle_s, got 5.0: an application serves one model"),
        ("--kv-events tcp://*:5557", "options must set kv_events to tcp://HOST:*"),
        ("--no-such-option", "unrecognized arguments: --no-such-option"),
        ("--quota a:max_running=1", "num_ingress must be 1 with --quota, got 2: each ingress would count"),
        ("--device cuda", "num_gpus must be > 0 with --device cuda, got 0.0"),
    ],
)
def test_what_has_no_meaning_here_is_refused_by_name(options: str, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("*", r"\*")):
        config_of(Arguments(options=options, num_ingress=2))


@pytest.mark.parametrize("name", ["requests_per_minute", "tokens_per_minute", "max_concurrent"])
def test_limits_of_keys_are_refused_by_name_where_several_would_count_them(name: str) -> None:
    key = ApiKey(digest=bytes(32), name="mine")
    check_limits([key])
    with pytest.raises(ValueError, match=f"{name} of key 'mine' must not be set with several ingresses, got 5"):
        check_limits([key, dataclasses.replace(key, **{name: 5})])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"min_replicas": 1}, "min_replicas and max_replicas must be given together"),
        ({"min_replicas": 1, "max_replicas": 2, "num_replicas": 2}, "num_replicas must not be given with min_replicas"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Arguments.model_validate(fields)


@pytest.mark.parametrize(
    ("running", "waiting", "kv_use", "expected"),
    [
        ([0, 0], [0, 0], [0, 0], 0),
        ([4, 4], [0, 0], [0.1, 0.1], 2),  # 8 requests of 5 that each should have
        ([8, 8], [9, 8], [0.1, 0.1], 5),  # what waits is the same for both, who have heard of it at different times
        ([1, 1], [0, 0], [0.9, 0.8], 3),  # their memory holds 1.7 engines' worth, of which each should hold 0.8
    ],
)
def test_engines_follow_requests_that_run_and_wait_and_their_memory(
    running: list[float], waiting: list[float], kv_use: list[float], expected: int
) -> None:
    metrics = {RUNNING: running, WAITING: waiting, KV_USE: kv_use, PLACES: [8.0, 8.0]}
    found = {name: dict(zip("ab", values, strict=True)) for name, values in metrics.items()}
    assert WorkPolicy(target_load=5 / 8, target_kv_use=0.8)(SimpleNamespace(aggregated_metrics=found)) == (expected, {})


def test_without_numbers_the_number_of_engines_stays() -> None:
    assert WorkPolicy(target_load=0.8, target_kv_use=0.8)(
        SimpleNamespace(current_num_replicas=3, aggregated_metrics=None)
    ) == (3, {})


def test_each_engine_publishes_on_a_port_of_its_own_and_says_how_it_is_reached() -> None:
    assert with_port("tcp://*:*") != with_port("tcp://*:*")
    found = [reachable(one, "10.1.2.3") for one in ("tcp://*:5557", "tcp://127.0.0.1:5557")]
    assert found == ["tcp://10.1.2.3:5557", "tcp://127.0.0.1:5557"]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("client", "is_served"),
    [(("127.0.0.1", 5), True), (("::1", 5), True), (("10.0.0.1", 5), False), (None, False)],
)
async def test_without_keys_only_this_host_is_served(client: tuple[str, int] | None, is_served: bool) -> None:
    statuses: list[int] = []

    async def send(message: Message) -> None:
        statuses.append(message.get("status", 0))

    async def receive() -> Message:
        return {}

    await LocalOnly(Response(status_code=204))({"type": "http", "client": client}, receive, send)
    assert statuses[0] == (204 if is_served else 403)
