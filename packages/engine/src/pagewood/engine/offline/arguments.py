"""Checks the arguments of calls and makes requests from them: errors name the argument, the rule and the value."""

from __future__ import annotations

import difflib
import itertools
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, cast

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.api import EngineConfig, Image, SamplingParams, Submit
from pagewood.engine.fan_out import fan_out
from pagewood.engine.images.limits import ImageError, ImageLimits
from pagewood.engine.images.prompts import ImagePrompts, parts_of
from pagewood.engine.images.sources import image_of
from pagewood.engine.model_folder.vector_recipe import VectorRecipe
from pagewood.engine.offline.calls import Call
from pagewood.engine.text import ChatMessage, ChatTemplateError, Tokenizer


class PicturedPrompt(TypedDict):
    """A prompt with images."""

    prompt: str
    """A text with the model's token for an image in the place of each."""
    images: Sequence[object]
    """Pictures of Pillow, paths of files, their bytes, or data URLs, in the order of their places."""


Prompt = str | Sequence[int] | NDArray[np.integer[Any]] | PicturedPrompt
"""Text, token ids, or a text with images."""

Prompts = Prompt | Sequence[Prompt]
"""One prompt or several."""

Conversation = Sequence[ChatMessage]
"""Messages, each with a `role` and a `content`: a text, or parts of the types `text`, `image` and `image_url`."""


class WithImages(NamedTuple):
    """The tokens of a prompt, and the images that some of them stand for."""

    tokens: bytes
    images: tuple[Image, ...]


Conversations = Conversation | Sequence[Conversation]
"""One conversation or several."""


def engine_config(model: object, options: Mapping[str, Any]) -> EngineConfig:
    """Return the configuration of an engine.

    Raises:
        TypeError: an option does not exist, or the model is not a path.
        ValueError: an option is out of its range.
    """
    if not (model is None or isinstance(model, (str, Path))):
        raise TypeError(f"model must be the path of a folder, or None, got {_short(model)}")
    names = [field.name for field in fields(EngineConfig) if field.name != "model"]
    for name in options:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise TypeError(f"options must be fields of EngineConfig ({', '.join(names)}), got {name!r}{hint}")
    return EngineConfig(model=None if model is None else str(model), **options)


def stop_strings(stop: object) -> tuple[str, ...]:
    """Return the stop strings: one string is one stop string.

    Raises:
        TypeError: a stop string is not a string.
        ValueError: a stop string is empty.
    """
    strings = _strings("stop", stop)
    if not all(strings):
        raise ValueError(f"stop must hold no empty string, got {_short(strings if isinstance(stop, str) else stop)}")
    return strings


def stop_expressions(stop_regex: object) -> tuple[str, ...]:
    """Return the stop expressions, which `TextStream` checks: one string is one expression.

    Raises:
        TypeError: an expression is not a string.
    """
    return _strings("stop_regex", stop_regex)


def _num_each(n: object) -> int | None:
    """Return the number of answers to each prompt.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is below 1.
    """
    if n is None:
        return None
    if not _is_int(n):
        raise TypeError(f"n must be an int or None, got {_short(n)}")
    if cast("int", n) < 1:
        raise ValueError(f"n must be >= 1, got {n}")
    return int(cast("int", n))


