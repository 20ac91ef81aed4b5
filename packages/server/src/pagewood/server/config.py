"""Settings of a server."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pagewood.engine.api import EngineConfig
from pagewood.server import logs
from pagewood.server.limits import HttpLimits, default_max_connections, possible_connections

_HOST = re.compile(r"\*|(\*\.)?[A-Za-z0-9._-]+")
_EVENTS_ADDRESS = re.compile(r"tcp://[^/]+:(\d+|\*)|ipc://.+")
_ORIGIN = re.compile(r"\*|null|[A-Za-z][A-Za-z0-9+.-]*://[^/?#]+/?")


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

    kv_events: str | None = None
    """Address at which the engine process publishes the changes of its prefix cache, such as `tcp://*:5557`."""
    kv_events_replay: str | None = None
    """Address at which it repeats what a subscriber has lost."""
    kv_events_form: Literal["map", "array"] = "map"
    """How events are written: vLLM's maps, or arrays for older readers."""

    def __post_init__(self) -> None:
        if self.kv_events is None and self.kv_events_replay is not None:
            raise ValueError("kv_events must be given with kv_events_replay")
        if self.kv_events is not None and not self.engine.prefix_cache:
            raise ValueError("prefix_cache must be true for kv_events")
        for name in ("kv_events", "kv_events_replay"):
            address = getattr(self, name)
            if address is not None and not _EVENTS_ADDRESS.fullmatch(address):
                raise ValueError(f"{name} must be like tcp://*:5557 or ipc:///path, got {address!r}")
        if self.kv_events_form not in ("map", "array"):
            raise ValueError(f"kv_events_form must be map or array, got {self.kv_events_form!r}")
        if not 0 <= self.port < 65536:
            raise ValueError(f"port must be in [0, 65535], got {self.port}")
        for name in ("tokenizer_workers", "max_body_bytes", "max_connections"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        possible = possible_connections()
        if self.max_connections is not None and possible is not None and self.max_connections > possible:
            raise ValueError(
                f"max_connections must be <= {possible} here, because `ulimit -n` allows no more open files, "
                f"got {self.max_connections}"
            )
        if self.max_queued < 0:
            raise ValueError(f"max_queued must be >= 0, got {self.max_queued}")
        if self.log_level not in logs.LEVELS:
            raise ValueError(f"log_level must be one of {', '.join(logs.LEVELS)}, got {self.log_level!r}")
        if not self.served_model_name:
            raise ValueError("served_model_name must not be empty")
        for host in self.allowed_hosts:
            if not _HOST.fullmatch(host):
                raise ValueError(f"allowed_hosts must be names without scheme, port or path, got {host!r}")
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"allowed_origins must be '*' or like 'https://chat.example.com', without path, got {origin!r}"
                )
        for name in ("config.json", "tokenizer.json"):
            if not (self.model_folder / name).is_file():
                raise ValueError(f"model must be a folder with a {name}, got {str(self.model_folder)!r}")

    def http_limits(self) -> HttpLimits:
        """Return the limits of the HTTP process."""
        return HttpLimits(
            max_connections=self.max_connections or default_max_connections(),
            max_body_bytes=self.max_body_bytes,
            max_buffered_bytes=16 * self.max_body_bytes,
        )
