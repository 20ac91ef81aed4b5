"""The process with the requests: HTTP, tokenizers and the detokenizer of an ordinary server, without engines."""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from pagewood.server.config import ServeConfig
from pagewood.server.http.errors import ApiError
from pagewood.server.keys.file import read_keys
from pagewood.server.keys.gate import KeyGate
from pagewood.server.keys.key import ApiKey
from pagewood.server.messages.links import ZmqSender, address
from pagewood.server.metrics.metrics import Metrics
from pagewood.server.metrics.requests import RequestMetrics
from pagewood.server.models.engine_group import DETOKENIZER
from pagewood.server.models.served_model import ServedModel
from pagewood.server.models.single import SingleModel
from pagewood.server.observe import logs
from pagewood.server.ray.arguments import COUNTED_APART
from pagewood.server.ray.calls import EngineCalls, kind_of
from pagewood.server.ray.joining import Joining
from pagewood.server.replicas.roster import Roster
from pagewood.server.serve import make_frontend

_log = logging.getLogger(__name__)


class Ingress:
    """An ordinary server whose engines are elsewhere, as a Serve replica with an ASGI application.

    It holds the requests and the tokens that each has had, so they go on whichever engine ends, but not without it.

    Args:
        config: of the server.
        engines: handle of `ServedEngine`.
        most: engines at a time.
        is_alone: whether there is no other ingress. With others, each has a router, limits and seeds of its own, and no
            response is kept, because the next request may come to another one.

    Raises:
        ValueError: a key has limits, and there are several to count for.
    """

    async def __init__(self, config: ServeConfig, engines: Any, *, most: int, is_alone: bool = True) -> None:
        logs.configure(config.log_level, "http", form=config.log_format)
        self._folder = Path(tempfile.mkdtemp(prefix="pagewood-"))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._failed: str | None = None  # written by: _fail
        metrics = Metrics(requests=RequestMetrics(), compat=config.metrics_compat)
        keys = [*config.api_keys, *(() if config.api_key_file is None else read_keys(config.api_key_file))]
        kind = kind_of(config.engine)
        if not is_alone:
            check_limits(keys)
            config = replace(config, engine=replace(config.engine, seed=random.SystemRandom().getrandbits(31)))
        roster = Roster(most=most)
        self._served = SingleModel(
            ServedModel(config, metrics=metrics, roster=roster),
            folder=self._folder,
            context=self._context,
            give_up=self._fail,
            on_news=lambda status: None,
        )
        self._relay = ZmqSender(self._context, address(self._folder, DETOKENIZER.name))
        joining = Joining(
            roster,
            EngineCalls(engines),
            self._relay,
            kind=kind,
            is_wanted=lambda: bool(self._served.held.num_live),
        )
        await self._served.start()
        app = make_frontend(
            config,
            self._served,
            gate=KeyGate(keys),
            metrics=metrics if config.metrics else None,
            tracing=None,
            keeps_responses=is_alone,
        ).app()
        self._app = app if config.has_keys or config.insecure_no_keys else LocalOnly(app)
        self._tasks = [asyncio.create_task(work) for work in (*self._served.work(), joining.run())]

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application, after the constructor."""
        return self._app

    def check_health(self) -> None:
        """Raise RuntimeError if a process cannot be kept alive, so that Ray Serve starts another replica."""
        if self._failed is not None:
            raise RuntimeError(self._failed)

    async def __del__(self) -> None:
        """End the processes."""
        await self._served.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._relay.close()
        self._served.close()
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _fail(self, why: str, code: int) -> None:
        _log.error("%s", why)
        self._failed = why


def check_limits(keys: Sequence[ApiKey]) -> None:
    """Check that no key has a limit that several ingresses would each count for themselves.

    Raises:
        ValueError: a key has one.
    """
    for key in keys:
        for name in ("requests_per_minute", "tokens_per_minute", "max_concurrent"):
            value: int | None = getattr(key, name)
            if value is not None:
                raise ValueError(
                    f"{name} of key {key.name!r} must not be set with several ingresses, got {value}: {COUNTED_APART}"
                )


class LocalOnly:
    """An ASGI application around another one, for clients on this host: Ray Serve may listen for everyone."""

    __slots__ = ("_app",)

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        host = (scope.get("client") or ("",))[0]
        if scope["type"] != "http" or host == "::1" or host.startswith("127."):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            "Without API keys the server answers clients on its own host only. Give it keys with --api-key-file, or "
            "let everyone in who reaches it with --insecure-no-keys.",
            code="keys_required",
        )
        await Response(error.body(), status_code=403, media_type="application/json")(scope, receive, send)
