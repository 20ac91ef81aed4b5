"""How a model wants its pictures: the size, the interpolation and the colours, as its folder says. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from pagewood.engine.json_fields import Fields
from pagewood.engine.models.images.config import ImagesConfig, read_images

_FILES = ("processor_config.json", "preprocessor_config.json")
_MOST_PIXELS = 1 << 30
_LONGEST_TO_SHORTEST = 200
_FILTERS: Mapping[int, str] = MappingProxyType({0: "NEAREST", 1: "LANCZOS", 2: "BILINEAR", 3: "BICUBIC", 5: "HAMMING"})
"""Pillow's names of interpolations, by the numbers in files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Colours:
    """A colour c in [0, 255] becomes (factor c - mean) / deviation, by channel."""

    factor: float
    means: tuple[float, float, float]
    deviations: tuple[float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRecipe:
    """What a picture must become for a model.

    Raises:
        ValueError: two numbers contradict each other.
    """

    config: ImagesConfig
    colours: Colours
    interpolation: str
    """A filter of Pillow."""
    least_pixels: int
    """Where the size of pictures is not fixed: one with fewer pixels is enlarged."""
    most_pixels: int
    """Likewise: one with more is made smaller."""

    def __post_init__(self) -> None:
        if not 1 <= self.least_pixels <= self.most_pixels:
            raise ValueError(
                f"size must have 1 <= shortest_edge <= longest_edge, got {self.least_pixels} and {self.most_pixels}"
            )

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width that a picture of some pixels gets.

        Raises:
            ValueError: one side is more than 200 times as long as the other.
        """
        tower = self.config.tower
        if tower.image_size is not None:
            return tower.image_size, tower.image_size
        longest, shortest = max(height, width), min(height, width)
        if longest > _LONGEST_TO_SHORTEST * shortest:
            raise ValueError(
                f"an image must be at most {_LONGEST_TO_SHORTEST} times as long as wide, got {width} times {height}"
            )
        side = tower.side
        found = round(height / side) * side, round(width / side) * side
        if found[0] * found[1] > self.most_pixels:
            shrink = math.sqrt(height * width / self.most_pixels)
            height, width = (max(side, math.floor(one / shrink / side) * side) for one in (height, width))
            return height, width
        if found[0] * found[1] < self.least_pixels:
            grow = math.sqrt(self.least_pixels / (height * width))
            height, width = (math.ceil(one * grow / side) * side for one in (height, width))
            return height, width
        return found

    def num_tokens(self, height: int, width: int) -> int:
        """Return the tokens of a picture that has been resized."""
        rows, columns = self.config.tower.grid(height, width)
        return rows * columns


def read_recipe(folder: str | Path) -> ImageRecipe | None:
    """Return how a folder's model wants pictures; None: it takes text only, or this package has no tower for it.

    Raises:
        FileNotFoundError: config.json does not exist.
        ValueError: a field is missing, of another type or out of its range, or asks for a step that is not supported.
    """
    config = read_images(folder)
    if config is None:
        return None
    fields = _fields(Path(folder))
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if not fields.flag(name, True):
            raise ValueError(f"{fields.source}: {name} must be true, got false")
    if fields.flag("do_pan_and_scan", False):
        raise ValueError(f"{fields.source}: do_pan_and_scan must be false, got true: images are not cut into parts")
    is_fixed = config.tower.image_size is not None
    clip = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    half = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
    means, deviations = half if is_fixed else clip
    number = fields.integer("resample", 2 if is_fixed else 3, high=5)
    if number not in _FILTERS:
        raise ValueError(f"{fields.source}: resample must be one of {', '.join(map(str, _FILTERS))}, got {number}")
    least, most = _pixels(fields, config)
    return ImageRecipe(
        config=config,
        colours=Colours(
            factor=fields.number("rescale_factor", 1 / 255, low=1e-9, high=1e3),
            means=_three(fields, "image_mean", means, low=-1e3),
            deviations=_three(fields, "image_std", deviations, low=1e-9),
        ),
        interpolation=_FILTERS[number],
        least_pixels=least,
        most_pixels=most,
    )


def _fields(folder: Path) -> Fields:
    """Return the fields of pictures, which newer folders have in the file of the processor."""
    for name in _FILES:
        if (folder / name).is_file():
            found = Fields.from_file(folder / name)
            if name == _FILES[1]:
                return found
            section = found.section("image_processor")
            if section is not None:
                return section
    return Fields(str(folder / _FILES[1]), {})


def _pixels(fields: Fields, config: ImagesConfig) -> tuple[int, int]:
    """Return the least and the most pixels of a picture."""
    tower, size = config.tower, fields.section("size") or fields.empty("size")
    if tower.image_size is not None:
        for name in ("height", "width"):
            if (found := size.integer(name, tower.image_size, low=1, high=1 << 20)) != tower.image_size:
                raise ValueError(
                    f"{size.source}: {name} must be the tower's image_size {tower.image_size}, got {found}"
                )
        return 1, _MOST_PIXELS
    for name, value in (("patch_size", tower.patch_size), ("merge_size", tower.merge)):
        if (found := fields.integer(name, value, low=1, high=1 << 20)) != value:
            raise ValueError(f"{fields.source}: {name} must be that of the tower, {value}, got {found}")
    least, most = (
        fields.integer(old, size.integer(name, default, low=1, high=_MOST_PIXELS), low=1, high=_MOST_PIXELS)
        for name, old, default in (
            ("shortest_edge", "min_pixels", 56 * 56),
            ("longest_edge", "max_pixels", 28 * 28 * 1280),
        )
    )
    return least, most


def _three(fields: Fields, name: str, default: tuple[float, float, float], *, low: float) -> tuple[float, float, float]:
    """Return a number for each channel."""
    if fields.values.get(name) is None:
        return default
    first, second, third = fields.numbers(name, 3, low=low, high=1e3)
    return first, second, third
