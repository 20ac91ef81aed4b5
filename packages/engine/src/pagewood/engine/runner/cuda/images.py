"""The images of a step on a CUDA device: their rows, the rotations of their tokens, and which positions these see.

A step that shows images is computed without a graph. In the steps behind them, a row's tokens are as those of text,
whose places in the table of rotations are shifted.

Legend: T tokens of a step, K tokens of images among them, G grants, W elements of a row of a tower, E hidden_size, F
frequencies of the rope.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.runner.cuda.attention import offsets_of
from pagewood.engine.runner.cuda.device import Device
from pagewood.engine.runner.cuda.drafts.masks import Masks, MaskShape, packed_masks
from pagewood.engine.runner.cuda.step_arrays import StepArrays, wide
from pagewood.engine.runner.row_images import Float32, ImagesOfRows

_NOTHING = np.empty(0, np.int32)


def _nothing() -> Int32:
    return _NOTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class StepImages:
    """What a step needs for images, on the host."""

    shifts: Mapping[int, int]
    """How far the places of the tokens of each admitted row are behind their positions, where that has changed."""
    is_shown: bool = False
    """Whether the step has tokens that a graph cannot compute."""
    places: Int32 = field(default_factory=_nothing)
    """[3T], how far the three components of each token's position are behind that position, which only the device may
    know; [0]: the step has no such tokens, or the model none."""
    tokens: Int32 = field(default_factory=_nothing)
    """[2K] int64 viewed as int32, ascending, the tokens of images."""
    last_seen: Int32 = field(default_factory=_nothing)
    """[T], how far behind a token is the last position that it sees; [0]: no token sees others behind it."""
    features: Sequence[Float32] = ()
    """`[n, W]` each, the rows of all K tokens."""

    def words(self) -> dict[str, Int32]:
        """Return the arrays that the device gets, by name."""
        return {
            "image_rows": wide(np.array([*self.shifts], np.int32)),
            "image_shifts": np.array([*self.shifts.values()], np.int32),
            "image_places": self.places,
            "image_tokens": self.tokens,
            "image_seen": self.last_seen,
        }


class ShownImages:
    """The images of a step on the device; satisfies `models.ops.Visual`."""

    __slots__ = ("_components", "_features", "_places", "_seen", "_tokens", "num_levels")

    def __init__(
        self, words: Mapping[str, Tensor], features: Tensor | None, *, components: Tensor | None, num_levels: int
    ) -> None:
        """Take the arrays of `StepImages`, the rows `[K, W]` of its tokens in the dtype of activations, if any, and for
        each column of the table of rotations `[2F] int64` a component of positions."""
        self._tokens = words["image_tokens"].view(torch.int64)
        self._places = words["image_places"]
        self._seen = words["image_seen"]
        self._features = features
        self._components = components
        self.num_levels = 0 if features is None else num_levels
        """See `Visual`."""

    def replace(self, x: Tensor) -> None:
        """Put rows in the place of the embeddings `x` `[T, E]` of their tokens."""
        if self._features is not None:
            x.index_copy_(0, self._tokens, self._features[:, : x.shape[1]])

    def add(self, x: Tensor, level: int) -> None:
        """Add to `x` `[T, E]` what belongs behind layer `level`."""
        if self._features is not None:
            first = (1 + level) * x.shape[1]
            x.index_add_(0, self._tokens, self._features[:, first : first + x.shape[1]])

    def rotation(self, table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the rotation of each token, as `CUDAOps` takes it, by a table of places; None: as of other tokens."""
        if self._components is None or not len(self._places):
            return None
        places = self._places.view(3, -1) + positions
        by_component = table.index_select(0, places.flatten()).view(3, -1, table.shape[1])
        num_tokens = by_component.shape[1]
        own = by_component.gather(0, self._components.expand(1, num_tokens, -1))[0]
        return torch.arange(num_tokens, dtype=torch.int32, device=table.device), own

    def last_seen(self, positions: Tensor) -> Tensor | None:
        """Return the last position that each token at `positions` `[T]` sees; None: no token sees others behind it."""
        return positions + self._seen if len(self._seen) else None

    def masks(self, host: StepArrays[Tensor], step: StepArrays[Tensor], windows: Sequence[int]) -> Masks | None:
        """Return masks by which each token sees all of its image; None: no token sees others behind it.

        Args:
            host: the arrays of the step in pinned memory.
            step: the same on the device.
            windows: see `packed_masks`.
        """
        last_seen = self.last_seen(step.positions)
        if last_seen is None:
            return None
        counts = np.diff(host.qo_indptr.numpy())
        shape = MaskShape.of(counts, host.kv_lens.numpy())
        sizes = step.qo_indptr.diff().long() * step.kv_lens
        offsets = torch.zeros_like(step.qo_indptr)
        offsets[1:] = torch.cumsum((sizes + 7) // 8, 0)
        return packed_masks(
            step.positions, step.qo_indptr, step.kv_lens, offsets, windows, num_bytes=int(shape.offsets[-1]),
            rows_per_byte=shape.rows_per_byte, last_seen=last_seen,
        )  # fmt: skip


class CUDAImages:
    """Finds what images change in a step, and brings it to the device.

    Args:
        rows: the images of the runner's rows.
        device: where the runner computes.
        dtype: of activations.
    """

    __slots__ = ("_components", "_device", "_dtype", "_rows")

    def __init__(self, rows: ImagesOfRows, device: Device, dtype: torch.dtype) -> None:
        self._rows = rows
        self._device = device
        self._dtype = dtype
        self._components: Tensor | None = None
        if rows.components is not None:
            self._components = torch.from_numpy(np.tile(rows.components, 2)).to(device.torch_device)

    @property
    def shift_positions(self) -> bool:
        """Whether the tokens behind an image have places before their positions."""
        return self._components is not None

    @property
    def see_each_other(self) -> bool:
        """Whether each token of an image sees all tokens of that image."""
        return self._rows.see_each_other

    def of_step(self, batch: Batch) -> StepImages | None:
        """Take the images of admitted requests; return what the step needs, or None: nothing."""
        shifts = self._rows.admit(batch)
        if not self._rows.are_shown(batch.rows, batch.starts):
            return StepImages(shifts=shifts) if shifts else None
        firsts = offsets_of(batch.counts)
        places, last_seen = np.zeros((3, batch.num_tokens), np.int32), np.zeros(batch.num_tokens, np.int32)
        tokens, features = list[Int32](), list[Float32]()
        spans = zip(batch.rows.tolist(), firsts.tolist(), batch.starts.tolist(), batch.counts.tolist(), strict=False)
        for row, token, start, count in spans:
            own = self._rows.get(row)
            if own is None:
                continue
            if self._components is not None:
                positions = np.arange(start, start + count, dtype=np.int32)
                places[:, token : token + count] = own.components(start, count) - positions
            for behind, rows, end in own.shown(start, count):
                first = token + behind
                tokens.append(np.arange(first, first + len(rows), dtype=np.int32))
                last_seen[first : first + len(rows)] = end - 1 - start - behind - np.arange(len(rows))
                features.append(rows)
        return StepImages(
            shifts=shifts,
            is_shown=True,
            places=_NOTHING if self._components is None else places.ravel(),
            tokens=wide(np.concatenate([_NOTHING, *tokens])),
            last_seen=last_seen if features and self._rows.see_each_other else _NOTHING,
            features=features,
        )

    def on_device(self, images: StepImages, words: Mapping[str, Tensor], shifts: Tensor | None) -> ShownImages | None:
        """Queue what changes on the device; return the images of the step, or None: it shows none.

        Args:
            images: of the step.
            words: its arrays on the device.
            shifts: `[rows]`, how far the place of a position is behind it; None: never.
        """
        if shifts is not None and images.shifts:
            shifts.index_copy_(0, words["image_rows"].view(torch.int64), words["image_shifts"])
        if not images.is_shown:
            return None
        features = self._uploaded(images.features) if images.features else None
        return ShownImages(words, features, components=self._components, num_levels=self._rows.num_levels)

    def _uploaded(self, features: Sequence[Float32]) -> Tensor:
        """Queue the copy of rows `[n, W]` to the device; return all of them, `[K, W]`."""
        shape = sum(map(len, features)), features[0].shape[1]
        pinned = self._device.pinned(shape[0] * shape[1], self._dtype).view(shape)
        first = 0
        for rows in features:
            pinned[first : first + len(rows)].copy_(torch.from_numpy(rows))
            first += len(rows)
        found = torch.empty(shape, dtype=self._dtype, device=self._device.torch_device)
        self._device.upload(pinned, found)
        return found
