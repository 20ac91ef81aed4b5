"""The detokenizer stage: tokens become text that may be shown, and a stop string ends a request toward its client."""

from __future__ import annotations

from collections.abc import Callable

from pagewood.engine.api import Delta, FinishReason
from pagewood.engine.text import TextStream, Tokenizer
from pagewood.server import wire
from pagewood.server.links import Receiver, Sender


def run_detokenizer(tokenizer: Tokenizer, inbox: Receiver, outbox: Sender, *, stopped: Callable[[], bool]) -> None:
    """Serve until `stopped`."""
    streams = TextStreams(tokenizer)
    while not stopped():
        for message in wire.read(wire.from_engine, inbox.receive(timeout_s=None)):
            outbox.send(wire.encode(streams.take(message)))


class TextStreams:
    """The text of every request that the engine works on. Invariant: holds only requests whose end is still to come."""

    __slots__ = ("_incarnation", "_streams", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._streams: dict[str, TextStream] = {}  # written by: take, _answer
        self._incarnation = 0  # written by: take

    @property
    def num_open(self) -> int:
        """Requests whose end is still to come."""
        return len(self._streams)

    def take(self, message: wire.FromEngine) -> wire.ToHttp:
        """Return what HTTP is told because of `message`."""
        match message:
            case wire.Step():
                return wire.Answers(
                    tuple([answer for delta in message.deltas if (answer := self._answer(delta)) is not None])
                )
            case wire.Loading(incarnation=incarnation) | wire.Pulse(incarnation=incarnation):
                if incarnation != self._incarnation:  # the requests of an engine that died get no end
                    self._incarnation = incarnation
                    self._streams.clear()
                return message

    def _answer(self, delta: Delta) -> wire.Answer | None:
        """Return what the client of `delta` is told; None where it has nothing to learn."""
        prefix = self._open(delta) if delta.first else ""
        stream = self._streams.get(delta.request_id)
        ended = delta.finish is not None
        if ended:
            self._streams.pop(delta.request_id, None)
        if stream is None or stream.stopped_by is not None:
            # Its client has heard the end of it: from a stop string, or because the process before this one died.
            return _answer_to(delta, text="", finish=delta.finish, ended=True) if ended else None
        text = prefix + stream.push(delta.tokens)
        if ended:
            text += stream.finish()
        finish = delta.finish if stream.stopped_by is None else FinishReason.STOP
        return _answer_to(delta, text=text, finish=finish, ended=ended)

    def _open(self, delta: Delta) -> str:
        """Begin the text of a request and return what goes before it."""
        options = wire.text_options.decode(delta.carry) if delta.carry else wire.TextOptions()
        self._streams[delta.request_id] = TextStream(self._tokenizer, stop=options.stop)
        return options.prefix


def _answer_to(delta: Delta, *, text: str, finish: FinishReason | None, ended: bool) -> wire.Answer:
    return wire.Answer(
        request_id=delta.request_id,
        text=text,
        finish=finish,
        ended=ended,
        refusal=delta.refusal,
        num_prompt_tokens=delta.num_prompt_tokens,
        num_cached_tokens=delta.num_cached_tokens,
        num_output_tokens=delta.num_output_tokens,
    )
