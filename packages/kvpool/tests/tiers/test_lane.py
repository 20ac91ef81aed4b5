from threading import Event

import pytest

from pagewood.kvpool.tiers import ThreadLane, Transfer, TransferCancelled
from pagewood.kvpool.tiers.testing import ManualLane


def test_a_layer_can_be_waited_for_before_the_others_have_arrived() -> None:
    lane = ThreadLane("test", max_bytes_in_flight=100)
    go_on = Event()

    def work(transfer: Transfer) -> None:
        transfer.advance(num_layers=1)
        assert go_on.wait(10)
        transfer.advance(num_layers=2)

    transfer = lane.submit(work, 10)
    assert transfer is not None
    assert transfer.wait_layer(0, 10)
    assert not transfer.wait_layer(1, 0.0)
    assert not transfer.is_done
    go_on.set()
    assert transfer.wait_layer(1, 10)
    assert transfer.wait(10)
    lane.close()


def test_a_lane_accepts_no_more_bytes_than_its_limit_except_for_a_single_transfer() -> None:
    lane = ThreadLane("test", max_bytes_in_flight=100)
    go_on = Event()

    def work(_: Transfer) -> None:
        assert go_on.wait(10)

    first = lane.submit(work, 1000)
    assert first is not None
    assert not lane.accepts(1)
    assert lane.submit(work, 1) is None
    go_on.set()
    first.wait(10)
    assert lane.accepts(1)
    assert lane.submit(work, 60) is not None
    lane.close()


def test_waiting_raises_the_exception_of_the_copy() -> None:
    lane = ThreadLane("test", max_bytes_in_flight=100)

    def work(transfer: Transfer) -> None:
        transfer.advance(num_layers=1)
        raise OSError(5, "the disk failed")

    transfer = lane.submit(work, 1)
    assert transfer is not None
    lane.wait(transfer)
    assert isinstance(transfer.error, OSError)
    assert transfer.wait_layer(0)  # this layer has arrived
    with pytest.raises(OSError, match="the disk failed"):
        transfer.wait_layer(1)
    with pytest.raises(OSError, match="the disk failed"):
        transfer.wait()
    lane.close()


@pytest.mark.parametrize("is_running", [False, True])
def test_a_cancelled_transfer_stops_at_the_next_layer(is_running: bool) -> None:
    lane = ManualLane()

    def work(transfer: Transfer) -> None:
        if is_running:
            transfer.cancel()
        for layer in range(3):
            transfer.advance(num_layers=layer + 1)

    transfer = lane.submit(work, 1)
    assert transfer is not None
    if not is_running:
        transfer.cancel()
    assert not transfer.is_done  # the lane may still use the memory
    lane.run()
    assert transfer.is_done
    assert transfer.num_layers == (1 if is_running else 0)
    with pytest.raises(TransferCancelled):
        transfer.wait()


def test_a_limit_below_one_byte_is_an_error() -> None:
    with pytest.raises(ValueError, match="max_bytes_in_flight must be >= 1, got 0"):
        ThreadLane("test", max_bytes_in_flight=0)
