"""A GGUF file in several parts, as `llama-gguf-split` makes them: the first has all keys, each has some tensors.

Source: gguf-split.cpp of llama.cpp.
"""

from __future__ import annotations

import re
from pathlib import Path

from pagewood.engine.json_fields import Fields
from pagewood.engine.weights.gguf.file import GGUFFile

FILE = "model.gguf"
"""The name of a GGUF file, or of its first part, in the folder that is made for it."""
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.ASCII)
_MOST_PARTS = 99_999


def part_name(number: int, count: int, *, stem: str = "model") -> str:
    """Return the name of a part, counted from 1."""
    return f"{stem}-{number:05}-of-{count:05}.gguf"


def name_of(path: Path) -> str:
    """Return the name of a model, without `.gguf` and the number of a part."""
    found = _PART.fullmatch(path.name)
    return found[1] if found else path.name.removesuffix(".gguf")


def part_files(path: Path) -> list[Path]:
    """Return all parts of the file whose first part is at `path`, by their names, `path` first.

    Raises:
        FileNotFoundError: a part is missing.
        ValueError: `path` leads to another part than the first.
    """
    if path.name == FILE:  # in a folder that was made for it
        return [path, *sorted(other for other in path.parent.iterdir() if _PART.fullmatch(other.name))]
    found = _PART.fullmatch(path.name)
    if not found:
        return [path]
    stem, number, count = found[1], int(found[2]), int(found[3])
    if number != 1:
        raise ValueError(f"{path} must be the first part, {part_name(1, count, stem=stem)}, got part {number}")
    paths = [path, *(path.with_name(part_name(at, count, stem=stem)) for at in range(2, count + 1))]
    for other in paths:
        if not other.is_file():
            raise FileNotFoundError(f"{path} needs all of its {count} parts, but {other.name} does not exist")
    return paths


def open_gguf(path: Path) -> GGUFFile:
    """Open a GGUF file with all of its parts.

    Raises:
        FileNotFoundError: there is no such file, or a part is missing.
        ValueError: see `GGUFFile`; or the parts do not belong together.
    """
    paths = part_files(path)
    whole = GGUFFile(paths[0])
    _check_place(whole, 0, len(paths))
    for number, other in enumerate(paths[1:], 1):
        part = GGUFFile(other)
        _check_place(part, number, len(paths))
        whole.append(part)
    if len(paths) > 1:
        fields = Fields(str(path), whole.metadata)
        count = fields.integer("split.tensors.count", len(whole.tensors), high=1 << 31)
        if count != len(whole.tensors):
            raise ValueError(
                f"{path}: the parts must hold {count} tensors (split.tensors.count), got {len(whole.tensors)}"
            )
    return whole


def _check_place(file: GGUFFile, number: int, count: int) -> None:
    """Check the keys by which a part describes itself."""
    fields = Fields(str(file.path), file.metadata)
    own = fields.integer("split.count", 1, high=_MOST_PARTS)
    if max(own, 1) != count:
        raise ValueError(
            f"{file.path}: split.count must be {count}, got {own}: parts are files named "
            f"{part_name(1, max(own, count), stem='name')} and so on"
        )
    place = fields.integer("split.no", 0, high=_MOST_PARTS)
    if place != number:
        raise ValueError(f"{file.path}: split.no must be {number}, got {place}")
