"""Pictures from outside: what they become, as in `transformers`, and that broken and hostile files are refused."""

# pyright: basic
# transformers and Pillow are typed in part only.

from __future__ import annotations

import base64
import contextlib
import json
import re
import struct
import subprocess
import sys
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as pillow
from PIL.Image import Image as Picture
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from pagewood.engine.core.images import PromptImages, marks_of
from pagewood.engine.images.decoding import decoded
from pagewood.engine.images.limits import ImageError, ImageLimits
from pagewood.engine.images.preparing import prepared
from pagewood.engine.images.prompts import image_prompts
from pagewood.engine.images.recipe import ImageRecipe, read_recipe
from pagewood.engine.images.sources import image_of
from pagewood.engine.text import Tokenizer
from pictured import pictured, pictures

LIMITS = ImageLimits(max_bytes=1 << 20, max_pixels=1 << 20)
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "architectures": ["Gemma3ForConditionalGeneration"], "text_config": {"hidden_size": 2560},
        "vision_config": {"hidden_size": 1152, "image_size": 896, "patch_size": 14, "num_attention_heads": 16},
        "mm_tokens_per_image": 256,
    },
    "qwen2.5": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "vision_config": {"hidden_size": 1280, "intermediate_size": 3420, "depth": 32, "num_heads": 16},
    },
    "qwen3": {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "vision_config": {"hidden_size": 1024, "intermediate_size": 4096, "depth": 24, "num_heads": 16},
    },
}  # fmt: skip


def recipe_of(kind: str, folder: Path) -> tuple[ImageRecipe, Any]:
    """The recipe of a folder, and the processor that has written it."""
    if kind == "gemma3":
        processor: Any = Gemma3ImageProcessorPil(size={"height": 896, "width": 896})
    elif kind == "qwen2.5":
        processor = Qwen2VLImageProcessorPil(size={"shortest_edge": 3136, "longest_edge": 300_000})
    else:
        half = [0.5, 0.5, 0.5]
        size = {"shortest_edge": 65_536, "longest_edge": 300_000}
        processor = Qwen2VLImageProcessorPil(patch_size=16, size=size, image_mean=half, image_std=half)
    processor.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(CONFIGS[kind]))
    recipe = read_recipe(folder)
    assert recipe is not None
    return recipe, processor


def numbers(recipe: ImageRecipe, picture: Picture) -> np.ndarray:
    """The numbers of a picture, `[3, height, width]`."""
    image, colours = prepared(picture, recipe), recipe.colours
    found = np.frombuffer(image.pixels, np.uint8).reshape(image.height, image.width, 3).astype(np.float32)
    return ((found * colours.factor - colours.means) / colours.deviations).transpose(2, 0, 1)


@pytest.mark.parametrize("kind", CONFIGS)
def test_numbers_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    recipe, processor = recipe_of(kind, tmp_path)
    rng = np.random.default_rng(0)
    for height, width in ((300, 200), (28, 700), (31, 33), (900, 1300)):
        picture = pillow.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        expected = processor(picture, return_tensors="np")["pixel_values"]
        own = numbers(recipe, picture)
        if kind != "gemma3":
            patch, merge = recipe.config.tower.patch_size, recipe.config.tower.merge
            h, w = (size // (patch * merge) for size in own.shape[1:])
            cut = own.reshape(3, h, merge, patch, w, merge, patch).transpose(1, 4, 2, 5, 0, 3, 6)
            own = np.repeat(cut[:, :, :, :, :, None], 2, axis=5).reshape(len(expected), -1)
            expected = expected.reshape(own.shape)
        else:
            expected = expected[0]
        np.testing.assert_allclose(own, expected, atol=1e-5)


def test_folders_that_ask_for_something_else_are_refused(tmp_path: Path) -> None:
    recipe_of("gemma3", tmp_path)
    path = tmp_path / "preprocessor_config.json"
    usual = json.loads(path.read_text())
    for change, word in (
        ({"do_pan_and_scan": True}, "do_pan_and_scan must be false"),
        ({"do_resize": False}, "do_resize must be true"),
        ({"size": {"height": 448, "width": 896}}, "height must be the tower's image_size 896"),
        ({"resample": 4}, "resample must be one of"),
        ({"image_std": [0, 1, 1]}, "image_std"),
    ):
        path.write_text(json.dumps(usual | change))
        with pytest.raises(ValueError, match=word):
            read_recipe(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["gemma3"] | {"architectures": ["LlamaForCausalLM"]}))
    assert read_recipe(tmp_path) is None


