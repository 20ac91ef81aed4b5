"""The engine's configuration from options."""

from __future__ import annotations

import argparse

from pagewood.engine.api import EngineConfig
from pagewood.server.cli.options.page import settings_of


def engine_config(options: argparse.Namespace, *, model: str | None) -> EngineConfig:
    """Return the configuration of the engine for a model; fields without an option keep their defaults.

    Raises:
        ValueError: an option is out of its range, or two contradict each other.
    """
    settings = settings_of(options, EngineConfig)
    settings["model"] = model
    return EngineConfig(**settings)
