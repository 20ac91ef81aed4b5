"""Which tokens of a prompt stand for its images, and under which ids a cache has them. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from pagewood.engine.api import Image
from pagewood.engine.core.images import marks_of
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.images.recipe import ImageRecipe


def spans_of(prompt: Int32, images: Sequence[Image], recipe: ImageRecipe) -> tuple[tuple[int, int], ...]:
    """Return the positions [start, end) of the tokens of each image.

    Args:
        prompt: `[n]`, its tokens.
        images: in the order of their tokens.
        recipe: of the model.

    Raises:
        ValueError: the prompt has not as many tokens of images as these have, or other tokens between those of one.
    """
    places, token = np.flatnonzero(prompt == recipe.config.token), recipe.config.token
    nums = [recipe.num_tokens(image.height, image.width) for image in images]
    if sum(nums) != len(places):
        raise ValueError(f"prompt must have {sum(nums)} tokens {token} for {len(images)} images, got {len(places)}")
    spans: list[tuple[int, int]] = []
    for own in np.split(places, np.cumsum(nums)[:-1]) if nums else ():
        if own[-1] - own[0] + 1 != len(own):
            raise ValueError(f"the tokens of an image must follow each other, got other tokens behind {own[0]}")
        spans.append((int(own[0]), int(own[-1]) + 1))
    return tuple(spans)


def digest_of(image: Image, recipe: ImageRecipe) -> bytes:
    """Return a digest of all that an image's rows depend on beside the tower."""
    text = f"{image.height} {image.width} {recipe.colours}"
    return blake2b(text.encode() + image.pixels, digest_size=32).digest()


def cached_ids(prompt: Int32, images: Sequence[Image], recipe: ImageRecipe) -> Int32:
    """Return the ids `[n]` under which a cache has the tokens of a prompt; see `spans_of`."""
    marks = marks_of(spans_of(prompt, images, recipe), [digest_of(image, recipe) for image in images])
    found = prompt.copy()
    found[: len(marks)] ^= marks
    return found