def saved(picture: Picture, kind: str, **options: Any) -> bytes:
    file = BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG of some bytes that stands for many pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


RED, BLUE = (200, 30, 30), (20, 40, 220)


def test_each_kind_of_file_becomes_the_right_picture() -> None:
    plain = pillow.new("RGB", (40, 20), RED)
    plain.paste(BLUE, (0, 0, 20, 20))  # the left half
    clear = plain.convert("RGBA")
    clear.putalpha(pillow.new("L", (40, 20), 0))
    turned = pillow.Exif()
    turned[0x0112] = 6  # shown after a quarter turn to the right
    files: dict[str, tuple[bytes, tuple[int, int], tuple[int, int, int]]] = {
        "png": (saved(plain, "PNG"), (40, 20), BLUE),
        "jpeg": (saved(plain, "JPEG", quality=95), (40, 20), BLUE),
        "webp": (saved(plain, "WEBP", lossless=True), (40, 20), BLUE),
        "bmp": (saved(plain, "BMP"), (40, 20), BLUE),
        "palette": (saved(plain.quantize(8), "PNG"), (40, 20), BLUE),
        "cmyk": (saved(plain.convert("CMYK"), "JPEG", quality=95), (40, 20), BLUE),
        "grey": (saved(plain.convert("L"), "PNG"), (40, 20), (54, 54, 54)),
        "bits": (saved(pillow.new("1", (40, 20), 1), "PNG"), (40, 20), (255, 255, 255)),
        "clear": (saved(clear, "PNG"), (40, 20), (255, 255, 255)),
        "clear palette": (saved(plain.quantize(8), "PNG", transparency=0), (40, 20), (255, 255, 255)),
        "turned": (saved(plain, "JPEG", exif=turned, quality=95), (20, 40), BLUE),
        "animated": (saved(plain, "GIF", save_all=True, append_images=[pillow.new("RGB", (40, 20))]), (40, 20), BLUE),
        "animated webp": (
            saved(plain, "WEBP", save_all=True, lossless=True, append_images=[pillow.new("RGB", (40, 20))]), (40, 20),
            BLUE,
        ),
    }  # fmt: skip
    for name, (data, size, colour) in files.items():
        found = decoded(data, LIMITS)
        assert (found.mode, found.size) == ("RGB", size), name
        colours: list[Any] = [found.getpixel((5, 5))]
        if name == "clear palette":  # one of its two colours is transparent
            colours.append(found.getpixel((35, 5)))
        distances = [np.abs(np.array(one) - colour).max() for one in colours]
        assert min(distances) < 12, (name, colours)


