"""AsyncLLM over the embedded model: many callers, one engine in a thread."""

import asyncio
import gc
import os
import random
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from pagewood.engine import (
    LLM,
    AsyncLLM,
    Completion,
    EngineFailedError,
    FinishReason,
    LLMClosedError,
    SamplingParams,
)
from pagewood.engine.core.loop import Counters, Engine
from pagewood.engine.offline.async_llm import AsyncStream

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True)
PROMPTS = ["Count from 1 to 20", "Repeat after me: tree", "What is 3 + 4?", "Reverse the word: stone"]
OPTIONS: dict[str, Any] = {"max_total_tokens": 4096, "max_running": 8}


@pytest.fixture(scope="module")
def expected() -> list[Completion]:
    """Return the answers of the synchronous LLM to PROMPTS."""
    with LLM(**OPTIONS) as llm:
        return llm.generate(PROMPTS, ENDLESS)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Engine]]:
    """Collect the engines that are built during a test."""
    from pagewood.engine import build

    built: list[Engine] = []
    build_engine = build.build_engine

    def recording(*args: Any, **kwargs: Any) -> Engine:
        built.append(build_engine(*args, **kwargs))
        return built[-1]

    monkeypatch.setattr(build, "build_engine", recording)
    yield built
    for engine in built:
        assert engine.violation() is None
    assert not any(thread.name == "pagewood-engine" for thread in threading.enumerate())


def run(scenario: Callable[[AsyncLLM], Awaitable[None]]) -> None:
    async def main() -> None:
        async with AsyncLLM(**OPTIONS) as llm:
            await scenario(llm)

    asyncio.run(asyncio.wait_for(main(), 120))


async def until_at_rest(engine: Engine) -> Counters:
    while True:
        counters = engine.counters()
        if counters.num_running + counters.num_waiting + counters.num_draining == 0:
            return counters
        await asyncio.sleep(0.001)


def test_many_callers_get_the_answers_of_the_synchronous_llm(expected: list[Completion], engines: list[Engine]) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        several = llm.generate(PROMPTS, ENDLESS)
        singles = [llm.generate(prompt, ENDLESS) for prompt in PROMPTS]
        streams = [read(llm, prompt) for prompt in PROMPTS]
        together, *rest = await asyncio.gather(several, *singles, *streams)
        assert [c.tokens for c in together] == [c.tokens for c in expected]
        assert [one.tokens for (one,) in rest[:4]] == [c.tokens for c in expected]
        assert rest[4:] == [c.text for c in expected]
        conversation = [{"role": "user", "content": "What is 12 + 7?"}]
        (answer,) = await llm.chat(conversation, GREEDY)
        assert "19" in answer.text
        assert "".join([piece async for piece in llm.stream_chat(conversation, GREEDY)]) == answer.text
        assert llm.tokenizer.decode(answer.tokens) == answer.text
        assert llm.info.max_length > 500
        assert await llm.generate([]) == []

    async def read(llm: AsyncLLM, prompt: str) -> Any:
        return "".join([piece async for piece in llm.stream(prompt, ENDLESS)])

    run(scenario)


def test_callers_share_steps(engines: list[Engine]) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        await asyncio.gather(*(llm.generate([7, 8, n], ENDLESS) for n in range(8)))
        assert engines[0].counters().num_steps < 4 * 24  # alone, each takes 24

    run(scenario)


def test_a_stop_string_ends_a_call_and_a_stream(expected: list[Completion], engines: list[Engine]) -> None:
    stop = expected[0].text[5:8]
    text = expected[0].text[: expected[0].text.index(stop)]

    async def scenario(llm: AsyncLLM) -> None:
        (completion,) = await llm.generate(PROMPTS[0], LONG, stop=stop)
        assert (completion.text, completion.finish) == (text, FinishReason.STOP)
        stream = llm.stream(PROMPTS[0], LONG, stop=stop)
        assert "".join([piece async for piece in stream]) == text
        assert stream.completion == completion
        assert [piece async for piece in stream] == []
        counters = await until_at_rest(engines[0])
        assert counters.num_tokens < 1500

    run(scenario)


def test_cancelling_a_call_aborts_its_requests(engines: list[Engine]) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        other = llm.stream([5, 6], ENDLESS)
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(llm.generate([[7, 8], [9, 10]], LONG)),
            asyncio.create_task(read_all(llm.stream([11], LONG))),
        ]
        while engines[0].counters().num_running < 3:
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        assert [type(result) for result in await asyncio.gather(*tasks, return_exceptions=True)] == [
            asyncio.CancelledError
        ] * 2
        await read_all(other)
        assert other.completion is not None
        assert len(other.completion.tokens) == 24
        counters = await until_at_rest(engines[0])
        assert counters.num_tokens < 3 * 1500
        for _ in range(20):  # if this thread stands still, the answer may be there at the same time as the limit
            try:
                await asyncio.wait_for(llm.generate([7], LONG), 0.01)
            except TimeoutError:
                break
        else:
            raise AssertionError("no call was cancelled")
        await until_at_rest(engines[0])

    run(scenario)


