"""What ranks of one host write, those of another read; a host that is lost, silent or wrong ends the group."""

# pyright: basic
# numba's kernels have no types.

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from itertools import combinations

import numpy as np
import pytest

from pagewood.engine.core.messages.result import StepResult
from pagewood.engine.runner.cpu.compiled.exchange import EXCHANGE, NUM_LANES, PIECE
from pagewood.engine.runner.cpu.compiled.hand_over import DEPTH, HAND_OVER
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.cpu.program.tape import Buffer
from pagewood.engine.runner.ranks.hosts.frames import ALIVE, COUNT, END, PIECE_OF_LANE, RESULTS, STEP
from pagewood.engine.runner.ranks.hosts.relay import Relay
from pagewood.engine.runner.ranks.result_stream import ResultStream
from pagewood.engine.runner.ranks.segment import NUM_KEPT, Segment, segment_bytes
from pagewood.engine.runner.ranks.stage_memory import RESULT_BYTES, StageMemory, stage_bytes
from stand_ins.tapes import write_down

Connected = Callable[..., tuple[list[Segment], list[StageMemory]]]


def streams() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection over TCP."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        one = socket.create_connection(listening.getsockname())
        return one, listening.accept()[0]


@pytest.fixture
def connected() -> Generator[Connected]:
    """Return a function that connects segments of several nodes with each other; all is closed in the end.

    With stages, it also returns what these share on each node.
    """
    segments: list[Segment] = []
    relays: list[Relay] = []

    def connect(num_nodes: int, per_node: int, num_stages: int = 1) -> tuple[list[Segment], list[StageMemory]]:
        count = num_nodes * per_node
        segments.extend(Segment.in_memory(np.zeros(segment_bytes(count), np.uint8), count) for _ in range(num_nodes))
        stages: list[StageMemory] = []
        if num_stages > 1:
            size = stage_bytes(count, num_stages)
            stages += [StageMemory.in_memory(np.zeros(size, np.uint8), one, num_stages) for one in segments]
        ranks = [range(node * per_node, (node + 1) * per_node) for node in range(num_nodes)]
        for one, other in combinations(range(num_nodes), 2):
            for here, there, stream in zip((one, other), (other, one), streams(), strict=True):
                name = f"node {there}"
                own = stages[here] if stages else None
                relays.append(Relay(segments[here], own, ranks[here], ranks[there], name, stream, heartbeat_s=5.0))
        return segments, stages

    yield connect
    for segment in segments:
        segment.end(0, "the test is over")
    for relay in relays:
        relay.close()


@pytest.mark.parametrize(("num_nodes", "per_node"), [(2, 1), pytest.param(3, 2, marks=pytest.mark.slow)])
def test_sums_and_columns_are_those_of_one_host(num_nodes: int, per_node: int, connected: Connected) -> None:
    segments, _ = connected(num_nodes, per_node)
    kernel = warm_up(16, others=[EXCHANGE])
    count = num_nodes * per_node
    wrong: list[str] = []

    def run(rank: int) -> None:
        exchange = segments[rank // per_node].exchange(rank)
        for shape in ((1, 1024), (40, 1000), (2, PIECE), (1, 300_001)):
            made = np.random.default_rng(shape[0])
            own = np.empty(shape, np.float32)
            add = write_down(exchange.sum_ranks, own, kernel=kernel, num_threads=1)
            gather = write_down(
                partial(exchange.gather_ranks, size=count * shape[1]), own, kernel=kernel, num_threads=1
            )
            for _ in range(3):
                parts = made.standard_normal((count, *shape), np.float32)
                own[:] = parts[rank]
                expected = parts[0]
                for part in parts[1:]:
                    expected = expected + part
                if not np.array_equal(add(), expected):
                    wrong.append(f"sum of {shape} on rank {rank}")
                if not np.array_equal(gather(), np.concatenate(list(parts), axis=1)):
                    wrong.append(f"columns of {shape} on rank {rank}")

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads), [one.end_reason for one in segments]
    assert not wrong


def test_steps_arrive_with_their_digests(connected: Connected) -> None:
    segments, _ = connected(2, 1)
    for number in range(1, 3 * NUM_KEPT):
        for rank, segment in enumerate(segments):
            segment.digests[rank, number % NUM_KEPT] = number, -number
            segment.launched[rank, 0] = number
            segment.end_step(rank)
        for rank, segment in enumerate(segments):
            segment.agree(number)
            assert segment.digests[1 - rank, number % NUM_KEPT].tolist() == [number, -number]
            assert segment.end_reason is None
    segments[1].digests[1, 3 * NUM_KEPT % NUM_KEPT] = 5, 5
    for rank, segment in enumerate(segments):
        segment.end_step(rank)
    segments[0].agree(3 * NUM_KEPT)
    assert "rank 1 has other tokens" in (segments[0].end_reason or "")
    assert "rank 1 has other tokens" in (segments[1].wait_for_end(60) or "")
    assert segments[1].ended[0] == 2


