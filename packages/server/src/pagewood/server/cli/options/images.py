"""Options for images."""

from __future__ import annotations

from pagewood.engine.images.limits import ImageLimits
from pagewood.server.cli.options.page import Page

LIMITS = ImageLimits()


def add_image_options(page: Page) -> None:
    """Add the group."""
    images = page.group("images, for models that see them")
    images.setting(
        "--images",
        metavar="WHAT",
        help="whether the model gets images: auto, on, off (default: auto)",
        more="auto: if it has a tower for them that Pagewood knows, and no other option rules it out; the log says "
        "which. off saves the memory of the tower. Images need pagewood-server[images].",
    )
    images.setting(
        "--image-cache-gb",
        metavar="GB",
        help="memory for what was computed of images (default: %(default)s)",
        more="So that an image which comes again is not computed again, also where its KV is not cached any more.",
    )
    images.add(
        "--image-host",
        action="append",
        default=[],
        dest="image_hosts",
        metavar="HOST",
        help="fetch images from this host if clients send its URLs; repeatable",
        more="Such as images.example.com or *.example.com, with a port if it is not that of the scheme. Redirects are "
        "not followed. Without it, images come as data URLs only.",
    )
    images.setting(
        "--image-timeout-seconds",
        dest="image_timeout_s",
        metavar="S",
        help="how long fetching an image may take (default: %(default)s)",
    )
    images.setting(
        "--max-images",
        metavar="N",
        help="images of a request, those of its history too (default: %(default)s)",
    )
    images.setting(
        "--max-image-bytes",
        metavar="N",
        help="longest file of an image (default: %(default)s)",
        more="Images in a body count for --max-body-bytes, too.",
    )
    images.setting(
        "--max-image-pixels",
        metavar="N",
        help="most pixels of an image, before it is decoded (default: %(default)s)",
    )
