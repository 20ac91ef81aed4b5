"""Objects whose unknown fields are ignored, as Ollama does, and which of a request's fields these were."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, cast

from pydantic import BaseModel, ConfigDict

MAX_NAMED = 10
"""Most fields that a line of the log names."""
MAX_NAME_LENGTH = 40
"""Most characters of each."""
MAX_LOOKED_AT = 1_000
"""Most objects of a list whose fields are looked at, which takes 4 microseconds each."""

logger = logging.getLogger(__name__)


class Lenient(BaseModel):
    """An object whose unknown fields are kept, but have no effect."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


def log_ignored(request: Lenient, *, more: Iterable[str] = ()) -> None:
    """Write a line about what a request asks for without effect, if there is anything.

    Args:
        request: the body.
        more: what it asks for in vain by fields that are known.
    """
    names = list(dict.fromkeys([*_unknown(request), *more]))
    if names:
        shown = [name if name.isprintable() else ascii(name) for name in names[:MAX_NAMED]]
        others = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        logger.info("without effect: %s%s", ", ".join(shown), others)


def _unknown(value: Lenient, place: str = "") -> Iterator[str]:
    """Yield the names of the unknown fields of an object and of those in it, such as `messages[].name`."""
    for name in value.model_extra or ():
        yield place + name[:MAX_NAME_LENGTH]
    for name in type(value).model_fields:
        one = getattr(value, name)
        if isinstance(one, Lenient):
            yield from _unknown(one, f"{place}{name}.")
        elif isinstance(one, list):
            for item in islice(cast("list[Any]", one), MAX_LOOKED_AT):
                if isinstance(item, Lenient):
                    yield from _unknown(item, f"{place}{name}[].")