class Arguments:
    """Turns the arguments of calls into requests for one engine. Invariant: request ids are unique.

    Args:
        tokenizer: of the model.
        default_sampling: used by calls that pass no sampling parameters.
        vocab_size: token ids are below it.
        recipe: how texts become vectors; None: the recipe of a folder without such files.
        pictures: how prompts get images; None: they have none.
    """

    __slots__ = ("_eos_token_ids", "_ids", "_pictures", "default_sampling", "recipe", "tokenizer", "vocab_size")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        default_sampling: SamplingParams,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
        recipe: VectorRecipe | None = None,
        pictures: ImagePrompts | None = None,
    ) -> None:
        self._pictures = pictures
        self.tokenizer = tokenizer
        self.default_sampling = default_sampling
        self.vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self.recipe = recipe or VectorRecipe()
        self._ids = itertools.count(1)

    def prompts(self, prompts: object) -> list[bytes]:
        """Return the token ids of one prompt or of several, int32 little-endian.

        Raises:
            TypeError: a prompt is neither text nor integers.
            ValueError: a prompt is empty, or holds an id or a character that does not exist, or images.
        """
        found = self.pictured_prompts(prompts)
        for index, one in enumerate(found):
            if isinstance(one, WithImages):
                raise ValueError(f"prompts[{index}] must have no images here, got {len(one.images)}")
        return cast("list[bytes]", found)

    def pictured_prompts(self, prompts: object) -> list[bytes | WithImages]:
        """Return the same of prompts that may have images.

        Raises:
            TypeError: a prompt is neither text nor integers.
            ValueError: a prompt is empty, or holds an id or a character that does not exist.
        """
        if _is_one_prompt(prompts):
            return [self.prompt("prompts", prompts)]
        if not _is_sequence(prompts):
            raise TypeError(f"prompts must be text, token ids, or a sequence of those, got {_short(prompts)}")
        return [self.prompt(f"prompts[{i}]", prompt) for i, prompt in enumerate(cast("Sequence[object]", prompts))]

    def prompt(self, name: str, prompt: object) -> bytes | WithImages:
        """Return the token ids of one prompt; `name` is its name in errors."""
        if isinstance(prompt, Mapping):
            fields_ = cast("Mapping[str, object]", prompt)
            text, sources = fields_.get("prompt"), fields_.get("images")
            if set(fields_) != {"prompt", "images"} or not isinstance(text, str) or not _is_sequence(sources):
                raise TypeError(f"{name} must have a 'prompt' that is text and 'images', got {_short(fields_)}")
            return self._pictured(name, text, cast("Sequence[object]", sources), add_special_tokens=True)
        if isinstance(prompt, str):
            return self._text(name, prompt, add_special_tokens=True)
        if not _is_sequence(prompt):
            raise TypeError(f"{name} must be text or a sequence of token ids, got {_short(prompt)}")
        ids = cast("Sequence[int] | NDArray[np.integer[Any]]", prompt)
        if not len(ids):
            raise ValueError(f"{name} must hold at least one token, got {_short(prompt)}")
        self._check_types(name, ids)
        low, high = (ids.min(), ids.max()) if isinstance(ids, np.ndarray) else (min(ids), max(ids))
        if low < 0 or high >= self.vocab_size:
            index = next(i for i, one in enumerate(ids) if not 0 <= one < self.vocab_size)
            raise ValueError(f"{name}[{index}] must be a token id in [0, {self.vocab_size}), got {ids[index]}")
        return np.asarray(ids, "<i4").tobytes()

    def pair(self, first: str, second: str, type_stride: int, longest: int | None) -> bytes:
        """Return the token ids of two texts as one, int32 little-endian; see `Tokenizer.encode_pair`."""
        return (
            self.tokenizer.encode_pair(first, second, type_stride=type_stride, longest=longest).astype("<i4").tobytes()
        )

    def conversations(self, conversations: object) -> list[bytes | WithImages]:
        """Return the token ids of one conversation or of several, int32 little-endian.

        Raises:
            TypeError: a conversation is not a sequence of messages.
            ValueError: a message lacks its role or content, or the model's chat template refuses the messages.
        """
        if not _is_sequence(conversations):
            raise TypeError(
                f"conversations must be a sequence of messages, or of conversations, got {_short(conversations)}"
            )
        several = cast("Sequence[object]", conversations)
        if len(several) and isinstance(several[0], Mapping):
            return [self.conversation("conversations", several)]
        return [self.conversation(f"conversations[{i}]", one) for i, one in enumerate(several)]

    def conversation(self, name: str, messages: object) -> bytes | WithImages:
        """Return the token ids of one conversation; `name` is its name in errors."""
        if not _is_sequence(messages):
            raise TypeError(f"{name} must be a sequence of messages, got {_short(messages)}")
        if not len(cast("Sequence[object]", messages)):
            raise ValueError(f"{name} must hold at least one message, got {_short(messages)}")
        for index, message in enumerate(cast("Sequence[object]", messages)):
            _check_message(f"{name}[{index}]", message)
        shown, sources = parts_of(cast("Conversation", messages))
        try:
            text = self.tokenizer.render_chat(shown)
        except ChatTemplateError as error:
            raise ChatTemplateError(f"{name}: {error}") from error
        return self._pictured(name, text, sources, add_special_tokens=False)

    def _pictured(
        self, name: str, text: str, sources: Sequence[object], *, add_special_tokens: bool
    ) -> bytes | WithImages:
        """Return the token ids of a text with images, if there are any."""
        if not sources:
            return self._text(name, text, add_special_tokens=add_special_tokens)
        if self._pictures is None:
            raise ValueError(f"{name} must have no images, because the model takes text only, got {len(sources)}")
        images: list[Image] = []
        for index, source in enumerate(sources):
            try:
                images.append(image_of(source, self._pictures.recipe, ImageLimits()))
            except (ImageError, TypeError) as error:
                raise type(error)(f"image {index} of {name}: {error}") from error
        try:
            text = self._pictures.written(text, images)
        except ImageError as error:
            raise ImageError(f"{name}: {error}") from error
        return WithImages(self._text(name, text, add_special_tokens=add_special_tokens), tuple(images))

    def call(
        self,
        prompts: Sequence[bytes | WithImages],
        sampling: object,
        n: object = None,
        /,
        *,
        stop: object = (),
        stop_regex: object = (),
        priority: object = 0,
        adapter: object = None,
        keep_stop_token: object = False,
    ) -> Call:
        """Return the call that answers prompts, with `n` answers to each; it is not submitted yet.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: an argument has a wrong value.
        """
        num_each = _num_each(n)
        return Call(
            self.submits(
                prompts,
                sampling,
                priority,
                num_answers=num_each or 1,
                adapter=adapter,
                keep_stop_token=keep_stop_token,
            ),
            tokenizer=self.tokenizer,
            eos_token_ids=self._eos_token_ids,
            num_each=num_each,
            stop=stop_strings(stop),
            stop_regex=stop_expressions(stop_regex),
        )

    def submits(
        self,
        prompts: Sequence[bytes | WithImages],
        sampling: object,
        priority: object,
        *,
        num_answers: int = 1,
        adapter: object = None,
        keep_stop_token: object = False,
    ) -> list[Submit]:
        """Return `num_answers` requests for each prompt, those of the first prompt first.

        Raises:
            TypeError: sampling parameters, a priority, an adapter or `keep_stop_token` have the wrong type.
            ValueError: there are not as many of them as prompts.
        """
        samplings = _spread("sampling", self.default_sampling if sampling is None else sampling, len(prompts))
        priorities = _spread("priority", priority, len(prompts))
        adapters = _spread("adapter", adapter, len(prompts))
        for name, one in samplings:
            if not isinstance(one, SamplingParams):
                raise TypeError(f"{name} must be SamplingParams, got {_short(one)}")
        for name, one in priorities:
            if not _is_int(one):
                raise TypeError(f"{name} must be an int, got {_short(one)}")
        for name, one in adapters:
            if one is not None and not isinstance(one, str):
                raise TypeError(f"{name} must be a string or None, got {_short(one)}")
        if not isinstance(keep_stop_token, bool):
            raise TypeError(f"keep_stop_token must be True or False, got {_short(keep_stop_token)}")
        submits: list[Submit] = []
        for prompt, (_, params), (_, rank), (_, own) in zip(prompts, samplings, priorities, adapters, strict=True):
            first, *others = [str(next(self._ids)) for _ in range(num_answers)]
            submit = Submit(
                request_id=first,
                tokens=prompt if isinstance(prompt, bytes) else prompt.tokens,
                images=() if isinstance(prompt, bytes) else prompt.images,
                sampling=cast("SamplingParams", params),
                priority=int(cast("int", rank)),
                adapter=cast("str | None", own),
                keep_stop_token=keep_stop_token,
            )
            submits += fan_out(submit, others) if others else [submit]
        return submits

    def _text(self, name: str, text: str, *, add_special_tokens: bool) -> bytes:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{name} must be Unicode text, got {text[error.start]!r} at index {error.start}, "
                "which is half of a surrogate pair"
            ) from error
        tokens = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if not len(tokens):
            raise ValueError(f"{name} must hold at least one token, got {_short(text)}")
        return tokens.astype("<i4").tobytes()

    def _check_types(self, name: str, ids: Sequence[int] | NDArray[np.integer[Any]]) -> None:
        if isinstance(ids, np.ndarray):
            if ids.ndim != 1 or ids.dtype.kind not in "iu":
                raise TypeError(f"{name} must be a row of integers, got {ids.dtype} of shape {ids.shape}")
        elif not all(map(_is_int_type, set(map(type, ids)))):
            index = next(i for i, one in enumerate(ids) if not _is_int(one))
            raise TypeError(f"{name}[{index}] must be an int token id, got {_short(ids[index])}")


