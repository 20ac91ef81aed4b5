"""Makes of a picture what a model's tower gets."""

# pyright: basic
# Pillow is optional.

from __future__ import annotations

from typing import TYPE_CHECKING

from pagewood.engine.api import Image
from pagewood.engine.images.limits import ImageError
from pagewood.engine.images.recipe import ImageRecipe

if TYPE_CHECKING:
    from PIL.Image import Image as Picture


def prepared(picture: Picture, recipe: ImageRecipe) -> Image:
    """Return a picture in RGB, resized as a model wants it.

    Raises:
        ImageError: it is too long for its width.
    """
    from PIL import Image as pillow

    try:
        height, width = recipe.size(picture.height, picture.width)
    except ValueError as error:
        raise ImageError(str(error)) from None
    if (picture.height, picture.width) != (height, width):
        picture = picture.resize((width, height), pillow.Resampling[recipe.interpolation])
    return Image(pixels=picture.tobytes(), height=height, width=width)
