"""A folder for a GGUF file, with the files of a Hugging Face folder, so that other modules need not know GGUF."""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from pagewood.engine import cache_folder
from pagewood.engine.weights.gguf.config import config_of, generation_config_of
from pagewood.engine.weights.gguf.file import MAGIC
from pagewood.engine.weights.gguf.keys import log_ignored
from pagewood.engine.weights.gguf.parts import FILE, open_gguf, part_files, part_name
from pagewood.engine.weights.gguf.tokenizer import tokenizer_of

_log = logging.getLogger(__name__)

_VERSION = 6
"""Version of the folder's content; other versions use other folders."""
_UNFINISHED = "new-"
_PIECE_BYTES, _HEADER_PIECES = 1 << 20, 32
"""Together more than a header, which consists mainly of the vocabulary."""


def cache_root() -> Path:
    """Return the folder in which these folders are made."""
    return cache_folder.cache_root() / "gguf"


def is_gguf(path: Path) -> bool:
    """Whether a path leads to a file that begins like GGUF."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def gguf_folder(path: Path) -> Path:
    """Return the folder of a GGUF file: its configuration, its tokenizer, and links to the file and its other parts.

    The folder is in the user's cache folder, under a name that follows from the path, the size and the times of each
    file and from its header, so processes share it, and a changed file has another one. If the cache folder cannot be
    written, it is a temporary one of this process, which is removed at its end.

    Raises:
        FileNotFoundError: there is no such file, or a part of it is missing.
        ValueError: the file is damaged, something in it is not supported, or there is no room for a folder anywhere.
    """
    paths = [part.resolve() for part in part_files(path.absolute())]  # links may lead to names without numbers
    folder = cache_root() / _name(paths)
    if (folder / FILE).is_file():
        return folder
    contents = _contents(path.absolute())
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        cache_folder.remove_abandoned(folder.parent, f"{_UNFINISHED}*")
        made = _made(Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=folder.parent)), contents, paths)
    except OSError as error:
        _log.warning(
            "configuration and tokenizer of %s cannot be kept in %s, so each start reads them again: %s; %s",
            path, folder.parent, error, cache_folder.REMEDY,
        )  # fmt: skip
        return _temporary(path, contents, paths)
    try:
        made.rename(folder)
    except OSError:  # another process was faster, and wrote the same content
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _name(paths: Sequence[Path]) -> str:
    """Return a name that changes with the files. The header is read because times may be set back, or be too coarse."""
    states = [(part, part.stat()) for part in paths]
    digest = hashlib.sha256(f"{_VERSION}".encode())
    for part, state in states:
        times = f"{state.st_mtime_ns} {state.st_ctime_ns} {state.st_ino}"
        digest.update(f"\0{part} {state.st_size} {times}\0".encode(errors="surrogateescape"))
    with paths[0].open("rb") as file:
        for _ in range(_HEADER_PIECES):
            digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()[:32]


def _made(made: Path, contents: Mapping[str, str], paths: Sequence[Path]) -> Path:
    """Fill a new folder; it is removed if that fails."""
    try:
        for name, text in contents.items():
            (made / name).write_text(text, encoding="utf-8")
        for number, part in enumerate(paths, 1):
            (made / (FILE if number == 1 else part_name(number, len(paths)))).symlink_to(part)
    except OSError:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return made


def _temporary(path: Path, contents: Mapping[str, str], paths: Sequence[Path]) -> Path:
    try:
        made = _made(Path(tempfile.mkdtemp(prefix="pagewood-gguf-")), contents, paths)
    except OSError as error:
        needed = sum(len(text.encode()) for text in contents.values())
        raise ValueError(
            f"{path} needs a folder with room for the {needed} bytes of its configuration and tokenizer: neither "
            f"{cache_root()} nor {tempfile.gettempdir()} can be written ({error}); {cache_folder.REMEDY}"
        ) from error
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def _contents(path: Path) -> dict[str, str]:
    """Return the text files of the folder by name."""
    file = open_gguf(path)
    config = config_of(file)
    log_ignored(file, file.metadata["general.architecture"])
    tokenizer, tokenizer_config = tokenizer_of(file, vocab_size=config["vocab_size"])
    files = {
        "config.json": config,
        "generation_config.json": generation_config_of(file, config),
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": tokenizer_config,
    }
    return {name: json.dumps(values, ensure_ascii=False) for name, values in files.items()}
