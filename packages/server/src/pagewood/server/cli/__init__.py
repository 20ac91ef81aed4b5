"""The command `pagewood`."""

from pagewood.server.cli.main import main

__all__ = ["main"]
