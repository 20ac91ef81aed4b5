"""The offline API over the embedded model."""

import _thread
import gc
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, Literal

import pytest

from pagewood.engine import LLM, EngineFailedError, FinishReason, LLMBusyError, LLMClosedError, SamplingParams
from pagewood.engine.core.loop import Counters
from pagewood.engine.offline.llm import Stream
from pagewood.engine.offline.shared_engine import SharedEngine

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_total_tokens=4096, max_running=8) as model:
        yield model


def engine_of(llm: LLM) -> SharedEngine:
    return llm._engine  # pyright: ignore[reportPrivateUsage]


def alive(counters: Counters) -> int:
    return counters.num_running + counters.num_waiting + counters.num_draining


def assert_at_rest(llm: LLM) -> None:
    assert alive(llm.counters()) == 0
    assert engine_of(llm).violation() is None
    assert engine_of(llm)._router.num_open == 0  # pyright: ignore[reportPrivateUsage]


def test_one_prompt_and_several_give_the_same_completions(llm: LLM) -> None:
    prompts = ["What is", "Repeat after me: tree", "The capital of France"]
    together = llm.generate(prompts, ENDLESS)
    alone = [llm.generate(prompt, ENDLESS)[0] for prompt in prompts]
    assert [c.tokens for c in together] == [c.tokens for c in alone]
    assert all(len(c.tokens) == 24 and c.finish is FinishReason.LENGTH for c in together)


def test_no_prompts_give_no_completions(llm: LLM) -> None:
    assert llm.generate([]) == []
    assert llm.chat([]) == []


def test_text_is_the_decoded_tokens(llm: LLM) -> None:
    (completion,) = llm.generate("Reverse the word: stone", ENDLESS)
    assert completion.text == llm.tokenizer.decode(completion.tokens)


def test_token_ids_are_a_prompt_like_their_text(llm: LLM) -> None:
    tokens = llm.tokenizer.encode("Say hello")
    expected = llm.generate("Say hello", ENDLESS)[0].tokens
    assert llm.generate(tokens.tolist(), ENDLESS)[0].tokens == expected
    assert llm.generate(tokens, ENDLESS)[0].tokens == expected
    assert [c.tokens for c in llm.generate([tokens, "Say hello"], ENDLESS)] == [expected, expected]


def test_each_prompt_may_have_its_own_sampling(llm: LLM) -> None:
    short, long = llm.generate(
        ["a", "b"],
        [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (2, 7)],
    )
    assert (len(short.tokens), len(long.tokens)) == (2, 7)


def test_completions_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    lengths = [9, 2, 14, 5, 1, 11, 3, 7, 4, 12, 6, 8]  # more than can run at once; they end in another order
    completions = llm.generate(
        [[5, 6, n] for n in lengths],
        [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths],
    )
    assert [len(completion.tokens) for completion in completions] == lengths


def test_a_higher_priority_is_computed_first(llm: LLM) -> None:
    for first_token, priority, num_cached in ((5, 0, [0, 64]), (6, [0, 1], [64, 0])):
        shared = [first_token, *range(100, 164)]  # the first request computes it for the other
        completions = llm.generate([[*shared, 7], [*shared, 8]], ENDLESS, priority=priority)
        assert [completion.num_cached_tokens for completion in completions] == num_cached


def test_a_stop_string_ends_the_text_before_it_and_the_tokens_with_it(llm: LLM) -> None:
    whole = llm.generate("Count from 1 to 20", ENDLESS)[0]
    stop = whole.text[5:8]
    (completion,) = llm.generate("Count from 1 to 20", LONG, stop=[stop])
    assert completion.text == whole.text[: whole.text.index(stop)]
    assert completion.finish is FinishReason.STOP
    assert stop in llm.tokenizer.decode(completion.tokens)
    assert stop not in llm.tokenizer.decode(completion.tokens[:-1])
    assert_at_rest(llm)


def test_an_expression_ends_the_text_before_its_match(llm: LLM) -> None:
    whole = llm.generate("Count from 1 to 20", ENDLESS)[0].text
    stop = re.compile(rf"{re.escape(whole[5])}(?:.|\n){{2}}")
    found = stop.search(whole)
    assert found is not None
    for answer in (llm.generate("Count from 1 to 20", ENDLESS, stop="never said", stop_regex=stop.pattern)[0].text,
                   "".join(llm.stream("Count from 1 to 20", ENDLESS, stop_regex=[stop.pattern]))):  # fmt: skip
        assert answer == whole[: found.start()]


