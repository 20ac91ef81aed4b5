"""The models of a server, as the endpoints of all protocols see them; and a server that has one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec
from starlette.requests import Request

from pagewood.engine.text import ResponseTemplate
from pagewood.server.keys.caller import current_caller
from pagewood.server.messages import wire
from pagewood.server.metrics.metrics import Metrics
from pagewood.server.observe.incidents import Incidents
from pagewood.server.protocols.common.reader import Reader
from pagewood.server.protocols.common.service import Service
from pagewood.server.requests.adapters import ServedAdapters

CHOSEN = "model"
"""Parameter of the query that chooses a model where a request has no field for it."""


class ModelState(msgspec.Struct, frozen=True, kw_only=True):
    """What one of several models is doing."""

    value: Literal["unloaded", "loading", "loaded"]
    """llama.cpp's words."""
    detail: str
    """In words: how far it is, or what it waits for."""
    waiting: int
    """Requests that wait for its load."""
    running: int
    """Requests that use it."""
    pinned: bool
    """Whether it is loaded at the start and stays."""
    draining: bool
    """Whether it is unloaded when its running requests have ended."""
    expires_at: str | None
    """When it is unloaded if no request comes, RFC 3339; null: at no time, or requests are running."""
    memory_bytes: int
    """What it takes, or would take, by the server's account."""
    failed: bool
    """Whether its last load failed."""
    reason: str | None
    """Why it failed."""


@dataclass(slots=True, kw_only=True)
class Loads:
    """How often one of several models was loaded and unloaded. Invariant: a count only grows."""

    num_loaded: int = 0  # written by: models.pool
    num_failed: int = 0  # written by: models.pool
    load_s: float = 0.0  # written by: models.pool
    """Time of all loads that succeeded, seconds."""
    unloaded: Counter[str] = field(default_factory=Counter[str])
    """By why: idle, memory or request."""  # contents written by: models.pool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """A model at one moment, loaded or not."""

    name: str
    created: int
    """Unix time, seconds."""
    adapters: ServedAdapters
    template: ResponseTemplate | None
    incidents: Incidents
    metrics: Metrics | None
    """None: nothing is measured."""
    service: Service | None
    """None: it is not loaded."""
    model: wire.Model | None
    """What its engine has said of it; None: it has never been loaded."""
    state: ModelState | None = None
    """None: it is the only model."""
    loads: Loads = field(default_factory=Loads)


class HeldRequests(Protocol):
    """The requests of all models."""

    @property
    def num_live(self) -> int:
        """Requests that a client waits for."""
        ...

    @property
    def num_ending(self) -> int:
        """Requests that no client waits for, and whose end the engine has not confirmed yet."""
        ...

    @property
    def is_closed(self) -> bool:
        """Whether the server takes no further requests, because it stops."""
        ...

    @property
    def is_draining(self) -> bool:
        """Whether the server takes no further requests for the time being."""
        ...

    def set_draining(self, is_draining: bool) -> None:
        """Take no further requests, or take them again."""
        ...


class Models(Protocol):
    """Invariant: names are unique."""

    @property
    def held(self) -> HeldRequests:
        """The requests of all models."""
        ...

    @property
    def reader(self) -> Reader:
        """Reads bodies."""
        ...

    @property
    def names(self) -> Sequence[str]:
        """Names of all models, at least one."""
        ...

    async def serving(
        self, name: str | None, request: Request, *, keep_s: float | None = None, deadline_s: float | None = None
    ) -> Service:
        """Return the service of the model that a client names, when it is loaded; it stays so until the request ends.

        Args:
            name: of a model, or of an adapter; None: the client names none.
            request: its body has been read.
            keep_s: how long the model shall stay loaded when no request uses it, seconds; None: nothing is asked.
            deadline_s: when the request must have ended, on the clock of `time.monotonic`; None: at no time.

        Raises:
            ApiError: there is no such model, the caller may not use it, or it cannot be loaded.
            ClientDisconnect: the client left while it waited.
        """
        ...

    def chosen(self, request: Request) -> Service:
        """Return the service of the model that the query names, or of the only model.

        Raises:
            ApiError: it names none although there are several, or the model is not loaded.
        """
        ...

    def loaded(self) -> Sequence[Service]:
        """Return the services of all models that are loaded."""
        ...

    def listed(self) -> Sequence[ModelEntry]:
        """Return all models."""
        ...

    def let_go(self, name: str) -> bool:
        """Have a model unloaded as soon as no request uses it; return whether it can be unloaded.

        Raises:
            ApiError: as `entry_of`.
        """
        ...

    def entry_of(self, name: str) -> tuple[ModelEntry, str | None]:
        """Return a model and the adapter that a client names; None: it names the model.

        Raises:
            ApiError: there is no such model, or the caller may not use it.
        """
        ...


def visible(models: Models) -> Sequence[ModelEntry]:
    """Return the models that the present caller may use."""
    caller = current_caller()
    return [entry for entry in models.listed() if caller.may_use(entry.name)]


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlyModel:
    """The model of a server that has one; satisfies `Models`. It is loaded at the start, and stays."""

    service: Service
    reader: Reader

    @property
    def held(self) -> HeldRequests:
        """Its requests."""
        return self.service.live

    @property
    def names(self) -> Sequence[str]:
        """Its name."""
        return (self.service.model_name,)

    async def serving(
        self, name: str | None, request: Request, *, keep_s: float | None = None, deadline_s: float | None = None
    ) -> Service:
        """Return it; whether `name` is its name, and whether it works, is for `Service.model` to say."""
        current_caller().check_model(self.service.model_name)
        return self.service

    def chosen(self, request: Request) -> Service:
        """Return it.

        Raises:
            ApiError: the query names another model.
        """
        if (name := request.query_params.get(CHOSEN)) is not None:
            self.service.adapter_of(name)
        return self.service

    def loaded(self) -> Sequence[Service]:
        """Return it."""
        return (self.service,)

    def listed(self) -> Sequence[ModelEntry]:
        """Return it."""
        service = self.service
        return (
            ModelEntry(
                name=service.model_name,
                created=service.started,
                adapters=service.adapters,
                template=service.template,
                incidents=service.live.incidents,
                metrics=service.metrics,
                service=service,
                model=service.status.model,
            ),
        )

    def let_go(self, name: str) -> bool:
        """Return False: it stays.

        Raises:
            ApiError: it has another name.
        """
        self.entry_of(name)
        return False

    def entry_of(self, name: str) -> tuple[ModelEntry, str | None]:
        """Return it and the adapter that a client names.

        Raises:
            ApiError: it is neither.
        """
        current_caller().check_model(self.service.model_name)
        return self.listed()[0], self.service.adapter_of(name)
