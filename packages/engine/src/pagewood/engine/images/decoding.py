"""Decodes the file of a picture, or refuses it, with Pillow.

A file is a program for a decoder, so only common formats are opened, and their sizes are checked first: a bomb of
some kilobytes may stand for gigabytes of pixels.
"""

# pyright: basic
# Pillow is optional.

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING

from pagewood.engine.images.limits import FORMATS, ImageError, ImageLimits

if TYPE_CHECKING:
    from PIL.Image import Image

_WHITE = (255, 255, 255, 255)


def decoded(data: bytes, limits: ImageLimits) -> Image:
    """Return the picture of a file: upright, as RGB. Of several frames, the first one.

    Transparent parts become white.

    Raises:
        ImageError: it is too large, damaged, or of another format.
    """
    if len(data) > limits.max_bytes:
        raise ImageError(f"an image must have at most {limits.max_bytes} bytes, got {len(data)}")
    try:
        from PIL import Image
    except ImportError:
        raise ImageError("images cannot be decoded here, because Pillow is not installed") from None
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as opened:
            width, height = opened.size
            if width * height > limits.max_pixels:
                raise ImageError(f"an image must have at most {limits.max_pixels} pixels, got {width} times {height}")
            opened.load()  # the first frame
            return in_colours(opened)
    except ImageError:
        raise
    except Image.UnidentifiedImageError:
        raise ImageError(f"an image must be of the format {', '.join(FORMATS)}, got another one") from None
    except Exception as error:  # decoders raise whatever a damaged file makes of them
        raise ImageError(f"an image cannot be decoded: {error}"[:300]) from error


def in_colours(picture: Image) -> Image:
    """Return a picture upright, as its file's orientation says, in RGB; transparent parts become white."""
    from PIL import Image, ImageOps

    upright = ImageOps.exif_transpose(picture)
    if upright.mode == "RGB":
        return upright
    if upright.mode in ("I", "I;16", "I;16B", "I;16L", "F"):
        raise ImageError(f"an image must have 8 bits for each colour, got the mode {upright.mode}")
    if "A" in upright.getbands() or "transparency" in upright.info:
        layered = upright.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layered.size, _WHITE), layered).convert("RGB")
    return upright.convert("RGB")
