"""An exception ends the requests that it concerns, and does not stop later answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from pagewood.engine.api import FinishReason
from pagewood.server.http.errors import ApiError
from pagewood.server.messages import wire
from pagewood.server.messages.links import address
from pagewood.server.requests.live import LiveRequests
from pagewood.server.requests.pump import MAX_FAILURES, AnswerPump
from recorded import Recorder

pytestmark = pytest.mark.anyio


def generate(request_id: str) -> wire.Generate:
    return wire.Generate(request_id=request_id, prompt=wire.TextPrompt(text="x"))


def taking(live: LiveRequests) -> Callable[[wire.ToHttp], None]:
    """Return a function that passes answers to `live`."""

    def take(message: wire.ToHttp) -> None:
        assert isinstance(message, wire.Answers)
        live.take(message)

    return take


def answer(request_id: str, text: str, *, ended: bool = True) -> wire.Answers:
    return wire.Answers((wire.Answer(request_id, text, FinishReason.STOP if ended else None, ended, None, 1, 0, 1),))


async def test_a_message_that_fails_ends_its_own_requests(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    live = LiveRequests([Recorder()], limit=9)
    groups = {name: live.submit([generate(name)], prompt_param="prompt") for name in "abc"}

    def take(message: wire.ToHttp) -> None:
        assert isinstance(message, wire.Answers)
        if message.answers[0].text == "bad":
            raise KeyError("a defect")
        live.take(message)

    pump = AnswerPump(address(tmp_path, "http"), take=take, fail=live.fail, fail_all=live.fail_all, give_up=pytest.fail)
    task = asyncio.create_task(pump.run())
    with zmq.asyncio.Context() as context, context.socket(zmq.PUSH) as push:
        push.connect(address(tmp_path, "http"))
        with caplog.at_level(logging.ERROR):
            for message in (answer("a", "bad", ended=False), answer("b", "good"), answer("c", "bad")):
                await push.send(wire.encode(message))
            with pytest.raises(ApiError, match="failed on an answer") as error:
                await asyncio.wait_for(groups["a"].next(), 30)
            assert error.value.status == 503
            assert (await asyncio.wait_for(groups["b"].next(), 30))[1].text == "good"
            with pytest.raises(ApiError, match="failed on an answer"):
                await asyncio.wait_for(groups["c"].next(), 30)
    assert caplog.text.count("KeyError: 'a defect'") == 2
    assert (live.num_live, live.num_ending) == (0, 0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_socket_that_fails_ends_all_requests_and_at_last_the_server(tmp_path: Path) -> None:
    live = LiveRequests([Recorder()], limit=9)
    reasons: list[str] = []
    group = live.submit([generate("a")], prompt_param="prompt")
    missing = address(tmp_path / "missing", "http")  # nothing can be bound there
    pump = AnswerPump(missing, take=taking(live), fail=live.fail, fail_all=live.fail_all, give_up=reasons.append)
    task = asyncio.create_task(pump.run())
    with pytest.raises(ApiError, match="Answers were lost"):
        await asyncio.wait_for(group.next(), 30)
    await asyncio.wait_for(task, 30)
    assert len(reasons) == 1
    assert "answers cannot be received" in reasons[0]
    assert MAX_FAILURES > 1


async def test_a_socket_that_works_again_is_used_again(tmp_path: Path) -> None:
    live = LiveRequests([Recorder()], limit=9)
    folder = tmp_path / "late"
    failures: list[ApiError] = []

    def fail_all(error: ApiError) -> None:
        failures.append(error)
        folder.mkdir(exist_ok=True)

    pump = AnswerPump(
        address(folder, "http"), take=taking(live), fail=live.fail, fail_all=fail_all, give_up=pytest.fail
    )
    group = live.submit([generate("a")], prompt_param="prompt")
    task = asyncio.create_task(pump.run())
    with zmq.asyncio.Context() as context, context.socket(zmq.PUSH) as push:
        push.connect(address(folder, "http"))
        await push.send(wire.encode(answer("a", "good")))
        assert (await asyncio.wait_for(group.next(), 30))[1].text == "good"
    assert len(failures) == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
