"""Limits of pictures that come from outside."""

from __future__ import annotations

from dataclasses import dataclass

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats that are decoded, by Pillow's names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """What a picture may be. All but the number is known before anything is decoded.

    Raises:
        ValueError: a limit is below 1.
    """

    max_images: int = 16
    """Pictures of a request."""
    max_bytes: int = 20 << 20
    """Bytes of the file of each."""
    max_pixels: int = 1 << 25
    """Pixels of each, as its file says; a decoded pixel takes up to 8 bytes."""

    def __post_init__(self) -> None:
        for name in ("max_images", "max_bytes", "max_pixels"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")


class ImageError(ValueError):
    """A picture cannot be used. Its text is meant for the sender."""
