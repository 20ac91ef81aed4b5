"""The adapters of an engine: which are loaded, and which of them lie in the slots of the device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Hashable, Iterable
from typing import Any, Protocol

from pagewood.engine.api import LoadAdapter, Refusal
from pagewood.engine.core.adapter import Adapter, LoadedAdapter
from pagewood.engine.core.request import Request


class Loading(Protocol):
    """A folder that is being read."""

    def done(self) -> bool:
        """Whether it has been read, or cannot be."""
        ...

    def result(self) -> LoadedAdapter | Refusal:
        """Return the adapter, or why it could not be read; only when it is `done`."""
        ...


class AdapterSource(Protocol):
    """Reads folders of adapters, in a thread of its own, and gives the runner what it has read."""

    def load(self, folder: str) -> Loading:
        """Begin to read a folder."""
        ...

    def keep(self, number: int, weights: object) -> None:
        """Let the runner find the weights of an adapter by its number, as long as they are referred to."""
        ...

    def forget_unused(self) -> None:
        """Give back memory of adapters that nothing refers to any more; called before each step."""
        ...

    def close(self) -> None:
        """Read no more folders."""
        ...


class SlotSharing(Protocol):
    """Decides which requests may run, where those with the same adapter share a slot."""

    def pin(self, keys: Iterable[Hashable]) -> None:
        """Let these keys, and no others, hold a slot at all times."""
        ...

    def begin_step(self, waiting: Container[Any]) -> None:
        """Forget requests that are no longer waiting."""
        ...

    def may_admit(self, request: Request, key: Hashable) -> bool:
        """Return whether a request may run now; if not, those admitted from now on pass it."""
        ...

    def admitted(self, request: Request, key: Hashable) -> None:
        """Note that a request runs."""
        ...

    def stopped(self, key: Hashable) -> None:
        """Note that a running request has ended or was preempted."""
        ...


class AdapterPool:
    """Loaded adapters and the slots of the device.

    Invariant: a slot changes its adapter only while no request with a row has it, so no launched step reads it. An
    adapter that is replaced or unloaded lives on until its last request has ended, and no longer.

    Args:
        num_slots: adapters that requests with a row may have at the same time.
        source: reads folders.
        sharing: decides which requests may run.
    """

    __slots__ = (
        "_by_name", "_loading", "_num_loaded", "_num_updates", "_num_users", "_pinned", "_sharing", "_slots",
        "_source",
    )  # fmt: skip

    def __init__(self, num_slots: int, *, source: AdapterSource, sharing: SlotSharing) -> None:
        self._source = source
        self._sharing = sharing
        self._by_name: dict[str, Adapter] = {}  # written by: adapters
        self._pinned: set[str] = set()  # written by: adapters
        self._loading: list[tuple[LoadAdapter, Loading, int]] = []
        """With the number of updates of the weights before."""  # written by: adapters
        self._num_updates = 0  # written by: note_update
        self._num_loaded = 0  # written by: adapters
        self._slots: OrderedDict[int, Adapter | None] = OrderedDict((slot, None) for slot in range(num_slots))
        """By slot, its adapter; the one whose requests ended longest ago comes first."""  # written by: adapters
        self._num_users: dict[int, int] = {}
        """Requests with a row, by the number of their adapter."""  # written by: adapters

    @property
    def num_slots(self) -> int:
        """Adapters that requests with a row may have at the same time."""
        return len(self._slots)

    @property
    def versions(self) -> dict[str, str]:
        """The versions of the loaded adapters, by name; empty where prefixes are those of the model up to a token."""
        return {name: "" if one.invocation else one.version for name, one in self._by_name.items()}

    def bound(self, live: Iterable[Request]) -> str | None:
        """Return the name of an adapter that fits only the present weights, and is loaded or has a live request."""
        named = (*self._by_name.values(), *(one.adapter for one in live if one.adapter is not None))
        return next((one.name for one in named if one.is_bound), None)

    def note_update(self) -> None:
        """Note that the weights of the model are others; no adapter is `bound` to the old ones."""
        self._num_updates += 1

    def current(self, name: str) -> Adapter | None:
        """Return the adapter that a new request gets under a name; None: the name is unknown."""
        return self._by_name.get(name)

    def begin_load(self, command: LoadAdapter) -> Refusal | None:
        """Begin to read the folder of an adapter; return why not, or None."""
        name = command.name
        if not command.replaces and name in self._by_name:
            message = f"name must not be that of a loaded adapter unless it is to be replaced, got {name!r}"
            return Refusal(message=message, param="name", code="adapter_exists")
        if any(other.name == name for other, *_ in self._loading):
            return Refusal(message=f"an adapter {name!r} is being loaded", param="name", code="adapter_exists")
        if command.is_pinned and len(self._pinned | {name}) >= self.num_slots:
            message = f"is_pinned must be False for one of the {self.num_slots} adapters that can run, got True"
            return Refusal(message=message, param="is_pinned")
        self._loading.append((command, self._source.load(command.folder), self._num_updates))
        return None

    def load(self, command: LoadAdapter) -> Refusal | None:
        """Read the folder of an adapter and wait for it; return why it could not be read, or None."""
        refusal = self.begin_load(command)
        if refusal is not None:
            return refusal
        found = self._put(command, self._loading.pop()[1].result(), self._num_updates)
        return found if isinstance(found, Refusal) else None

    def poll(self) -> list[tuple[LoadAdapter, Adapter | Refusal]]:
        """Return the commands whose folders have been read, each with the adapter that requests get from now on."""
        ended = [entry for entry in self._loading if entry[1].done()]
        self._loading = [entry for entry in self._loading if entry not in ended]
        return [(command, self._put(command, loading.result(), number)) for command, loading, number in ended]

    def unload(self, name: str) -> bool:
        """Let no new request have an adapter; return whether there was one."""
        old = self._by_name.pop(name, None)
        if old is None:
            return False
        self._clear(old)
        self._pinned.discard(name)
        self._pin()
        return True

    def begin_step(self, waiting: Container[Request]) -> None:
        """Forget requests that are no longer waiting, and adapters that nothing refers to."""
        self._sharing.begin_step(waiting)
        self._source.forget_unused()

    def may_admit(self, request: Request) -> bool:
        """Return whether a request may run now; if not, those admitted from now on pass it."""
        return request.adapter is None or self._sharing.may_admit(request, request.adapter.number)

    def hold(self, request: Request) -> None:
        """Give the adapter of an admitted request a slot, if it has none."""
        adapter = request.adapter
        if adapter is None:
            return
        self._sharing.admitted(request, adapter.number)
        self._num_users[adapter.number] = self._num_users.get(adapter.number, 0) + 1
        if self._slot_of(adapter) is None:
            slot = next(slot for slot, other in self._slots.items() if self._is_free(other))
            self._slots[slot] = adapter

    def drop(self, request: Request) -> None:
        """Note that a request has no row any more."""
        adapter = request.adapter
        if adapter is None:
            return
        self._sharing.stopped(adapter.number)
        self._num_users[adapter.number] -= 1
        if not self._num_users[adapter.number]:
            del self._num_users[adapter.number]
            slot = self._slot_of(adapter)
            assert slot is not None
            self._slots.move_to_end(slot)
            self._clear(adapter)

    def place_of(self, request: Request) -> tuple[int, int, int]:
        """Return the slot and the number of the adapter of a request with a row, and the first position that it
        computes; -1, -1 and 0: it has none."""
        adapter = request.adapter
        if adapter is None:
            return -1, -1, 0
        slot = self._slot_of(adapter)
        assert slot is not None
        return slot, adapter.number, 0 if request.activation is None else request.activation.start

    def close(self) -> None:
        """Read no more folders."""
        self._source.close()

    def _put(self, command: LoadAdapter, loaded: LoadedAdapter | Refusal, num_updates: int) -> Adapter | Refusal:
        if isinstance(loaded, Refusal):
            return loaded
        if loaded.is_bound and num_updates != self._num_updates:
            message = "an adapter with numbers of the model must be loaded again, because the weights changed meanwhile"
            return Refusal(message=message, code="weights_changed")
        old = self._by_name.get(command.name)
        if old is None or old.version != loaded.version:
            self._num_loaded += 1
            adapter = Adapter(
                name=command.name,
                version=loaded.version,
                number=self._num_loaded,
                weights=loaded.weights,
                invocation=loaded.invocation,
                is_bound=loaded.is_bound,
            )
            self._source.keep(adapter.number, loaded.weights)
            self._by_name[command.name] = adapter
            if old is not None:
                self._clear(old)
        (self._pinned.add if command.is_pinned else self._pinned.discard)(command.name)
        self._pin()
        return self._by_name[command.name]

    def _pin(self) -> None:
        self._sharing.pin(self._by_name[name].number for name in self._pinned)

    def _slot_of(self, adapter: Adapter) -> int | None:
        return next((slot for slot, other in self._slots.items() if other is adapter), None)

    def _clear(self, adapter: Adapter) -> None:
        """Take an adapter out of its slot if nothing can name it any more."""
        slot = self._slot_of(adapter)
        if (
            slot is not None
            and adapter.number not in self._num_users
            and self._by_name.get(adapter.name) is not adapter
        ):
            self._slots[slot] = None

    def _is_free(self, adapter: Adapter | None) -> bool:
        """Whether the slot of an adapter may get another one."""
        if adapter is None:
            return True
        is_pinned = adapter.name in self._pinned and self._by_name.get(adapter.name) is adapter
        return not is_pinned and adapter.number not in self._num_users
