"""Time of planning a step while a burst of requests that repeat one long prompt waits for it to be computed."""

# pyright: basic
# pytest-benchmark is typed in part only.

import numpy as np
import pytest
from bench_step import NoDevice
from pytest_benchmark.fixture import BenchmarkFixture

from pagewood.engine.api import EngineConfig, SamplingParams, Submit
from pagewood.engine.assemble import assemble
from pagewood.engine.core.loop import EngineInfo
from pagewood.engine.links import MemoryInbox, MemoryOutbox

PAGE_SIZE = 16
CHUNK = 64


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
@pytest.mark.parametrize(("num_repeats", "num_shared"), [(0, 20_000), (50, 20_000), (300, 20_000), (250, 100_000)])
def test_step(benchmark: BenchmarkFixture, num_repeats: int, num_shared: int, policy: str) -> None:
    inbox, outbox = MemoryInbox(), MemoryOutbox()
    engine = assemble(
        EngineConfig(chunked_prefill_size=CHUNK, page_size=PAGE_SIZE, schedule_policy=policy),
        info=EngineInfo(
            model_name="none",
            max_length=num_shared + 100,
            vocab_size=32_000,
            eos_token_ids=(),
            num_pages=2 * num_shared // PAGE_SIZE,
            page_size=PAGE_SIZE,
        ),
        make_runner=lambda kv: NoDevice(),
        inbox=inbox,
        outbox=outbox,
    )
    prefix = np.random.default_rng(0).integers(0, 32_000, num_shared, dtype=np.int32)
    for index in range(num_repeats + 1):
        tokens = np.append(prefix, np.int32(index)).tobytes()
        inbox.put(Submit(request_id=str(index), tokens=tokens, sampling=SamplingParams(max_tokens=8)))
    engine.step()

    def step() -> None:
        engine.step()

    benchmark.pedantic(step, rounds=250, warmup_rounds=30)
    assert engine.counters().num_waiting == num_repeats