def test_broken_and_hostile_files_are_refused() -> None:
    (picture,) = pictures(1)
    png, jpeg = saved(picture, "PNG"), saved(picture, "JPEG")
    files: dict[str, tuple[bytes, str]] = {
        "empty": (b"", "must be of the format"),
        "text": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "must be of the format"),
        "tiff": (saved(picture, "TIFF"), "must be of the format"),
        "icon": (saved(picture, "ICO"), "must be of the format"),
        "bomb": (bomb(60_000, 60_000), "pixels"),
        "wide bomb": (bomb(2**31 - 1, 1), "pixels|cannot be decoded"),
        "less data than pixels": (bomb(500, 500), "cannot be decoded"),
        "cut png": (png[: len(png) // 2], "cannot be decoded"),
        "cut jpeg": (jpeg[: len(jpeg) // 2], "cannot be decoded"),
        "deep": (saved(pillow.new("I;16", (8, 8)), "PNG"), "8 bits"),
        "long": (bytes((1 << 20) + 1), "bytes"),
    }
    for name, (data, word) in files.items():
        with pytest.raises(ImageError) as error:
            decoded(data, LIMITS)
        assert re.search(word, str(error.value)), (name, error.value)
    rng = np.random.default_rng(1)
    for data in (png, jpeg, saved(picture, "GIF"), saved(picture, "WEBP")):
        for _ in range(60):  # damaged somewhere: refused, or some picture
            torn = bytearray(data)
            for place in rng.integers(0, len(torn), 6):
                torn[place] = rng.integers(0, 256)
            with contextlib.suppress(ImageError):
                assert decoded(bytes(torn), LIMITS).mode == "RGB"


def test_sources_of_offline_calls(tmp_path: Path) -> None:
    model, (picture,) = pictured("qwen2.5"), pictures(1)
    data = saved(picture, "PNG")
    (tmp_path / "one.png").write_bytes(data)
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    expected = model.image(picture)
    for source in (picture, data, url, str(tmp_path / "one.png"), tmp_path / "one.png"):
        assert image_of(source, model.recipe, LIMITS) == expected
    for source, error, word in (
        (7, TypeError, "must be a PIL image"),
        ("data:image/png,plain", ImageError, "data URL in base64"),
        ("data:;base64,%%%", ImageError, "must be base64"),
        (f"data:;base64,{'A' * 2_000_000}", ImageError, "at most"),
        ("/nowhere/one.png", FileNotFoundError, "nowhere"),
    ):
        with pytest.raises(error, match=word):
            image_of(source, model.recipe, LIMITS)


def test_texts_get_the_tokens_of_images() -> None:
    for kind, before in (("gemma3", "\n\n<begin>"), ("qwen2.5", "")):
        model, (picture,) = pictured(kind), pictures(1)
        written = image_prompts(model.folder, Tokenizer.from_folder(model.folder))
        assert written is not None
        image = model.image(picture)
        num = model.recipe.num_tokens(image.height, image.width)
        text = written.written(f"w3 {written.mark} w4", [image])
        assert text.startswith(f"w3 {before}{'<image>' * num}")
        for wrong in ("w3", f"{written.mark} {written.mark}"):
            with pytest.raises(ImageError, match="once for each of 1 images"):
                written.written(wrong, [image])


def test_ids_in_the_cache_distinguish_images_at_their_first_token() -> None:
    spans = ((9, 13), (14, 20))
    one, other = (marks_of(spans, [first, b"same"]) for first in (b"one", b"other"))
    assert (one[:2] == 0).all()
    assert (one[2:13] < 0).all()
    assert (one[2:10] != other[2:10]).all()
    assert (one[14:20] == other[14:20]).all()
    images = PromptImages(
        spans=spans, features=(), digests=(b"one", b"same"), positions=np.empty((3, 0), np.int32), see_each_other=True,
        sources=(), version=0,
    )  # fmt: skip
    tokens = np.arange(30, dtype=np.int32)
    whole = images.marked(tokens, 0)
    for first in range(30):
        np.testing.assert_array_equal(images.marked(tokens[first:], first), whole[first:])
    assert len(set(whole.tolist())) == 30
    assert [images.whole(0, count) for count in (9, 10, 12, 13, 14, 15, 19, 20, 25)] == [
        9,
        9,
        9,
        13,
        14,
        14,
        14,
        20,
        25,
    ]
    assert images.whole(10, 2) == 0


def test_pictures_are_decoded_without_torch() -> None:
    code = (
        "import sys; from pagewood.engine.images import decoding, preparing, prompts, recipe, sources; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
