"""The images of admitted requests as arrays of a batch.

Legend: R admitted requests with images, N images, K tokens of all of them, W elements of a row of a tower, P tokens of
prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.core.messages.arrays import Int32

Float32 = NDArray[np.float32]


class _Images(Protocol):
    @property
    def spans(self) -> tuple[tuple[int, int], ...]: ...
    @property
    def features(self) -> tuple[Float32, ...]: ...
    @property
    def positions(self) -> Int32: ...


class Pictured(Protocol):
    """The attributes of an admitted request that a batch reads."""

    @property
    def images(self) -> _Images | None:
        """The images of its prompt; None: there are none."""
        ...

    @property
    def num_matched(self) -> int:
        """Leading tokens whose KV is cached."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchImages:
    """The images that a step's admitted requests have beyond their cached prefixes. A runner keeps them by row."""

    grants: Int32
    """[R], indices of the grants whose requests have images, of A admitted ones, ascending."""
    spans: Int32
    """[N, 3], for each image which of the R requests has it, and the positions [start, end) of its tokens."""
    features: Float32
    """[K, W], in place of embeddings: the rows of all images, one after the other. The runner must not change them: a
    batch with one image shares them with the engine's cache."""
    num_positions: Int32
    """[R], tokens of each prompt, or 0 if the tokens of images have positions as others have."""
    positions: Int32
    """[3, P], the components of the positions of the tokens of all prompts, one after the other. A token behind a
    prompt has three equal components, which go on behind the largest one of the prompt."""

    @classmethod
    def of(cls, grants: Sequence[int], admitted: Sequence[Pictured]) -> BatchImages | None:
        """Return the images of admitted requests, whose grants have these indices; None: there are none."""
        own = [(grant, one, one.images) for grant, one in zip(grants, admitted, strict=True) if one.images is not None]
        if not own:
            return None
        spans: list[tuple[int, int, int]] = []
        features: list[Float32] = []
        for index, (_, request, images) in enumerate(own):
            for (start, end), rows in zip(images.spans, images.features, strict=True):
                if end > request.num_matched:
                    spans.append((index, start, end))
                    features.append(rows)
        width = own[0][2].features[0].shape[1]
        joined = features[0] if len(features) == 1 else np.concatenate([np.empty((0, width), np.float32), *features])
        return cls(
            grants=np.array([grant for grant, _, _ in own], np.int32),
            spans=np.array(spans, np.int32).reshape(-1, 3),
            features=joined,
            num_positions=np.array([images.positions.shape[1] for _, _, images in own], np.int32),
            positions=np.concatenate([images.positions for _, _, images in own], axis=1),
        )
