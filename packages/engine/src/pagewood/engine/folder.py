"""The folder of a model: where it is, and what it advises about sampling. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path

from pagewood.engine.api import SamplingParams

EMBEDDED_NAME = "pagewood-demo"


def model_folder(model: str | Path | None) -> Path:
    """Return the folder of `model`; None is the model that ships inside this package.

    Raises:
        ValueError: there is no such folder.
    """
    folder = Path(__file__).parent / "demo" if model is None else Path(model)
    if not folder.is_dir():
        raise ValueError(f"model must be a folder, got {folder}")
    return folder


def model_name(model: str | None) -> str:
    """Return what clients call `model` unless they are told otherwise: the name of its folder."""
    return EMBEDDED_NAME if model is None else Path(model).resolve().name


def sampling_defaults(folder: Path) -> SamplingParams:
    """Return how tokens are chosen where a request does not say, from `generation_config.json`.

    Without the file, or for what it leaves open, `SamplingParams()` holds; `do_sample: false` is temperature 0.

    Raises:
        ValueError: the file does not hold what it should.
    """
    file = folder / "generation_config.json"
    if not file.is_file():
        return SamplingParams()
    try:
        values = {name: value for name, value in json.loads(file.read_text("utf-8")).items() if value is not None}
        return SamplingParams(
            temperature=0.0 if values.get("do_sample") is False else float(values.get("temperature", 1.0)),
            top_k=int(values.get("top_k", 0)),
            top_p=float(values.get("top_p", 1.0)),
            min_p=float(values.get("min_p", 0.0)),
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} must hold a generation configuration: {error}") from error
