# pyright: basic
# The bindings of `tokenizers` carry no usable annotations.
"""Reads a Hugging Face tokenizer folder without `transformers`: text -> ids, messages -> ids, ids -> text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy as np
import tokenizers
from numpy.typing import NDArray

from pagewood.engine.text.chat_template import ChatMessage, ChatOptions, ChatTemplate, ChatTemplateError
from pagewood.engine.text.incremental import IncrementalDecoder, incremental_decoder
from pagewood.engine.text.length_bound import LengthBound, length_bound
from pagewood.engine.text.panics import panics_as_errors
from pagewood.engine.text.response import ResponseTemplate
from pagewood.engine.text.template_files import chat_templates, read_json
from pagewood.engine.text.token_bytes import TokenBytes

_PART = 65_536
"""Ids that are copied at a time, which takes some milliseconds."""
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Turns text into ids and back. Invariant: holds no state of any text, so one serves every request and thread."""

    __slots__ = (
        "_bound",
        "_chat_template",
        "_decoders",
        "_token_bytes",
        "_tokenizer",
        "_tool_template",
        "response_template",
    )

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        chat_template: ChatTemplate | None = None,
        tool_template: ChatTemplate | None = None,
        response_template: ResponseTemplate | None = None,
    ) -> None:
        """Take the library's tokenizer, and the templates of conversations: `tool_template` of those with tools."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._bound: LengthBound | Literal["unknown"] | None = "unknown"  # written by: fewest_tokens
        self._chat_template = chat_template
        self._tool_template = tool_template
        self.response_template = response_template
        """Rules for reading the model's answers; None: answers are plain text."""
        self._decoders: dict[tuple[bool, frozenset[str]], Callable[[], IncrementalDecoder]] = {}
        # written by: incremental_decoder. By whether special tokens are skipped, and which are shown all the same
        self._token_bytes: dict[bool, TokenBytes] = {}  # written by: bytes_of_tokens

    @staticmethod
    def from_folder(path: str | Path) -> Tokenizer:
        """Read `tokenizer.json`, `tokenizer_config.json` and the templates of chats and answers of a model folder.

        Raises:
            ValueError: the folder has no `tokenizer.json`, or a file in it cannot be read.
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"model folder must hold a tokenizer.json, got {folder}")
        try:
            with panics_as_errors():
                tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the bindings raise plain Exception
            raise ValueError(f"{file} cannot be read: {error}") from error
        config = read_json(folder / "tokenizer_config.json")
        special_tokens = _special_tokens(read_json(folder / "special_tokens_map.json") | config)
        sources = chat_templates(folder)
        templates = {
            name: ChatTemplate(sources[name], special_tokens=special_tokens)
            for name in ("default", "tool_use")
            if name in sources
        }
        return Tokenizer(
            tokenizer,
            chat_template=templates.get("default"),
            tool_template=templates.get("tool_use"),
            response_template=ResponseTemplate.from_folder(folder),
        )

    @property
    def vocab_size(self) -> int:
        """Number of ids, including added tokens."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def special_tokens(self) -> dict[str, int]:
        """The text and id of each token that is no text for the model, such as its end of sequence."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template."""
        return self._chat_template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> NDArray[np.int32]:
        """Return the ids of `text`, [num_tokens] int32. Other Python threads run meanwhile.

        Raises:
            ValueError: `text` holds a lone surrogate, half of a UTF-16 pair, which is not a character.
            TokenizerPanic: the tokenizers library failed on this text.
        """
        check_unicode(text)
        with panics_as_errors():
            # Of the library's ways to encode, only those that take a batch release the interpreter's lock.
            encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        return _as_array(encoding.ids)

    def encode_pair(
        self, first: str, second: str, *, type_stride: int = 0, longest: int | None = None
    ) -> NDArray[np.int32]:
        """Return the ids of two texts as one, with the tokens that the tokenizer puts around and between them.

        Args:
            first: of the pair.
            second: of the pair.
            type_stride: what is added to the ids of tokens of the second type, see `HeadScoring`.
            longest: tokens beyond which the longer text loses its end, or both do; None: nothing is cut.

        Returns:
            [num_tokens] int32.

        Raises:
            ValueError: as in `encode`.
            TokenizerPanic: as in `encode`.
        """
        check_unicode(first)
        check_unicode(second)
        with panics_as_errors():
            encoding = self._tokenizer.encode_batch([(first, second)])[0]
        tokens = _as_array(encoding.ids) + np.int32(type_stride) * _as_array(encoding.type_ids)
        if longest is None or len(tokens) <= longest:
            return tokens
        of = np.array([-1 if one is None else one for one in encoding.sequence_ids])
        kept = _longest_first(int((of == 0).sum()), int((of == 1).sum()), max(0, longest - int((of == -1).sum())))
        places = [np.cumsum(of == number) <= kept[number] for number in (0, 1)]
        return tokens[(of == -1) | ((of == 0) & places[0]) | ((of == 1) & places[1])]

    def fewest_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens of `text`; 0 if no bound is known. Much faster than `encode`.

        Raises:
            ValueError: `text` holds a lone surrogate.
        """
        check_unicode(text)
        if self._bound == "unknown":
            self._bound = length_bound(self._tokenizer)
        return 0 if self._bound is None else self._bound.fewest_tokens(text)

    def decode(self, tokens: Sequence[int] | NDArray[np.int32], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `tokens`; unknown ids are skipped.

        Raises:
            TokenizerPanic: the tokenizers library failed on these ids.
        """
        ids = [int(token) for token in tokens]
        with panics_as_errors():
            return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token: int, *, skip_special_tokens: bool = False) -> bytes:
        """Return the bytes that `token` adds in the middle of a text: UTF-8, perhaps of a part of a character.

        Special tokens have the bytes of their content, or none if they are skipped. Unknown tokens have none.

        Raises:
            TokenizerPanic: the tokenizers library failed on this token.
        """
        return self.bytes_of_tokens(skip_special_tokens=skip_special_tokens)(token)

    def bytes_of_tokens(self, *, skip_special_tokens: bool = False) -> Callable[[int], bytes]:
        """Return `token_bytes` with that option, for many tokens."""
        known = self._token_bytes.get(skip_special_tokens)
        if known is None:
            known = TokenBytes(self._tokenizer, skip_special_tokens=skip_special_tokens)
            self._token_bytes[skip_special_tokens] = known
        return known.of

    def render_chat(self, messages: Sequence[ChatMessage], **options: Unpack[ChatOptions]) -> str:
        """Return the prompt text of a conversation, see `ChatTemplate.render`.

        A model that has a template named `tool_use` uses it where there are `tools`.

        Raises:
            ChatTemplateError: the model has no chat template, or as in `ChatTemplate.render`.
        """
        tools = options.get("tools")
        template = self._chat_template if tools is None or self._tool_template is None else self._tool_template
        if template is None:
            what = "no chat template" if self._tool_template is None else "a chat template for tools only"
            raise ChatTemplateError(f"this model has {what}; send it a plain prompt")
        return template.render(messages, **options)

    def encode_chat(self, messages: Sequence[ChatMessage], **options: Unpack[ChatOptions]) -> NDArray[np.int32]:
        """Return the prompt ids of a conversation, [num_tokens] int32; special tokens come from the template only.

        Raises:
            ChatTemplateError: as in `render_chat`.
        """
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)

    def incremental_decoder(
        self, *, skip_special_tokens: bool = True, keep: frozenset[str] = frozenset()
    ) -> IncrementalDecoder:
        """Return a decoder for one new sequence, with the special tokens in `keep` in any case."""
        options = (skip_special_tokens, keep)
        if options not in self._decoders:
            self._decoders[options] = incremental_decoder(
                self._tokenizer, skip_special_tokens=skip_special_tokens, keep=keep
            )
        return self._decoders[options]()


def _longest_first(num_first: int, num_second: int, room: int) -> tuple[int, int]:
    """Return how many tokens of two texts are kept in `room`: the longer one is cut first, as in `transformers`."""
    shorter, longer = sorted((num_first, num_second))
    longer = min(longer, max(shorter, room - shorter))
    if shorter + longer > room:
        shorter, longer = room // 2, room - room // 2
    return (longer, shorter) if num_first > num_second else (shorter, longer)


def _as_array(ids: list[int]) -> NDArray[np.int32]:
    """Return ids as an array; other Python threads run between the parts of a long one."""
    found = np.empty(len(ids), np.int32)
    for start in range(0, len(ids), _PART):
        found[start : start + _PART] = ids[start : start + _PART]
    return found


def check_unicode(text: str) -> None:
    """Raise ValueError if `text` holds a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text must hold characters only, got the lone surrogate U+{ord(text[error.start]):04X} at {error.start}"
        ) from None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the named special tokens; each is a text, or an object with a `content`."""
    tokens: dict[str, str] = {}
    for name in _NAMED_TOKENS:
        match config.get(name):
            case str(text) | {"content": str(text)}:
                tokens[name] = text
            case _:
                pass
    return tokens
