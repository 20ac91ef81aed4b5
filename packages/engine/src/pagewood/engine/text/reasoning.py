"""The texts that end the reasoning which a prompt has begun."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagewood.engine.text.response import ResponseParser, reasoning_ends
from pagewood.engine.text.tokenizer import Tokenizer

TAIL_LENGTH = 1024
"""Characters at the end of a prompt that may begin a section of its answer."""


def ends_of_reasoning(tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]], prompt_tail: str) -> tuple[str, ...]:
    """Return the texts that each end the reasoning begun by the prompt; empty if it has begun none.

    Args:
        tokenizer: of a model with a response template.
        tools: that are offered, as in OpenAI's API.
        prompt_tail: the end of the prompt.
    """
    template = tokenizer.response_template
    assert template is not None
    parser = ResponseParser(template, tools=tools, prompt_tail=prompt_tail)
    if all(part.kind != "reasoning" for part in [*parser.feed("x"), *parser.finish()]):
        return ()
    return reasoning_ends(template)
