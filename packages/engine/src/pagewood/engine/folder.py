"""The folder of a model: where it is, and which sampling it recommends. Imports neither torch nor transformers."""

from __future__ import annotations

from pathlib import Path

from pagewood.engine.api import SamplingParams
from pagewood.engine.models.fields import Fields

_LARGEST_TOP_K = (1 << 31) - 1


def model_folder(model: str | Path | None) -> Path:
    """Return the folder of a model; None: of the model that ships inside this package.

    Raises:
        FileNotFoundError: the folder does not exist.
    """
    folder = Path(__file__).parent / "demo" if model is None else Path(model)
    if not folder.is_dir():
        raise FileNotFoundError(f"model must be a folder with a Hugging Face model, got {str(folder)!r}")
    return folder


def model_name(model: str | Path | None) -> str:
    """Return the default name of a model for clients: the name of its folder."""
    return "pagewood-demo" if model is None else Path(model).resolve().name


def default_sampling(folder: str | Path) -> SamplingParams:
    """Read `generation_config.json`; where it is silent or does not exist, `SamplingParams` has the defaults.

    Raises:
        ValueError: a field is of another type or out of its range.
    """
    file = Path(folder) / "generation_config.json"
    if not file.is_file():
        return SamplingParams()
    try:
        fields = Fields.from_file(file)
        greedy = not fields.flag("do_sample", True)
        return SamplingParams(
            temperature=0.0 if greedy else fields.number("temperature", 1.0, low=0, high=100),
            top_k=fields.integer("top_k", 0, high=_LARGEST_TOP_K),
            top_p=fields.number("top_p", 1.0, low=0, high=1),
            min_p=fields.number("min_p", 0.0, low=0, high=1),
        )
    except ValueError as error:
        raise ValueError(f"{file} must hold a generation configuration: {error}") from error