def test_beats_are_those_of_the_rank(connected: Connected) -> None:
    segments, _ = connected(2, 2)
    segments[1].beats[3, 0] = 7
    while segments[0].beats[3, 0] != 7:
        assert segments[0].wait_for_end(0.01) is None
    assert segments[0].beats[:, 0].tolist() == [0, 0, 0, 7]


@pytest.mark.parametrize("shape", [(3, 100), (2 * NUM_LANES * DEPTH, PIECE)])
def test_rows_of_a_stage_arrive_on_the_next_host(shape: tuple[int, int], connected: Connected) -> None:
    """The second shape does not fit the places of a channel, so what was read is told to the sender's host."""
    segments, stages = connected(2, 1, 2)
    relays = [stages[rank].relay(rank, np.zeros(3, np.int64)) for rank in range(2)]
    kernel, other = (warm_up(16, others=[EXCHANGE, HAND_OVER]) for _ in range(2))
    own = np.empty(shape, np.float32)

    def sending(x: Buffer) -> Buffer:
        relays[0].send(x)
        return x

    send = write_down(sending, own, kernel=kernel, num_threads=1)
    tokens = np.zeros((shape[0], 1), np.int32)
    take = write_down(lambda x: relays[1].receive(x, shape[1]), tokens, kernel=other, num_threads=1)
    parts = [np.random.default_rng(i).standard_normal(shape, np.float32) for i in range(3)]

    def give() -> None:
        for part in parts:
            own[:] = part
            send()

    thread = threading.Thread(target=give, daemon=True)
    thread.start()
    for part in parts:
        np.testing.assert_array_equal(take(), part)
    thread.join(60)
    assert not thread.is_alive()
    assert [one.end_reason for one in segments] == [None, None]
    assert not segments[1].arrivals.any()


def test_a_stage_that_sends_does_not_wait_for_the_other_host(connected: Connected) -> None:
    """Several steps of a few rows are on their way before the other host reads the first."""
    _, stages = connected(2, 1, 2)
    relays = [stages[rank].relay(rank, np.zeros(3, np.int64)) for rank in range(2)]
    kernel, other = (warm_up(16, others=[EXCHANGE, HAND_OVER]) for _ in range(2))
    own = np.empty((4, 100), np.float32)

    def sending(x: Buffer) -> Buffer:
        relays[0].send(x)
        return x

    send = write_down(sending, own, kernel=kernel, num_threads=1)
    take = write_down(lambda x: relays[1].receive(x, 100), np.zeros((4, 1), np.int32), kernel=other, num_threads=1)
    for number in range(DEPTH):
        own[:] = number
        send()
    for number in range(DEPTH):
        assert (take() == number).all()


