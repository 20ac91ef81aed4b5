"""The simulated device: its times are exact, no result comes before its step ends, and loops do not change tokens."""

from __future__ import annotations

import random
from time import perf_counter
from typing import Any

import numpy as np
import pytest

from pagewood.engine.api import EngineConfig, FinishReason, Grammar, SamplingParams, Submit
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.result import StepResult
from pagewood.engine.testing import (
    SimulatedDevice,
    SimulatedEngine,
    VirtualClock,
    made_up_token,
    oracle_tokens,
    seconds_by,
    simulated_engine,
)
from pagewood.engine.testing.echo_grammar import EchoCompiler, allowed_tokens
from pagewood.schedpolicy import StepModel

LOOPS: dict[str, dict[str, Any]] = {
    "plain": {"overlap": False},
    "overlapped": {"overlap": True},
    "several steps": {"num_continuous_decode_steps": 4},
}
MAX_TOKENS = 21


def submit(index: int, grammar: Grammar | None = None, *, max_tokens: int = MAX_TOKENS) -> Submit:
    return Submit(
        request_id=str(index),
        tokens=np.arange(1, 4 + index, dtype="<i4").tobytes(),
        sampling=SamplingParams(max_tokens=max_tokens, seed=100 + index, ignore_eos=True, grammar=grammar),
    )


def answers(simulated: SimulatedEngine, *submits: Submit) -> dict[str, list[int]]:
    """Return the tokens of all requests."""
    for one in submits:
        simulated.inbox.put(one)
    simulated.run_until_idle()
    simulated.close()
    found: dict[str, list[int]] = {one.request_id: [] for one in submits}
    for delta in simulated.outbox.take():
        assert delta.refusal is None, delta.refusal
        found[delta.request_id] += delta.tokens
    return found


@pytest.mark.parametrize(("loop", "idle_steps"), [("plain", 20), ("overlapped", 0), ("several steps", 5)])
def test_the_host_delays_the_device_only_where_the_loop_lets_it(loop: str, idle_steps: int) -> None:
    clock = VirtualClock()

    def slow_launch(_: Batch) -> float:
        clock.wait_until(clock.now() + 0.002)  # the host's work before the step is launched
        return 0.010

    simulated = simulated_engine(
        EngineConfig(max_running=4, **LOOPS[loop]), step_s=slow_launch, max_length=64, device_clock=clock
    )
    answers(simulated, submit(0), submit(1))
    times = simulated.device.times()
    # One step computes the prompts, 20 decode; the device is idle before a step that was launched too late.
    assert times.num_steps == 21
    assert times.busy_s == pytest.approx(0.21)
    assert times.idle_s == pytest.approx(0.002 * idle_steps)
    assert times.idle_share == pytest.approx(times.idle_s / (0.21 + times.idle_s))


def test_a_result_is_not_there_before_its_step_ends() -> None:
    simulated = simulated_engine(EngineConfig(max_running=4), step_s=0.01, max_length=64)
    begin = perf_counter()
    answers(simulated, submit(0, max_tokens=8))
    assert perf_counter() - begin >= 0.08
    assert simulated.device.times().busy_s == pytest.approx(0.08)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("speculative", ["off", "ngram"])
def test_tokens_are_those_of_seed_and_position_in_every_loop(loop: str, speculative: Any) -> None:
    config = EngineConfig(max_running=4, speculative=speculative, speculative_control="fixed", **LOOPS[loop])
    simulated = simulated_engine(config, step_s=0.0, max_length=64, vocab_size=500)
    found = answers(simulated, *(submit(index) for index in range(6)))
    expected = {
        str(index): [made_up_token(100 + index, 3 + index + i, 500) for i in range(MAX_TOKENS)] for index in range(6)
    }
    assert found == expected
    num_steps = simulated.device.times().num_steps
    assert (num_steps < 2 * MAX_TOKENS) == (speculative == "ngram")  # the first four, then two more


