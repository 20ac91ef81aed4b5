"""The folder of a model: where it is, and how it advises to sample. Imports neither torch nor transformers."""

from __future__ import annotations

import json
from pathlib import Path

from pagewood.engine.api import SamplingParams


def model_folder(model: str | Path | None) -> Path:
    """Return the folder of a model; None: the one that ships inside.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    folder = Path(__file__).parent / "demo" if model is None else Path(model)
    if not folder.is_dir():
        raise FileNotFoundError(f"model must be a folder with a Hugging Face model, got {str(folder)!r}")
    return folder


def model_name(model: str | Path | None) -> str:
    """Return what clients call a model unless they are told otherwise: the name of its folder."""
    return "pagewood-demo" if model is None else Path(model).resolve().name


def default_sampling(folder: str | Path) -> SamplingParams:
    """Read `generation_config.json`; what it does not say, and all of it where there is none, is `SamplingParams`' own.

    Raises:
        ValueError: the file does not hold what it should.
    """
    file = Path(folder) / "generation_config.json"
    if not file.is_file():
        return SamplingParams()
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        present = {name: value for name, value in values.items() if value is not None}
        greedy = present.get("do_sample") is False
        return SamplingParams(
            temperature=0.0 if greedy else float(present.get("temperature", 1.0)),
            top_k=int(present.get("top_k", 0)),
            top_p=float(present.get("top_p", 1.0)),
            min_p=float(present.get("min_p", 0.0)),
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} must hold a generation configuration: {error}") from error
