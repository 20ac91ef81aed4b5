# pyright: basic
# (the tasks of tools/demo_model are not a package)
"""Prompts for the embedded model, and recorded edits of texts for drafters that look text up."""

from __future__ import annotations

import random
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pagewood.engine.model_folder.folder import model_folder
from pagewood.engine.text.tokenizer import Tokenizer

_TOOLS = Path(__file__).resolve().parents[2] / "tools" / "demo_model"
_COPYING = ("repeat n times", "count aloud")
"""Tasks of the embedded model whose answers repeat themselves or the prompt."""
_NUM_EDITS = 20
"""Edits that are drawn together, so that all calls agree on the order."""
_PIECES = re.compile(r"\w+|\s+|[^\w\s]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A text and its edited form, as token ids."""

    name: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(model_folder(None))


def task_prompts(num_prompts: int, *, seed: int, copying: bool = False) -> list[list[int]]:
    """Return held-out prompts of the embedded model's tasks as token ids, each different.

    Args:
        num_prompts: how many.
        seed: makes them.
        copying: only tasks with answers that copy; otherwise all tasks.
    """
    sys.path.insert(0, str(_TOOLS))
    try:
        import fact_tasks  # noqa: F401  # pyright: ignore  # registers its tasks, as the others do
        import number_tasks  # noqa: F401  # pyright: ignore
        import talk_tasks  # noqa: F401  # pyright: ignore
        import text_tasks  # noqa: F401  # pyright: ignore
        from tasks import GENERATORS, draw  # pyright: ignore
    finally:
        sys.path.remove(str(_TOOLS))
    rng = random.Random(seed)
    names = _COPYING if copying else sorted(GENERATORS)
    tokenizer = _tokenizer()
    prompts: list[list[int]] = []
    for index in range(num_prompts):
        turn = draw(rng, names[index % len(names)], held=not copying)
        prompts.append(tokenizer.encode_chat([{"role": "user", "content": turn.prompt}]).tolist())
    rng.shuffle(prompts)
    return prompts


def recorded_edits(num_edits: int, *, num_lines: int | None = None, first: int = 0) -> list[Edit]:
    """Return edits of this repository's source files: an identifier is renamed, and one line in twenty is new.

    A token is a word, a run of white space or a sign, so it is about as long as a token of a large vocabulary.

    Args:
        num_edits: how many.
        num_lines: only the first lines of each file; None: all of it.
        first: edits that are left out, so that calls can get different ones.
    """
    root = Path(__file__).resolve().parents[2] / "packages"
    files = sorted((path for path in root.rglob("*.py") if 2_000 < path.stat().st_size < 9_000), key=str)
    rng = random.Random(0)
    numbers: dict[str, int] = {}

    def encode(text: str) -> tuple[int, ...]:
        return tuple(numbers.setdefault(piece, len(numbers)) for piece in _PIECES.findall(text))

    edits: list[Edit] = []
    for path in rng.sample(files, min(max(_NUM_EDITS, first + num_edits), len(files))):
        text = "".join(path.read_text().splitlines(keepends=True)[:num_lines])
        names = sorted({name for name in re.findall(r"\b[a-z_]{5,}\b", text) if text.count(name) > 2})
        if not names:
            continue
        old = rng.choice(names)
        lines = re.sub(rf"\b{old}\b", f"{old}_of_row", text).splitlines(keepends=True)
        for at in sorted(rng.sample(range(len(lines)), max(1, len(lines) // 20)), reverse=True):
            lines.insert(at, f"    assert {rng.choice(names)} is not None, {rng.randrange(10_000)}\n")
        edits.append(Edit(name=path.name, prompt=encode(f"Rename {old}:\n{text}\n"), answer=encode("".join(lines))))
    return edits[first : first + num_edits]
