"""What travels between the processes: msgspec structs in msgpack, one type for each way.

    HTTP --ToTokenizer--> tokenizer --ToEngine--> engine --FromEngine--> detokenizer --ToHttp--> HTTP

The vocabulary of the engine (`pagewood.engine.api`) travels as it is, inside a struct that says which it is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import msgspec

from pagewood.engine.api import (
    Abort,
    Command,
    Delta,
    FinishReason,
    Refusal,
    Refuse,
    SamplingParams,
    SetPriority,
    Submit,
)

T = TypeVar("T")


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True, tag="chat"):
    """A conversation; plain JSON values, for the model's chat template."""

    messages: tuple[dict[str, Any], ...]


class TextPrompt(msgspec.Struct, frozen=True, kw_only=True, tag="text"):
    """A text to continue."""

    text: str


class TokenPrompt(msgspec.Struct, frozen=True, kw_only=True, tag="tokens"):
    """Ids to continue."""

    tokens: bytes
    """int32, little-endian."""


Prompt = ChatPrompt | TextPrompt | TokenPrompt


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag="generate"):
    """A new request."""

    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    echo: bool = False
    """Whether the text of the prompt comes back in front of the answer."""
    priority: int = 0


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """End a request, wherever it is."""

    request_id: str


class Prioritize(msgspec.Struct, frozen=True, kw_only=True, tag="prioritize"):
    """Give a request another priority, wherever it is."""

    request_id: str
    priority: int


ToTokenizer = Generate | Cancel | Prioritize


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the detokenizer has to know of a request; `Submit.carry` holds it, past the engine."""

    stop: tuple[str, ...] = ()
    prefix: str = ""
    """Text that goes before the answer."""


class SubmitCommand(msgspec.Struct, frozen=True, tag="submit"):
    """Holds a `Submit`."""

    command: Submit


class AbortCommand(msgspec.Struct, frozen=True, tag="abort"):
    """Holds an `Abort`."""

    command: Abort


class PriorityCommand(msgspec.Struct, frozen=True, tag="priority"):
    """Holds a `SetPriority`."""

    command: SetPriority


class RefuseCommand(msgspec.Struct, frozen=True, tag="refuse"):
    """Holds a `Refuse`."""

    command: Refuse


ToEngine = SubmitCommand | AbortCommand | PriorityCommand | RefuseCommand


def to_engine(command: Command) -> ToEngine:
    """Return `command` as it travels."""
    match command:
        case Submit():
            return SubmitCommand(command)
        case Abort():
            return AbortCommand(command)
        case SetPriority():
            return PriorityCommand(command)
        case Refuse():
            return RefuseCommand(command)


class Step(msgspec.Struct, frozen=True, tag="step"):
    """What one step of the engine did."""

    deltas: tuple[Delta, ...]


class Loading(msgspec.Struct, frozen=True, kw_only=True, tag="loading"):
    """How far an engine is before it can serve; `incarnation` counts the engine processes of this server from 0."""

    incarnation: int
    what: str
    done: int
    total: int


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """What the HTTP side has to know of the loaded model."""

    max_length: int
    """Longest prompt plus output."""
    vocab_size: int


class Pulse(msgspec.Struct, frozen=True, kw_only=True, tag="pulse"):
    """The engine process is alive; sent while the engine works, while it waits, and during a long step."""

    incarnation: int
    model: Model
    counters: dict[str, int]
    step_s: float = 0.0
    """How long the engine's thread has computed without looking for commands, seconds: the length of a long step."""


FromEngine = Step | Loading | Pulse


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """What one step did for one client.

    The first Answer of a request with a `finish` is the last that its client sees. `ended` says that the engine is done
    with it too; after a stop string, that comes later, in an Answer of its own.
    """

    request_id: str
    text: str
    finish: FinishReason | None
    ended: bool
    refusal: Refusal | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


class Answers(msgspec.Struct, frozen=True, tag="answers"):
    """What one step did for all clients."""

    answers: tuple[Answer, ...]


ToHttp = Answers | Loading | Pulse


encode = msgspec.msgpack.Encoder().encode
"""Turns any of these into a frame."""


to_tokenizer: msgspec.msgpack.Decoder[ToTokenizer] = msgspec.msgpack.Decoder(ToTokenizer)
engine_commands: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
to_http: msgspec.msgpack.Decoder[ToHttp] = msgspec.msgpack.Decoder(ToHttp)
text_options: msgspec.msgpack.Decoder[TextOptions] = msgspec.msgpack.Decoder(TextOptions)


def read(decoder: msgspec.msgpack.Decoder[T], frames: Iterable[bytes]) -> Iterator[T]:
    """Yield the message of each frame. A frame of another kind is reported and dropped: it cannot do harm."""
    for frame in frames:
        try:
            yield decoder.decode(frame)
        except (msgspec.DecodeError, RecursionError) as error:
            print(f"pagewood: dropped a malformed message of {len(frame)} bytes: {error}", file=sys.stderr)
