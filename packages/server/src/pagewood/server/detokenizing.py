"""The detokenizer stage: turns tokens into text for clients, and ends a request at its first stop string or
expression."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from pagewood.engine.api import Delta, FinishReason, Refusal
from pagewood.engine.text import TextStream, Tokenizer
from pagewood.server import wire
from pagewood.server.links import Receiver, Sender

LOST = Refusal(message="The detokenizer process was restarted while it worked on this request.")

logger = logging.getLogger(__name__)


def run_detokenizer(
    tokenizer: Tokenizer, inbox: Receiver, outbox: Sender, *, stopped: Callable[[], bool], incarnation: int = 0
) -> None:
    """Serve until `stopped`; `incarnation` counts the detokenizer processes of this server from 0."""
    streams = TextStreams(tokenizer, incarnation=incarnation)
    while not stopped():
        for message in wire.read(wire.from_engine, inbox.receive(timeout_s=None)):
            outbox.send(wire.encode(streams.take(message)))


class TextStreams:
    """The text of every request that the engine works on.

    Invariant: holds only requests whose end is still to come. A request whose first Delta this process has not seen,
    or whose text fails, gets no more text but an error.

    Args:
        tokenizer: decodes.
        incarnation: of this detokenizer process, noted in what it passes on.
    """

    __slots__ = ("_engine", "_incarnation", "_streams", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, *, incarnation: int = 0) -> None:
        self._tokenizer = tokenizer
        self._incarnation = incarnation
        self._streams: dict[str, TextStream | None] = {}  # written by: _is_late, _answer. None: has ended in an error
        self._engine = -1  # written by: _is_late. Newest incarnation of the engine; -1 before its first message

    @property
    def num_open(self) -> int:
        """Requests whose end is still to come."""
        return len(self._streams)

    def take(self, message: wire.FromEngine) -> wire.ToHttp:
        """Return the message for HTTP that follows from `message`."""
        is_late = self._is_late(message.incarnation)
        match message:
            case wire.Step() if is_late:
                return wire.Answers(())
            case wire.Step():
                return wire.Answers(
                    tuple([answer for delta in message.deltas if (answer := self._answer(delta)) is not None])
                )
            case wire.Loading() | wire.Pulse():
                return msgspec.structs.replace(message, relay=self._incarnation)

    def _is_late(self, incarnation: int) -> bool:
        """Return whether a message comes from an engine that was replaced; forget the requests of replaced engines."""
        if incarnation > self._engine:
            self._engine = incarnation
            self._streams.clear()
        return incarnation < self._engine

    def _answer(self, delta: Delta) -> wire.Answer | None:
        """Return the answer to send for `delta`; None if there is nothing new for its client."""
        error: Refusal | None = None
        text, num_unused = "", 0
        is_known = delta.first or delta.request_id in self._streams
        stream = self._streams.get(delta.request_id)
        is_over = is_known and not delta.first and (stream is None or stream.stopped_by is not None)
        if not is_known:
            error = LOST
        elif not is_over:
            try:
                stream, text, num_unused = self._text(delta)
            except Exception as exception:  # a tokenizer comes with its model: any error is this request's alone
                logger.exception("request %s: its tokens cannot be decoded", delta.request_id)
                error = Refusal(message=f"The tokens of the answer cannot be decoded: {exception}")
        ended = delta.finish is not None
        if ended:
            self._streams.pop(delta.request_id, None)
        else:
            self._streams[delta.request_id] = None if error is not None else stream
        if is_over:  # its client has already received the end
            return _answer_to(delta, text="", finish=delta.finish, ended=True) if ended else None
        ends_text = delta.finish in (None, FinishReason.STOP, FinishReason.LENGTH)
        if error is not None and ends_text:
            return _answer_to(delta, text="", finish=FinishReason.ERROR, ended=ended, refusal=error)
        is_stopped = ends_text and stream is not None and stream.stopped_by is not None
        finish = FinishReason.STOP if is_stopped else delta.finish
        return _answer_to(delta, text=text, finish=finish, ended=ended, num_unused=num_unused)

    def _text(self, delta: Delta) -> tuple[TextStream, str, int]:
        """Return the stream of a request, its new text, and how many of its new tokens come after a stop string."""
        prefix = ""
        stream = self._streams.get(delta.request_id)
        if delta.first or stream is None:
            options = wire.text_options.decode(delta.carry) if delta.carry else wire.TextOptions()
            stream = TextStream(self._tokenizer, stop=options.stop, stop_regex=options.stop_regex)
            prefix = options.prefix
        text, num_unused = _push(stream, delta)
        if delta.finish is not None:
            text += stream.finish()
        return stream, prefix + text, num_unused


def _push(stream: TextStream, delta: Delta) -> tuple[str, int]:
    """Return the new text of a stream, and the number of tokens that come after a stop string in the same step."""
    if len(delta.tokens) < 2:
        return stream.push(delta.tokens), 0
    text = ""
    for index, token in enumerate(delta.tokens):
        text += stream.push((token,))
        if stream.stopped_by is not None:
            # `tokens` does not hold the token that ended the request, but `num_output_tokens` counts it.
            return text, len(delta.tokens) - 1 - index + (delta.finish is FinishReason.STOP)
    return text, 0


def _answer_to(
    delta: Delta,
    *,
    text: str,
    finish: FinishReason | None,
    ended: bool,
    refusal: Refusal | None = None,
    num_unused: int = 0,
) -> wire.Answer:
    return wire.Answer(
        request_id=delta.request_id,
        text=text,
        finish=finish,
        ended=ended,
        refusal=refusal or delta.refusal,
        num_prompt_tokens=delta.num_prompt_tokens,
        num_cached_tokens=delta.num_cached_tokens,
        num_output_tokens=delta.num_output_tokens - num_unused,
        num_drafted_tokens=delta.num_drafted_tokens,
        num_accepted_tokens=delta.num_accepted_tokens,
    )
