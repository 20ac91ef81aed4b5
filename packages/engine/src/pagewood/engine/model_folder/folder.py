"""The folder of a model: its path, its recommended parameters, and its drafter.

Imports neither torch nor transformers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from pagewood.engine.api import SAMPLING_PARAMETERS, SamplingParams
from pagewood.engine.json_fields import Fields
from pagewood.engine.model_folder.hub import hub_folder, is_hub_name
from pagewood.engine.models.head_config import find_head_names
from pagewood.engine.models.stored.checkpoint_files import tensor_names
from pagewood.engine.weights.gguf.folder import gguf_folder, is_gguf
from pagewood.engine.weights.gguf.parts import name_of

_log = logging.getLogger(__name__)

_NOT_FOLLOWED: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "bad_words_ids": ([],),
        "begin_suppress_tokens": ([],),
        "diversity_penalty": (0,),
        "epsilon_cutoff": (0,),
        "eta_cutoff": (0,),
        "exponential_decay_length_penalty": (),
        "forced_bos_token_id": (),
        "forced_eos_token_id": (),
        "guidance_scale": (1,),
        "min_length": (0,),
        "min_new_tokens": (0,),
        "no_repeat_ngram_size": (0,),
        "num_beams": (1,),
        "penalty_alpha": (0,),
        "sequence_bias": ([], {}),
        "stop_strings": ([],),
        "suppress_tokens": ([],),
        "top_h": (),
    }
)
"""Fields of generation_config.json that change what `transformers` generates, with values that change nothing."""
_REPOSITORY = "models--"
"""Begins the name of a repository's folder in a Hugging Face cache."""


def model_folder(model: str | Path | None) -> Path:
    """Return the folder of a model; None: the model that ships inside this package.

    For a GGUF file it is made in the user's cache folder, see `gguf_folder`; for `org/name`, where no such folder is,
    it is that of the Hugging Face hub, see `hub_folder`.

    Raises:
        FileNotFoundError: the folder or file does not exist, or cannot be downloaded.
        ValueError: the GGUF file is damaged, or something in it is not supported.
    """
    folder = Path(__file__).parents[1] / "demo" if model is None else Path(model)
    if is_gguf(folder):
        return gguf_folder(folder)
    if is_hub_name(model):
        return hub_folder(str(model))
    if not folder.is_dir():
        raise FileNotFoundError(
            "model must be a folder with a Hugging Face model, a GGUF file, or the name of one on the hub (org/name), "
            f"got {str(folder)!r}"
        )
    return folder


def model_name(model: str | Path | None) -> str:
    """Return the default name of a model for clients.

    That is the name of its folder, or of its file without `.gguf` and a part. A snapshot in a Hugging Face cache, whose
    folder is named by a commit, has the name of its repository, as in `org/name`.
    """
    if model is None:
        return "pagewood-demo"
    if is_hub_name(model):
        return str(model)
    path = Path(model)
    if path.is_dir():
        path = path.resolve()
        if path.parent.name == "snapshots" and path.parent.parent.name.startswith(_REPOSITORY):
            return path.parent.parent.name.removeprefix(_REPOSITORY).replace("--", "/")
        return name_of(path)
    return name_of(path)  # a file of a snapshot is a link to one that is named by its hash


def default_sampling(folder: str | Path) -> SamplingParams:
    """Read `generation_config.json`; fields that it lacks have the defaults of `SamplingParams`.

    Fields that `transformers` follows and this engine does not are named in the log.

    Raises:
        ValueError: a field is of another type or out of its range.
    """
    file = Path(folder) / "generation_config.json"
    if not file.is_file():
        return SamplingParams()
    try:
        fields = Fields.from_file(file)
        ignored = [name for name, neutral in _NOT_FOLLOWED.items() if fields.values.get(name) not in (None, *neutral)]
        if ignored:
            _log.warning("%s: not followed: %s", file, ", ".join(ignored))
        found = {name: _number_of(fields, name) for name, one in SAMPLING_PARAMETERS.items() if one.is_recommended}
        if not fields.flag("do_sample", True):
            found["temperature"] = 0.0
        return replace(SamplingParams(), **found)
    except ValueError as error:
        raise ValueError(f"{file} must hold a generation configuration: {error}") from error


def _number_of(fields: Fields, name: str) -> float:
    parameter, default = SAMPLING_PARAMETERS[name], getattr(SamplingParams(), name)
    if isinstance(default, int):
        return fields.integer(name, default, low=int(parameter.low), high=int(parameter.high))
    return fields.number(name, default, low=parameter.low, high=parameter.high)


DrafterKind = Literal["ngram", "suffix", "draft", "eagle"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundDrafter:
    """The drafter of a model."""

    kind: DrafterKind
    folder: Path | None = None
    """Folder of the draft model or the head; the target's own for layers of multi-token prediction. None: no model."""


def find_drafter(
    model: Path, speculative: DrafterKind | Literal["auto"], *, speculative_model: str | Path | None = None
) -> FoundDrafter:
    """Return the drafter of the model in folder `model`.

    "auto" takes a head if there is one, otherwise a draft model, otherwise n-grams. It looks into `speculative_model`,
    if that is given, otherwise into the parts that ship with the model: `eagle/`, layers for multi-token prediction
    among the model's own tensors, and `draft/`, in this order.

    Raises:
        FileNotFoundError: there is no such folder, or the folder has no safetensors.
        ValueError: a file is damaged, or `speculative_model` is given for a drafter without a model.
    """
    if speculative in ("ngram", "suffix"):
        if speculative_model is not None:
            raise ValueError(
                f"speculative_model must be None for speculative {speculative!r}, got {str(speculative_model)!r}"
            )
        return FoundDrafter(kind=speculative)
    if speculative_model is not None:
        folder = Path(speculative_model)
        if is_gguf(folder):
            folder = gguf_folder(folder)
        elif is_hub_name(speculative_model):
            folder = hub_folder(str(speculative_model))
        if not folder.is_dir():
            raise FileNotFoundError(f"speculative_model must be a folder, got {str(folder)!r}")
        kind = ("eagle" if _has_head(folder) else "draft") if speculative == "auto" else speculative
        return FoundDrafter(kind=kind, folder=folder)
    if speculative != "draft":
        if (model / "eagle").is_dir():
            return FoundDrafter(kind="eagle", folder=model / "eagle")
        if _has_head(model):
            return FoundDrafter(kind="eagle", folder=model)
    if speculative != "eagle" and (model / "draft").is_dir():
        return FoundDrafter(kind="draft", folder=model / "draft")
    if speculative == "auto":
        return FoundDrafter(kind="ngram")
    wanted = "a folder draft/" if speculative == "draft" else "a folder eagle/ or layers for multi-token prediction"
    raise FileNotFoundError(f"speculative_model must be given, because {model} does not hold {wanted}")


def _has_head(folder: Path) -> bool:
    return find_head_names(tensor_names(folder)) is not None
