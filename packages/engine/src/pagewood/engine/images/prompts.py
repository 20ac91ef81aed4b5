"""The places of images in the text of a prompt: one token for each, which becomes those of its rows."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pagewood.engine.api import Image
from pagewood.engine.images.limits import ImageError
from pagewood.engine.images.recipe import ImageRecipe, read_recipe
from pagewood.engine.text import Tokenizer

_log = logging.getLogger(__name__)


class ImagePrompts:
    """Writes the tokens of images into prompts.

    Args:
        recipe: of the model.
        tokenizer: of the model.

    Raises:
        ValueError: the tokenizer lacks a token that the model's configuration names.
    """

    __slots__ = ("_mark", "_text_around", "_token", "recipe")

    def __init__(self, recipe: ImageRecipe, tokenizer: Tokenizer) -> None:
        config = recipe.config
        self.recipe = recipe
        names = {number: text for text, number in tokenizer.special_tokens.items()}
        for number in (config.token, config.begin, config.end):
            if number is not None and number not in names:
                raise ValueError(f"the tokenizer must have the token {number}, which config.json names for images")
        self._token = names[config.token]
        self._mark = self._token if config.begin is None else names[config.begin]
        self._text_around = ("", "")
        if config.begin is not None:
            end = "" if config.end is None else names[config.end]
            self._text_around = (f"\n\n{self._mark}", f"{end}\n\n")

    @property
    def mark(self) -> str:
        """What stands for an image in a text."""
        return self._mark

    def written(self, text: str, images: Sequence[Image]) -> str:
        """Return a text with the tokens of images in the places of their marks.

        Raises:
            ImageError: there are not as many marks as images.
        """
        parts = text.split(self._mark)
        if len(parts) - 1 != len(images):
            raise ImageError(
                f"a prompt must have {self._mark} once for each of {len(images)} images, got it {len(parts) - 1} times"
            )
        before, behind = self._text_around
        found = [parts[0]]
        for image, part in zip(images, parts[1:], strict=True):
            found += [before, self._token * self.recipe.num_tokens(image.height, image.width), behind, part]
        return "".join(found)


def image_prompts(folder: str | Path, tokenizer: Tokenizer) -> ImagePrompts | None:
    """Return what writes images into prompts of a folder's model; None: it takes text only.

    So it is if its files say something about images that is not supported, which the log says.
    """
    try:
        recipe = read_recipe(folder)
        return None if recipe is None else ImagePrompts(recipe, tokenizer)
    except ValueError as error:
        _log.info("images: none are taken: %s", error)
        return None


def parts_of(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[object]]:
    """Return messages as chat templates read them, and the sources of their images, in order.

    An image is a part `{"type": "image", "image": ...}` or `{"type": "image_url", "image_url": {"url": ...}}` of a
    content; for the template it is `{"type": "image"}`. Messages without images stay as they are.
    """
    found: list[dict[str, Any]] = []
    sources: list[object] = []
    for message in messages:
        content = message.get("content")
        if not isinstance(content, list | tuple):
            found.append(dict(message))
            continue
        parts: list[object] = []
        for part in cast("Sequence[Any]", content):
            match part:
                case {"type": "image", "image": source} | {"type": "image_url", "image_url": {"url": source}}:
                    sources.append(source)
                    parts.append({"type": "image"})
                case {"type": "image_url", "image_url": str(source)}:
                    sources.append(source)
                    parts.append({"type": "image"})
                case _:
                    parts.append(part)
        found.append({**message, "content": parts})
    return found, sources
