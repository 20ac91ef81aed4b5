"""KV cache events over ZeroMQ, as vLLM publishes them: a PUB socket, and a ROUTER socket that repeats lost batches."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec
import zmq

MAX_KEPT = 10_000
"""Batches that can be repeated."""
MAX_QUEUED = 100_000
"""Batches that wait for a slow subscriber before it loses some."""
HEARTBEAT_S = 1.0
END = (-1).to_bytes(8, "big", signed=True)
"""The sequence number that ends a repetition."""

_log = logging.getLogger(__name__)


class Publisher:
    """Publishes batches of events, numbered from 0 in steps of one; a thread of its own sends them.

    A message has three frames: the topic, the number (8 bytes, most significant first) and a msgpack array of
    the time in seconds, the events, and the data-parallel rank (0). A subscriber that sees a gap sends an empty frame
    and the first number that it lacks to the replay address, and gets an empty frame and the message for each batch
    that is still kept, and at last `END`. An empty batch follows a second of silence, so that gaps are seen.

    Invariant: only the thread uses the two sockets; the last `MAX_KEPT` batches are kept.

    Args:
        endpoint: address to bind the PUB socket to, such as `tcp://*:5557`.
        replay_endpoint: address to bind the ROUTER socket to; None: nothing is repeated.
        topic: first frame of each message, by which subscribers choose.
        heartbeat_s: seconds of silence before an empty batch.

    Raises:
        ValueError: an address cannot be bound.
    """

    __slots__ = (
        "_context",
        "_heartbeat_s",
        "_kept",
        "_num_sent",
        "_pub",
        "_queue",
        "_router",
        "_thread",
        "_topic",
        "_wake",
    )

    def __init__(
        self,
        endpoint: str,
        *,
        replay_endpoint: str | None = None,
        topic: bytes = b"",
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._heartbeat_s = heartbeat_s
        self._topic = topic
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=MAX_KEPT)  # written by: _send
        self._num_sent = 0  # written by: _send
        self._queue: queue.SimpleQueue[list[object] | None] = queue.SimpleQueue()
        try:
            self._pub = self._bind(zmq.PUB, endpoint, MAX_QUEUED)
            # A whole repetition must fit into the queue of a slow subscriber.
            self._router = self._bind(zmq.ROUTER, replay_endpoint, 2 * (MAX_KEPT + 1)) if replay_endpoint else None
        except ValueError:
            self._context.destroy(linger=0)
            raise
        self._wake = self._context.socket(zmq.PUSH)
        wake_up = self._context.socket(zmq.PULL)
        wake_up.bind("inproc://wake")
        self._wake.connect("inproc://wake")
        self._thread = threading.Thread(target=self._run, args=(wake_up,), name="kv-events", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """The address that the PUB socket is bound to."""
        return self._pub.get_string(zmq.LAST_ENDPOINT)

    @property
    def replay_endpoint(self) -> str | None:
        """The address that the ROUTER socket is bound to."""
        return None if self._router is None else self._router.get_string(zmq.LAST_ENDPOINT)

    def publish(self, events: list[object]) -> None:
        """Send a batch; call it from one thread at a time. It does not wait."""
        self._queue.put(events)
        self._wake.send(b"")

    def close(self) -> None:
        """Send all published batches, and close the sockets."""
        self._queue.put(None)
        self._wake.send(b"")
        self._thread.join()
        self._wake.close(linger=0)
        self._context.term()

    def _bind(self, kind: int, endpoint: str, max_queued: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, max_queued)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ValueError(f"kv_events must be addresses that can be bound, got {endpoint!r}: {error}") from None
        return socket

    def _run(self, wake_up: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(wake_up, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        is_over = False
        while not is_over:
            ready = dict(poller.poll(round(self._heartbeat_s * 1000)))
            if not ready:
                self._send([])
            if wake_up in ready:
                wake_up.recv()
                batch = self._queue.get()
                is_over = batch is None
                if batch is not None:
                    self._send(batch)
            if self._router is not None and self._router in ready:
                self._repeat(self._router)
        for socket in (wake_up, self._pub, self._router):
            if socket is not None:
                socket.close(linger=200)

    def _send(self, events: list[object]) -> None:
        payload = msgspec.msgpack.encode([time.time(), events, 0])
        self._pub.send_multipart((self._topic, self._num_sent.to_bytes(8, "big"), payload))
        self._kept.append((self._num_sent, payload))
        self._num_sent += 1

    def _repeat(self, router: zmq.Socket[bytes]) -> None:
        frames = router.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            _log.warning("a replay request must be an empty frame and 8 bytes, got %d frames", len(frames) - 1)
            return
        client, _, start = frames
        for number, payload in self._kept:
            if number >= int.from_bytes(start, "big"):
                router.send_multipart((client, b"", self._topic, number.to_bytes(8, "big"), payload))
        router.send_multipart((client, b"", b"", END, b""))


class EventPump:
    """Publishes the changes of a cache, between two steps of the engine.

    Args:
        read: returns the events since the last call.
        publisher: sends them.
    """

    __slots__ = ("_publisher", "_read")

    def __init__(self, read: Callable[[], list[object]], publisher: Publisher) -> None:
        self._read = read
        self._publisher = publisher

    def turn(self) -> None:
        """Publish the latest changes; the engine's thread calls this between two steps and before it waits."""
        events = self._read()
        if events:
            self._publisher.publish(events)

    def close(self) -> None:
        """Publish the rest, and close the publisher."""
        self.turn()
        self._publisher.close()
