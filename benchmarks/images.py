# pyright: basic
# (transformers is typed in part only)
"""Measures images per second of a tower beside `transformers`: one machine, one run, in turns.

python benchmarks/images.py            # three minutes; needs transformers and Pillow
python benchmarks/images.py --quick    # shows that it works

The towers have the shapes of Qwen2.5-VL (7B) and Qwen3-VL (2B) with a quarter and a third of their layers, and random
weights in float32. Each call takes one picture to the rows that the model reads: both resize and norm it. The rows are
compared, so that both do the same work.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image as pillow
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from end_to_end.machine import describe_machine
from pagewood.engine.images.preparing import prepared
from pagewood.engine.images.recipe import read_recipe
from pagewood.engine.models.images.tower import Tower
from pagewood.engine.models.images.tower_weights import TowerWeights
from pagewood.engine.models.stored.tensor_files import open_tensors

SIDES = (224, 448)
TEXT: dict[str, Any] = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2,
}  # fmt: skip
TOKENS = {"image_token_id": 90, "vision_start_token_id": 91, "vision_end_token_id": 92, "video_token_id": 93}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Qwen2.5-VL": (
        "Qwen2_5_VL",
        {
            "depth": 8, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14,
            "window_size": 112, "fullatt_block_indexes": [7], "out_hidden_size": 64,
        },
        {"mrope_section": [4, 6, 6]},
    ),
    "Qwen3-VL": (
        "Qwen3VL",
        {
            "depth": 8, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "patch_size": 16,
            "deepstack_visual_indexes": [2, 5, 7], "out_hidden_size": 64,
        },
        {"mrope_section": [6, 5, 5], "mrope_interleaved": True},
    ),
}  # fmt: skip


def systems(name: str, folder: Path) -> dict[str, Callable[[Any], Any]]:
    """Return what makes rows of a picture, by the name of the system."""
    prefix, vision, rope = KINDS[name]
    text = getattr(transformers, f"{prefix}TextConfig")(
        **TEXT, rope_parameters={"rope_type": "default", "rope_theta": 1e6, **rope}
    )
    config = getattr(transformers, f"{prefix}Config")(text_config=text.to_dict(), vision_config=vision, **TOKENS)
    cls = getattr(transformers, f"{prefix}ForConditionalGeneration")
    reference = cls._from_config(config, attn_implementation="sdpa", dtype=torch.float32).eval()
    reference.save_pretrained(folder)
    side = 2 * vision["patch_size"]
    processor = Qwen2VLImageProcessorPil(
        patch_size=vision["patch_size"], merge_size=2, size={"shortest_edge": side**2, "longest_edge": 1 << 24}
    )
    processor.save_pretrained(folder)
    recipe = read_recipe(folder)
    assert recipe is not None
    weights = TowerWeights(open_tensors(folder), recipe.config.prefixes)
    tower = Tower(recipe.config.tower, weights, recipe.colours)

    def ours(picture: Any) -> Any:
        image = prepared(picture, recipe)
        pixels = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8)
        return tower(pixels.view(image.height, image.width, 3))

    def theirs(picture: Any) -> Any:
        found = processor(picture, return_tensors="pt")
        return reference.model.visual(found["pixel_values"], grid_thw=found["image_grid_thw"]).pooler_output

    return {"pagewood": ours, "transformers": theirs}


@torch.inference_mode()
def main() -> None:
    """Measure both systems."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads (default: all cores)")
    parser.add_argument("--rounds", type=int, default=7, help="(default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one small round")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds = 1
    torch.manual_seed(1)
    torch.set_num_threads(arguments.threads)
    print(describe_machine(arguments.threads), flush=True)
    print("\n| tower | pixels | tokens | pagewood, images/s | transformers, images/s | ratio |")
    print("|---|--:|--:|--:|--:|--:|")
    rng = np.random.default_rng(0)
    for name in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            both = systems(name, Path(folder))
            for side in SIDES[:1] if arguments.quick else SIDES:
                picture = pillow.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8))
                ours, theirs = (system(picture) for system in both.values())
                num_tokens, width = theirs.shape
                torch.testing.assert_close(ours[:, :width], theirs, atol=1e-3, rtol=1e-3)
                taken: dict[str, list[float]] = {one: [] for one in both}
                for number in range(arguments.rounds):
                    for one in Random(number).sample(list(both), len(both)):
                        begun = time.perf_counter()
                        both[one](picture)
                        taken[one].append(1 / (time.perf_counter() - begun))
                cells = [f"{median(one):.2f} ({min(one):.2f} to {max(one):.2f})" for one in taken.values()]
                ratios = [first / second for first, second in zip(*taken.values(), strict=True)]
                print(
                    f"| {name} | {side} x {side} | {num_tokens} | {' | '.join(cells)} | {median(ratios):.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
