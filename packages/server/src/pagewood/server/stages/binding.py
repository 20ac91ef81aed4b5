"""Grammars of answers that a response template reads: they bind calls, and begin after reasoning."""

from __future__ import annotations

from dataclasses import replace

from pagewood.engine.api import Grammar, Refusal, SamplingParams
from pagewood.engine.text import ResponseTemplate, Tokenizer, calls_or, ends_of_reasoning, tool_grammar
from pagewood.server.messages import wire


def bound(tokenizer: Tokenizer, sampling: SamplingParams, reading: wire.Reading) -> SamplingParams | Refusal:
    """Return the sampling parameters with the grammar of an answer.

    An answer is bound to the client's grammar (`sampling.grammar`), or without one, to calls as in `reading`. If
    functions are offered together with a grammar, calls are an alternative to it.

    Args:
        tokenizer: of the model.
        sampling: of the request.
        reading: rules for reading its answer.

    Returns:
        The parameters; or a refusal, if no grammar can express the request.
    """
    template, grammar = tokenizer.response_template, sampling.grammar
    if template is None:
        return sampling
    if reading.tools:
        found = _with_calls(tokenizer, template, grammar, reading)
        if isinstance(found, Refusal):
            return found
        grammar = found
    if grammar is None:
        return sampling
    return replace(
        sampling, grammar=replace(grammar, after=ends_of_reasoning(tokenizer, reading.tools, reading.prompt_tail))
    )


def _with_calls(
    tokenizer: Tokenizer, template: ResponseTemplate, answer: Grammar | None, reading: wire.Reading
) -> Grammar | Refusal | None:
    """Return the grammar of an answer in a conversation with tools; None: nothing is bound."""
    choice = reading.binds if answer is None or reading.binds not in (None, "auto") else "required"
    if choice is None:
        return None
    try:
        calls = tool_grammar(
            template, reading.tools, choice, parallel=reading.parallel, special_tokens=tokenizer.special_tokens
        )
        if calls is None:
            return answer if reading.binds in (None, "auto") else _refusal("calls of this model cannot be required")
        return calls if answer is None or reading.binds not in (None, "auto") else calls_or(answer, calls)
    except ValueError as error:
        return _refusal(str(error))


def _refusal(message: str) -> Refusal:
    return Refusal(message=message, param="grammar", code="invalid_grammar")
