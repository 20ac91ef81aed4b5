"""What stages give each other: rows through channels, and results through a stream, between threads."""

# pyright: basic
# numba's kernels have no types.

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pagewood.engine.core.loop import RunnerLostError
from pagewood.engine.core.messages.result import StepResult
from pagewood.engine.runner.cpu.compiled.exchange import EXCHANGE, NUM_LANES, PIECE
from pagewood.engine.runner.cpu.compiled.hand_over import DEPTH, HAND_OVER
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.cpu.program.relay import ChannelRelay
from pagewood.engine.runner.cpu.program.tape import Buffer
from pagewood.engine.runner.ranks.result_stream import ResultStream
from pagewood.engine.runner.ranks.segment import Segment, segment_bytes
from pagewood.engine.runner.ranks.stage_memory import RESULT_BYTES, StageMemory, stage_bytes
from stand_ins.tapes import write_down

PATIENCE_S = 60


def stage_memory(num_ranks: int, num_stages: int) -> StageMemory:
    segment = Segment.in_memory(np.zeros(segment_bytes(num_ranks), np.uint8), num_ranks)
    return StageMemory.in_memory(np.zeros(stage_bytes(num_ranks, num_stages), np.uint8), segment, num_stages)


def sending(relay: ChannelRelay) -> Callable[[Buffer], Buffer]:
    def write(x: Buffer) -> Buffer:
        relay.send(x)
        return x

    return write


def relays(memory: StageMemory) -> tuple[ChannelRelay, ChannelRelay]:
    return memory.relay(0, np.zeros(3, np.int64)), memory.relay(1, np.zeros(3, np.int64))


@pytest.mark.parametrize("threads", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("shape", [(1, 100), (7, 20_000), (2 * NUM_LANES * DEPTH, PIECE)])
def test_rows_arrive_in_their_order(shape: tuple[int, int], threads: tuple[int, int]) -> None:
    """The last shape does not fit the places of a channel, so the sender waits for the other one."""
    memory = stage_memory(2, 2)
    sender, receiver = relays(memory)
    kernel, other = (warm_up(16, others=[EXCHANGE, HAND_OVER]) for _ in range(2))
    own = np.empty(shape, np.float32)
    tokens = np.zeros((shape[0], 1), np.int32)
    send = write_down(sending(sender), own, kernel=kernel, num_threads=threads[0])
    take = write_down(lambda x: receiver.receive(x, shape[1]), tokens, kernel=other, num_threads=threads[1])
    num = 3 if shape[0] > 100 else 12
    parts = [np.random.default_rng(i).standard_normal(shape, np.float32) for i in range(num)]

    def give() -> list[int]:
        sleeps, sums = random.Random(0), list[int]()
        for part in parts:
            own[:] = part
            time.sleep(sleeps.choice((0.0, 0.0, 0.002)))
            send()
            sums.append(int(sender.states[0]))
        return sums

    with ThreadPoolExecutor(1) as pool:
        given = pool.submit(give)
        sums: list[int] = []
        for part in parts:
            np.testing.assert_array_equal(take(), part)
            sums.append(int(receiver.states[1]))
        assert given.result(PATIENCE_S) == sums


def test_nothing_waits_for_a_group_that_has_ended() -> None:
    memory = stage_memory(2, 2)
    sender, _ = relays(memory)
    kernel, other = (warm_up(16, others=[EXCHANGE, HAND_OVER]) for _ in range(2))
    large = np.zeros((2 * NUM_LANES * DEPTH, PIECE), np.float32)
    send = write_down(sending(sender), large, kernel=kernel, num_threads=1)
    stream = ResultStream(memory, 0)
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(send), pool.submit(stream.take, 1)]
        time.sleep(0.05)
        assert not any(call.done() for call in calls)
        memory.segment.end(1, "a test ends it")
        calls[0].result(PATIENCE_S)
        with pytest.raises(RunnerLostError, match="a test ends it"):
            calls[1].result(PATIENCE_S)
    memory = stage_memory(2, 2)
    take = write_down(
        lambda x: memory.relay(1, np.zeros(3, np.int64)).receive(x, 10), np.zeros((3, 1), np.int32), kernel=other,
        num_threads=1,
    )  # fmt: skip
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(take)
        time.sleep(0.05)
        assert not call.done()
        memory.segment.end(0, "a test ends it")
        call.result(PATIENCE_S)


def result(number: int, size: int) -> StepResult:
    tokens = np.random.default_rng(number).integers(0, 1000, size, np.int32)
    return StepResult(tokens=tokens, counts=np.ones(size, np.int32))


def test_results_reach_all_earlier_stages() -> None:
    """Long ones go in parts; a step may have failed, and a rank that has failed itself passes over its result."""
    memory = stage_memory(6, 3)
    streams = [ResultStream(memory, rank) for rank in range(6)]
    assert [stream.writes for stream in streams] == [False] * 4 + [True, False]
    assert [stream.reads for stream in streams] == [True] * 4 + [False] * 2
    sizes = [3, 0, RESULT_BYTES // 4, 17, RESULT_BYTES, 1, 5]
    failed = 4

    def read(rank: int) -> None:
        for number, size in enumerate(sizes, 1):
            if rank == 2 and number == 3:
                continue
            time.sleep(0.001 * rank)
            found = streams[rank].take(number)
            if number == failed:
                assert found is None
                continue
            assert found is not None
            np.testing.assert_array_equal(found.tokens, result(number, size).tokens)

    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(read, rank) for rank in range(4)]
        for number, size in enumerate(sizes, 1):
            streams[4].write(number, None if number == failed else result(number, size))
        for call in calls:
            call.result(PATIENCE_S)


def test_a_result_that_is_missing_ends_the_group() -> None:
    memory = stage_memory(2, 2)
    reader, writer = (ResultStream(memory, rank) for rank in range(2))
    writer.write(2, result(2, 3))
    with pytest.raises(RunnerLostError, match="rank 1 has not computed step 1"):
        reader.take(1)
    assert memory.segment.end_reason == "rank 1 has not computed step 1"


def test_witnesses_of_ranks_and_stages_are_compared() -> None:
    for rank, column, message in (
        (3, 3, "rank 3 has computed another batch than rank 0 in step 5"),
        (2, 2, "rank 2 has other tokens or drafts than rank 0 in step 5"),
        (1, 0, "rank 1 has other hidden states than rank 0 after step 5"),
        (2, 1, "rank 2 has received other hidden states than rank 0 sent in step 5"),
        (3, 0, "rank 3 has other hidden states than rank 2 after step 5"),
    ):
        memory = stage_memory(4, 2)
        memory.witnesses[:, 5] = [[7, 0, 5, 1], [7, 0, 5, 1], [8, 7, 5, 1], [8, 7, 5, 1]]
        memory.agree(5)
        assert memory.segment.end_reason is None
        memory.witnesses[rank, 5, column] += 1
        memory.agree(5)
        assert memory.segment.end_reason == message
