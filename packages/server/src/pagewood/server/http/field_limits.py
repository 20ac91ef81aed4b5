"""Limits on the number and length of texts in the fields of a request, the same in all protocols.

Texts of the prompt are not among them: the model's length limits these.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pagewood.engine.api import MAX_BAD_WORDS

MAX_STOPS = 16
"""Most stop strings of a request."""
MAX_STOP_LENGTH = 1_024
"""Longest stop string, in characters. The search for one keeps a table of its length and may hold back as much text."""
MAX_STOP_TOKENS = 1_024
"""Most token ids that end an answer."""
MAX_STOP_EXPRESSIONS = 4
"""They are compiled in the HTTP process and in the detokenizer, a few milliseconds each."""
MAX_STOP_EXPRESSION_LENGTH = 512
"""Longest stop expression, in characters, as in the engine's `stop_regex`."""
MAX_WORDS = MAX_BAD_WORDS // 2
"""Most bad words: each is two sequences of tokens, without and with a space before it."""
MAX_WORD_LENGTH = 256
"""Longest bad word, in characters."""
MAX_SALT_LENGTH = 512
"""Longest `cache_salt`, in characters."""
MAX_NAME_LENGTH = 128
"""Longest name that a client gives to something: a request, a tool, a tag, a class."""
MAX_ID_LENGTH = 512
"""Longest id by which a request is found, in characters."""

MAX_IDLE_S = 1e9
"""Longest time for which a client may ask that a model stays loaded, seconds."""

StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)]
Id = Annotated[str, Field(min_length=1, max_length=MAX_ID_LENGTH)]
Label = Annotated[str, Field(max_length=MAX_NAME_LENGTH)]
IdleSeconds = Annotated[float, Field(ge=0, le=MAX_IDLE_S)]
Salt = Annotated[str, Field(max_length=MAX_SALT_LENGTH)]
