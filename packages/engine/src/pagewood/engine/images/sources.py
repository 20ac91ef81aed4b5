"""Where the pictures of an offline call come from: a picture of Pillow, a file, its bytes, or a data URL."""

# pyright: basic
# Pillow is optional.

from __future__ import annotations

import base64
import binascii
import re
from pathlib import Path

from pagewood.engine.api import Image
from pagewood.engine.images.decoding import decoded, in_colours
from pagewood.engine.images.limits import ImageError, ImageLimits
from pagewood.engine.images.preparing import prepared
from pagewood.engine.images.recipe import ImageRecipe

_DATA_URL = re.compile(r"data:(?:[\w.+-]{1,64}/[\w.+-]{1,64})?(?:;[\w.+-]{1,64}=[\w.+-]{1,64}){0,4};base64,", re.ASCII)
_START = 400
"""Characters of an URL that may come before its data."""


def data_of(url: str, limits: ImageLimits) -> bytes:
    """Return the bytes of a data URL in base64.

    Raises:
        ImageError: it is another URL, too long, or not base64.
    """
    head = _DATA_URL.match(url[:_START])
    if head is None:
        raise ImageError(f"an image must be a data URL in base64, got {url[:60]!r}")
    return bytes_of(url[head.end() :], limits)


def bytes_of(text: str, limits: ImageLimits) -> bytes:
    """Return the bytes that a text in base64 stands for.

    Raises:
        ImageError: it stands for too many, or is not base64.
    """
    if len(text) > 4 * (limits.max_bytes + 2) // 3 + 2:
        raise ImageError(f"an image must have at most {limits.max_bytes} bytes, got about {len(text) * 3 // 4}")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"an image must be base64: {error}") from None


def image_of(source: object, recipe: ImageRecipe, limits: ImageLimits) -> Image:
    """Return a picture as a model's tower gets it.

    Args:
        source: a picture of Pillow, the path of a file, its bytes, or a data URL.
        recipe: of the model.
        limits: of the file; a picture of Pillow has been decoded.

    Raises:
        TypeError: it is something else.
        ImageError: it cannot be used.
        OSError: the file cannot be read.
    """
    if isinstance(source, str) and source.startswith("data:"):
        return prepared(decoded(data_of(source, limits), limits), recipe)
    if isinstance(source, str | Path):
        with Path(source).open("rb") as file:
            return prepared(decoded(file.read(limits.max_bytes + 1), limits), recipe)
    if isinstance(source, bytes):
        return prepared(decoded(source, limits), recipe)
    try:
        from PIL.Image import Image as Picture
    except ImportError:
        raise ImageError("images cannot be read here, because Pillow is not installed") from None
    if not isinstance(source, Picture):
        raise TypeError(f"an image must be a PIL image, a path, bytes or a data URL, got {type(source).__name__}")
    return prepared(in_colours(source), recipe)
