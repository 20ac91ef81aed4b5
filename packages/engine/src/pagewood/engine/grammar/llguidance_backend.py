# pyright: basic
# The bindings of llguidance are typed in part only.
"""Grammars by llguidance: masks from an Earley parser over a lexer of derivatives, computed as they are needed.

Source: https://github.com/guidance-ai/llguidance
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator, Sequence
from typing import Any

import llguidance
import numpy as np

from pagewood.engine.api import Grammar
from pagewood.engine.grammar.lark_limits import check_lark
from pagewood.engine.grammar.limits import check_expression, read_choices, read_json
from pagewood.engine.grammar.matcher import Mask, mask_words
from pagewood.engine.grammar.schema_limits import check_schema
from pagewood.engine.grammar.structural_tag import lark_of_tag

_MAX_MESSAGE = 500
_LIMITS = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
}
"""Limits of a grammar and of one mask, in the library's units; it fails with a message when one is reached. Its own
defaults, but fewer states: one takes 1 to 2 kB, and they are kept as long as the grammar is cached."""
_NOT_ALLOWED = "doesn't satisfy the grammar"


class LLGuidanceBackend:
    """llguidance with the vocabulary of a model. Safe to use from all threads.

    Compiling and filling release the interpreter's lock; advancing keeps it, but takes microseconds.
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
            ValueError: the library cannot read the tokenizer.
        """
        # The library needs an id for the end; a model that has none lends one that is not text either.
        eos_token_ids = tuple(eos_token_ids) or _first_special(tokenizer)
        try:
            with _panics_as_errors():
                self._tokenizer = llguidance.LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos_token_ids))
        except ValueError as error:
            raise ValueError(f"tokenizer must be one that llguidance can read: {_short(str(error))}") from None
        if self._tokenizer.vocab_size != vocab_size:
            raise ValueError(
                f"vocab_size must be that of the tokenizer, {self._tokenizer.vocab_size}, got {vocab_size}"
            )
        self._eos_token_ids = frozenset(eos_token_ids)
        self._limits = llguidance.LLParserLimits(verbose_errors=False, **_LIMITS)
        self._max_whitespace = max_whitespace
        self._vocab_size = vocab_size

    def compile(self, grammar: Grammar) -> LLGuidancePrototype:
        """Compile `grammar`, and compute its first mask, so that a grammar that allows nothing is refused here.

        Raises:
            ValueError: the grammar is wrong, too large, or has a keyword that is not supported.
        """
        grammars = self._translate(grammar)
        with _panics_as_errors():
            matcher = llguidance.LLMatcher(self._tokenizer, grammars, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise ValueError(_short(matcher.get_error()))
        prototype = LLGuidancePrototype(matcher, vocab_size=self._vocab_size, eos_token_ids=self._eos_token_ids)
        first = prototype.matcher(self._eos_token_ids)
        first.fill(np.empty(mask_words(self._vocab_size), np.int32))
        if first.error is not None:
            raise ValueError(f"the grammar allows no first token: {first.error}")
        return prototype

    def _translate(self, grammar: Grammar) -> str:
        """Return the grammar in the library's own form, a JSON list of grammars that may refer to each other."""
        text = grammar.text
        match grammar.kind:
            case "json_schema":
                schema = check_schema(read_json("schema", text))
                return _grammars(json_schema=schema | {"x-guidance": self._json_options})
            case "regex":
                check_expression("regex", text)
                return llguidance.LLMatcher.grammar_from_regex(text)
            case "lark":
                check_lark(text)
                return _grammars(lark_grammar=text)
            case "choice":
                choices = (json.dumps(choice).replace("\x7f", r"\u007f") for choice in read_choices(text))
                return _grammars(lark_grammar=f"start: CHOICE\nCHOICE: {' | '.join(choices)}")
            case "structural_tag":
                lark, named = lark_of_tag(read_json("structural tag", text), quote_regex=_quote_regex)
                check_lark(lark)
                entries: list[dict[str, Any]] = [{"lark_grammar": lark}]
                for name, inner in named.items():
                    if isinstance(inner, str):
                        check_lark(inner)
                        entries.append({"name": name, "lark_grammar": inner})
                    else:
                        schema = check_schema(inner)
                        entries.append({"name": name, "json_schema": schema | {"x-guidance": self._json_options}})
                return json.dumps({"grammars": entries})

    @property
    def _json_options(self) -> dict[str, Any]:
        if self._max_whitespace == 0:
            return {"whitespace_flexible": False}
        return {"whitespace_pattern": rf"[ \t\r\n]{{1,{self._max_whitespace}}}"}


