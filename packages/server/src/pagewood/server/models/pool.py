"""Several models behind one HTTP process: which of them are loaded."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from pagewood.server.http.errors import ApiError, deadline_exceeded, overloaded, unavailable
from pagewood.server.keys.caller import current_caller
from pagewood.server.models.errors import closing, load_failed, no_name, not_on_demand, unknown
from pagewood.server.models.lifecycle import Lifecycle, Phase, Waiter
from pagewood.server.models.loader import Loader
from pagewood.server.models.room import Room, gb
from pagewood.server.models.served_model import ServedModel

if TYPE_CHECKING:
    from starlette.requests import Request

    from pagewood.server.http.operations import Operation
    from pagewood.server.protocols.common.models import ModelEntry, Models
    from pagewood.server.protocols.common.reader import Reader
    from pagewood.server.protocols.common.service import Service

_log = logging.getLogger(__name__)


class ModelPool:
    """The models of a server that has several, with the processes of those that are loaded. It satisfies `Models`.

    A request whose model is not loaded waits, in the order of arrival over all models. The first of them decides what
    is loaded next; if there is no room, models that no request has used for longest are unloaded, when the requests
    that use them have ended. What these models are asked meanwhile waits for their next load, behind the first. A model
    that can never have room is refused at once, and no other is unloaded for it.

    Invariant: a load begins only if `need_bytes` of all models with processes add up to `memory_bytes` at most, and
    these models are no more than `max_loaded`. A model has one load at a time, however many requests wait for it.

    Args:
        models: at least one, and what each takes in memory, in bytes.
        folder: below it each load has a folder of its own, for its sockets.
        context: of the sockets.
        memory_bytes: for all models that are loaded.
        pinned: names of those that are loaded at the start, and stay unless an admin unloads them.
        max_loaded: most models that are loaded at a time; 0: any number.
        idle_s: how long a model stays without use, seconds; None: until memory is needed.
        loads_on_demand: whether a request loads its model.
        clock: seconds.
    """

    __slots__ = (
        *("_clock", "_idle_s", "_is_closed", "_is_draining", "_loader", "_loads_on_demand", "_models", "_numbers"),
        *("_reader", "_room", "_tasks"),
    )

    def __init__(
        self,
        models: Sequence[tuple[ServedModel, int]],
        *,
        folder: Path,
        context: zmq.Context[zmq.Socket[bytes]],
        memory_bytes: int,
        pinned: Sequence[str] = (),
        max_loaded: int = 0,
        idle_s: float | None = None,
        loads_on_demand: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from pagewood.server.protocols.common.models import Loads

        self._clock, self._loader = clock, Loader(folder=folder, context=context)
        self._room = Room(memory_bytes=memory_bytes, max_loaded=max_loaded)
        self._loads_on_demand = loads_on_demand
        self._idle_s = math.inf if idle_s is None else idle_s
        self._models = {
            model.name: Lifecycle(
                model=model,
                number=number,
                is_pinned=model.name in pinned,
                keep_s=self._idle_s,
                need_bytes=need_bytes,
                loads=Loads(),
            )
            for number, (model, need_bytes) in enumerate(models)
        }
        self._reader: Reader | None = None  # written by: models
        self._is_closed = False  # written by: close_door
        self._is_draining = False  # written by: set_draining
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        """Loads and unloads."""  # contents written by: _begin

    # What the server does with it.

    @property
    def held(self) -> ModelPool:
        """Itself: it has the requests of all models."""
        return self

    async def start(self) -> None:
        """Begin to load the models that are pinned."""
        for one in self._models.values():
            if one.is_pinned:
                self._wait(one).arrived.add_done_callback(partial(self._pinned, one))
        self._plan()

    def models(self, reader: Reader) -> Models:
        """Return itself, with what reads bodies."""
        self._reader = reader
        return self

    def operations(self) -> Sequence[Operation]:
        """Return the operations of admins that load and unload."""
        from pagewood.server.models.endpoints import PoolEndpoints

        return PoolEndpoints(self).operations()

    def work(self) -> Sequence[Coroutine[Any, Any, None]]:
        """Return nothing: each load has tasks of its own."""
        return ()

    def begin_to_replace(self) -> None:
        """Begin to replace the engines of all models that are loaded."""
        for one in self._loaded():
            assert one.model.group is not None
            one.model.group.begin_to_replace()

    def pids(self) -> Mapping[str, int]:
        """Return the process ids by the name of the model and of the process."""
        groups = {one.name: one.model.group for one in self._models.values() if one.model.group is not None}
        return {f"{name}/{stage}": pid for name, group in groups.items() for stage, pid in group.pids().items()}

    def kill_all(self) -> None:
        """Kill all processes without waiting for them; safe in a signal handler."""
        for one in self._models.values():
            if one.model.group is not None:
                one.model.group.kill_all()

    async def stop(self) -> None:
        """End all processes."""
        self.close_door()
        for one in self._models.values():
            if one.outcome is not None and not one.outcome.done():
                one.outcome.set_result("the server stops")
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self._loader.end(one) for one in self._models.values() if one.model.group is not None))

    def close(self) -> None:
        """Do nothing: the sockets of each model are closed when its processes have ended."""

    # The requests of all models.

    @property
    def num_live(self) -> int:
        """Requests that a client waits for, those among them that wait for a load."""
        waiting = sum(len(one.waiters) for one in self._models.values())
        return waiting + sum(service.live.num_live for service in self.loaded())

    @property
    def num_ending(self) -> int:
        """Requests that no client waits for, and whose end an engine has not confirmed yet."""
        return sum(service.live.num_ending for service in self.loaded())

    @property
    def is_closed(self) -> bool:
        """Whether the server stops."""
        return self._is_closed

    @property
    def is_draining(self) -> bool:
        """Whether no requests are taken for the time being."""
        return self._is_draining

    def close_door(self) -> None:
        """Refuse all further requests: the server stops. Those that wait for a load end with an error."""
        self._is_closed = True
        for one in self._models.values():
            self._refuse(one, closing())
            if one.model.group is not None:
                one.model.group.live.close_door()

    def set_draining(self, is_draining: bool) -> None:
        """Take no further requests, or take them again."""
        self._is_draining = is_draining
        for one in self._models.values():
            if one.model.group is not None:
                one.model.group.live.set_draining(is_draining)

    def fail_all(self, error: ApiError) -> None:
        """End all requests with an error."""
        for one in self._models.values():
            self._refuse(one, error)
            if one.model.group is not None:
                one.model.group.live.fail_all(error)

    # What endpoints do with it.

    @property
    def reader(self) -> Reader:
        """Reads bodies."""
        assert self._reader is not None
        return self._reader

    @property
    def names(self) -> Sequence[str]:
        """Names of all models."""
        return tuple(self._models)

    def listed(self) -> Sequence[ModelEntry]:
        """Return all models."""
        now_s = self._clock()
        return [one.entry(now_s) for one in self._models.values()]

    def loaded(self) -> Sequence[Service]:
        """Return the services of all models that are loaded."""
        return [one.model.service for one in self._loaded() if one.model.service is not None]

    def entry_of(self, name: str) -> tuple[ModelEntry, str | None]:
        """Return a model and the adapter that a client names.

        Raises:
            ApiError: there is no such model, or the caller may not use it.
        """
        one = self._find(name)
        adapter = None if name == one.name else name.removeprefix(f"{one.name}:")
        return one.entry(self._clock()), adapter

    def let_go(self, name: str) -> bool:
        """Have a model unloaded as soon as no request uses it, if the caller may say so; return True.

        Raises:
            ApiError: as `entry_of`.
        """
        self._keep(self._find(name), 0.0)
        return True

    def chosen(self, request: Request) -> Service:
        """Return the service of the model that the query names; it is loaded.

        Raises:
            ApiError: it names none, or the model is not loaded.
        """
        name = request.query_params.get("model")
        if name is None and len(self._models) > 1:
            raise no_name("a parameter 'model' in the query")
        one = next(iter(self._models.values())) if name is None else self._find(name)
        if one.phase is not Phase.LOADED or one.model.service is None:
            raise unavailable(f"The model '{one.name}' is not loaded.", code="model_not_loaded")
        return one.model.service

    async def serving(
        self, name: str | None, request: Request, *, keep_s: float | None = None, deadline_s: float | None = None
    ) -> Service:
        """Return the service of a model, when it is loaded; see `Models.serving`. A request that ends is a use less."""
        from pagewood.server.http.exchange import exchange_of

        if name is None:
            raise no_name("a field 'model'")
        exchange, one = exchange_of(request.scope), self._find(name)
        if one.is_usable:
            one.num_uses += 1
        else:
            if self._is_closed:
                raise closing()
            if self._is_draining:
                raise unavailable("The server is draining: it takes no new requests.", code="draining")
            asked = request.query_params.get("autoload", "true" if self._loads_on_demand else "false")
            if one.phase is Phase.UNLOADED and asked in ("false", "0"):
                raise not_on_demand(one.name)
            began_s = self._clock()
            await self._until_loaded(one, request, deadline_s)
            exchange.load_s = self._clock() - began_s
        if keep_s is not None:
            self._keep(one, keep_s)
        assert exchange.on_end is None
        exchange.on_end = lambda: self._release(one)
        assert one.model.service is not None
        return one.model.service

    # What admins do with it.

    async def load(self, name: str) -> None:
        """Load a model, if it is not loaded; return when it is.

        Raises:
            ApiError: there is no such model, or it cannot be loaded.
        """
        one = self._find(name)
        if self._is_closed:
            raise closing()
        if one.is_usable:
            return
        waiter = self._wait(one)
        self._plan()
        await waiter.arrived
        self._release(one)

    async def unload(self, name: str) -> None:
        """Unload a model when the requests that use it have ended; return then. Later requests load it again.

        Raises:
            ApiError: there is no such model.
        """
        one = self._find(name)
        if one.outcome is not None and not one.outcome.done():
            one.outcome.set_result("it was unloaded by request")
        if one.phase is Phase.LOADED:
            one.leaving = "request"
            self._plan()
        before = one.num_ends
        while one.num_ends == before and one.phase is not Phase.UNLOADED:
            await asyncio.sleep(_POLL_S)

    # How it decides.

    def _find(self, name: str) -> Lifecycle:
        """Return the model that a client names: by its name, with an adapter behind a colon, or by that of an adapter.

        Raises:
            ApiError: there is no such model, or the caller may not use it.
        """
        caller, found = current_caller(), self._models.get(name)
        if found is None:
            found = next(
                (
                    one
                    for one in self._models.values()
                    if name.removeprefix(f"{one.name}:") in one.model.adapters.by_name
                ),
                None,
            )
        if found is None:
            raise unknown(name, [one for one in self._models if caller.may_use(one)])
        caller.check_model(found.name)
        return found

    def _keep(self, one: Lifecycle, keep_s: float) -> None:
        """Note how long a model shall stay without use, until it is loaded the next time.

        Where callers have keys, only admins decide that: a model may serve several tenants.
        """
        caller = current_caller()
        if caller.tenant and not caller.is_admin:
            _log.info("how long a model stays loaded is for admins to say; the request's wish has no effect")
            return
        one.keep_s = keep_s
        self._note_use(one)
        if not one.num_uses and keep_s == 0 and one.is_usable:
            self._plan()

    def _wait(self, one: Lifecycle) -> Waiter:
        waiter = Waiter(number=next(self._numbers), arrived=asyncio.get_running_loop().create_future())
        one.waiters.append(waiter)
        return waiter

    async def _until_loaded(self, one: Lifecycle, request: Request, deadline_s: float | None) -> None:
        """Wait until a model is loaded and counts this request as a use.

        Raises:
            ApiError: it cannot be loaded, too many requests wait, or the deadline has come.
            ClientDisconnect: the client has left.
        """
        from starlette.requests import ClientDisconnect

        config = one.model.config
        limit = config.engine.num_rows + config.max_queued
        if len(one.waiters) >= limit:
            one.model.metrics.incidents.refused["full"] += 1
            raise overloaded(limit)
        waiter = self._wait(one)
        gone = asyncio.create_task(_disconnect(request))
        try:
            self._plan()
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            await asyncio.wait((waiter.arrived, gone), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if waiter.arrived.done():
                waiter.arrived.result()
            elif gone.done():
                raise ClientDisconnect
            else:
                raise deadline_exceeded()
        except BaseException:
            if waiter in one.waiters:
                one.waiters.remove(waiter)
                self._plan()  # it may have been the only one
            elif waiter.arrived.done() and waiter.arrived.exception() is None:
                self._release(one)
            raise
        finally:
            gone.cancel()

    def _release(self, one: Lifecycle) -> None:
        one.num_uses -= 1
        if not one.num_uses:
            self._note_use(one)
            self._plan()

    def _note_use(self, one: Lifecycle) -> None:
        """Note that a model was used until now, and look at it again when its idle time is over."""
        one.last_used_s = self._clock()
        if one.timer is not None:
            one.timer.cancel()
            one.timer = None
        if 0 < one.keep_s < math.inf and not one.is_pinned:
            one.timer = asyncio.get_running_loop().call_later(one.keep_s + _POLL_S, self._plan)

    def _plan(self) -> None:
        """Begin the loads and unloads that are due."""
        if self._is_closed:
            return
        models = tuple(self._models.values())
        for one, error in self._room.due(models, self._clock()):
            if error is not None:
                self._refuse(one, error)
            else:
                self._begin(one, Phase.LOADING, self._load(one))
        for one in models:
            if one.is_usable:
                self._admit(one)
            elif one.phase is Phase.LOADED and one.leaving is not None and not one.num_uses:
                self._begin(one, Phase.ENDING, self._unload(one, one.leaving))

    def _begin(self, one: Lifecycle, phase: Phase, work: Coroutine[Any, Any, None]) -> None:
        one.phase, one.leaving = phase, None
        if phase is Phase.ENDING:
            one.keep_s = self._idle_s  # what clients have asked is for one load
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self, one: Lifecycle) -> None:
        """Start the processes of a model, and admit the requests that wait when it is ready."""
        began_s = self._clock()
        one.outcome = asyncio.get_running_loop().create_future()
        _log.info("the model %s is being loaded; it needs %s", one.name, gb(one.need_bytes))
        why: str | None = None
        try:
            why = await self._loader.start(one, is_draining=self._is_draining, on_loss=self._lost)
        except Exception as error:  # otherwise the requests would wait for ever
            _log.exception("the model %s cannot be loaded", one.name)
            why = repr(error)
        if why is not None:  # clients need not know where it lies
            why = why.replace(str(one.model.config.model_folder), one.name)
        one.outcome, one.failure = None, why
        if why is None:
            one.phase = Phase.LOADED
            one.loads.num_loaded += 1
            one.loads.load_s += self._clock() - began_s
            self._note_use(one)
            self._admit(one)  # before the next plan, which could unload it for others
            _log.info("the model %s is loaded after %.1f s", one.name, self._clock() - began_s)
        else:
            one.loads.num_failed += 1
            _log.error("the model %s cannot be loaded: %s", one.name, why)
            await self._loader.end(one)
            one.phase = Phase.UNLOADED
            self._refuse(one, load_failed(one.name, why))
        self._plan()

    def _lost(self, one: Lifecycle, why: str) -> None:
        """Unload a model whose processes do not stay alive."""
        assert one.model.group is not None
        one.failure = why
        one.model.group.live.fail_all(load_failed(one.name, why))
        self._begin(one, Phase.ENDING, self._unload(one, "failure"))

    async def _unload(self, one: Lifecycle, why: str) -> None:
        _log.info("the model %s is unloaded (%s)", one.name, why)
        await self._loader.end(one)
        one.loads.unloaded[why] += 1
        one.phase = Phase.UNLOADED
        self._plan()

    def _admit(self, one: Lifecycle) -> None:
        """Let the requests that wait for a model use it, in their order."""
        while one.waiters:
            waiter = one.waiters.popleft()
            if not waiter.arrived.done():
                one.num_uses += 1
                waiter.arrived.set_result(None)

    def _refuse(self, one: Lifecycle, error: ApiError) -> None:
        while one.waiters:
            waiter = one.waiters.popleft()
            if not waiter.arrived.done():
                waiter.arrived.set_exception(error)

    def _pinned(self, one: Lifecycle, arrived: asyncio.Future[None]) -> None:
        """Note that the first load of a model that is pinned has ended; a failure is in the log."""
        if arrived.exception() is None:
            self._release(one)

    def _loaded(self) -> Sequence[Lifecycle]:
        return [one for one in self._models.values() if one.phase is Phase.LOADED]


_POLL_S = 0.02


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
