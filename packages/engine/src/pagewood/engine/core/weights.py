"""The weights that an engine computes with: their version, and those that are being read to replace them."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from pagewood.engine.api import Refusal
from pagewood.engine.weight_commands import (
    CheckWeights,
    DropUpdate,
    FinishUpdate,
    JoinGroup,
    LeaveGroup,
    Sleep,
    UpdateWeights,
    WakeUp,
    WeightCommand,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadWeights:
    """Weights that have been read and checked, and can be computed with."""

    digest: str
    """Distinguishes their KV from that of all other weights of the model; of what is no whole update, nothing."""


class ReadingWeights(Protocol):
    """Weights that are being read."""

    def done(self) -> bool:
        """Whether they have been read, or cannot be."""
        ...

    def result(self) -> ReadWeights | Refusal:
        """Return what is known of them, or why they cannot be used; only when it is `done`."""
        ...


class WeightSource(Protocol):
    """Reads weights beside the steps, and lets the runner compute with them."""

    def read(self, command: WeightCommand) -> ReadingWeights:
        """Begin to carry out a command, such as to read the weights of an update."""
        ...

    def exchange(self) -> str | None:
        """Let later steps compute with the weights that were read last; no step is in flight.

        For `Sleep`, memory goes back to the system instead, and for `WakeUp` it is there again.

        Returns:
            Why the old weights stay, or None.
        """
        ...

    def close(self) -> None:
        """Read no more weights."""
        ...


class ServedWeights:
    """The weights of an engine. Invariant: `version` and `digest` are those of the weights of the next step.

    They cannot be updated while there is an adapter that is right for the present ones only: `bound`, its name.

    Args:
        source: reads weights; None: they never change, and never sleep.
        why_fixed: why there is no source, or why it cannot update weights; empty: it can.
        why_awake: why memory cannot be given back; empty: it can, if there is a source.
    """

    __slots__ = (
        "_command", "_dropping", "_num_kept", "_reading", "_ready", "are_dropped", "checksum", "digest", "finished",
        "num_updates", "source", "version", "why_awake", "why_fixed",
    )  # fmt: skip

    def __init__(
        self,
        source: WeightSource | None,
        *,
        why_fixed: str = "",
        why_awake: str = "",
    ) -> None:
        self.source = source
        """Reads weights; with a decision log, through what keeps that."""  # written by: assemble
        self.why_fixed = why_fixed
        self.why_awake = why_awake
        self.checksum = ""
        """What the latest `CheckWeights` has found."""  # written by: weights
        self.are_dropped = False
        """Whether there are no weights before the next update."""  # written by: weights
        self._command: WeightCommand | None = None  # written by: weights
        self._reading: ReadingWeights | None = None  # written by: weights
        self._ready: tuple[UpdateWeights, ReadWeights] | None = None
        """An update that waits, and what is known of it."""  # written by: weights
        self._dropping: DropUpdate | None = None
        """What comes behind the update that is being read, which is forgotten then."""  # written by: weights
        self.finished = ""
        """The id of the update that waited and was finished last."""  # written by: weights
        self.num_updates = 0
        """Updates that were carried out."""  # written by: weights
        self._num_kept = 0
        """Updates whose weights have added to the KV of others, which is nobody's from then on."""
        # written by: weights
        self.version = ""
        """The name of the weights; empty: those that the engine began with."""  # written by: weights, rest
        self.digest: str | None = None
        """A part of the keys of cached prefixes; None: the weights that the engine began with."""
        # written by: weights

    @property
    def is_busy(self) -> bool:
        """Whether a command is being carried out, or an update waits."""
        return self._reading is not None or self._ready is not None

    def refusal_to_sleep(self, command: Sleep, *, bound: str | None) -> Refusal | None:
        """Return why memory cannot be given back, or None."""
        reason = self.why_awake or ("its runner cannot do that" if self.source is None else "")
        if reason:
            message = f"the memory of this engine cannot be given back, because {reason}"
            return Refusal(message=message, code="sleep_unsupported")
        if command.drops_weights and (reason := self.why_fixed or _why_bound(bound)):
            message = f"weights must be kept, because they could not be updated: {reason}"
            return Refusal(message=message, code="sleep_unsupported")
        return None

    @property
    def is_due(self) -> bool:
        """Whether an update has been read, so that it can be carried out or refused."""
        return self._reading is not None and self._reading.done()

    def begin(self, command: WeightCommand | FinishUpdate, *, bound: str | None) -> Refusal | None:
        """Begin to carry out a command; return why not, or None."""
        reason = self.why_fixed
        if isinstance(command, UpdateWeights):
            reason = reason or _why_bound(bound)
        if self.source is None or (reason and not isinstance(command, Sleep | WakeUp | CheckWeights)):
            message = f"the weights of this engine cannot be updated, because {reason}"
            return Refusal(message=message, code="weights_fixed")
        if isinstance(command, DropUpdate) and self._dropping is None:
            self._ready = None
            if isinstance(self._command, UpdateWeights):
                self._dropping = command
                return None
        if isinstance(command, FinishUpdate):
            if self._ready is None or self._ready[0].request_id != command.update:
                message = f"update must be the id of one that waits, got {command.update!r:.100}"
                return Refusal(message=message, code="weights_lost")
            update, found = self._ready
            self._command = replace(update, request_id=command.request_id, waits=False)
            self._reading = known = Future[ReadWeights | Refusal]()
            known.set_result(found)
            return None
        if self.is_busy:
            return Refusal(message="weights must be updated one after the other", code="weights_busy")
        self._command, self._reading = command, self.source.read(command)
        return None

    def exchange(self, *, bound: str | None) -> tuple[WeightCommand, Refusal | None]:
        """Compute with the weights that are due from the next step on; no step is in flight.

        Returns:
            The command, and why the old weights stay, or None.
        """
        assert self.source is not None
        assert self._command is not None
        assert self._reading is not None
        command, found = self._command, self._reading.result()
        self._command = self._reading = None
        if self._dropping is not None:
            self._command, self._dropping = self._dropping, None
            self._reading = self.source.read(self._command)
            return command, Refusal(message="the update was dropped", code="weights_lost")
        if isinstance(found, Refusal):
            return command, found
        if isinstance(command, CheckWeights):
            self.checksum = found.digest
        if isinstance(command, JoinGroup | LeaveGroup | CheckWeights | DropUpdate) or (
            isinstance(command, UpdateWeights) and not command.is_last
        ):
            return command, None
        if isinstance(command, UpdateWeights) and command.waits:
            self._ready = command, found
            return command, None
        ready, self._ready = self._ready, None
        why_not = _why_bound(bound) if isinstance(command, UpdateWeights) else ""  # adapters may have come meanwhile
        why_not = why_not or self.source.exchange()
        if why_not is not None:
            return command, Refusal(message=f"the weights could not be exchanged: {why_not}", code="weights_failed")
        if isinstance(command, Sleep | WakeUp):
            self.are_dropped |= isinstance(command, Sleep) and command.drops_weights
            return command, None
        assert isinstance(command, UpdateWeights)
        self.are_dropped = False
        self.num_updates += 1
        self.finished = "" if ready is None else ready[0].request_id
        self.version = command.version or str(self.num_updates)
        if command.old_kv == "keep":
            self._num_kept += 1
        else:
            self.digest = f"{found.digest} {self._num_kept}" if self._num_kept else found.digest
        return command, None

    def drop(self) -> str | None:
        """Forget the update that is being read; return the id of its command, or None."""
        command, self._command, self._reading = self._command, None, None
        return None if command is None else command.request_id

    def close(self) -> None:
        """Read no more weights."""
        if self.source is not None:
            self.source.close()


def _why_bound(bound: str | None) -> str:
    """Return why weights cannot be updated now, or nothing."""
    if bound is None:
        return ""
    return (
        f"numbers of them are in the adapter {bound!r}, by DoRA, trained rows of tokens, a bias or a module that is "
        "saved whole; it must be unloaded, and its requests must end"
    )
