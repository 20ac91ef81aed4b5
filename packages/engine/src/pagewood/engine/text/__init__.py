"""Text for an engine that knows only token ids: tokenizer, chat template, streamed decoding, and ends of texts.

Nothing here imports torch or transformers, so a process that only handles text starts fast and stays small.
"""

from pagewood.engine.text.chat_template import ChatMessage, ChatTemplate, ChatTemplateError
from pagewood.engine.text.panics import TokenizerPanic
from pagewood.engine.text.read_stops import ReadStops
from pagewood.engine.text.reasoning import ends_of_reasoning
from pagewood.engine.text.response import (
    Part,
    PartKind,
    ResponseParser,
    ResponseTemplate,
    calls_or,
    reasoning_ends,
    tool_grammar,
)
from pagewood.engine.text.stop import StopStrings
from pagewood.engine.text.stop_regex import StopExpressions, Stops, stops_of
from pagewood.engine.text.stream import TextStream
from pagewood.engine.text.tokenizer import Tokenizer

__all__ = [
    "ChatMessage",
    "ChatTemplate",
    "ChatTemplateError",
    "Part",
    "PartKind",
    "ReadStops",
    "ResponseParser",
    "ResponseTemplate",
    "StopExpressions",
    "StopStrings",
    "Stops",
    "TextStream",
    "Tokenizer",
    "TokenizerPanic",
    "calls_or",
    "ends_of_reasoning",
    "reasoning_ends",
    "stops_of",
    "tool_grammar",
]