class LLGuidancePrototype:
    """A compiled grammar. Safe to use from all threads.

    The matchers of one prototype share the states of a lexer. What one of them has computed, the others need not; if
    one of them reaches a limit of the lexer, all have reached it.
    """

    __slots__ = ("_matcher", "_vocab_size", "eos_token_ids", "is_spoiled")

    def __init__(self, matcher: Any, *, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.is_spoiled = False
        """Whether a limit of the lexer has been reached; written by: LLGuidanceMatcher."""

    def matcher(self, end_tokens: frozenset[int]) -> LLGuidanceMatcher:
        """Return a matcher at the start of the grammar.

        Raises:
            ValueError: an end token is not in the vocabulary.
        """
        for token in end_tokens:
            if not 0 <= token < self._vocab_size:
                raise ValueError(f"end_tokens must be in [0, {self._vocab_size}), got {token}")
        ends = _Ends(end_tokens, self.eos_token_ids | end_tokens)
        return LLGuidanceMatcher(self, self._matcher.deep_copy(), ends=ends, vocab_size=self._vocab_size)


class _Ends:
    """The end tokens of a request as bits of a mask. Immutable."""

    __slots__ = ("_allowed", "_cleared", "_words", "tokens")

    def __init__(self, tokens: frozenset[int], cleared: frozenset[int]) -> None:
        """Prepare the bits of `tokens`, and of those that the library sets or may set for another reason."""
        self.tokens = tokens
        self._words = np.array(sorted({token // 32 for token in cleared}), dtype=np.intp)
        place = {int(word): index for index, word in enumerate(self._words)}
        keep = np.full(len(place), 0xFFFFFFFF, dtype=np.uint32)
        allowed = np.zeros(len(place), dtype=np.uint32)
        for token in cleared:
            keep[place[token // 32]] &= np.uint32(0xFFFFFFFF ^ (1 << token % 32))
        for token in tokens:
            allowed[place[token // 32]] |= np.uint32(1 << token % 32)
        self._cleared = keep.view(np.int32)
        self._allowed = allowed.view(np.int32)

    def write(self, row: Mask, *, can_end: bool) -> None:
        """Set the end tokens in `row` if `can_end`, and clear the others."""
        words = row[self._words] & self._cleared
        row[self._words] = words | self._allowed if can_end else words


class LLGuidanceMatcher:
    """The state of one request in a grammar of llguidance; see `Matcher`."""

    __slots__ = ("_ends", "_error", "_has_ended", "_matcher", "_num_bytes", "_prototype", "_vocab_size")

    def __init__(self, prototype: LLGuidancePrototype, matcher: Any, *, ends: _Ends, vocab_size: int) -> None:
        self._prototype = prototype
        self._matcher = matcher
        self._ends = ends
        self._vocab_size = vocab_size
        self._num_bytes = 4 * mask_words(vocab_size)
        self._error: str | None = None
        self._has_ended = False

    def fill(self, row: Mask) -> None:
        """Write the tokens that may come next into `row`.

        Args:
            row: [mask_words(vocab_size)] int32, contiguous.

        Raises:
            ValueError: `row` has another shape.
        """
        if row.dtype != np.int32 or row.shape != (self._num_bytes // 4,) or not row.flags.c_contiguous:
            raise ValueError(
                f"row must be contiguous int32 of shape ({self._num_bytes // 4},), got {row.dtype} of shape {row.shape}"
            )
        if self._error is not None or self._has_ended:
            row[:] = 0
            if self._error is None:
                self._ends.write(row, can_end=True)
            return
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, self._num_bytes)
        if self._matcher.is_error():
            self._fail(self._matcher.get_error())
            row[:] = 0
            return
        self._ends.write(row, can_end=self._matcher.is_accepting())
        if not row.any() and not self.is_finished:
            if self._matcher.is_accepting():
                self._has_ended = True
            else:
                self._fail("every token that may come next is an end token")

    def fill_ahead(self, drafts: Sequence[int], rows: Mask) -> int:
        """Write the masks along a chain of drafts, and return how many; see `Matcher`.

        Args:
            drafts: token ids.
            rows: [at least 1 + len(drafts), mask_words(vocab_size)] int32, contiguous.

        Raises:
            ValueError: `rows` has another shape.
        """
        if len(rows) <= len(drafts):
            raise ValueError(f"rows must be more than the {len(drafts)} drafts, got {len(rows)}")
        num_consumed = 0
        self.fill(rows[0])
        for draft in drafts:
            row = rows[num_consumed]
            if self._error is not None or draft in self._ends.tokens or not 0 <= draft < self._vocab_size:
                break
            if not int(row[draft // 32]) >> draft % 32 & 1:
                break
            if not self._matcher.consume_token(draft):
                self._fail(self._matcher.get_error())
                break
            num_consumed += 1
            self.fill(rows[num_consumed])
        self._roll_back(num_consumed)
        return num_consumed + 1

    def advance(self, tokens: Sequence[int]) -> bool:
        """Go on by `tokens`; False if one of them is not allowed, or the library fails."""
        tokens = [int(token) for token in tokens]
        ends = self._ends.tokens
        num_before = next((index for index, token in enumerate(tokens) if token in ends), len(tokens))
        if self._error is None and self._has_ended and tokens:
            self._error = f"token {tokens[0]} follows the end"
        for token in tokens[:num_before]:
            if self._error is None and not 0 <= token < self._vocab_size:
                self._error = f"token must be in [0, {self._vocab_size}), got {token}"
        if self._error is None and num_before and not self._matcher.consume_tokens(tokens[:num_before]):
            self._fail(self._matcher.get_error())
        if self._error is None and num_before < len(tokens):
            if not self._matcher.is_accepting():
                self._error = f"end token {tokens[num_before]} comes before the grammar can end"
            elif num_before + 1 < len(tokens):
                self._error = f"token {tokens[num_before + 1]} follows the end"
            else:
                self._has_ended = True
        return self._error is None

    def accepts(self, tokens: Sequence[int]) -> int:
        """Return how many of `tokens` are allowed one after the other; the state is as before."""
        if self._error is not None or self._has_ended:
            return 0
        ends = self._ends.tokens
        before: list[int] = []
        for token in tokens:
            if token in ends or not 0 <= token < self._vocab_size or token in self._prototype.eos_token_ids:
                break
            before.append(int(token))
        num_allowed = int(self._matcher.validate_tokens(before)) if before else 0
        if num_allowed < len(before) or num_allowed == len(tokens) or tokens[num_allowed] not in ends:
            return num_allowed
        self._matcher.try_consume_tokens(before)
        can_end = bool(self._matcher.is_accepting())
        self._roll_back(len(before))
        return num_allowed + can_end

    def forced(self) -> tuple[int, ...]:
        """Return the tokens that come next in any case, as far as they are known."""
        if self._error is not None or self.is_finished:
            return ()
        return tuple(self._matcher.compute_ff_tokens())

    @property
    def is_finished(self) -> bool:
        """Whether nothing but the end can follow, or the end has come."""
        return self._error is None and (self._has_ended or bool(self._matcher.is_stopped()))

    @property
    def can_end(self) -> bool:
        """Whether the text is complete, though it may go on."""
        return self._error is None and (self._has_ended or bool(self._matcher.is_accepting()))

    @property
    def error(self) -> str | None:
        """Why the matcher has failed; None: it has not."""
        return self._error

    def copy(self) -> LLGuidanceMatcher:
        """Return a matcher in the same state, that goes on by itself."""
        copy = LLGuidanceMatcher(
            self._prototype, self._matcher.deep_copy(), ends=self._ends, vocab_size=self._vocab_size
        )
        copy._error = self._error
        copy._has_ended = self._has_ended
        return copy

    def _roll_back(self, num_tokens: int) -> None:
        if num_tokens and self._error is None and not self._matcher.rollback(num_tokens):
            self._fail(self._matcher.get_error())

    def _fail(self, message: str) -> None:
        self._error = _short(message)
        if _NOT_ALLOWED not in message:
            self._prototype.is_spoiled = True


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
