"""The logits processors that a configuration names."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import cast

from pagewood.engine.api import EngineConfig


def load_processors(config: EngineConfig) -> dict[str, Callable[..., None]]:
    """Import the functions of `config.logits_processors`; return them by name.

    Raises:
        ValueError: one cannot be imported, or is no function.
    """
    found: dict[str, Callable[..., None]] = {}
    for name, place in config.logits_processors:
        module, _, attribute = place.partition(":")
        try:
            function: object = getattr(import_module(module), attribute)
        except Exception as error:  # the operator's module may raise anything
            raise ValueError(
                f"logits_processors must be importable, got {place!r} for {name!r}: {type(error).__name__}: {error}"
            ) from error
        if not callable(function):
            raise ValueError(
                f"logits_processors must be functions, got {type(function).__name__} at {place!r} for {name!r}"
            )
        found[name] = cast("Callable[..., None]", function)
    return found
