"""Texts whose inputs to matrices show which weights matter: from a file, or from Python's documentation."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagewood.engine.text import ChatTemplateError, Tokenizer

_LENGTH = 512
_DOCUMENTATION = "pydoc_data.topics"
"""A module of Python's standard library: the chapters that `help()` shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Texts of one length in tokens."""

    tokens: Tensor
    """[texts, tokens] int64"""
    source: str
    """Their source, for messages."""


def read_calibration(
    folder: Path, file: Path | None, *, num_tokens: int, vocab_size: int, max_position: int
) -> Calibration:
    """Return texts for the model in `folder`: about `num_tokens` tokens, taken evenly from the whole source.

    Args:
        folder: with the tokenizer.
        file: a text; or `*.jsonl`, each line of which has a conversation under "messages" (and its "tools"), or a
            "text". None: chapters of Python's documentation that ship with Python.
        num_tokens: in all texts.
        vocab_size: of the model; tokens beyond it are an error.
        max_position: longest text.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line has another form, or there are no tokens.
    """
    if num_tokens < 1:
        raise ValueError(f"num_tokens must be >= 1, got {num_tokens}")
    tokenizer = Tokenizer.from_folder(folder)
    source = f"Python's documentation ({_DOCUMENTATION})" if file is None else str(file)
    parts = [np.asarray(part, np.int64) for part in _parts(tokenizer, file)]
    stream = np.concatenate(parts) if parts else np.empty(0, np.int64)
    if not len(stream):
        raise ValueError(f"calibration must hold at least one token, got none in {source}")
    if int(stream.max()) >= vocab_size:
        raise ValueError(f"{folder}: tokens must be below the vocabulary's size {vocab_size}, got {int(stream.max())}")
    length = min(_LENGTH, max_position, len(stream))
    count = max(1, min(-(-num_tokens // length), len(stream) // length))
    starts = np.linspace(0, len(stream) - length, count).astype(np.int64)
    return Calibration(tokens=torch.from_numpy(stream[starts[:, None] + np.arange(length)]), source=source)


def documentation() -> list[str]:
    """Return the chapters of Python's documentation, in the order of their names."""
    topics: dict[str, str] = importlib.import_module(_DOCUMENTATION).topics
    return [topics[name] for name in sorted(topics)]


def _parts(tokenizer: Tokenizer, file: Path | None) -> Iterator[Any]:
    if file is None:
        yield from (tokenizer.encode(text) for text in documentation())
        return
    try:
        content = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} must be UTF-8: {error}") from error
    if file.suffix != ".jsonl":
        yield tokenizer.encode(content)
        return
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            yield _line(tokenizer, line, f"{file}, line {number}")


def _line(tokenizer: Tokenizer, line: str, where: str) -> Any:
    try:
        entry: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} must be JSON: {error}") from error
    if isinstance(entry, dict) and isinstance(entry.get("text"), str):
        return tokenizer.encode(entry["text"])
    if not isinstance(entry, dict) or not isinstance(entry.get("messages"), list):
        raise ValueError(f'{where} must be an object with "messages" or "text", got {line[:80]!r}')
    try:
        return tokenizer.encode_chat(entry["messages"], tools=entry.get("tools"), add_generation_prompt=False)
    except (ChatTemplateError, TypeError, AttributeError) as error:
        raise ValueError(f"{where}: {error}") from error