@pytest.mark.parametrize("loop", LOOPS)
def test_the_echo_model_runs_on_the_device(loop: str) -> None:
    simulated = simulated_engine(
        EngineConfig(max_running=4, page_size=4, **LOOPS[loop]),
        step_s=0.0, max_length=40, vocab_size=50, num_pages=24, model="echo",
    )  # fmt: skip
    submits = [submit(index) for index in range(6)]
    found = answers(simulated, *submits)
    for one in submits:
        prompt = np.frombuffer(one.tokens, "<i4").tolist()
        assert found[one.request_id] == oracle_tokens(
            prompt, one.sampling, vocab_size=50, stop_ids=frozenset(), max_length=40
        )


@pytest.mark.parametrize("loop", LOOPS)
def test_requests_with_a_grammar_get_tokens_that_it_allows(loop: str) -> None:
    clock = VirtualClock()
    config = EngineConfig(max_running=4, speculative="ngram", speculative_control="fixed", **LOOPS[loop])
    grammars = [Grammar(kind="regex", text=f"{number} 12 999 0") for number in range(3)]
    simulated = simulated_engine(
        config, step_s=0.01, max_length=64, vocab_size=40, device_clock=clock,
        compiler=EchoCompiler(random.Random(0), 40),
    )  # fmt: skip
    found = answers(simulated, *(submit(index, grammar) for index, grammar in enumerate([*grammars, None])))
    for index, grammar in enumerate(grammars):
        text = found[str(index)]
        for end in range(len(text)):
            assert text[end] in allowed_tokens(grammar, text[:end], frozenset(), 40)
    assert len(found["3"]) == MAX_TOKENS


class Broken:
    """A runner whose steps fail."""

    def launch(self, batch: Batch) -> Broken:
        return self

    def wait(self) -> StepResult:
        raise RuntimeError("out of order")

    def close(self) -> None: ...


def test_a_failure_of_the_runner_ends_the_requests_of_its_step() -> None:
    simulated = simulated_engine(EngineConfig(max_running=4), step_s=0.0, max_length=64)
    simulated.device._runner = Broken()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    simulated.inbox.put(submit(0))
    simulated.run_until_idle()
    [delta] = simulated.outbox.take()
    assert delta.finish is FinishReason.ERROR
    assert delta.refusal is not None
    assert "out of order" in delta.refusal.message
    simulated.close()


def test_times_can_be_forgotten() -> None:
    clock = VirtualClock()
    simulated = simulated_engine(EngineConfig(max_running=4), step_s=0.01, max_length=64, device_clock=clock)
    simulated.inbox.put(submit(0))
    simulated.run_until_idle()
    simulated.outbox.take()
    simulated.device.forget_times()
    clock.wait_until(5.0)  # not idle time of a step
    answers(simulated, submit(1, max_tokens=3))
    times = simulated.device.times()
    assert (times.num_steps, times.idle_s) == (3, 0.0)


def test_a_model_of_steps_tells_prompts_from_decodes() -> None:
    clock = VirtualClock()
    model = StepModel(base_s=1.0, prefill_s=0.01, decode_s=0.1, kv_s=0.001, pair_s=0.002)
    simulated = simulated_engine(
        EngineConfig(max_running=4, overlap=False), step_s=seconds_by(model), max_length=64, device_clock=clock
    )
    answers(simulated, submit(7, max_tokens=3))  # a prompt of 10 tokens
    prompt_s, decodes_s = 10 * 0.01 + 55 * 0.002, 2 * 0.1 + (11 + 12) * 0.001
    assert simulated.device.times().busy_s == pytest.approx(3 * 1.0 + prompt_s + decodes_s)


def test_a_negative_time_is_refused() -> None:
    with pytest.raises(ValueError, match=r"step_s must be >= 0, got -1\.0"):
        SimulatedDevice(Broken(), step_s=-1.0)
