"""Tools that `gen` offers: their description in the prompt, the allowed calls, and the model's calls as data."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from pagewood.engine.api import Grammar
from pagewood.engine.program.backend import Answer, Prompt, Sampling, ToolCall
from pagewood.engine.text import (
    ReadStops,
    ResponseParser,
    ResponseTemplate,
    Tokenizer,
    ends_of_reasoning,
    stops_of,
    tool_grammar,
)
from pagewood.engine.text.reasoning import TAIL_LENGTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Functions that the model may or must call. Invariant: there is at least one."""

    tools: tuple[dict[str, Any], ...]
    """As in OpenAI's API."""
    choice: str
    """auto, required, or the name of a function that must be called."""

    def grammar(self, tokenizer: Tokenizer, prompt: Prompt) -> Grammar | None:
        """Return the grammar of the answer; None: calling is optional.

        Raises:
            ValueError: the model's response template cannot read calls, or does not describe how they are written.
        """
        template = _template(tokenizer)
        if self.choice == "auto":
            return None
        grammar = tool_grammar(template, self.tools, self.choice, special_tokens=tokenizer.special_tokens)
        if grammar is None:
            raise ValueError(
                f"tool_choice must be auto, because calls of this model cannot be required, got {self.choice!r}"
            )
        return replace(grammar, after=ends_of_reasoning(tokenizer, self.tools, _tail(prompt, tokenizer)))

    def stops(self, sampling: Sampling, tokenizer: Tokenizer, prompt: Prompt) -> Callable[[], ReadStops] | None:
        """Return a maker of the search for stop strings and expressions in content; None: there are none.

        Raises:
            ValueError: the model's response template cannot read calls.
        """
        if not sampling.stop and not sampling.stop_regex:
            return None
        template, tail = _template(tokenizer), _tail(prompt, tokenizer)

        def make() -> ReadStops:
            search = stops_of(sampling.stop, sampling.stop_regex)
            return ReadStops(ResponseParser(template, tools=self.tools, prompt_tail=tail, stops=search))

        return make

    def read(self, answer: Answer, tokenizer: Tokenizer, prompt: Prompt) -> Answer:
        """Return an answer with the calls in its text."""
        parser = ResponseParser(_template(tokenizer), tools=self.tools, prompt_tail=_tail(prompt, tokenizer))
        calls: list[_Call] = []
        content: list[str] = []
        for part in [*parser.feed(answer.text), *parser.finish(is_cut=answer.finish == "length")]:
            match part.kind:
                case "tool_call":
                    calls.append(_Call(name=part.text, id=part.id))
                case "arguments":
                    calls[part.index].arguments.append(part.text)
                case "call_end":
                    calls[part.index].is_complete = True
                case "content":
                    content.append(part.text)
                case "reasoning":
                    pass
        found = tuple(
            ToolCall(one.name, json.loads("".join(one.arguments)), id=one.id) for one in calls if one.is_complete
        )
        return replace(answer, calls=found, content="".join(content))


@dataclass(slots=True, kw_only=True)
class _Call:
    name: str
    id: str
    arguments: list[str] = field(default_factory=list[str])  # contents written by: tools
    is_complete: bool = False  # written by: tools


def offer(tools: object, choice: object) -> Offer | None:
    """Return the tools of `gen` after their checks; None: there are none.

    Raises:
        TypeError: a tool is no object.
        ValueError: a tool has no name, two have one name, or the choice names none of them.
    """
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise TypeError(f"tools must be a sequence of objects, got {tools!r:.100}")
    given: list[dict[str, Any]] = []
    names: list[str] = []
    for index, tool in enumerate(cast("Sequence[object]", tools)):
        if not isinstance(tool, Mapping):
            raise TypeError(f"tools[{index}] must be an object as in OpenAI's API, got {tool!r:.100}")
        found = dict(cast("Mapping[str, Any]", tool))
        function = found.get("function", found)  # the function alone is a tool, too
        name = cast("Mapping[str, Any]", function).get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name or name in names:
            raise ValueError(f"tools[{index}] must have a function with a new name, got {name!r:.100}")
        given.append(found if "function" in found else {"type": "function", "function": found})
        names.append(name)
    if not isinstance(choice, str) or choice not in ("auto", *(("required", *names) if names else ())):
        raise ValueError(f"tool_choice must be auto, required or the name of a tool, got {choice!r:.100}")
    return Offer(tools=tuple(given), choice=choice) if given else None


def _template(tokenizer: Tokenizer) -> ResponseTemplate:
    template = tokenizer.response_template
    if template is None or not template.has_calls:
        raise ValueError("tools must be empty: this model has no template by which calls could be read")
    if template.marks_with(tokenizer.special_tokens):
        raise ValueError("tools must be empty: this model marks calls with special tokens, which texts do not show")
    return template


def _tail(prompt: Prompt, tokenizer: Tokenizer) -> str:
    return prompt.render(tokenizer)[-TAIL_LENGTH:]
