"""uvicorn with the application, the protocol and the limits of this server."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import uvicorn

from pagewood.server.app import Frontend
from pagewood.server.connections import HttpConnection


def http_server(frontend: Frontend, *, stop_grace_s: int) -> uvicorn.Server:
    """Return a server that is not started yet.

    Args:
        frontend: the application and its limits.
        stop_grace_s: time that requests get to end when the server stops, seconds.
    """
    protocol = partial(HttpConnection, limits=frontend.limits, connections=frontend.connections)
    return uvicorn.Server(
        uvicorn.Config(
            frontend.app(),
            http=cast("Any", protocol),  # uvicorn only calls it
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # refused requests are logged by this server
            access_log=False,
            server_header=False,
            timeout_keep_alive=frontend.limits.keep_alive_s,
            timeout_graceful_shutdown=stop_grace_s,
        )
    )
