"""Functions of the server's operator that change logits: which of them requests name, and with which arguments.

A runner gets this once, when a request is admitted, and calls the functions for every token that is drawn.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from pagewood.engine.api import LogitsProcessor, Refusal
from pagewood.engine.core.messages.adjustments import Admitted
from pagewood.engine.core.messages.arrays import Int32

_PARAM = "logits_processors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Processors:
    """What J admitted requests name."""

    rows: Int32
    """[J], row of each."""
    calls: tuple[tuple[LogitsProcessor, ...], ...]
    """[J], the functions of each, in their order."""

    @classmethod
    def of(cls, requests: Sequence[Admitted]) -> Processors | None:
        """Return the processors that requests name, or None if no request names any."""
        naming = [one for one in requests if one.sampling.logits_processors]
        if not naming:
            return None
        return cls(
            rows=np.array([one.row for one in naming], np.int32),
            calls=tuple([one.sampling.logits_processors for one in naming]),
        )


def arguments_of(processor: LogitsProcessor) -> dict[str, Any]:
    """Return the keyword arguments of a call.

    Raises:
        ValueError: they are not a JSON object.
    """
    try:
        arguments: object = json.loads(processor.arguments, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("too deeply nested") from error
    if not isinstance(arguments, dict):
        raise ValueError(f"not a JSON object but {type(arguments).__name__}")
    return cast("dict[str, Any]", arguments)


def processors_refusal(
    processors: Sequence[LogitsProcessor], functions: Mapping[str, Callable[..., None]]
) -> Refusal | None:
    """Return why a request with these processors is refused, or None if it is accepted.

    Args:
        processors: of the request.
        functions: those of the engine, by name.
    """
    for processor in processors:
        name, function = processor.name, functions.get(processor.name)
        if function is None:
            known = f"be one of {', '.join(functions)}" if functions else "be empty: this engine has none"
            return Refusal(
                message=f"{_PARAM} must {known}, got {name!r}", param=_PARAM, code="unknown_logits_processor"
            )
        try:
            arguments = arguments_of(processor)
        except ValueError as error:
            message = f"{_PARAM} must have JSON objects as arguments, got for {name!r}: {error}"
            return Refusal(message=message, param=_PARAM, code="invalid_value")
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # raised for some functions written in C
            continue
        try:
            signature.bind(None, None, **arguments)
        except TypeError as error:
            message = f"{_PARAM} must have the arguments of their functions, got for {name!r}: {error}"
            return Refusal(message=message, param=_PARAM, code="invalid_value")
    return None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
