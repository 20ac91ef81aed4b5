"""A pair of tensors that a checkpoint may store twice or under one name: an embedding and its output projection."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from pagewood.engine.json_fields import Fields
from pagewood.engine.models.stored.mapped_memory import give_back
from pagewood.engine.models.stored.tensor_files import TensorFiles
from pagewood.engine.weights.checkpoint_formats import FLOATS

EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"
_ROWS = 4096


def stored_name(folder: Path, name: str, names: Collection[str]) -> str:
    """Return the name under which a tensor is stored: a tied pair may be stored under the name of the output alone."""
    is_swapped = name.endswith(EMBEDDING.removeprefix("model.")) and name not in names and OUTPUT in names
    return OUTPUT if is_swapped and is_tied(folder) else name


def check_copy(folder: Path, files: TensorFiles, copy: str, original: str, *, why: str) -> None:
    """Compare two tensors, one of which is not read because the configuration says that they are the same.

    Args:
        folder: for the error.
        files: of the checkpoint; nothing is compared if it lacks one of the two.
        copy: the tensor that is not read.
        original: the one that is read in its place.
        why: the reason why they must be the same.

    Raises:
        ValueError: they differ.
    """
    if copy not in files.names() or original not in files.names():
        return
    headers = [files.header(name) for name in (copy, original)]
    if headers[0][0] != headers[1][0] or any(dtype not in FLOATS for _, dtype in headers):
        raise ValueError(f"{folder}: {copy} must equal {original} because {why}, got {headers[0]} and {headers[1]}")
    one, other = files.read(copy), files.read(original)
    for start in range(0, len(one), _ROWS):
        parts = one[start : start + _ROWS], other[start : start + _ROWS]
        differs = (parts[0].float() != parts[1].float()).any(dim=1)
        if bool(differs.any()):
            row = start + int(differs.nonzero()[0])
            raise ValueError(f"{folder}: {copy} must equal {original} because {why}, but row {row} differs")
        for part in parts:
            give_back(part)


def is_tied(folder: Path) -> bool:
    """Whether a model's configuration says that the embedding is the output projection."""
    file = folder / "config.json"
    return file.is_file() and Fields.from_file(file).flag("tie_word_embeddings", False)
