"""Links between an engine and the thread of its callers."""

import threading
from collections.abc import Callable, Sequence

from pagewood.engine.api import Abort, Delta
from pagewood.engine.links import MemoryInbox, ThreadInbox, ThreadOutbox


def aborts(*names: str) -> list[Abort]:
    return [Abort(request_id=name) for name in names]


def deltas(*names: str) -> list[Delta]:
    return [Delta(request_id=name) for name in names]


def test_a_memory_inbox_gives_each_command_once() -> None:
    inbox = MemoryInbox()
    for command in aborts("a", "b"):
        inbox.put(command)
    assert inbox.receive(timeout_s=None) == aborts("a", "b")
    assert inbox.receive(timeout_s=None) == []


def test_a_thread_inbox_gives_all_commands_that_have_arrived_without_waiting() -> None:
    inbox = ThreadInbox()
    for command in aborts("a", "b"):
        inbox.put(command)
    assert inbox.receive(timeout_s=None) == aborts("a", "b")
    assert inbox.receive(timeout_s=0) == []
    assert inbox.receive(timeout_s=0.001) == []


def test_a_command_or_a_wake_ends_the_wait_of_a_thread_inbox() -> None:
    inbox = ThreadInbox()
    received: list[Sequence[object]] = []
    thread = threading.Thread(target=lambda: received.extend(inbox.receive(timeout_s=None) for _ in range(2)))
    thread.start()
    inbox.put(*aborts("a"))
    while not received:
        pass
    inbox.wake()
    thread.join()
    assert received == [aborts("a"), []]


class Loop:
    """Collects the functions to be called soon."""

    def __init__(self) -> None:
        self.scheduled: list[Callable[[], None]] = []

    def schedule(self, function: Callable[[], None]) -> None:
        self.scheduled.append(function)

    def run(self) -> None:
        scheduled, self.scheduled = self.scheduled, []
        for function in scheduled:
            function()


def test_a_thread_outbox_calls_the_loop_once_for_all_deltas_since_it_last_ran() -> None:
    loop, delivered = Loop(), list[Sequence[Delta]]()
    outbox = ThreadOutbox(loop.schedule, delivered.append)
    outbox.send(deltas("a", "b"))
    outbox.send(deltas("c"))
    assert len(loop.scheduled) == 1
    loop.run()
    assert delivered == [deltas("a", "b", "c")]
    assert loop.scheduled == []


def test_a_thread_outbox_loses_no_delta_that_is_sent_while_the_loop_reads() -> None:
    loop, delivered = Loop(), list[Delta]()
    outbox = ThreadOutbox(loop.schedule, delivered.extend)
    total = 20_000

    def send() -> None:
        for i in range(total):
            outbox.send(deltas(str(i)))

    thread = threading.Thread(target=send)
    thread.start()
    while thread.is_alive():
        loop.run()
    loop.run()
    assert [delta.request_id for delta in delivered] == [str(i) for i in range(total)]
