"""The files with the weights of a folder, and the names of their tensors. Imports neither torch nor transformers."""

# pyright: basic
# safetensors has no types.

from __future__ import annotations

import re
from pathlib import Path

from safetensors import SafetensorError, safe_open

from pagewood.engine.models.fields import Fields
from pagewood.engine.weights.gguf.parts import FILE, part_files
from pagewood.engine.weights.gguf.tensors import GGUFTensors

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_FILE_NAME = re.compile(r"[\w.-]+\.safetensors", re.ASCII)


def checkpoint_files(folder: Path) -> list[Path]:
    """Return the files that hold the weights of a folder: safetensors, or the GGUF file for which it was made.

    Raises:
        FileNotFoundError: there are no weights in it.
        ValueError: its index is not valid.
    """
    if (folder / FILE).is_file():
        return part_files(folder / FILE)
    if (folder / _INDEX).exists():
        weight_map = _weight_map(folder)
        names = sorted({weight_map.text(name) for name in weight_map.values})
        for name in names:
            if not _FILE_NAME.fullmatch(name):
                raise ValueError(f"{weight_map.source} must name *.safetensors files in the folder, got {name[:80]!r}")
        return [folder / name for name in names]
    if (folder / _SINGLE).exists():
        return [folder / _SINGLE]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise FileNotFoundError(
            f"{folder} holds weights only as pickles, which can run code when they are read: "
            "convert them to model.safetensors"
        )
    raise FileNotFoundError(f"{folder} holds neither model.safetensors nor model.safetensors.index.json")


def tensor_names(folder: str | Path) -> frozenset[str]:
    """Return the names of all tensors of a folder, from its index or from the header of its only file.

    Raises:
        FileNotFoundError: there are no weights in it.
        ValueError: its index or its file is damaged.
    """
    folder = Path(folder)
    if (folder / FILE).is_file():
        return frozenset(GGUFTensors(folder / FILE).names())
    if (folder / _INDEX).exists():
        return frozenset(_weight_map(folder).values)
    [path] = checkpoint_files(folder)
    try:
        with safe_open(path, framework="numpy") as file:
            return frozenset(file.keys())
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error


def _weight_map(folder: Path) -> Fields:
    fields = Fields.from_file(folder / _INDEX)
    return fields.section("weight_map") or fields.empty("weight_map")
