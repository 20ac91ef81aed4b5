"""The files with the weights of a folder, and the names of their tensors. Imports neither torch nor transformers."""

# pyright: basic
# safetensors has no types.

from __future__ import annotations

import logging
import re
from pathlib import Path

from safetensors import SafetensorError, safe_open

from pagewood.engine.json_fields import Fields
from pagewood.engine.weights.gguf.parts import FILE, part_files
from pagewood.engine.weights.gguf.tensors import GGUFTensors

_log = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_FILE_NAME = re.compile(r"[\w.-]+\.safetensors", re.ASCII)


def holds_gguf(folder: Path) -> bool:
    """Whether the weights of a folder are those of a GGUF file. Safetensors come first, as in `transformers`."""
    return (folder / FILE).is_file() and not (folder / _SINGLE).exists() and not (folder / _INDEX).exists()


def checkpoint_files(folder: Path) -> list[Path]:
    """Return the files that hold the weights of a folder: safetensors, or the GGUF file for which it was made.

    `transformers` takes model.safetensors before the shards of an index, and both before a GGUF file. So does this.

    Raises:
        FileNotFoundError: there are no weights in it.
        ValueError: its index is not valid, or does not name the files.
    """
    if holds_gguf(folder):
        return part_files(folder / FILE)
    if (folder / _SINGLE).exists():
        _check_single(folder)
        return [folder / _SINGLE]
    listed = weight_map(folder)
    if listed is not None:
        return [folder / name for name in sorted(set(listed.values()))]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise FileNotFoundError(
            f"{folder} holds weights only as pickles, which can run code when they are read: "
            "convert them to model.safetensors"
        )
    raise FileNotFoundError(f"{folder} holds neither model.safetensors nor model.safetensors.index.json")


def weight_map(folder: Path) -> dict[str, str] | None:
    """Return the name of the file of each tensor, as the index says, or None if the folder has no shards.

    Raises:
        ValueError: the index is not valid.
    """
    if (folder / _SINGLE).exists() or not (folder / _INDEX).exists():
        return None
    return _listed(folder)


def tensor_names(folder: str | Path) -> frozenset[str]:
    """Return the names of all tensors of a folder, from its index or from the header of its only file.

    Raises:
        FileNotFoundError: there are no weights in it.
        ValueError: its index or its file is damaged.
    """
    folder = Path(folder)
    if holds_gguf(folder):
        return frozenset(GGUFTensors(folder / FILE).names())
    listed = weight_map(folder)
    if listed is not None:
        return frozenset(listed)
    [path] = checkpoint_files(folder)
    try:
        with safe_open(path, framework="numpy") as file:
            return frozenset(file.keys())
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error


def index_file(folder: Path) -> Path:
    """Return the path of a folder's index, which need not exist."""
    return folder / _INDEX


def _listed(folder: Path) -> dict[str, str]:
    fields = Fields.from_file(folder / _INDEX)
    section = fields.section("weight_map") or fields.empty("weight_map")
    listed = {name: section.text(name) for name in section.values}
    for name in sorted(set(listed.values())):
        if not _FILE_NAME.fullmatch(name):
            raise ValueError(f"{section.source} must name *.safetensors files in the folder, got {name[:80]!r}")
    return listed


def _check_single(folder: Path) -> None:
    """Check that model.safetensors is not just one file of the index beside it; log if the index names other files."""
    if not (folder / _INDEX).exists():
        return
    others = sorted(set(_listed(folder).values()))
    if _SINGLE in others and len(others) > 1:
        other = next(name for name in others if name != _SINGLE)
        raise ValueError(
            f"{folder / _SINGLE} must hold all weights, or have another name, got an index that has weights in it and "
            f"in {other}: other loaders take {_SINGLE} alone"
        )
    if any((folder / name).exists() for name in others if name != _SINGLE):
        _log.warning("%s is read, and %s with its %d files is not", folder / _SINGLE, _INDEX, len(others))
