"""The settings of a server."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pagewood.engine
from pagewood.engine.api import EngineConfig

EMBEDDED_NAME = "pagewood-demo"


def model_folder(model: str | None) -> Path:
    """Return the folder of `model`; None is the model that ships inside pagewood-engine.

    Raises:
        ValueError: there is no such folder.
    """
    folder = Path(pagewood.engine.__file__).parent / "demo" if model is None else Path(model)
    if not folder.is_dir():
        raise ValueError(f"model must be a folder, got {folder}")
    return folder


def model_name(model: str | None) -> str:
    """Return what clients call `model`, unless they are told otherwise: the name of its folder."""
    return EMBEDDED_NAME if model is None else Path(model).resolve().name


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

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ValueError(f"port must be in [0, 65535], got {self.port}")
        for name in ("tokenizer_workers", "max_body_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.max_queued < 0:
            raise ValueError(f"max_queued must be >= 0, got {self.max_queued}")
        if not self.served_model_name:
            raise ValueError("served_model_name must not be empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """How tokens are chosen where a request does not say; the model's folder knows what suits it."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @staticmethod
    def from_folder(folder: Path) -> SamplingDefaults:
        """Read `generation_config.json`; without one, OpenAI's defaults hold.

        Raises:
            ValueError: the file does not hold what it should.
        """
        file = folder / "generation_config.json"
        if not file.is_file():
            return SamplingDefaults()
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
            present = {name: value for name, value in values.items() if value is not None}
            greedy = present.get("do_sample") is False
            return SamplingDefaults(
                temperature=0.0 if greedy else float(present.get("temperature", 1.0)),
                top_k=int(present.get("top_k", 0)),
                top_p=float(present.get("top_p", 1.0)),
                min_p=float(present.get("min_p", 0.0)),
            )
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} must hold a generation configuration: {error}") from error
