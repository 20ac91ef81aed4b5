"""Access checks of requests: they protect a local server against web pages that a browser on the same machine shows.

Two attacks are refused. With DNS rebinding, a page's own host name resolves to this server, so that the browser takes
both for one site; the `Host` header then holds the name of the attacker. With a cross-site request, a page sends a POST
to this server; the `Origin` header then holds the page's address. Programs other than browsers send no `Origin`.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.datastructures import Headers

from pagewood.server.http.errors import ApiError

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]{1,5})?")
_READING = ("GET", "HEAD", "OPTIONS")


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRules:
    """The host names of this server, and the foreign origins that may use it."""

    hosts: frozenset[str] = frozenset()
    """Names in lower case, without port; `*.example.com` allows all names below it, `*` all names."""
    origins: frozenset[str] = frozenset()
    """Origins such as `https://chat.example.com`, or `*`."""

    def check_host(self, headers: Headers, *, http_version: str) -> None:
        """Check that the request is meant for this server: by an IP address, a loopback name or an allowed name.

        Raises:
            ApiError: 400 if `Host` is missing, repeated or malformed, 403 if its name is not allowed.
        """
        values = headers.getlist("host")
        if not values and http_version == "1.0":
            return
        host = _HOST.fullmatch(values[0].strip().lower()) if len(values) == 1 else None
        if host is None:
            raise ApiError("The request must have exactly one valid Host header.", code="invalid_host")
        name = host[1].rstrip(".")
        if not (_is_loopback_name(name) or self._allows_host(name) or _is_address(name)):
            raise ApiError(
                f"This server does not answer for the host '{name}'. To allow it, start the server with "
                f"'--allowed-host {name}'.",
                status=403,
                code="host_not_allowed",
            )

    def check_origin(self, headers: Headers, *, method: str, scheme: str) -> None:
        """Check that a request which may change something does not come from a foreign web page.

        Args:
            headers: of the request.
            method: of the request.
            scheme: `http` or `https`, by which the request came. A page of https may send it by http, because a proxy
                may remove TLS. A page of http may not send it by https, because an attacker may have changed the page
                on its way.

        Raises:
            ApiError: 403 if `Origin` is neither this server nor allowed.
        """
        origin = headers.get("origin")
        if origin is None or method in _READING or self.allows_origin(origin):
            return
        host = headers.get("host", "").strip().lower()
        if origin.lower() not in (f"{scheme}://{host}", f"https://{host}"):
            raise ApiError(
                f"Requests from the origin '{origin[:200]}' are not allowed. To allow them, start the server with "
                "'--allowed-origin'.",
                status=403,
                code="origin_not_allowed",
            )

    def allows_origin(self, origin: str) -> bool:
        """Return whether a foreign origin is allowed by name."""
        return "*" in self.origins or origin.lower() in self.origins

    def _allows_host(self, name: str) -> bool:
        if "*" in self.hosts or name in self.hosts:
            return True
        return any(pattern.startswith("*.") and name.endswith(pattern[1:]) for pattern in self.hosts)


def access_rules(bound_host: str, allowed_hosts: Iterable[str], allowed_origins: Iterable[str]) -> AccessRules:
    """Return the rules of a server that listens on `bound_host`; the name of the machine is allowed, too."""
    hosts = {bound_host, socket.gethostname(), *allowed_hosts}
    return AccessRules(
        hosts=frozenset(host.lower().rstrip(".") for host in hosts if host),
        origins=frozenset(origin.lower().rstrip("/") for origin in allowed_origins),
    )


def check_json(headers: Headers) -> None:
    """Check that the body is declared as JSON; a web page needs the server's permission to declare that.

    Raises:
        ApiError: 415 for any other content type, or none.
    """
    content_type = headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        got = f"got '{content_type[:200]}'" if content_type else "the request has none"
        raise ApiError(
            f"The Content-Type of the request must be 'application/json', but {got}.",
            status=415,
            code="unsupported_media_type",
        )


def _is_loopback_name(name: str) -> bool:
    return name == "localhost" or name.endswith(".localhost")


def _is_address(name: str) -> bool:
    """Return whether `name` is an IP address, which needs no DNS and so cannot be rebound."""
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
