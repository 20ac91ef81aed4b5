"""The prefix of a path-based proxy, such as `/llm`: the application behind it sees the paths that follow it."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

_SCOPE_KEY = "pagewood.root_path"


@dataclass(frozen=True, slots=True, kw_only=True)
class BelowRootPath:
    """An ASGI application around another one, which sees itself at the root.

    A proxy that removes the prefix and one that keeps it both work. The host of the application may also name a prefix,
    as `root_path` of the ASGI scope; it takes precedence over the own one. No header of a request can set a prefix.
    """

    app: ASGIApp
    root_path: str = ""
    """Such as `/llm`; empty: the root."""
    is_ours: bool = False
    """Whether paths of the application begin with the prefix itself. A proxy must then remove it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        hosted = scope.get("root_path", "").rstrip("/")
        prefix = hosted or self.root_path
        if scope["type"] != "http" or not prefix:
            await self.app(scope, receive, send)
            return
        path: str = scope["path"]
        is_kept = hosted or not self.is_ours
        if is_kept and path == prefix:
            # Relative links of the page at the root need the slash. The redirect is relative, so it names no host.
            moved = Response(status_code=308, headers={"location": prefix.rpartition("/")[2] + "/"})
            await moved(scope, receive, send)
            return
        scope["root_path"], scope[_SCOPE_KEY] = "", prefix  # no copy: the connection finds the exchange in this scope
        if is_kept and path.startswith(prefix + "/"):
            scope["path"] = path[len(prefix) :]
            scope["raw_path"] = scope.get("raw_path", path.encode()).removeprefix(prefix.encode())
        await self.app(scope, receive, send)


def root_path_of(scope: Scope) -> str:
    """Return the prefix of the addresses of this server, such as `/llm`; empty: there is none."""
    return scope.get(_SCOPE_KEY, "")