def test_the_stop_token_is_answered_where_it_is_asked_for(llm: LLM) -> None:
    """With its log probability, and without its text, also where it is a word."""
    prompt = llm.tokenizer.encode_chat([{"role": "user", "content": "What is 12 + 7?"}]).tolist()
    [plain] = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=24))
    assert plain.finish is FinishReason.STOP
    [kept] = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=24, logprobs=0), keep_stop_token=True)
    assert kept.tokens == (*plain.tokens, llm.info.eos_token_ids[0])
    assert [entry.token for entry in kept.logprobs] == list(kept.tokens)
    assert (kept.text, kept.finish) == (plain.text, plain.finish)
    word = plain.tokens[3]
    stopped = SamplingParams(temperature=0.0, max_tokens=24, stop_token_ids=(word,), logprobs=0)
    before, at = (llm.generate([prompt], stopped, keep_stop_token=keeps)[0] for keeps in (False, True))
    assert at.tokens == (*before.tokens, word)
    assert at.text == before.text != llm.tokenizer.decode(at.tokens)
    [cut] = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=2), keep_stop_token=True)
    assert cut.tokens == plain.tokens[:2]
    with pytest.raises(TypeError, match="keep_stop_token must be True or False"):
        llm.generate([prompt], GREEDY, keep_stop_token=1)  # pyright: ignore[reportArgumentType]


def test_one_string_is_one_stop_string(llm: LLM) -> None:
    whole = llm.generate("Count from 1 to 20", ENDLESS)[0].text
    stop = whole[5:8]
    for answer in (llm.generate("Count from 1 to 20", ENDLESS, stop=stop)[0].text,
                   "".join(llm.stream("Count from 1 to 20", ENDLESS, stop=stop))):  # fmt: skip
        assert answer == whole[: whole.index(stop)]


def test_a_stream_is_the_completion_in_pieces(llm: LLM) -> None:
    stream = llm.stream("Count from 1 to 20", ENDLESS)
    assert stream.completion is None
    pieces = list(stream)
    assert len(pieces) > 5
    (completion,) = llm.generate("Count from 1 to 20", ENDLESS)
    assert "".join(pieces) == completion.text
    assert stream.completion is not None
    assert stream.completion.tokens == completion.tokens
    assert list(stream) == []


def test_a_stream_of_a_conversation_is_its_answer(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "What is 12 + 7?"}]
    assert "".join(llm.stream_chat(conversation, GREEDY)) == llm.chat(conversation, GREEDY)[0].text


def test_streams_and_calls_of_one_thread_interleave(llm: LLM) -> None:
    prompts = ["Count from 1 to 20", "Repeat after me: tree", "What is 3 + 4?", "Reverse the word: stone"]
    expected = [completion.text for completion in llm.generate(prompts, ENDLESS)]
    rng = random.Random(0)
    streams = {i: llm.stream(prompt, ENDLESS) for i, prompt in enumerate(prompts)}
    texts = [""] * len(prompts)
    while streams:
        i = rng.choice(list(streams))
        try:
            texts[i] += next(streams[i])
        except StopIteration:
            del streams[i]
        if rng.random() < 0.1:
            assert llm.generate(prompts[0], ENDLESS)[0].text == expected[0]
    assert texts == expected
    assert_at_rest(llm)


def test_streams_take_part_in_the_steps_of_other_calls(llm: LLM) -> None:
    stream = llm.stream("Count from 1 to 20", ENDLESS)
    llm.generate("Repeat after me: tree", LONG)
    assert alive(llm.counters()) == 0  # all of its answer is computed before it is read
    assert "".join(stream) == llm.generate("Count from 1 to 20", ENDLESS)[0].text


@pytest.mark.parametrize("how", ["closed", "dropped", "left by a loop", "left by a with block", "in a cycle"])
def test_a_stream_that_is_not_read_to_its_end_ends_its_request(llm: LLM, how: str) -> None:
    stream = llm.stream("Count from 1 to 20", LONG)
    next(stream)
    match how:
        case "closed":
            stream.close()
            assert_at_rest(llm)  # closing does not wait for the next call
            assert list(stream) == []
        case "left by a loop":
            for _ in stream:
                break
            del stream
        case "left by a with block":
            with stream:
                pass
            assert_at_rest(llm)
        case "in a cycle":
            cycle: list[object] = [stream]
            cycle.append(cycle)
            del cycle, stream
            gc.collect()
        case _:
            del stream
    before = llm.counters()
    llm.generate("a", SamplingParams(max_tokens=2, ignore_eos=True))
    assert llm.counters().num_tokens - before.num_tokens < 10
    assert_at_rest(llm)


