"""Predicted waits against queues whose waits are known."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory_server import MemoryServer
from pagewood.engine.api import FinishReason, RequestOptions
from pagewood.engine.text import Tokenizer
from pagewood.server.http.errors import ApiError
from pagewood.server.messages import wire
from pagewood.server.requests.forecast import LONGEST_RETRY_S, BusyRate, Forecast
from pagewood.server.requests.live import LiveRequests
from recorded import Clock


def test_idle_time_does_not_count() -> None:
    clock = Clock(100.0)
    rate = BusyRate(clock=clock)
    assert rate.per_second() is None
    for idle_s in (0.0, 1000.0, 5.0):
        clock.now_s += idle_s
        for _ in range(400):
            rate.set_busy(True)
            clock.now_s += 0.25
            rate.add(2)
        rate.set_busy(False)
        assert rate.per_second() == pytest.approx(8, rel=0.05)


def test_the_rate_follows_a_change_within_seconds_and_falls_when_nothing_is_done() -> None:
    clock = Clock(100.0)
    rate = BusyRate(clock=clock)
    rate.set_busy(True)
    for per_s, num_s in ((10, 60), (2, 60)):
        for _ in range(num_s):
            clock.now_s += 1
            rate.add(per_s)
    assert rate.per_second() == pytest.approx(2, rel=0.2)
    clock.now_s += 60
    found = rate.per_second()
    assert found is not None
    assert found < 0.1


@given(sizes=st.lists(st.integers(50, 5000), min_size=30, max_size=60), rate=st.floats(100.0, 1e5))
def test_a_queue_in_order_is_predicted(sizes: list[int], rate: float) -> None:
    """One server that works through requests one after the other, at `rate` bytes per second."""
    clock = Clock(100.0)
    forecast = Forecast(clock=clock)
    for number, size in enumerate(sizes):
        forecast.sent(f"{number}", num_bytes=size, priority=0)
    for number, size in enumerate(sizes[:20]):
        clock.now_s += size / rate
        forecast.begun(f"{number}")
    predicted_s = forecast.first_answer_s(num_bytes=700, priority=0)
    assert predicted_s == pytest.approx((sum(sizes[20:]) + 700) / rate, rel=0.02)
    ahead_s = forecast.first_answer_s(num_bytes=700, priority=1)
    assert ahead_s == pytest.approx(700 / rate, rel=0.02)  # those that wait have lower priority


def test_dropped_requests_are_no_work() -> None:
    clock = Clock(100.0)
    forecast = Forecast(clock=clock)
    forecast.sent("a", num_bytes=100, priority=0)
    clock.now_s += 1
    forecast.begun("a")
    for name in "bcd":
        forecast.sent(name, num_bytes=100, priority=0)
    for name in "bcd":
        forecast.dropped(name)
        forecast.dropped(name)
    clock.now_s += 1000  # idle
    assert forecast.first_answer_s(num_bytes=50, priority=0) == pytest.approx(0.5)


class Nowhere:
    def send(self, frame: bytes) -> None:
        pass


def generate(request_id: str, *, priority: int = 0) -> wire.Generate:
    return wire.Generate(
        request_id=request_id, prompt=wire.TextPrompt(text="x"), options=RequestOptions(priority=priority)
    )


def done(request_id: str) -> wire.Answers:
    return wire.Answers((wire.Answer(request_id, "t", FinishReason.LENGTH, True, None, 1, 0, 1),))


def test_retry_after_is_the_time_until_there_is_room() -> None:
    clock = Clock(100.0)
    live = LiveRequests([Nowhere()], limit=12, forecast=Forecast(clock=clock))
    for number in range(12):
        live.submit([generate(f"{number}")], prompt_param="prompt")
    for number in range(4):  # one in 3 s
        clock.now_s += 3
        live.take(done(f"{number}"))
    for number in range(12, 16):
        live.submit([generate(f"{number}")], prompt_param="prompt")
    for num, expected in ((1, 3), (4, 12)):
        with pytest.raises(ApiError) as error:
            live.submit([generate(f"new {n}") for n in range(num)], prompt_param="prompt")
        assert error.value.status == 429
        assert abs(int(error.value.headers["Retry-After"]) - expected) <= 1
    clock.now_s += 10_000
    with pytest.raises(ApiError) as error:
        live.submit([generate("new")], prompt_param="prompt")
    assert error.value.headers["Retry-After"] == str(LONGEST_RETRY_S)
    assert live.incidents.refused["full"] == 3


def test_a_request_that_would_begin_too_late_is_refused() -> None:
    clock = Clock(100.0)
    live = LiveRequests([Nowhere()], limit=99, forecast=Forecast(clock=clock), max_first_answer_s=5.0)
    live.submit([generate("first")], prompt_param="prompt")
    clock.now_s += 1
    live.take(done("first"))  # one takes a second
    for number in range(5):
        live.submit([generate(f"{number}")], prompt_param="prompt")
    with pytest.raises(ApiError, match=r"after about [56]\.\d s, and this server allows 5 s") as error:
        live.submit([generate("sixth")], prompt_param="prompt")
    assert error.value.status == 429
    assert error.value.code == "overloaded"
    assert error.value.headers["Retry-After"] == "1"
    live.submit([generate("urgent", priority=1)], prompt_param="prompt")
    assert live.incidents.refused["late"] == 1


@pytest.mark.anyio
async def test_a_late_request_gets_a_429_over_http(model_folder: Path, tokenizer: Tokenizer) -> None:
    server = MemoryServer(model_folder, tokenizer, limit=9, max_ttft_s=0.2)
    await server.start()
    body = {"prompt": "Hi", "max_tokens": 2}
    assert (await server.post("/v1/completions", body)).status_code == 200
    server.gate.close()  # the device is slow
    first = asyncio.create_task(server.post("/v1/completions", body))
    live = server.service.live
    await server.until(lambda: live.num_live == 1)
    await asyncio.sleep(0.5)
    refused = await server.post("/v1/completions", body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
    assert 1 <= int(refused.headers["retry-after"]) <= LONGEST_RETRY_S
    server.gate.open()
    assert (await first).status_code == 200
    await server.until_idle()
    await server.stop()
