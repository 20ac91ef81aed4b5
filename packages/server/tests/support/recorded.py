"""A clock that a test sets, and a sender that keeps its messages."""

from __future__ import annotations

from pagewood.server.messages import wire


class Clock:
    """Time that a test sets."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class Recorder:
    """A sender to a tokenizer that keeps its messages."""

    def __init__(self) -> None:
        self.messages: list[wire.ToTokenizer] = []

    def send(self, frame: bytes) -> None:
        self.messages.append(wire.to_tokenizer.decode(frame))

    def sent(self) -> list[wire.Generate]:
        """Return the requests since the last call, and forget all messages."""
        found = [message for message in self.messages if isinstance(message, wire.Generate)]
        self.messages.clear()
        return found
