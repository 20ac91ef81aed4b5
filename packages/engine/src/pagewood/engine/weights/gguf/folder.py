"""A folder for a GGUF file, with the files that a Hugging Face folder has, so that nothing else knows of GGUF."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from pagewood.engine.weights.gguf.config import config_of, generation_config_of
from pagewood.engine.weights.gguf.file import MAGIC
from pagewood.engine.weights.gguf.parts import FILE, open_gguf, part_files, part_name
from pagewood.engine.weights.gguf.tokenizer import tokenizer_of

_VERSION = 1
"""Of what is written; other versions have other folders."""


def cache_root() -> Path:
    """Return where folders are made: in the folder of the environment's PAGEWOOD_CACHE, or in ~/.cache/pagewood."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagewood"
    return Path(os.environ.get("PAGEWOOD_CACHE") or usual) / "gguf"


def is_gguf(path: Path) -> bool:
    """Whether a path leads to a file that begins as GGUF does."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def gguf_folder(path: Path) -> Path:
    """Return the folder of a GGUF file: its configuration, its tokenizer, and links to the file and its other parts.

    The folder is in the user's cache folder, under a name that follows from the path, the size and the time of each
    file, so processes share it, and a changed file has another one. If the cache folder cannot be written, it is a
    temporary one of this process, which is removed at its end.

    Raises:
        FileNotFoundError: there is no such file, or a part of it is missing.
        ValueError: the file is damaged, or something in it is not supported.
    """
    paths = [part.resolve() for part in part_files(path.absolute())]  # links may lead to names without numbers
    states = [(part, part.stat()) for part in paths]
    key = " ".join([str(_VERSION), *(f"{part} {state.st_size} {state.st_mtime_ns}" for part, state in states)])
    root = cache_root()
    folder = root / hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:32]
    if (folder / FILE).is_file():
        return folder
    contents = _contents(path.absolute())
    try:
        root.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix="new-", dir=root))
    except OSError:
        made = Path(tempfile.mkdtemp(prefix="pagewood-gguf-"))
        atexit.register(shutil.rmtree, made, ignore_errors=True)
        folder = made
    for name, text in contents.items():
        (made / name).write_text(text, encoding="utf-8")
    for number, part in enumerate(paths, 1):
        (made / (FILE if number == 1 else part_name(number, len(paths)))).symlink_to(part)
    if made != folder:
        try:
            made.rename(folder)
        except OSError:  # another process was faster, and wrote the same
            shutil.rmtree(made, ignore_errors=True)
    return folder


def _contents(path: Path) -> dict[str, str]:
    """Return the text files of the folder by name."""
    file = open_gguf(path)
    config = config_of(file)
    tokenizer, tokenizer_config = tokenizer_of(file, vocab_size=config["vocab_size"])
    files = {
        "config.json": config,
        "generation_config.json": generation_config_of(file, config),
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": tokenizer_config,
    }
    return {name: json.dumps(values, ensure_ascii=False) for name, values in files.items()}
