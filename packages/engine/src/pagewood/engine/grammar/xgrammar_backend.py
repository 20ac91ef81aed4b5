# pyright: basic
# The bindings of xgrammar are typed in part only, and it is an extra.
"""Grammars by xgrammar: masks of a pushdown automaton, most of each computed when the grammar is compiled.

Source: Dong et al., XGrammar, 2024; https://github.com/mlc-ai/xgrammar
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import tokenizers
import xgrammar  # pyright: ignore[reportMissingImports]

from pagewood.engine.api import Grammar
from pagewood.engine.grammar.budget import GrammarBudget, check_budget
from pagewood.engine.grammar.limits import MAX_LITERAL, check_expression, check_size, read_choices, read_json
from pagewood.engine.grammar.mask import EndTokens, Mask, mask_words
from pagewood.engine.grammar.request_matcher import RequestMatcher
from pagewood.engine.grammar.schema_limits import all_objects, check_schema
from pagewood.engine.grammar.utf8 import Utf8
from pagewood.engine.grammar.xgrammar_limits import kept_by_xgrammar

_MAX_NESTING = 200
"""Brackets in regular expressions and grammars, which are parsed by recursion."""


class XGrammarBackend:
    """xgrammar with the vocabulary of a model, for JSON schemas, regular expressions, choices and structural tags.

    Safe to use from all threads. It has no fuel: an expression that is small and costly may take until the deadline.
    """

    __slots__ = ("_compiler", "_max_whitespace", "_utf8", "_vocab_size")

    def __init__(self, tokenizer: str, *, vocab_size: int, eos_token_ids: Sequence[int], max_whitespace: int) -> None:
        """Read the vocabulary; the arguments are those of `LLGuidanceBackend`.

        Raises:
            ValueError: `vocab_size` is less than that of the tokenizer.
        """
        reader = tokenizers.Tokenizer.from_str(tokenizer)
        pieces = {index: piece for piece, index in reader.get_vocab(with_added_tokens=True).items()}
        if max(pieces, default=0) >= vocab_size:
            raise ValueError(f"vocab_size must be more than the largest id {max(pieces)}, got {vocab_size}")
        special = [index for index, token in reader.get_added_tokens_decoder().items() if token.special]
        metadata = xgrammar.TokenizerInfo._detect_metadata_from_hf(tokenizer)
        # Special tokens have no text for the library, so no text allows them.
        encoded = ["" if index in special else pieces.get(index, "") for index in range(vocab_size)]
        info = xgrammar.TokenizerInfo(
            encoded,
            vocab_type=metadata["vocab_type"],
            vocab_size=vocab_size,
            stop_token_ids=sorted(eos_token_ids),
            add_prefix_space=metadata["add_prefix_space"],
        )
        self._utf8 = Utf8(info.decoded_vocab, vocab_size=vocab_size)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._max_whitespace = max_whitespace
        self._vocab_size = vocab_size

    def compile(self, grammar: Grammar) -> XGrammarPrototype:
        """Compile `grammar`.

        Raises:
            ValueError: the grammar is wrong, too large, or of a kind or with a keyword that is not supported.
        """
        try:
            compiled = self._compiled(grammar)
        except RuntimeError as error:
            raise ValueError(str(error).partition("] ")[2] or str(error)) from None
        return XGrammarPrototype(compiled, utf8=self._utf8, vocab_size=self._vocab_size)

    def _compiled(self, grammar: Grammar) -> Any:
        text = grammar.text
        match grammar.kind:
            case "json_schema":
                schema = kept_by_xgrammar(check_schema(read_json("schema", text)))
                spaces: dict[str, Any] = {"max_whitespace_cnt": self._max_whitespace}
                if not self._max_whitespace:
                    spaces = {"any_whitespace": False, "separators": (",", ":")}
                return self._compiler.compile_json_schema(json.dumps(schema), strict_mode=False, **spaces)
            case "regex":
                check_expression("regex", text)
                _check_brackets("regex", text)
                return self._compiler.compile_regex(text)
            case "choice":
                choices = (json.dumps(choice, ensure_ascii=True) for choice in read_choices(text))
                return self._compiler.compile_grammar(f"root ::= {' | '.join(choices)}")
            case "structural_tag":
                tag = read_json("structural tag", text)
                for node in all_objects(tag):
                    for name in ("json_schema", "schema"):
                        if isinstance(schema := node.get(name), dict):
                            node[name] = kept_by_xgrammar(check_schema(schema))
                    for name in ("pattern", "grammar"):
                        if isinstance(expression := node.get(name), str):
                            check_size(name, expression, MAX_LITERAL)
                            _check_brackets(name, expression)
                return self._compiler.compile_structural_tag(json.dumps(tag))
            case "lark":
                raise ValueError("grammar kind must be one that xgrammar has, got lark, in the form of llguidance")


class XGrammarPrototype:
    """A compiled grammar of xgrammar. Safe to use from all threads."""

    __slots__ = ("_budget", "_compiled", "_utf8", "_vocab_size")

    def __init__(self, compiled: Any, *, utf8: Utf8, vocab_size: int) -> None:
        self._budget = GrammarBudget()
        self._compiled = compiled
        self._utf8 = utf8
        self._vocab_size = vocab_size

    @property
    def is_spoiled(self) -> bool:
        """Whether it must be compiled again; never, because its matchers share no mutable state."""
        return False

    def matcher(self, end_tokens: frozenset[int]) -> RequestMatcher:
        """Return a matcher at the start of the grammar.

        Raises:
            ValueError: an end token is not in the vocabulary, or the grammar is too slow.
        """
        check_budget(self._budget)
        matcher = xgrammar.GrammarMatcher(self._compiled)
        stops = frozenset(matcher.stop_token_ids)
        ends = EndTokens(end_tokens, others=stops, vocab_size=self._vocab_size)
        nothing = EndTokens(frozenset(), others=stops, vocab_size=self._vocab_size)
        row = np.empty(mask_words(self._vocab_size), np.int32)
        state = _XGrammarState(matcher, stops, nothing, row, self._utf8)
        return RequestMatcher(state, ends=ends, vocab_size=self._vocab_size, budget=self._budget)


class _XGrammarState:
    """A matcher of the library as a `LibraryState`.

    The library's classes of characters allow bytes that are not UTF-8, so this state checks the bytes itself.
    """

    __slots__ = ("_matcher", "_nothing", "_places", "_row", "_stops", "_utf8", "failure")

    def __init__(self, matcher: Any, stops: frozenset[int], nothing: EndTokens, row: Mask, utf8: Utf8) -> None:
        self._matcher = matcher
        self._stops = stops
        self._nothing = nothing
        self._row = row  # written by: is_stopped
        self._utf8 = utf8
        self._places = [0]  # written by: _XGrammarState
        """Place of the text within a character, at the start and after each token."""
        self.failure: str | None = None  # written by: _XGrammarState

    def fill(self, row: Mask) -> None:
        self._matcher.fill_next_token_bitmask(row[None])
        self._utf8.restrict(row, self._places[-1])
        if not row.any() and not self.can_end:
            self.failure = "the grammar allows no token"

    def consume(self, tokens: list[int]) -> bool:
        for token in tokens:
            if not self._accept(token):
                self.failure = f"token {token} doesn't satisfy the grammar"
                return False
        return True

    def num_allowed(self, tokens: list[int]) -> int:
        number = 0
        while number < len(tokens) and self._accept(tokens[number]):
            number += 1
        self.roll_back(number)
        return number

    def roll_back(self, num_tokens: int) -> None:
        if num_tokens:
            self._matcher.rollback(num_tokens)
            del self._places[-num_tokens:]

    def restart(self) -> None:
        self._matcher.reset()
        self._places = [0]
        self.failure = None

    def forced(self) -> tuple[int, ...]:
        return ()  # the library knows forced text, but not its tokens in the masks

    @property
    def can_end(self) -> bool:
        return self._places[-1] == 0 and bool(self._matcher.is_completed())

    @property
    def is_stopped(self) -> bool:
        if self.failure is not None or not self.can_end:
            return False
        self._matcher.fill_next_token_bitmask(self._row[None])
        self._utf8.restrict(self._row, self._places[-1])
        self._nothing.write(self._row, can_end=False)
        return not self._row.any()

    def copy(self) -> _XGrammarState:
        row = np.empty_like(self._row)
        copy = _XGrammarState(self._matcher.fork(), self._stops, self._nothing, row, self._utf8)
        copy._places = self._places.copy()
        copy.failure = self.failure
        return copy

    def _accept(self, token: int) -> bool:
        place = self._utf8.after(self._places[-1], token)
        if place is None or token in self._stops or not self._matcher.accept_token(token):
            return False
        self._places.append(place)
        return True


def _check_brackets(name: str, text: str) -> None:
    if text.count("(") + text.count("[") > _MAX_NESTING:
        raise ValueError(f"{name} must have at most {_MAX_NESTING} brackets for xgrammar")