async def read_all(stream: AsyncStream) -> str:
    return "".join([piece async for piece in stream])


@pytest.mark.parametrize("how", ["closed", "dropped", "left by a loop", "left by a with block", "in a cycle"])
def test_a_stream_that_is_not_read_to_its_end_ends_its_request(how: str, engines: list[Engine]) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        stream = llm.stream(PROMPTS[0], LONG)
        await anext(stream)
        match how:
            case "closed":
                await stream.aclose()
                assert [piece async for piece in stream] == []
            case "left by a loop":
                async for _ in stream:
                    break
                del stream
            case "left by a with block":
                async with stream:
                    pass
            case "in a cycle":
                cycle: list[object] = [stream]
                cycle.append(cycle)
                del cycle, stream
                gc.collect()
            case _:
                del stream
        counters = await until_at_rest(engines[0])
        assert counters.num_tokens < 1500

    run(scenario)


def test_ctrl_c_ends_the_program_and_the_engine(engines: list[Engine]) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        stream = llm.stream(PROMPTS[0], LONG)
        await anext(stream)
        os.kill(os.getpid(), signal.SIGINT)
        await llm.generate([[7, n] for n in range(100)], LONG)

    with pytest.raises(KeyboardInterrupt):
        run(scenario)


def test_a_slow_reader_delays_no_other_caller_and_gets_its_whole_answer(
    expected: list[Completion], engines: list[Engine]
) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        slow = llm.stream(PROMPTS[0], ENDLESS)
        first = await anext(slow)
        await llm.generate(PROMPTS[1], ENDLESS)
        await until_at_rest(engines[0])
        assert first + await read_all(slow) == expected[0].text

    run(scenario)


def test_a_refused_prompt_has_a_refusal_and_the_others_are_answered(engines: list[Engine]) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        refused, answered = await llm.generate([[1] * 5000, "a"], GREEDY)
        assert refused.refusal is not None
        assert "maximum context length" in refused.refusal.message
        assert answered.refusal is None
        with pytest.raises(ValueError, match="maximum context length"):
            await read_all(llm.stream([1] * 5000, GREEDY))

    run(scenario)


def test_bad_arguments_are_errors_and_nothing_is_submitted(engines: list[Engine]) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        with pytest.raises(ValueError, match=r"prompts\[1\] must hold at least one token"):
            await llm.generate(["a", ""], GREEDY)
        with pytest.raises(TypeError, match=r"stop must be a string or a sequence of strings, got 5"):
            await llm.generate("a", GREEDY, stop=5)  # pyright: ignore[reportArgumentType]
        with pytest.raises(ValueError, match=r"messages\[0\] must have a 'content'"):
            llm.stream_chat([{"role": "user"}])
        with pytest.raises(TypeError, match="prompt must be text or a sequence of token ids, got None"):
            llm.stream(None)  # pyright: ignore[reportArgumentType]
        assert engines[0].counters().num_tokens == 0

    run(scenario)


def test_callers_that_come_and_go_at_random_get_right_answers_and_leave_nothing_behind(
    expected: list[Completion], engines: list[Engine]
) -> None:
    rng = random.Random(0)
    num_right = 0

    async def scenario(llm: AsyncLLM) -> None:
        router = llm._engine._router  # pyright: ignore[reportPrivateUsage]

        async def caller() -> None:
            nonlocal num_right
            await asyncio.sleep(rng.uniform(0, 0.2))
            which = rng.randrange(len(PROMPTS))
            kind = rng.randrange(4)
            if kind == 0:
                (completion,) = await llm.generate(PROMPTS[which], ENDLESS, priority=rng.randrange(3))
                assert completion.tokens == expected[which].tokens
            elif kind == 1:
                assert await read_all(llm.stream(PROMPTS[which], ENDLESS)) == expected[which].text
            elif kind == 2:
                async for _ in llm.stream(PROMPTS[which], LONG):
                    if rng.random() < 0.2:
                        return
            else:
                text = ""
                async with llm.stream(PROMPTS[which], ENDLESS) as stream:
                    async for piece in stream:
                        text += piece
                        await asyncio.sleep(rng.uniform(0, 0.01))
                assert text == expected[which].text
            num_right += 1

        tasks = [asyncio.create_task(caller()) for _ in range(120)]
        for task in rng.sample(tasks, 40):
            asyncio.get_running_loop().call_later(rng.uniform(0, 0.4), task.cancel)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(result) for result in results} <= {type(None), asyncio.CancelledError}
        await until_at_rest(engines[0])
        while router.num_open:  # until the last answers are delivered
            await asyncio.sleep(0.001)

    run(scenario)
    assert num_right > 30


