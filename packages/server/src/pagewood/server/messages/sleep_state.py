"""What sleeps in the engine of a model, as the processes of the server know it."""

from __future__ import annotations

import msgspec

from pagewood.engine.weight_commands import SLEEP_TAGS, Sleep, SleepTag, WakeUp


class SleepState(msgspec.Struct, frozen=True, kw_only=True):
    """What sleeps; see `Sleep`. Invariant: it is what the engine says of itself after the same commands."""

    tags: tuple[SleepTag, ...] = ()
    """But for weights that were dropped."""
    are_weights_dropped: bool = False
    """Whether weights must be updated before anything is computed."""

    @property
    def is_asleep(self) -> bool:
        """Whether no steps are launched."""
        return bool(self.tags) or self.are_weights_dropped

    @property
    def shown(self) -> tuple[SleepTag, ...]:
        """What sleeps, as users see it: dropped weights sleep until they are updated."""
        asleep = {*self.tags, *(("weights",) if self.are_weights_dropped else ())}
        return tuple(tag for tag in SLEEP_TAGS if tag in asleep)

    def slept(self, command: Sleep) -> SleepState:
        """Return the state after a command was carried out."""
        are_dropped = self.are_weights_dropped or command.drops_weights
        asleep = {*self.tags, *command.tags} - ({"weights"} if are_dropped else set())
        return SleepState(tags=tuple(tag for tag in SLEEP_TAGS if tag in asleep), are_weights_dropped=are_dropped)

    def woken(self, command: WakeUp) -> SleepState:
        """Return the state after a command was carried out."""
        left: tuple[SleepTag, ...] = tuple(tag for tag in self.tags if command.tags and tag not in command.tags)
        if not set(left) - {"scheduling"}:
            left = ()
        return SleepState(tags=left, are_weights_dropped=self.are_weights_dropped)

    def updated(self) -> SleepState:
        """Return the state after all weights were updated."""
        return SleepState(tags=self.tags)

    def command(self, request_id: str) -> Sleep | None:
        """Return what lets a new engine sleep like that; None: it is awake."""
        if not self.is_asleep:
            return None
        return Sleep(request_id=request_id, tags=self.shown, drops_weights=self.are_weights_dropped)
