# pyright: basic
# (torch is typed in part only)
"""A logits processor that makes a model write given texts: what it draws is forced, and how it is drafted is not.

A random model has no text to copy. With this, an engine answers with recorded edits, and its drafters, its verification
and its steps do all that they would do with a model that wrote them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagewood.engine.api import LogitsProcessor
from speculation.prompts import Edit

PROCESSORS = (("follow", "speculation.forced:follow"),)
"""For `EngineConfig.logits_processors`."""
_edits: list[Edit] = []


def follow(tokens: Any, logits: Any, *, edit: int) -> None:
    """Leave only the next token of an edit."""
    recorded = _edits[edit]
    place = len(tokens) - len(recorded.prompt)
    logits.fill_(float("-inf"))
    logits[recorded.answer[place] if place < len(recorded.answer) else 0] = 0.0


def fields_of(edits: Sequence[Edit]) -> list[dict[str, Any]]:
    """Return the sampling parameters of requests whose prompts are those of the edits."""
    fields: list[dict[str, Any]] = []
    for edit in edits:
        _edits.append(edit)
        processor = LogitsProcessor("follow", f'{{"edit": {len(_edits) - 1}}}')
        fields.append({"logits_processors": (processor,)})
    return fields
