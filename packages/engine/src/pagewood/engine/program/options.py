"""The arguments of `gen` and `select`, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pagewood.engine.api import Grammar, SamplingParams
from pagewood.engine.offline.arguments import stop_expressions, stop_strings
from pagewood.engine.program.backend import Sampling
from pagewood.engine.program.tools import offer
from pagewood.engine.text import StopExpressions


def sampling(
    *,
    max_tokens: int,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    seed: int | None,
    stop: str | Sequence[str],
    stop_regex: str | Sequence[str],
    grammars: Mapping[str, Grammar | None],
    tools: object = (),
    tool_choice: object = "auto",
) -> Sampling:
    """Return the sampling options; `grammars` has the given grammars, by argument.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of its range, or several restrict the form of the text.
    """
    given = {name: grammar for name, grammar in grammars.items() if grammar is not None}
    if len(given) > 1:
        raise ValueError(f"at most one of {', '.join(grammars)} must be given, got {' and '.join(given)}")
    found = Sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=stop_strings(stop),
        stop_regex=stop_expressions(stop_regex),
        grammar=next(iter(given.values()), None),
        offer=offer(tools, tool_choice),
    )
    if given and found.offer is not None:
        raise ValueError(f"{next(iter(given))} must not come with tools, which say what the text may be")
    for name in ("max_tokens", "temperature", "top_p", "top_k", "seed"):
        value = getattr(found, name)
        kinds = (int, float) if name in ("temperature", "top_p") else (int,)
        if value is not None and (isinstance(value, bool) or not isinstance(value, kinds)):
            raise TypeError(f"{name} must be a number{'' if float in kinds else ' without a fraction'}, got {value!r}")
    if found.stop_regex:
        StopExpressions(found.stop_regex, strings=found.stop)
    sampling_params(found, SamplingParams())
    return found


def sampling_params(sampling: Sampling, defaults: SamplingParams) -> SamplingParams:
    """Return the parameters for an engine; `defaults` are those of the model.

    Raises:
        ValueError: one is out of its range.
    """
    names = ("temperature", "top_p", "top_k", "seed")
    given: dict[str, Any] = {name: getattr(sampling, name) for name in names if getattr(sampling, name) is not None}
    return replace(defaults, max_tokens=sampling.max_tokens, grammar=sampling.grammar, **given)


def check_choices(choices: object) -> tuple[str, ...]:
    """Return the choices of `select`.

    Raises:
        TypeError: they are not strings.
        ValueError: there is none, one is empty, or two are equal.
    """
    if isinstance(choices, str) or not isinstance(choices, Sequence):
        raise TypeError(f"choices must be a sequence of strings, got {choices!r:.100}")
    found: list[str] = []
    for index, choice in enumerate(choices):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        if not isinstance(choice, str):
            raise TypeError(f"choices[{index}] must be a string, got {choice!r:.100}")
        if not choice or choice in found:
            raise ValueError(f"choices[{index}] must be a new text that is not empty, got {choice!r:.100}")
        found.append(choice)
    if not found:
        raise ValueError("choices must hold at least one choice, got none")
    return tuple(found)
