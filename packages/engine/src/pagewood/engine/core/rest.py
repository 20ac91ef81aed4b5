"""When steps rest: pauses of the engine, sleep, and updates of the weights, which come between two steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from msgspec.structs import replace as replace_fields

from pagewood.engine.api import Delta, FinishReason, Pause, Refusal
from pagewood.engine.core.cache_keys import CacheKeys
from pagewood.engine.core.images import ImageEncoder
from pagewood.engine.core.memory.divided_kv import AnyKV
from pagewood.engine.core.queue.pausing import resume, retract_all
from pagewood.engine.core.queue.renewal import renew, show_again
from pagewood.engine.core.queue.state import EngineState
from pagewood.engine.core.request import Request
from pagewood.engine.core.retire import refuse
from pagewood.engine.core.weights import ServedWeights
from pagewood.engine.weight_commands import (
    CheckWeights,
    FinishUpdate,
    NameVersion,
    Sleep,
    SleepTag,
    UpdateWeights,
    WakeUp,
    WeightCommand,
)

_BUSY = Refusal(message="weights must be updated, and sleep, one after the other", code="weights_busy")


class Rest:
    """Pauses, sleep and updates. Invariant: `EngineState.paused` is what they want together.

    Args:
        state: the requests.
        kv: their memory.
        keys: of prefixes that the weights of the start have computed.
        weights: what the model computes with.
        images: makes rows of images, by weights that change with them.
    """

    __slots__ = ("_asleep", "_awaited", "_falling", "_images", "_kept_back", "_kv", "_paused", "_slept_before",
        "_state", "_weights", "keys")  # fmt: skip

    def __init__(
        self, *, state: EngineState, kv: AnyKV, keys: CacheKeys, weights: ServedWeights, images: ImageEncoder
    ) -> None:
        self._images = images
        self._state = state
        self._kv = kv
        self._weights = weights
        self.keys = keys
        """The keys of prefixes that the present weights have computed."""  # written by: rest
        self._awaited: Pause | None = None
        """A pause that waits for the end of requests."""  # written by: rest
        self._kept_back: list[Request] = []
        """Those that came after it."""  # written by: rest
        self._paused: Literal["no", "in_place", "retract"] = "no"
        """How the latest `Pause` wants it."""  # written by: rest
        self._asleep: frozenset[SleepTag] = frozenset()
        """What sleeps, or is about to; weights that are dropped do not."""  # written by: rest
        self._slept_before = self._asleep
        """The same before the latest `Sleep`."""  # written by: rest
        self._falling: Sleep | None = None
        """A command whose memory is still in use; it has the tags of what was awake."""  # written by: rest

    @property
    def keeps_back(self) -> bool:
        """Whether new requests wait for the end of a pause that waits."""
        return self._awaited is not None

    def keep_back(self, request: Request) -> None:
        """Let a request, which is paused, go on with the next `Resume`."""
        self._kept_back.append(request)

    def pause(self, command: Pause) -> Delta | None:
        """Stop computing, at once or at the end of the requests that there are."""
        if command.waits and self._awaited is None:
            self._awaited = command
            self._state.num_loading += 1
            return None
        self._paused = "retract" if command.retract else "in_place"
        if command.retract:
            retract_all(self._state)
        self._apply()
        return _done(command.request_id)

    def resume(self, request_id: str) -> Delta:
        """Compute again, also what was kept back for a pause that waits, or has waited."""
        self._paused = "no"
        self._apply()
        kept, self._kept_back = self._kept_back, []
        for request in kept:
            if request.finish is None:
                resume(self._state, request)
        return _done(request_id)

    def name_version(self, command: NameVersion) -> Delta:
        """Give the present weights another name."""
        self._weights.version = self._state.weight_version = command.version
        return self._versioned(command.request_id)

    def poll(self) -> list[Delta]:
        """Pause if a pause has waited for the end of requests, and give memory back that nothing uses any more.

        Returns:
            The answers to these commands.
        """
        deltas: list[Delta] = []
        if self._awaited is not None and all(one.pause != "no" for one in self._state.by_id.values()):
            deltas.append(self._pause_awaited())
        if self._falling is not None and (answer := self._fall_asleep(self._falling)) is not None:
            deltas.append(answer)
        return deltas

    def drop(self) -> list[str]:
        """Take back what waits, because the engine ends; return the ids of the commands."""
        names: list[str] = [] if self._awaited is None else [self._pause_awaited().request_id]
        update = self._weights.drop()
        if self._falling is not None:
            update, self._falling = self._falling.request_id, None
        if update is not None:
            self._state.num_loading -= 1
            names.append(update)
        return names

    def close(self) -> None:
        """Read no more weights."""
        self._weights.close()

    def update(self, command: WeightCommand | FinishUpdate) -> Delta | None:
        """Begin to read weights, or to check them, or to join a group; the answer comes from `exchange`."""
        if isinstance(command, UpdateWeights) and command.old_kv == "keep" and self._kv.tiers is not None:
            message = "old_kv must be drop or recompute with a host cache, which may outlive the update, got keep"
            return refuse(command.request_id, Refusal(message=message, param="old_kv"))
        if isinstance(command, FinishUpdate) and command.update == self._weights.finished:
            return self._versioned(command.request_id)
        is_check = isinstance(command, CheckWeights)
        if (isinstance(command, UpdateWeights) and "weights" in self._asleep) or (
            is_check and "weights" in self.asleep
        ):
            message = "weights must be awake when they are updated or checked"
            return refuse(command.request_id, Refusal(message=message, code="asleep"))
        refusal = self._weights.begin(command, bound=self._bound) if self._falling is None else _BUSY
        if refusal is not None:
            return refuse(command.request_id, refusal)
        self._state.num_loading += 1
        return None

    @property
    def asleep(self) -> frozenset[SleepTag]:
        """What sleeps, or is about to; weights that were dropped sleep until they are updated."""
        dropped: set[SleepTag] = {"weights"} if self._weights.are_dropped else set()
        return self._asleep | dropped

    def sleep(self, command: Sleep) -> Delta | None:
        """Give memory back as soon as nothing uses it; return the answer if there is one at once."""
        memory = frozenset(command.tags) - {"scheduling"} - self.asleep
        refusal = (
            self._weights.refusal_to_sleep(command, bound=self._bound) if memory or command.drops_weights else None
        )
        if self._falling is not None or self._weights.is_busy:
            refusal = _BUSY
        elif command.drops_weights and "weights" in self._asleep:
            refusal = Refusal(message="weights must be awake to be dropped; they sleep already", code="asleep")
        if refusal is not None:
            return refuse(command.request_id, refusal)
        kept = frozenset(command.tags) - ({"weights"} if command.drops_weights or self._weights.are_dropped else set())
        self._slept_before, self._asleep = self._asleep, self._asleep | kept
        self._apply()
        if not memory:
            return _done(command.request_id)
        if "kv_cache" in memory:
            retract_all(self._state)
            waiting = self._state.waiting
            for request in [one for one in self._state.by_id.values() if waiting.is_recalling(one)]:
                waiting.remove(request)  # what is copied for it is given up
                waiting.add(request)
        self._falling = replace_fields(command, tags=tuple(sorted(memory)))
        self._state.num_loading += 1
        return None

    def wake_up(self, command: WakeUp) -> Delta | None:
        """Begin to take memory again; return the answer if there is one at once."""
        tags = frozenset(command.tags) or self._asleep
        memory = (tags & self._asleep) - {"scheduling"}
        if self._falling is not None or self._weights.is_busy:
            return refuse(command.request_id, _BUSY)
        if not memory:
            return self._slept(replace_fields(command, tags=tuple(tags)), None)
        refusal = self._weights.begin(replace_fields(command, tags=tuple(sorted(memory))), bound=None)
        if refusal is not None:
            return refuse(command.request_id, refusal)
        self._state.num_loading += 1
        return None

    @property
    def has_new_weights(self) -> bool:
        """Whether an update of weights has been read, for `exchange`."""
        return self._weights.is_due

    def exchange(self) -> tuple[Delta, int]:
        """Carry out or refuse the update that has been read; no step is in flight.

        Returns:
            Its answer, and how many requests were preempted.
        """
        weights, old, num_updates = self._weights, self._weights.digest, self._weights.num_updates
        command, refusal = weights.exchange(bound=self._bound)
        self._state.num_loading -= 1
        if isinstance(command, Sleep | WakeUp):
            return self._slept(command, refusal), 0
        if refusal is not None:
            return refuse(command.request_id, refusal), 0
        if isinstance(command, CheckWeights):
            return Delta(command.request_id, finish=FinishReason.STOP, first=True, weights=weights.checksum), 0
        if weights.num_updates != num_updates and self._kv.adapters is not None:
            self._kv.adapters.note_update()
        num_preempted = show_again(self._state, self._kv, self._images)
        self._apply()
        self._state.weight_version = weights.version
        if weights.digest != old:
            self.keys = replace(self.keys, weights=weights.digest)
            recomputes = isinstance(command, UpdateWeights) and command.old_kv == "recompute"
            num_preempted += renew(self._state, self._kv, self.keys, recomputes=recomputes)
        return self._versioned(command.request_id), num_preempted

    @property
    def _bound(self) -> str | None:
        """The name of an adapter that is right for the present weights only, or None."""
        return None if self._kv.adapters is None else self._kv.adapters.bound(self._state.by_id.values())

    def _pause_awaited(self) -> Delta:
        assert self._awaited is not None
        command, self._awaited = self._awaited, None
        self._state.num_loading -= 1
        self._paused = "in_place"
        self._apply()
        return _done(command.request_id)

    def _fall_asleep(self, command: Sleep) -> Delta | None:
        """Begin to give memory back if no request and no copy uses it; return the refusal if that cannot be."""
        if "kv_cache" in command.tags and (self._state.holders or not self._kv.empty()):
            return None
        self._falling = None
        refusal = self._weights.begin(command, bound=None)
        if refusal is None:
            return None
        self._state.num_loading -= 1
        return self._slept(command, refusal)

    def _slept(self, command: Sleep | WakeUp, refusal: Refusal | None) -> Delta:
        """Note that memory was given back or taken again, or could not be; return the answer."""
        if isinstance(command, WakeUp) and refusal is None:
            left = self._asleep - frozenset(command.tags)
            self._asleep = left if left - {"scheduling"} else frozenset()
        elif isinstance(command, Sleep) and refusal is not None:
            self._asleep = self._slept_before
        self._apply()
        if refusal is not None:
            return refuse(command.request_id, refusal)
        return _done(command.request_id)

    def _apply(self) -> None:
        """Launch steps, or none, as pauses and sleep want it."""
        if "kv_cache" in self._asleep or self._paused == "retract":
            self._state.paused = "retract"
        elif self._asleep or self._weights.are_dropped or self._paused != "no":
            self._state.paused = "in_place"
        else:
            self._state.paused = "no"

    def _versioned(self, request_id: str) -> Delta:
        return Delta(request_id, finish=FinishReason.STOP, first=True, weights=self._weights.version)


def _done(request_id: str) -> Delta:
    return Delta(request_id, finish=FinishReason.STOP, first=True)