@pytest.mark.parametrize(("num_nodes", "per_node", "num_stages"), [(2, 1, 2), (3, 2, 3), (2, 3, 3)])
def test_results_reach_the_stages_of_all_hosts(
    num_nodes: int, per_node: int, num_stages: int, connected: Connected
) -> None:
    """Long ones go in parts; the last case has a stage that is on two hosts."""
    count = num_nodes * per_node
    _, stages = connected(num_nodes, per_node, num_stages)
    streams = [ResultStream(stages[rank // per_node], rank) for rank in range(count)]
    sizes = [3, 0, RESULT_BYTES // 4, 17, RESULT_BYTES // 4 + 1, 5]
    wrong: list[int] = []

    def tokens_of(number: int) -> np.ndarray:
        return np.random.default_rng(number).integers(0, 1000, sizes[number - 1], np.int32)

    def read(rank: int) -> None:
        for number in range(1, 1 + len(sizes)):
            found = streams[rank].take(number)
            if found is None or not np.array_equal(found.tokens, tokens_of(number)):
                wrong.append(rank)

    readers = [rank for rank in range(count) if streams[rank].reads]
    assert readers == list(range(count - count // num_stages))
    threads = [threading.Thread(target=read, args=(rank,), daemon=True) for rank in readers]
    for thread in threads:
        thread.start()
    for number, size in enumerate(sizes, 1):
        streams[len(readers)].write(number, StepResult(tokens=tokens_of(number), counts=np.ones(size, np.int32)))
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong


def test_witnesses_come_with_the_steps(connected: Connected) -> None:
    segments, stages = connected(2, 1, 2)
    for number in range(1, 2 * NUM_KEPT):
        for rank in range(2):
            stages[rank].witnesses[rank, number % NUM_KEPT] = (10 * number, 10 * number * rank, 3, 7)
            segments[rank].end_step(rank)
        segments[0].agree(number)
        stages[0].agree(number)
        assert segments[0].end_reason is None
    number = 2 * NUM_KEPT
    stages[1].witnesses[1, number % NUM_KEPT] = (1, 5, 3, 7)
    for rank in range(2):
        segments[rank].end_step(rank)
    segments[0].agree(number)
    stages[0].agree(number)
    assert "rank 1 has received other hidden states than rank 0 sent" in (segments[1].wait_for_end(60) or "")


@contextmanager
def node_0(*, heartbeat_s: float) -> Generator[tuple[Segment, socket.socket]]:
    """Yield the segment of node 0 of two, with two ranks each, and the stream to it that node 1 would have."""
    segment = Segment.in_memory(np.zeros(segment_bytes(4), np.uint8), 4)
    own, other = streams()
    relay = Relay(segment, None, range(2), range(2, 4), "node 1 (10.0.0.2)", own, heartbeat_s=heartbeat_s)
    yield segment, other
    segment.end(0, "the test is over")
    relay.close()
    other.close()


@pytest.fixture
def alone() -> Generator[tuple[Segment, socket.socket]]:
    with node_0(heartbeat_s=60.0) as found:
        yield found


def frame(kind: int, rank: int, first: int = 0, second: int = 0, rest: bytes = b"") -> bytes:
    return struct.pack("<4q", kind, rank, first, second) + rest


def test_a_silent_host_ends_the_group() -> None:
    num_signs = 0
    for _ in range(20):
        with node_0(heartbeat_s=0.5) as (segment, other):
            num_signs = 0
            while num_signs < 8 and segment.end_reason is None:  # it is not, as long as something comes
                other.sendall(frame(ALIVE, 0))
                segment.wait_for_end(0.1)
                num_signs += segment.end_reason is None
            assert segment.wait_for_end(60) == "node 1 (10.0.0.2) has given no sign of life for 0.5 s"
            assert segment.ended[0] == 3
        if num_signs == 8:  # otherwise this thread stood still for so long
            return
    raise AssertionError(f"the group has ended after {num_signs} signs of life")


def test_a_host_that_is_gone_ends_the_group(alone: tuple[Segment, socket.socket]) -> None:
    segment, other = alone
    other.close()
    assert segment.wait_for_end(60) in {f"node 1 (10.0.0.2) {how}" for how in (
        "has closed its connection", "cannot be reached")}  # fmt: skip


def test_a_host_tells_why_its_group_has_ended(alone: tuple[Segment, socket.socket]) -> None:
    segment, other = alone
    text = b"rank 3 has stumbled"
    other.sendall(frame(ALIVE, 0) + frame(END, 0, len(text), 3, text + bytes(-len(text) % 8)))
    assert segment.wait_for_end(60) == text.decode()
    assert segment.ended[0] == 4


WRONG = {
    "a kind that there is not": frame(17, 2),
    "a counter that there is not": frame(COUNT, 4, 5),
    "a negative counter": frame(COUNT, -1, 5),
    "a rank of the other host": frame(STEP, 1, 5, 5),
    "results without stages": frame(RESULTS, 0, 8, 0, bytes(8)),
    "a rank that there is not": frame(STEP, 4, 5, 5),
    "a negative rank": frame(STEP, -1, 5, 5),
    "a lane that there is not": frame(PIECE_OF_LANE, 2 * NUM_LANES, 1),
    "a negative lane": frame(PIECE_OF_LANE, -1, 1),
    "too many elements": frame(PIECE_OF_LANE, 0, PIECE + 1),
    "less than no elements": frame(PIECE_OF_LANE, 0, -1),
    "a long text": frame(END, 0, 513),
    "a text of a negative length": frame(END, 0, -8),
    "anything": bytes(range(1, 256)) * 3,
}


@pytest.mark.parametrize("name", WRONG)
def test_frames_that_no_rank_sends_end_the_group_and_write_nothing(
    name: str, alone: tuple[Segment, socket.socket]
) -> None:
    segment, other = alone
    other.sendall(WRONG[name])
    assert segment.wait_for_end(60) == "node 1 (10.0.0.2) has sent what no rank sends"
    assert not segment.places.any()
    for words in (segment.arrivals, segment.beats, segment.launched, segment.steps, segment.digests):
        assert not words.any()
