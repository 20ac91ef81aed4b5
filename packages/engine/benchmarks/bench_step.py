# pyright: basic
"""Host time of one decode step: commands, plan, batch, retire, answers; the device is a no-op."""

from __future__ import annotations

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from pagewood.engine.api import EngineConfig, SamplingParams, Submit
from pagewood.engine.assemble import assemble
from pagewood.engine.core.loop import Engine, EngineInfo
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.result import StepResult
from pagewood.engine.links import MemoryInbox, MemoryOutbox


class NoStep:
    """A step that takes no time."""

    def __init__(self, num_sampled: int) -> None:
        self._result = StepResult.of_one_each(np.full(num_sampled, 5, np.int32))

    def wait(self) -> StepResult:
        return self._result


class NoDevice:
    """A runner that computes nothing."""

    def launch(self, batch: Batch) -> NoStep:
        return NoStep(len(batch.sampled))

    def close(self) -> None: ...


def decoding_engine(*, num_requests: int, page_size: int) -> tuple[Engine, MemoryOutbox]:
    """An engine that is decoding the given number of requests, each of 100 prompt tokens."""
    inbox, outbox = MemoryInbox(), MemoryOutbox()
    num_output = 20_000
    engine = assemble(
        EngineConfig(max_running=num_requests, chunked_prefill_size=4096, page_size=page_size, max_prefills=64),
        info=EngineInfo(
            model_name="none",
            max_length=100 + num_output,
            vocab_size=32_000,
            eos_token_ids=(),
            num_pages=num_requests * (100 + num_output) // page_size,
            page_size=page_size,
        ),
        make_runner=lambda kv: NoDevice(),
        inbox=inbox,
        outbox=outbox,
    )
    rng = np.random.default_rng(0)
    for index in range(num_requests):
        tokens = rng.integers(0, 32_000, 100, dtype=np.int32).tobytes()
        inbox.put(Submit(request_id=str(index), tokens=tokens, sampling=SamplingParams(max_tokens=num_output)))
    for _ in range(30):
        engine.step()
    assert engine.counters().num_running == num_requests
    outbox.take()
    return engine, outbox


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("num_requests", [1, 32, 256])
def test_decode_step(benchmark: BenchmarkFixture, num_requests: int, page_size: int) -> None:
    engine, outbox = decoding_engine(num_requests=num_requests, page_size=page_size)

    def step() -> None:
        engine.step()
        outbox.take()

    benchmark.pedantic(step, rounds=400, warmup_rounds=20)