def test_no_python_code_runs_when_a_stream_is_dropped(llm: LLM) -> None:
    """A signal handler could raise in such code, and what is raised in a finalizer is lost: so would Ctrl-C be."""
    stream = llm.stream("Count from 1 to 20", LONG)
    next(stream)
    calls: list[str] = []
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        del stream
    finally:
        sys.setprofile(None)
    assert calls == []
    llm.generate("a", SamplingParams(max_tokens=2, ignore_eos=True))
    assert_at_rest(llm)


def test_a_stream_that_is_dropped_during_a_step_is_ended_by_the_next(llm: LLM) -> None:
    streams = [llm.stream([7, 8, n], LONG) for n in range(4)]
    next(streams[0])
    engine = engine_of(llm)._engine  # pyright: ignore[reportPrivateUsage]
    advance = type(engine).advance

    def dropping(pending: object) -> object:
        if streams:
            streams.pop()
        return advance(engine, pending)  # pyright: ignore[reportArgumentType]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(engine), "advance", lambda _, pending: dropping(pending))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
        assert len(llm.generate("a", ENDLESS)[0].tokens) == 24
    assert_at_rest(llm)


def test_a_second_question_reuses_the_prefix(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "Repeat after me: the quick brown fox jumps over the lazy dog"}]
    first = llm.chat(conversation, GREEDY)[0]
    again = llm.chat(conversation, GREEDY)[0]
    assert again.tokens == first.tokens
    assert again.num_cached_tokens >= 16


def test_a_prompt_that_is_too_long_is_refused_with_both_lengths_and_the_others_are_answered(llm: LLM) -> None:
    longest = llm.info.max_length
    refused, answered = llm.generate([[1] * (longest + 1), "a"], GREEDY)
    assert refused.finish is FinishReason.REFUSED
    assert refused.refusal is not None
    assert str(longest) in refused.refusal.message
    assert str(longest + 1) in refused.refusal.message
    assert "maximum context length" in repr(refused)
    assert answered.finish is not FinishReason.REFUSED
    with pytest.raises(ValueError, match="maximum context length"):
        next(llm.stream([1] * (longest + 1), GREEDY))
    assert_at_rest(llm)


def test_a_completion_has_a_short_repr(llm: LLM) -> None:
    (completion,) = llm.generate("Count from 1 to 20", LONG)
    assert len(repr(completion)) < 150
    assert "500 tokens, finish=length" in repr(completion)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("speculative", ["ngram", "draft", "eagle"])
def test_speculation_changes_no_token(llm: LLM, speculative: Literal["ngram", "draft", "eagle"], overlap: bool) -> None:
    prompts = ["Count from 1 to 20", "Repeat after me: tree tree tree tree", "one two three one two three one"]
    sampled = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=40, ignore_eos=True)
    options: dict[str, Any] = {"speculative_num_tokens": 3, "speculative_control": "fixed", "overlap": overlap}
    with LLM(max_total_tokens=4096, max_running=8, speculative=speculative, **options) as drafting:
        for sampling in (LONG, sampled):
            plain, drafted = llm.generate(prompts, sampling), drafting.generate(prompts, sampling)
            assert [one.tokens for one in drafted] == [one.tokens for one in plain]
            assert [one.num_drafted_tokens for one in plain] == [0, 0, 0]
            assert all(one.num_accepted_tokens <= one.num_drafted_tokens for one in drafted)
        counts = drafting.counters().speculation
        assert counts is not None
        assert 0 < counts.num_accepted < counts.num_drafted
        assert counts.num_drafted >= sum(one.num_drafted_tokens for one in drafted) > 0
        assert_at_rest(drafting)
    assert llm.counters().speculation is None


