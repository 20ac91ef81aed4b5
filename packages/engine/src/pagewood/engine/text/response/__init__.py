"""The parts of an answer: content, reasoning and calls, read by a template of the model's format."""

from pagewood.engine.text.response.parser import ResponseParser
from pagewood.engine.text.response.part import Part, PartKind
from pagewood.engine.text.response.template import ResponseTemplate
from pagewood.engine.text.response.tool_grammar import calls_or, reasoning_ends, tool_grammar

__all__ = ["Part", "PartKind", "ResponseParser", "ResponseTemplate", "calls_or", "reasoning_ends", "tool_grammar"]
