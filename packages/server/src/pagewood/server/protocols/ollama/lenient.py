"""Objects whose unknown fields are ignored, as in Ollama, and a log line with the ignored fields of a request."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, cast

from pydantic import BaseModel, ConfigDict

MAX_NAMED = 10
"""Most fields that a line of the log names."""
MAX_NAME_LENGTH = 40
"""Most characters of each name."""
MAX_LOOKED_AT = 1_000
"""Most objects of a list that are searched for unknown fields, which takes 4 microseconds each."""

logger = logging.getLogger(__name__)


class Lenient(BaseModel):
    """An object whose unknown fields are kept, but have no effect."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


def log_ignored(request: Lenient, *, more: Iterable[str] = ()) -> None:
    """Log one line with the fields of a request that have no effect, if there are any.

    Args:
        request: the body.
        more: known fields that have no effect in this request.
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
