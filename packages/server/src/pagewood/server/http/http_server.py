"""uvicorn with the application, the protocol and the limits of this server."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvicorn

from pagewood.server.http.connections import HttpConnection, Site


class HttpServer(uvicorn.Server):
    """uvicorn without handlers of signals: the process that has children handles them itself."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Do nothing."""
        yield


def http_server(
    site: Site,
    *,
    stop_grace_s: int,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    trusted_proxies: Sequence[str] = (),
) -> HttpServer:
    """Return a server that is not started yet.

    Args:
        site: what it serves.
        stop_grace_s: time that requests get to end when the server stops, seconds.
        tls_cert: certificate chain, PEM; None: HTTP without TLS.
        tls_key: its private key, PEM.
        trusted_proxies: addresses or networks of proxies whose `X-Forwarded-For` and `-Proto` name the client.
    """
    protocol = partial(HttpConnection, limits=site.limits, connections=site.connections)
    return HttpServer(
        uvicorn.Config(
            site.app,
            http=cast("Any", protocol),  # uvicorn only calls it
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # refused requests are logged by this server
            access_log=False,
            server_header=False,
            proxy_headers=bool(trusted_proxies),
            forwarded_allow_ips=list(trusted_proxies),
            timeout_keep_alive=site.limits.keep_alive_s,
            timeout_graceful_shutdown=stop_grace_s,
            ssl_certfile=tls_cert,
            ssl_keyfile=tls_key,
        )
    )
