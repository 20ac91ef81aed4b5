"""Receives the answers in the HTTP process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq
import zmq.asyncio

from pagewood.server.http.errors import ApiError, unavailable
from pagewood.server.messages import wire
from pagewood.server.messages.links import NO_MARK

MAX_FAILURES = 5
"""Failures in a row, with no message between them, after which the server ends."""
RETRY_DELAY_S = 0.1
MAX_AT_ONCE_BYTES = 256 * 1024
"""Bytes of messages after which the event loop gets a turn; otherwise it would get none while messages wait."""

logger = logging.getLogger(__name__)


class AnswerPump:
    """Receives what the detokenizer sends, and passes it on.

    Invariant: an exception ends the requests that it concerns with an error, and does not stop later answers. If
    answers cannot be received at all, the server ends.

    Args:
        address: where to listen.
        take: accepts one message.
        fail: ends the requests of a message that `take` could not accept.
        fail_all: ends all requests; called when answers may have been lost.
        give_up: ends the server, for the given reason.
    """

    __slots__ = ("_address", "_fail", "_fail_all", "_give_up", "_num_failures", "_take")

    def __init__(
        self,
        address: str,
        *,
        take: Callable[[wire.ToHttp], None],
        fail: Callable[[wire.Answers, ApiError], None],
        fail_all: Callable[[ApiError], None],
        give_up: Callable[[str], None],
    ) -> None:
        self._address = address
        self._take = take
        self._fail = fail
        self._fail_all = fail_all
        self._give_up = give_up
        self._num_failures = 0  # written by: run, _receive

    async def run(self) -> None:
        """Pump until cancelled, or until it fails too often."""
        while True:
            try:
                await self._receive()
            except Exception as error:
                self._num_failures += 1
                logger.exception("answers cannot be received (%d in a row)", self._num_failures)
                self._fail_all(unavailable("Answers were lost in the server.", code="answers_lost"))
                if self._num_failures >= MAX_FAILURES:
                    self._give_up(f"answers cannot be received: {error}")
                    return
                await asyncio.sleep(RETRY_DELAY_S)

    async def _receive(self) -> None:
        with zmq.asyncio.Context() as context, context.socket(zmq.PULL) as inbox:
            inbox.setsockopt(zmq.RCVHWM, NO_MARK)
            inbox.bind(self._address)
            num_bytes = 0
            while True:
                frame = await inbox.recv()
                num_bytes += len(frame)
                if num_bytes > MAX_AT_ONCE_BYTES:
                    num_bytes = 0
                    await asyncio.sleep(0)
                self._num_failures = 0
                for message in wire.read(wire.to_http, [frame]):
                    self.pass_on(message)

    def pass_on(self, message: wire.ToHttp) -> None:
        """Pass one message on; if that fails, only its requests fail."""
        try:
            self._take(message)
        except Exception:
            logger.exception("a message of the detokenizer cannot be handled")
            if isinstance(message, wire.Answers):
                self._fail(message, unavailable("The server failed on an answer.", code="answers_lost"))
            elif isinstance(message, wire.Routed):
                refused = wire.Answer(message.request_id, "", None, True, None, 0, 0, 0)
                error = unavailable("The server failed to choose a replica.", code="routing_failed")
                self._fail(wire.Answers((refused,)), error)
