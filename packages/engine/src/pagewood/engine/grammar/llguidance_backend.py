# pyright: basic
# The bindings of llguidance are typed in part only.
"""Grammars by llguidance: masks from an Earley parser over a lexer of derivatives, computed as they are needed.

Source: https://github.com/guidance-ai/llguidance
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from collections.abc import Generator, Sequence
from typing import Any

import llguidance
import numpy as np

from pagewood.engine.api import Grammar
from pagewood.engine.grammar.budget import GrammarBudget, check_budget
from pagewood.engine.grammar.lark_limits import check_lark, with_schemas
from pagewood.engine.grammar.limits import check_expression, read_choices, read_json
from pagewood.engine.grammar.mask import EndTokens, Mask, mask_words
from pagewood.engine.grammar.places import located, reason_in
from pagewood.engine.grammar.request_matcher import RequestMatcher
from pagewood.engine.grammar.schema_form import ESCAPES, kept_schema
from pagewood.engine.grammar.schema_limits import Schema, all_objects, check_schema
from pagewood.engine.grammar.structural_tag import lark_of_tag
from pagewood.engine.grammar.wide_schema import holds_range, lark_of_schema

_MAX_MESSAGE = 500
_LIMITS: dict[str, Any] = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
}
"""Limits of a grammar and of one mask, in the library's units; it fails with a message when one is reached. Its own
defaults, but fewer states: one takes 1 to 2 kB, and they are kept as long as the grammar is cached."""
_NOTHING = "NoExtensionBias"
"""The text of a message for a state in which no token is allowed."""
_SHARED_FAILURES = ("lexer error", "panic", "Poison")
"""Texts of messages for failures that all matchers of a prototype share; other failures concern one matcher."""


_PRINTABLE = r"[ -!#-\[\]-~]"
_SLICES = (
    r"[a-z]{1,10}",
    r"[a-zA-Z0-9]{1,10}",
    r"[a-zA-Z0-9 ]{1,10}",
    _PRINTABLE + "{1,10}",
    _PRINTABLE + "{1,30}",
)
"""Expressions whose tokens are allowed at once where the grammar contains the whole expression, besides the library's
own slices, which are for strings of JSON. Each is contained in the next. They do not change the allowed tokens; with
them, masks of bounded repetition such as `[a-z]{1,500}` take about half the time."""


class LLGuidanceBackend:
    """llguidance with the vocabulary of a model. Safe to use from all threads.

    Compiling and filling release the interpreter's lock: another thread kept 70 to 95% of its speed. Advancing keeps
    it, mostly for microseconds.
    """

    __slots__ = ("_eos_token_ids", "_limits", "_max_whitespace", "_tokenizer", "_vocab_size")

    def __init__(self, tokenizer: str, *, vocab_size: int, eos_token_ids: Sequence[int], max_whitespace: int) -> None:
        """Build the trie of the vocabulary.

        Args:
            tokenizer: text of a `tokenizer.json`.
            vocab_size: number of logits; at least the ids of the tokenizer.
            eos_token_ids: ids that are not text.
            max_whitespace: most characters of white space in one place of a JSON text.

        Raises:
            ValueError: the library cannot read the tokenizer, or it has more tokens than there are logits.
        """
        for token in eos_token_ids:
            if not 0 <= token < vocab_size:
                raise ValueError(f"eos_token_ids must be in [0, {vocab_size}), got {token}")
        # The library needs an id for the end; a model without one lends another id that is not text.
        eos_token_ids = tuple(eos_token_ids) or _first_special(tokenizer)
        try:
            with _panics_as_errors():
                self._tokenizer = llguidance.LLTokenizer(
                    tokenizer, n_vocab=vocab_size, eos_token=list(eos_token_ids), slices=_slices()
                )
        except ValueError as error:
            raise ValueError(f"tokenizer must be one that llguidance takes: {_short(str(error))}") from None
        self._eos_token_ids = frozenset(eos_token_ids)
        self._limits = llguidance.LLParserLimits(verbose_errors=False, **_LIMITS)
        self._max_whitespace = max_whitespace
        self._vocab_size = vocab_size

    def compile(self, grammar: Grammar) -> LLGuidancePrototype:
        """Compile `grammar`, and compute its first mask, so that a grammar that allows nothing is refused here.

        Raises:
            ValueError: the grammar is wrong, too large, or has a keyword that is not supported.
        """
        matcher = self._matcher(self._translate(grammar), self._tokenizer)
        if matcher.is_error():
            raise ValueError(_short(self._located(matcher.get_error(), grammar)))
        first = self._prototype(matcher).matcher(self._eos_token_ids)
        first.fill(np.empty(mask_words(self._vocab_size), np.int32))
        if first.error is not None:
            raise ValueError(f"the grammar allows no first token: {first.error}")
        return self._prototype(matcher)

    def _prototype(self, matcher: Any) -> LLGuidancePrototype:
        """Return a prototype with a budget of its own, because no step waits for compilation."""
        return LLGuidancePrototype(matcher, vocab_size=self._vocab_size, eos_token_ids=self._eos_token_ids)

    def _matcher(self, grammars: str, tokenizer: Any) -> Any:
        with _panics_as_errors():
            return llguidance.LLMatcher(tokenizer, grammars, log_level=0, limits=self._limits)

    def _located(self, message: str, grammar: Grammar) -> str:
        """Return a message with the place of its schema, if Lark names one."""
        if grammar.kind == "json_schema":
            return reason_in(message)  # the lines of Lark are generated here

        def reason_of(schema: dict[str, Any]) -> str | None:
            matcher = self._matcher(_grammars(lark_grammar=f"start: %json {json.dumps(schema)}"), self._tokenizer)
            return reason_in(matcher.get_error()) if matcher.is_error() else None

        texts = [grammar.text] if grammar.kind == "lark" else []
        if grammar.kind == "structural_tag":
            tags = all_objects(json.loads(grammar.text))
            texts = [tag["grammar"] for tag in tags if isinstance(tag.get("grammar"), str)]
        found = (located(message, text, reason_of) for text in texts)
        return next((text for text in found if text != message), message)

    def _translate(self, grammar: Grammar) -> str:
        """Return the grammar in the library's own form, a JSON list of grammars that may refer to each other."""
        text = grammar.text
        match grammar.kind:
            case "json_schema":
                return _grammars(**self._schema_entry(check_schema(read_json("schema", text))))
            case "regex":
                check_expression("regex", text)
                return llguidance.LLMatcher.grammar_from_regex(text)
            case "lark":
                return json.dumps({"grammars": self._lark_entries([("", text)])})
            case "choice":
                choices = (json.dumps(choice).replace("\x7f", r"\u007f") for choice in read_choices(text))
                return _grammars(lark_grammar=f"start: CHOICE\nCHOICE: {' | '.join(choices)}")
            case "structural_tag":
                lark, named = lark_of_tag(read_json("structural tag", text), quote_regex=_quote_regex)
                texts = [("", lark), *((name, inner) for name, inner in named.items() if isinstance(inner, str))]
                schemas = ((name, inner) for name, inner in named.items() if not isinstance(inner, str))
                entries = [{"name": name, **self._schema_entry(check_schema(inner))} for name, inner in schemas]
                return json.dumps({"grammars": [*self._lark_entries(texts), *entries]})

    def _lark_entries(self, texts: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
        """Return Lark grammars with their names and with kept JSON schemas; their own options take precedence."""
        apart: list[dict[str, Any]] = []

        def kept(value: object) -> str:
            entry = self._schema_entry(check_schema(value, allows_options=True))
            if "json_schema" in entry:
                return f"%json {json.dumps(entry['json_schema'], ensure_ascii=False)}"
            apart.append({"name": f"schema_{len(apart)}", **entry})
            return f"@{apart[-1]['name']}"

        entries: list[dict[str, Any]] = []
        for name, text in texts:
            check_lark(text, allows_text=self._allows_text)
            entries.append({"name": name or None, "lark_grammar": with_schemas(text, kept)})
        return [*entries, *apart]

    def _schema_entry(self, schema: Schema) -> dict[str, Any]:
        """Return a grammar of the library for a schema: the schema in a form that it keeps, or one in Lark."""
        options: dict[str, Any] = {"json_allowed_escapes": ESCAPES}
        whitespace = rf"[ \t\r\n]{{1,{self._max_whitespace}}}" if self._max_whitespace else None
        if "x-guidance" in schema:
            options |= schema["x-guidance"]
        elif whitespace is None:
            options["whitespace_flexible"] = False
        else:
            options["whitespace_pattern"] = whitespace
        kept = kept_schema(schema, begins=self._begins)
        if isinstance(kept, dict) and not holds_range(kept):
            return {"json_schema": kept | {"x-guidance": options}}
        if "x-guidance" in schema:
            raise ValueError("x-guidance must not be in a schema with integers that are not exact as 64-bit floats")
        return {"lark_grammar": lark_of_schema(kept, options, whitespace=whitespace)}

    def _allows_text(self, lark: str) -> bool:
        """Return whether a small grammar matches a text; True if the library refuses it."""
        matcher = self._matcher(_grammars(lark_grammar=lark), _bytes())
        if not matcher.is_error():
            row = np.empty(mask_words(_bytes().vocab_size), np.int32)
            matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        return not (matcher.is_error() and _NOTHING in matcher.get_error())

    def _begins(self, schema: Schema, text: str) -> bool:
        """Return whether an instance of a small schema can begin with a text; True if the library refuses it."""
        compact = schema | {"x-guidance": {"whitespace_flexible": False, "json_allowed_escapes": ESCAPES}}
        matcher = self._matcher(_grammars(json_schema=compact), self._tokenizer)
        if matcher.is_error():
            return True
        tokens = self._tokenizer.tokenize_str(text)
        return matcher.validate_tokens(tokens) == len(tokens)


class LLGuidancePrototype:
    """A compiled grammar. Safe to use from all threads.

    The matchers of one prototype share the states of a lexer. A state that one of them has computed is available to
    all; if one of them reaches a limit of the lexer, all have reached it.
    """

    __slots__ = ("_budget", "_matcher", "_vocab_size", "eos_token_ids", "is_spoiled")

    def __init__(self, matcher: Any, *, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._budget = GrammarBudget()
        self._matcher = matcher
        self._vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.is_spoiled = False  # written by: _LLGuidanceState
        """Whether a limit of the lexer has been reached."""

    def matcher(self, end_tokens: frozenset[int]) -> RequestMatcher:
        """Return a matcher at the start of the grammar.

        Raises:
            ValueError: an end token is not in the vocabulary, or the grammar is too slow.
        """
        check_budget(self._budget)
        ends = EndTokens(end_tokens, others=self.eos_token_ids, vocab_size=self._vocab_size)
        state = _LLGuidanceState(self, self.restarted(), 4 * mask_words(self._vocab_size))
        return RequestMatcher(state, ends=ends, vocab_size=self._vocab_size, budget=self._budget)

    def restarted(self) -> Any:
        """Return a matcher of the library at the start of the grammar."""
        return self._matcher.deep_copy()


class _LLGuidanceState:
    """A matcher of the library as a `LibraryState`."""

    __slots__ = ("_matcher", "_num_bytes", "_prototype", "failure")

    def __init__(self, prototype: LLGuidancePrototype, matcher: Any, num_bytes: int) -> None:
        self._prototype = prototype
        self._matcher = matcher  # written by: restart
        self._num_bytes = num_bytes
        self.failure: str | None = None  # written by: _LLGuidanceState

    def fill(self, row: Mask) -> None:
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, self._num_bytes)
        self._look_for_failure()

    def consume(self, tokens: list[int]) -> bool:
        eos = self._prototype.eos_token_ids
        if any(token in eos for token in tokens):  # the library takes it where the text is complete
            self.failure = f"token {next(token for token in tokens if token in eos)} doesn't satisfy the grammar"
        elif not self._matcher.consume_tokens(tokens):
            self._look_for_failure()
        return self.failure is None

    def num_allowed(self, tokens: list[int]) -> int:
        eos = self._prototype.eos_token_ids
        tokens = list(itertools.takewhile(lambda token: token not in eos, tokens))
        number = int(self._matcher.validate_tokens(tokens)) if tokens else 0
        self._look_for_failure()
        return number

    def roll_back(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)
        self._look_for_failure()

    def restart(self) -> None:
        self._matcher = self._prototype.restarted()
        self.failure = None
        self._look_for_failure()

    def forced(self) -> tuple[int, ...]:
        return tuple(self._matcher.compute_ff_tokens())

    @property
    def can_end(self) -> bool:
        return bool(self._matcher.is_accepting())

    @property
    def is_stopped(self) -> bool:
        return self.failure is None and bool(self._matcher.is_stopped())

    def copy(self) -> _LLGuidanceState:
        copy = _LLGuidanceState(self._prototype, self._matcher.deep_copy(), self._num_bytes)
        copy.failure = self.failure
        return copy

    def _look_for_failure(self) -> None:
        """The library raises no exceptions; its errors are final states."""
        if self.failure is None and self._matcher.is_error():
            message = self._matcher.get_error()
            self.failure = _short(message)
            if any(sign in message for sign in _SHARED_FAILURES):
                self._prototype.is_spoiled = True


@functools.cache
def _bytes() -> Any:
    """Return a vocabulary of all bytes."""
    return llguidance.LLTokenizer("byte")


def _slices() -> list[str]:
    """Return the library's slices, with our slices before those for all characters of a JSON string."""
    white, *strings = llguidance.LLTokenizer.general_slices()
    return [white, *_SLICES, *strings]


def _grammars(**entry: object) -> str:
    return json.dumps({"grammars": [entry]})


def _quote_regex(expression: str) -> str:
    """Return a regular expression in Lark's slashes."""
    return f"/{llguidance.regex_to_lark(expression, '')}/"


def _first_special(tokenizer: str) -> tuple[int, ...]:
    """Return the first id that is not text.

    Raises:
        ValueError: there is none.
    """
    added = _added_tokens(tokenizer)
    special = [token["id"] for token in added if token.get("special")]
    if not special:
        raise ValueError("eos_token_ids must not be empty for a tokenizer without special tokens")
    return (min(special),)


def _added_tokens(tokenizer: str) -> list[dict[str, Any]]:
    """Return the added tokens of a `tokenizer.json`."""
    value = json.loads(tokenizer)
    return list(value.get("added_tokens") or []) if isinstance(value, dict) else []


def _short(message: str) -> str:
    """Return a message of the library for people: its first part and its last, without dumps of its state."""
    for dump in ("<non-verbose/>", "<state>", "<backtrace>", "<grammar>"):
        message = message.partition(dump)[0]
    message = message.strip() or "the library gives no reason"
    if len(message) > _MAX_MESSAGE:
        message = f"{message[: _MAX_MESSAGE * 2 // 3]} ... {message[-_MAX_MESSAGE // 3 :]}"
    return message


@contextlib.contextmanager
def _panics_as_errors() -> Generator[None]:
    """Raise ValueError for a panic inside the block; pyo3 raises a `PanicException`, which no `except` names."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"llguidance panicked: {_short(str(error))}") from None