def test_closing_ends_every_call(engines: list[Engine]) -> None:
    async def main() -> None:
        llm = AsyncLLM(**OPTIONS)
        await llm.start()
        stream = llm.stream(PROMPTS[0], LONG)
        await anext(stream)
        waiting: list[asyncio.Task[Any]] = [asyncio.create_task(one) for one in coroutines(llm)]
        waiting.append(asyncio.create_task(read_all(llm.stream([5, 6], LONG))))
        while engines[0].counters().num_running < 4:
            await asyncio.sleep(0)
        await llm.close()
        await llm.close()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [LLMClosedError] * 3
        with pytest.raises(LLMClosedError, match="the AsyncLLM is closed"):
            await anext(stream)
        for attempt in coroutines(llm):
            with pytest.raises(LLMClosedError):
                await attempt
        with pytest.raises(LLMClosedError):
            llm.stream("a")
        with pytest.raises(RuntimeError, match="only once"):
            await llm.start()

    def coroutines(llm: AsyncLLM) -> list[Coroutine[Any, Any, list[Completion]]]:
        return [llm.generate([3, 4], LONG), llm.chat([{"role": "user", "content": "Say hello"}], LONG)]

    asyncio.run(asyncio.wait_for(main(), 120))


def fail(*_: object) -> None:
    raise ZeroDivisionError


def test_an_error_of_the_engine_reaches_every_caller(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        stream = llm.stream(PROMPTS[0], LONG)
        tasks = [asyncio.create_task(llm.generate([3, 4, n], LONG)) for n in range(3)]
        await anext(stream)
        with monkeypatch.context() as patch:
            patch.setattr("pagewood.engine.core.steps.plan.Planner.plan", fail)
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            assert isinstance(result, EngineFailedError)
            assert isinstance(result.__cause__, ZeroDivisionError)
        for attempt in (anext(stream), llm.generate("a")):
            with pytest.raises(EngineFailedError, match="ZeroDivisionError"):
                await attempt
        engines.clear()  # do not check them: the error may have left wrong accounts

    run(scenario)
    assert "the engine has failed" in caplog.text


def test_a_model_that_cannot_be_loaded_is_an_error_of_start(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(FileNotFoundError, match="model must be a folder"):
            async with AsyncLLM(tmp_path / "absent"):
                raise AssertionError("not reached")
        llm = AsyncLLM(tmp_path)
        with pytest.raises(ValueError, match=r"tokenizer\.json"):
            await llm.start()
        with pytest.raises(LLMClosedError):
            await llm.generate("a")
        await llm.close()

    asyncio.run(main())


def test_starting_can_be_cancelled(engines: list[Engine]) -> None:
    async def main() -> None:
        llm = AsyncLLM(**OPTIONS)
        starting = asyncio.create_task(llm.start())
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        with pytest.raises(LLMClosedError):
            llm.stream("a")
        await llm.close()

    asyncio.run(main())


def test_use_before_start_and_in_another_loop_is_an_error(engines: list[Engine]) -> None:
    llm = AsyncLLM(**OPTIONS)

    async def use() -> None:
        await llm.generate("a")

    with pytest.raises(RuntimeError, match="must be started before it is used"):
        asyncio.run(use())

    async def main() -> None:
        async with llm:
            for attempt in (use, llm.close):
                with pytest.raises(RuntimeError, match="in the event loop that started it"):
                    await asyncio.to_thread(asyncio.run, attempt())
            # What the message recommends:
            loop = asyncio.get_running_loop()
            done = await asyncio.to_thread(
                lambda: asyncio.run_coroutine_threadsafe(llm.generate("a", ENDLESS), loop).result(60)
            )
            assert len(done[0].tokens) == 24

    asyncio.run(asyncio.wait_for(main(), 120))


def test_an_llm_that_was_never_started_can_be_closed() -> None:
    async def main() -> None:
        llm = AsyncLLM()
        await llm.close()
        with pytest.raises(LLMClosedError):
            await llm.start()

    asyncio.run(main())


def test_an_engine_ends_when_its_loop_was_closed_without_closing_it(engines: list[Engine]) -> None:
    llm = AsyncLLM(**OPTIONS)
    streams: list[AsyncStream] = []  # alive when the loop is closed

    async def main() -> threading.Thread:
        await llm.start()
        streams.append(llm.stream(PROMPTS[0], LONG))
        await anext(streams[0])
        return next(thread for thread in threading.enumerate() if thread.name == "pagewood-engine")

    thread = asyncio.run(main())
    thread.join(60)
    assert not thread.is_alive()
    engines.clear()  # do not check them: they were stopped in the middle of a step


def test_an_engine_ends_when_its_loop_is_closed_before_it_has_delivered_answers(engines: list[Engine]) -> None:
    loop = asyncio.new_event_loop()
    llm = AsyncLLM(**OPTIONS)
    streams: list[AsyncStream] = []

    async def main() -> threading.Thread:
        await llm.start()
        streams.append(llm.stream(PROMPTS[0], LONG))
        await anext(streams[0])
        return next(thread for thread in threading.enumerate() if thread.name == "pagewood-engine")

    thread = loop.run_until_complete(main())
    (engine,) = engines
    num_steps = engine.counters().num_steps
    while engine.counters().num_steps < num_steps + 3:  # answers are sent, and the loop does not run
        time.sleep(0.001)
    loop.close()
    thread.join(60)
    assert not thread.is_alive()
    engines.clear()  # do not check them: they were stopped in the middle of a step