def _strings(name: str, value: object) -> tuple[str, ...]:
    """Return the strings of an argument: one string, or a sequence."""
    if isinstance(value, str):
        return (value,)
    if not _is_sequence(value):
        raise TypeError(f"{name} must be a string or a sequence of strings, got {_short(value)}")
    for index, one in enumerate(cast("Sequence[object]", value)):
        if not isinstance(one, str):
            raise TypeError(f"{name}[{index}] must be a string, got {_short(one)}")
    return tuple(cast("Sequence[str]", value))


def _check_message(name: str, message: object) -> None:
    if not isinstance(message, Mapping):
        raise TypeError(f"{name} must be a mapping with 'role' and 'content', got {_short(message)}")
    fields_ = cast("Mapping[str, object]", message)
    if not isinstance(fields_.get("role"), str):
        raise ValueError(f"{name} must have a 'role' that is text, got {_short(fields_.get('role'))}")
    content = fields_.get("content")
    if content is None and not fields_.get("tool_calls"):
        raise ValueError(f"{name} must have a 'content', got {_short(fields_)}")
    if not (content is None or isinstance(content, (str, list, tuple))):
        raise TypeError(f"{name}['content'] must be text or a list of parts, got {_short(content)}")


def _is_one_prompt(prompts: object) -> bool:
    """Return whether the argument is one prompt: text, numbers, or a text with images."""
    if isinstance(prompts, np.ndarray):
        return prompts.ndim == 1
    if isinstance(prompts, Sequence) and not isinstance(prompts, (str, bytes)):
        items = cast("Sequence[object]", prompts)
        return len(items) > 0 and isinstance(items[0], (int, float, np.number))
    return isinstance(prompts, str | Mapping)


def _is_sequence(value: object) -> bool:
    """Return whether the value is a list, a tuple or the like; text and bytes are single values here."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview))


def _is_int_type(kind: type) -> bool:
    return issubclass(kind, (int, np.integer)) and kind is not bool


def _is_int(value: object) -> bool:
    return _is_int_type(type(value))


def _spread(name: str, values: object, n: int) -> list[tuple[str, object]]:
    """Return (name for errors, value) for each of n prompts."""
    if not _is_sequence(values):
        return [(name, values)] * n
    items = cast("Sequence[object]", values)
    if len(items) != n:
        raise ValueError(f"{name} must have one entry for each of {n} prompts, got {len(items)}")
    return [(f"{name}[{i}]", item) for i, item in enumerate(items)]


def _short(value: object) -> str:
    """Return a value for an error message, cut if it is long."""
    return reprlib.repr(value)
