"""The images of a request: which of its tokens stand for them, and what that means for cached prefixes and chunks.

Where a prompt shows an image, it has tokens whose embeddings are replaced by rows that a tower has made of its pixels.
So KV from there on depends on the pixels. The cache has it under other ids: those of the image's tokens, and of the few
before them, are distinguished by a digest of what the tower gets. A prefix that has the first of these tokens has
passed at least eight of them (248 bits of the digest) unless the prompt begins with an image and pages are shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import shake_128
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.api import Image, Refusal
from pagewood.engine.core.messages.arrays import Int32

Float32 = NDArray[np.float32]
_NUM_BEFORE = 7
"""Tokens before an image that are distinguished by its digest, too: with its first one they are eight."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptImages:
    """The images of a prompt. Invariant: their spans ascend and do not overlap."""

    spans: tuple[tuple[int, int], ...]
    """The positions [start, end) of the tokens of each image."""
    features: tuple[Float32, ...]
    """The rows `[end - start, W]` that the tower has made of each image. A cache shares them, so they never change."""
    digests: tuple[bytes, ...]
    """The digest of each image, as the tower gets it."""
    positions: Int32
    """[3, tokens of the prompt], the three components of the position of each token; [3, 0] if images have positions as
    all other tokens have."""
    see_each_other: bool
    """Whether each token of an image sees all tokens of that image."""
    sources: tuple[Image, ...]
    """The images themselves, for other weights of the tower."""
    version: int
    """The `ImageEncoder.version` of the tower that has made the rows."""
    marks: Int32 = field(init=False)
    """[end of the last span], what ids differ by in the cache: 0, or a negative number."""

    def __post_init__(self) -> None:
        """Compute the marks."""
        object.__setattr__(self, "marks", marks_of(self.spans, self.digests))

    def marked(self, tokens: Int32, first: int) -> Int32:
        """Return the ids under which the cache has `tokens`, which lie from position `first` on."""
        end = min(len(self.marks), first + len(tokens))
        if first >= end:
            return tokens
        marked = tokens.copy()
        marked[: end - first] ^= self.marks[first:end]
        return marked

    def whole(self, start: int, count: int) -> int:
        """Return how many of `count` positions from `start` on a step may compute, so that it cuts no image whose
        tokens see each other; 0 if the image that begins or goes on there is longer."""
        if not self.see_each_other:
            return count
        end = start + count
        return next((max(0, first - start) for first, last in self.spans if first < end < last), count)


def marks_of(spans: Sequence[tuple[int, int]], digests: Sequence[bytes]) -> Int32:
    """Return `PromptImages.marks` for images with these digests."""
    marks = np.zeros(spans[-1][1], np.int32)
    for (start, end), digest in zip(spans, digests, strict=True):
        first = max(0, start - _NUM_BEFORE)
        words = np.frombuffer(shake_128(digest).digest(4 * (_NUM_BEFORE + end - start)), "<i4")
        marks[first:end] = (marks[first:end] ^ words[_NUM_BEFORE - (start - first) :]) | np.int32(-(2**31))
    return marks


class Encoding(Protocol):
    """Images that another thread makes rows of."""

    def done(self) -> bool:
        """Return whether there is a result."""
        ...

    def result(self) -> PromptImages | Refusal:
        """Return the images of the prompt, or why there are none; call it only when done."""
        ...


class ImageEncoder(Protocol):
    """Makes rows of images in a thread of its own."""

    @property
    def version(self) -> int:
        """How often the tower has changed; rows of an earlier one are not computed with."""
        ...

    def refusal(self, prompt: Int32, images: Sequence[Image]) -> Refusal | None:
        """Return why a prompt cannot have these images, or lacks images that it has tokens of; or None."""
        ...

    def encode(
        self, prompt: Int32, images: Sequence[Image], *, namespace: str | None, is_wanted: Callable[[], bool]
    ) -> Encoding:
        """Begin to encode images that are not refused.

        Args:
            prompt: `[n]`, its tokens.
            images: in the order of their tokens.
            namespace: whose images they are; what was made of those of others must not make it faster.
            is_wanted: whether the result is still needed when its turn comes.
        """
        ...

    def close(self) -> None:
        """End the thread; what waits is dropped."""
        ...


@dataclass(frozen=True, slots=True)
class NoImages:
    """The `ImageEncoder` of an engine that takes none."""

    why: str
    """The end of a sentence."""

    @property
    def version(self) -> int:
        """There is no tower to change."""
        return 0

    def refusal(self, prompt: Int32, images: Sequence[Image]) -> Refusal | None:
        """Refuse all images."""
        if not images:
            return None
        message = f"images must be empty, because {self.why}, got {len(images)}"
        return Refusal(message=message, param="images", code="images_not_supported")

    def encode(
        self, prompt: Int32, images: Sequence[Image], *, namespace: str | None, is_wanted: Callable[[], bool]
    ) -> Encoding:
        """Never called."""
        raise AssertionError("images are refused")

    def close(self) -> None:
        """Do nothing."""
