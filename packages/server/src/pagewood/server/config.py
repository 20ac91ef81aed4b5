"""The settings of a server."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pagewood.engine.api import EngineConfig
from pagewood.server import logs


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Everything that decides how a server runs.

    Raises:
        ValueError: a field is out of its range.
    """

    engine: EngineConfig = field(default_factory=EngineConfig)
    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free port."""
    served_model_name: str
    """What clients call the model."""
    model_folder: Path
    """Folder of the tokenizer and the configuration of the model."""
    tokenizer_workers: int = 1
    """Tokenizer processes."""
    max_queued: int = 1024
    """Requests that may wait beyond those that run."""
    max_body_bytes: int = 16 * 1024 * 1024
    """Longest request body."""
    log_level: str = "info"
    """Lowest level that the log of every process shows: debug, info, warning or error."""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ValueError(f"port must be in [0, 65535], got {self.port}")
        for name in ("tokenizer_workers", "max_body_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.max_queued < 0:
            raise ValueError(f"max_queued must be >= 0, got {self.max_queued}")
        if self.log_level not in logs.LEVELS:
            raise ValueError(f"log_level must be one of {', '.join(logs.LEVELS)}, got {self.log_level!r}")
        if not self.served_model_name:
            raise ValueError("served_model_name must not be empty")
