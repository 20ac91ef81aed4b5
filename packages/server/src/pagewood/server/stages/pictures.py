"""The images of prompts in a tokenizer process: decoded within limits, resized, and written into the text."""

from __future__ import annotations

from dataclasses import dataclass

from pagewood.engine.api import Image
from pagewood.engine.images.decoding import decoded
from pagewood.engine.images.limits import ImageError, ImageLimits
from pagewood.engine.images.preparing import prepared
from pagewood.engine.images.prompts import ImagePrompts
from pagewood.server.messages import wire


class TextOnly(ImageError):
    """The model takes text only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """What a model's images must be."""

    prompts: ImagePrompts
    limits: ImageLimits


def images_of(prompt: wire.Prompt, pictures: Pictures | None) -> tuple[Image, ...]:
    """Return the images of a prompt as the engine takes them.

    Raises:
        ImageError: one cannot be used, or the model takes none.
    """
    files = prompt.images if isinstance(prompt, wire.ChatPrompt) else ()
    if not files:
        return ()
    if pictures is None:
        raise TextOnly("this model takes text only; leave the images out")
    return tuple(prepared(decoded(file, pictures.limits), pictures.prompts.recipe) for file in files)
