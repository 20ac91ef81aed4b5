"""Pagewood on Ray Serve: `serve run pagewood.server.ray:app`, which needs the extra `pagewood-server[ray]`."""

from __future__ import annotations

from importlib import import_module


def __getattr__(name: str) -> object:
    """Return the builder of the application; the modules that need no Ray can be imported without it."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.application").app
