"""The time of a batch and of a result as bytes, there and back, at 256 rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagewood.engine.api import SamplingParams
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.codec import Message, decode, encode
from pagewood.engine.core.messages.result import StepResult
from pagewood.engine.core.messages.sampling_table import SamplingArrays

NUM_ROWS = 256
ROWS = np.arange(NUM_ROWS, dtype=np.int32)
ONES = np.ones_like(ROWS)
EMPTY = np.empty(0, np.int32)
MESSAGES: dict[str, Message] = {
    "batch": Batch(
        page_rows=ROWS[:16], page_columns=ROWS[:16], page_ids=ROWS[:16], token_rows=EMPTY, token_positions=EMPTY,
        token_ids=EMPTY, rows=ROWS, starts=ROWS, counts=ONES, sampled=ROWS, num_promised=ONES,
        sampling=SamplingArrays.of([SamplingParams()] * NUM_ROWS, range(NUM_ROWS)),
    ),
    "result": StepResult(tokens=ROWS, counts=ONES),
}  # fmt: skip


@pytest.mark.parametrize("name", MESSAGES)
def test_encode(benchmark: Any, name: str) -> None:
    benchmark(encode, MESSAGES[name])


@pytest.mark.parametrize("name", MESSAGES)
def test_decode(benchmark: Any, name: str) -> None:
    benchmark(decode, encode(MESSAGES[name]))
