"""The engine's commands in messages of the tokenizers."""

from __future__ import annotations

from pagewood.engine.api import Command
from pagewood.server.messages import wire


def command_of(message: wire.ToEngine) -> Command:
    """Return the command that a message holds; it must hold one."""
    assert not isinstance(message, wire.ProfileCommand | wire.Watch)
    return message.command
