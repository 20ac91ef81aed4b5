"""Settings of a server."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pagewood.engine.api import EngineConfig
from pagewood.server import logs
from pagewood.server.limits import HttpLimits, default_max_connections


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """All settings of a server.

    Raises:
        ValueError: a field is out of its range.
    """

    engine: EngineConfig = field(default_factory=EngineConfig)
    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free port."""
    served_model_name: str
    """Clients' name of the model."""
    model_folder: Path
    """Folder with the tokenizer and the configuration of the model."""
    tokenizer_workers: int = 1
    """Tokenizer processes."""
    max_queued: int = 1024
    """Requests that may be queued beyond those that run."""
    max_body_bytes: int = 16 * 1024 * 1024
    """Longest request body."""
    max_connections: int | None = None
    """Open connections; None: what the process's limit of open files allows."""
    allowed_hosts: tuple[str, ...] = ()
    """Further host names under which clients reach the server; `*.example.com` and `*` are patterns."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may use the server, or `*`."""
    log_level: str = "info"
    """Lowest level that the log of every process shows: debug, info, warning or error."""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ValueError(f"port must be in [0, 65535], got {self.port}")
        for name in ("tokenizer_workers", "max_body_bytes", "max_connections"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.max_queued < 0:
            raise ValueError(f"max_queued must be >= 0, got {self.max_queued}")
        if self.log_level not in logs.LEVELS:
            raise ValueError(f"log_level must be one of {', '.join(logs.LEVELS)}, got {self.log_level!r}")
        if not self.served_model_name:
            raise ValueError("served_model_name must not be empty")

    def http_limits(self) -> HttpLimits:
        """Return the limits of the HTTP process."""
        return HttpLimits(
            max_connections=self.max_connections or default_max_connections(),
            max_body_bytes=self.max_body_bytes,
            max_buffered_bytes=16 * self.max_body_bytes,
        )
