"""The engine's commands among the messages of the tokenizers."""

from __future__ import annotations

from pagewood.engine.api import Command
from pagewood.server.messages import wire


def command_of(message: wire.ToEngine) -> Command:
    """Return a message that is a command of the engine."""
    assert not isinstance(message, wire.Profile | wire.Watch | wire.ShowCache)
    return message
