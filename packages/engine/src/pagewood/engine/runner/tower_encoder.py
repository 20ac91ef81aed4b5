"""Runs a model's tower on images, in a thread of its own, and keeps what it has made of them.

Legend: P tokens of a prompt, n tokens of an image, W elements of a row.
"""

# pyright: basic
# torch's conversions from numpy have no types.

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray

from pagewood.engine.api import Image, Refusal
from pagewood.engine.core.images import PromptImages
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.images.cached_ids import digest_of, spans_of
from pagewood.engine.images.recipe import ImageRecipe
from pagewood.engine.models.images.tower import Tower
from pagewood.engine.runner.worker import Later, Worker

_log = logging.getLogger(__name__)

Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TowerEncoding:
    """Images that are being encoded."""

    _later: Later[PromptImages | Refusal]

    def done(self) -> bool:
        """Return whether there is a result."""
        return self._later.is_known

    def result(self) -> PromptImages | Refusal:
        """Return it, or the refusal of images at which the tower failed."""
        try:
            return self._later.take()
        except Exception as error:
            _log.exception("images cannot be encoded")
            message = f"images cannot be encoded: {type(error).__name__}"
            return Refusal(message=message, param="images", code="image_failed")


class TowerEncoder:
    """The tower of a model. Invariant: an image is computed once while what was made of it is kept.

    Args:
        tower: of the model.
        recipe: of the model.
        cache_bytes: of rows that are kept, on the host; those of live requests are kept beside.
        begin: called first on the thread that computes.
    """

    __slots__ = (
        "_cache_bytes", "_is_closed", "_is_resting", "_kept", "_num_kept_bytes", "_recipe", "_turn", "_worker",
        "num_computed", "tower", "version",
    )  # fmt: skip

    def __init__(self, tower: Tower, recipe: ImageRecipe, *, cache_bytes: int, begin: Callable[[], None]) -> None:
        self.tower = tower
        """Its numbers change only while it rests."""
        self._recipe = recipe
        self._cache_bytes = cache_bytes
        self._kept: OrderedDict[tuple[str | None, bytes], Float32] = OrderedDict()
        """Rows of images by namespace and digest, those used last at the end."""  # written by: the worker, renew
        self._num_kept_bytes = 0  # written by: the worker, renew
        self.version = 0
        """How often the tower has got other numbers."""  # written by: renew
        self._turn = Lock()
        """Held while an image is computed, and while the tower rests."""
        self._is_resting = False  # written by: rest, go_on
        self._is_closed = False  # written by: close
        self.num_computed = 0
        """Images that the tower has computed."""  # written by: the worker
        self._worker = Worker("tower", begin=begin)

    def refusal(self, prompt: Int32, images: Sequence[Image]) -> Refusal | None:
        """Return why a prompt cannot have these images, or None."""
        if not images and not np.any(prompt == self._recipe.config.token):
            return None
        try:
            for index, image in enumerate(images):
                self._check(index, image)
            spans_of(prompt, images, self._recipe)
        except ValueError as error:
            return Refusal(message=str(error), param="images", code="invalid_image")
        return None

    def _check(self, index: int, image: Image) -> None:
        """Check the size of an image.

        Raises:
            ValueError: the tower does not take it.
        """
        self._recipe.num_tokens(image.height, image.width)
        if len(image.pixels) != 3 * image.height * image.width:
            wanted = 3 * image.height * image.width
            raise ValueError(f"images[{index}].pixels must have {wanted} bytes, got {len(image.pixels)}")

    def encode(
        self, prompt: Int32, images: Sequence[Image], *, namespace: str | None, is_wanted: Callable[[], bool]
    ) -> TowerEncoding:
        """Begin to encode images that are not refused; see `ImageEncoder`."""
        return TowerEncoding(self._worker.submit(partial(self._encode, prompt.copy(), images, namespace, is_wanted)))

    def rest(self) -> None:
        """Wait for the image that is being computed, and compute no other before `go_on`."""
        if not self._is_resting:
            self._turn.acquire()
            self._is_resting = True

    def go_on(self) -> None:
        """Compute images again, if the tower rests."""
        if self._is_resting:
            self._is_resting = False
            self._turn.release()

    def renew(self) -> None:
        """Forget what was made of images: the tower, which rests, has other numbers."""
        self._kept.clear()
        self._num_kept_bytes = 0
        self.version += 1

    def close(self) -> None:
        """End the thread; what waits is dropped."""
        self._is_closed = True
        self.go_on()
        self._worker.close()

    def _encode(
        self, prompt: Int32, images: Sequence[Image], namespace: str | None, is_wanted: Callable[[], bool]
    ) -> PromptImages | Refusal:
        digests = [digest_of(image, self._recipe) for image in images]
        features: list[Float32] = []
        version = self.version  # that of the first image, if it changes between two
        for digest, image in zip(digests, images, strict=True):
            with self._turn:
                if self._is_closed or not is_wanted():
                    return Refusal(message="the request has ended", code="cancelled")
                features.append(self._rows((namespace, digest), image))
        spans = spans_of(prompt, images, self._recipe)
        return PromptImages(
            spans=spans,
            features=tuple(features),
            digests=tuple(digests),
            positions=self._positions(prompt, spans, images),
            see_each_other=self._recipe.config.see_each_other,
            sources=tuple(images),
            version=version,
        )

    def _rows(self, key: tuple[str | None, bytes], image: Image) -> Float32:
        """Return the rows `[n, W]` of an image."""
        if (kept := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return kept
        picture = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).view(image.height, image.width, 3)
        with torch.inference_mode():
            rows = self.tower(picture).cpu().numpy()
        self.num_computed += 1
        if rows.nbytes <= self._cache_bytes:
            self._kept[key] = rows
            self._num_kept_bytes += rows.nbytes
            while self._num_kept_bytes > self._cache_bytes:
                self._num_kept_bytes -= self._kept.popitem(last=False)[1].nbytes
        return rows

    def _positions(self, prompt: Int32, spans: Sequence[tuple[int, int]], images: Sequence[Image]) -> Int32:
        """Return the components `[3, P]` of the positions of a prompt's tokens, or `[3, 0]`: they are as all others.

        A text's tokens have three equal ones, one more than the token before. An image at position p has p in time for
        all its tokens, p and more from line to line, and p and more from column to column; behind it the text goes on
        after the longest of its sides.
        """
        if self._recipe.config.components is None:
            return np.empty((3, 0), np.int32)
        found = np.empty((3, len(prompt)), np.int32)
        known = position = 0
        for (start, end), image in zip(spans, images, strict=True):
            rows, columns = self._recipe.config.tower.grid(image.height, image.width)
            found[:, known:start] = np.arange(position, position + start - known)
            position += start - known
            found[0, start:end] = position
            found[1, start:end] = position + np.repeat(np.arange(rows), columns)
            found[2, start:end] = position + np.tile(np.arange(columns), rows)
            known, position = end, position + max(rows, columns)
        found[:, known:] = np.arange(position, position + len(prompt) - known)
        return found
