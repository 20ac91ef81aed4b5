"""Grammars of answers that a response template reads: they bind calls, and begin behind reasoning."""

from __future__ import annotations

from dataclasses import replace

from pagewood.engine.api import Grammar, Refusal, SamplingParams
from pagewood.engine.text import ResponseParser, ResponseTemplate, Tokenizer, calls_or, reasoning_end, tool_grammar
from pagewood.server import wire


def bound(tokenizer: Tokenizer, sampling: SamplingParams, reading: wire.Reading) -> SamplingParams | Refusal:
    """Return the sampling parameters with the grammar of an answer.

    An answer is bound to what the client has said it may be (`sampling.grammar`), or, if it has said nothing, to calls
    as `reading` says. Where functions are offered with such a grammar, calls are an alternative to it.

    Args:
        tokenizer: of the model.
        sampling: of the request.
        reading: how its answer is read.

    Returns:
        The parameters; or a refusal, if the request asks for what no grammar can say.
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
    return replace(sampling, grammar=replace(grammar, after=_end_of_reasoning(tokenizer, template, reading)))


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


def _end_of_reasoning(tokenizer: Tokenizer, template: ResponseTemplate, reading: wire.Reading) -> tuple[int, ...]:
    """Return the tokens that end the reasoning which the prompt has begun; none if it has not."""
    parser = ResponseParser(template, tools=reading.tools, prompt_tail=reading.prompt_tail)
    if all(part.kind != "reasoning" for part in [*parser.feed("x"), *parser.finish()]):
        return ()
    end = reasoning_end(template)
    return () if end is None else tuple(tokenizer.encode(end, add_special_tokens=False).tolist())