def test_an_error_in_a_call_ends_its_requests_and_not_those_of_others(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = llm.stream("Count from 1 to 20", ENDLESS)
    num_pushes = iter(range(1000))

    def failing(tokens: object) -> str:
        if next(num_pushes) > 3:
            raise RuntimeError("the decoder has failed")
        return ""

    with monkeypatch.context() as patch:
        patch.setattr("pagewood.engine.text.TextStream.push", lambda _, tokens: failing(tokens))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
        with pytest.raises(RuntimeError, match="the decoder has failed"):
            llm.generate(["a", "b", "c"], LONG)
    assert alive(llm.counters()) <= 4
    assert len("".join(stream)) > 20
    assert_at_rest(llm)


def interrupt_main(_: int, __: FrameType | None) -> None:
    raise KeyboardInterrupt


@pytest.mark.timeout(300, method="thread")  # the test uses the timer of the other method
def test_ctrl_c_at_any_moment_leaves_the_llm_usable(llm: LLM) -> None:
    rng = random.Random(1)
    prompts = [[9, 10, n] for n in range(10)]
    expected = [completion.tokens for completion in llm.generate(prompts, ENDLESS)]
    started = time.perf_counter()
    llm.generate(prompts, ENDLESS)
    usual_s = time.perf_counter() - started

    def interrupt_later(kind: int, delay_s: float) -> None:
        def fire() -> None:
            time.sleep(delay_s)
            if kind == 0:
                _thread.interrupt_main()
            else:
                os.kill(os.getpid(), signal.SIGINT)

        if kind == 2:
            signal.setitimer(signal.ITIMER_REAL, delay_s)
        else:
            _thread.start_new_thread(fire, ())

    previous = signal.signal(signal.SIGALRM, interrupt_main)
    try:
        for turn in range(50):
            other = llm.stream("Count from 1 to 20", ENDLESS)
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012  # the interrupt may come at any moment from here on
                interrupt_later(turn % 3, rng.uniform(0.0001, usual_s))
                while True:
                    if turn % 2:
                        llm.generate(prompts, ENDLESS)
                    else:
                        "".join(llm.stream(prompts[0], ENDLESS))
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            assert signal.getsignal(signal.SIGALRM) is interrupt_main
            assert engine_of(llm).violation() is None
            if turn % 5 == 0:
                assert len("".join(other)) > 20  # it was not this call that was interrupted
                assert [completion.tokens for completion in llm.generate(prompts, ENDLESS)] == expected
                assert_at_rest(llm)
            del other
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert [completion.tokens for completion in llm.generate(prompts, ENDLESS)] == expected
    assert_at_rest(llm)


def test_a_call_during_a_call_of_another_thread_is_an_error(llm: LLM) -> None:
    stream = llm.stream("Count from 1 to 20", ENDLESS)
    errors: list[BaseException] = []
    is_computing, tried = threading.Event(), threading.Event()

    def call() -> None:
        is_computing.wait()
        for attempt in (lambda: llm.generate("a", GREEDY), lambda: next(stream), lambda: llm.stream("a"), llm.close):
            try:
                attempt()
            except BaseException as error:
                errors.append(error)
        tried.set()

    thread = threading.Thread(target=call)
    thread.start()
    engine = engine_of(llm)._engine  # pyright: ignore[reportPrivateUsage]
    advance = type(engine).advance

    def waiting(pending: object) -> object:
        is_computing.set()
        tried.wait()
        return advance(engine, pending)  # pyright: ignore[reportArgumentType]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(engine), "advance", lambda _, pending: waiting(pending))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
        (completion,) = llm.generate("a", ENDLESS)
    thread.join()
    assert [type(error) for error in errors] == [LLMBusyError] * 4
    assert "AsyncLLM" in str(errors[0])
    assert len(completion.tokens) == 24
    assert len("".join(stream)) > 20  # the stream that was read during a step can continue
    assert_at_rest(llm)


def test_threads_may_use_one_llm_in_turn(llm: LLM) -> None:
    expected = llm.generate("Count from 1 to 20", ENDLESS)[0].text
    stream = llm.stream("Count from 1 to 20", ENDLESS)
    texts = [next(stream)]
    thread = threading.Thread(target=lambda: texts.extend(stream))
    thread.start()
    thread.join()
    assert "".join(texts) == expected


def test_a_closed_llm_says_so() -> None:
    llm = LLM(max_total_tokens=1024, max_running=2)
    stream = llm.stream("Count from 1 to 20", LONG)
    next(stream)
    llm.close()
    llm.close()
    for call in (lambda: llm.generate("a"), lambda: llm.chat([]), lambda: llm.stream("a"), lambda: next(stream)):
        with pytest.raises(LLMClosedError, match="the LLM is closed"):
            call()
    assert list(stream) == []
    stream.close()
    assert alive(llm.counters()) == 0


def fail(*_: object) -> None:
    raise ZeroDivisionError


def test_an_error_that_escapes_from_a_step_is_raised_by_every_later_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(max_total_tokens=1024, max_running=2) as llm:
        stream: Stream = llm.stream("Count from 1 to 20", LONG)
        with monkeypatch.context() as patch:
            patch.setattr("pagewood.engine.core.steps.plan.Planner.plan", fail)
            with pytest.raises(ZeroDivisionError):
                llm.generate("a", GREEDY)
        for call in (lambda: llm.generate("a", GREEDY), lambda: next(stream)):
            with pytest.raises(EngineFailedError, match="ZeroDivisionError") as raised:
                call()
            assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_the_package_loads_its_parts_on_first_use() -> None:
    code = (
        "import sys, pagewood.engine as e; assert 'torch' not in sys.modules; e.AsyncLLM; "
        "assert 'torch' not in sys.modules; e.LLM; e.Completion; assert set(e.__all__) <= set(dir(e)) | {*e._MODULES}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
