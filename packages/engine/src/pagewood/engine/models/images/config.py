"""What a model's folder says of images: its tower, and the tokens that stand for its rows. Imports no torch.

A picture is cut into square patches, and a tower (an encoder) makes a vector of each. Then patches that form a square
are merged into one row, which takes the place of a token's embedding.

Legend: h, w patches of a picture in height and width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from pagewood.engine.json_fields import Fields
from pagewood.engine.models.limits import LARGEST

_MOST = 1 << 20
Kind = Literal["siglip", "qwen2.5", "qwen3"]
"""Whose tower it is. siglip: learned positions, layer norms, patches merged by their mean and a projection; qwen2.5:
rotations, RMS norms, gates, windows, patches merged by a network of two layers; qwen3: both kinds of positions, layer
norms, and the network also behind some of its blocks, for the first layers of the decoder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerConfig:
    """The numbers of a tower.

    Raises:
        ValueError: a number is out of its range, or two numbers contradict each other.
    """

    kind: Kind
    hidden_size: int
    intermediate_size: int
    num_blocks: int
    num_heads: int
    patch_size: int
    """Pixels on each side of a patch."""
    merge: int
    """Patches on each side of the square that becomes a row."""
    out_size: int
    """Elements of a row, the decoder's hidden_size."""
    activation: str
    epsilon: float = 1e-6
    num_frames: int = 1
    """Pictures of a video that a patch is made of. A still picture stands for all of them."""
    theta: float = 1e4
    """The base of rotations, where there are some."""
    num_positions: int = 0
    """Rows of the table of learned positions, one for each place in a square of patches; 0: there is no table."""
    window: int | None = None
    """Rows on each side of the square in which patches see each other, in blocks that are not `whole_blocks`; None: all
    see all."""
    whole_blocks: tuple[int, ...] = ()
    """With a window: the blocks without it."""
    deep_blocks: tuple[int, ...] = ()
    """The blocks behind which rows are made for the first layers of the decoder."""
    image_size: int | None = None
    """Pixels on each side of a picture; None: sizes differ."""

    def __post_init__(self) -> None:
        if self.hidden_size % (4 * self.num_heads):
            raise ValueError(
                f"hidden_size must be a multiple of 4 num_heads ({self.num_heads}), got {self.hidden_size}"
            )
        side = self.patch_size * self.merge
        if self.image_size is not None and self.image_size % side:
            raise ValueError(f"image_size must be a multiple of {side}, got {self.image_size}")
        if round(self.num_positions**0.5) ** 2 != self.num_positions:
            raise ValueError(f"num_position_embeddings must be a square, got {self.num_positions}")
        blocks = (*self.whole_blocks, *self.deep_blocks)
        if blocks and not 0 <= min(blocks) <= max(blocks) < self.num_blocks:
            raise ValueError(f"blocks must be in [0, {self.num_blocks}), got {blocks}")

    @property
    def side(self) -> int:
        """Pixels on each side of a row; the sides of a picture are multiples of it."""
        return self.patch_size * self.merge

    @property
    def width(self) -> int:
        """Elements of all that is made of a square: the row, and the parts for the first layers behind it."""
        return self.out_size * (1 + len(self.deep_blocks))

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return how many rows a picture of some pixels becomes, from top to bottom and from left to right.

        Raises:
            ValueError: the tower takes no picture of that size.
        """
        fixed = self.image_size
        if fixed is not None and (height, width) != (fixed, fixed):
            raise ValueError(f"images must have {fixed} times {fixed} pixels, got {width} times {height}")
        if height < 1 or width < 1 or height % self.side or width % self.side:
            raise ValueError(f"the sides of images must be multiples of {self.side} pixels, got {width} times {height}")
        return height // self.side, width // self.side


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagesConfig:
    """A model's tower, and its tokens.

    Raises:
        ValueError: two numbers contradict each other.
    """

    tower: TowerConfig
    token: int
    """The id of the tokens that rows stand for."""
    begin: int | None = None
    """The id of the token that stands for an image in the text of a prompt, before it is taken apart into `token`s;
    None: `token` itself."""
    end: int | None = None
    """With `begin`: the id of the token behind an image."""
    see_each_other: bool = False
    """Whether each token of an image sees all tokens of that image."""
    components: tuple[int, ...] | None = None
    """For each frequency of the decoder's rope, which component of a position it is multiplied by: 0: time, 1: the row
    from the top, 2: the column from the left; None: positions of images are as others."""
    prefixes: tuple[str, ...] = ()
    """Beginnings of the names of the tower's tensors, one of which a checkpoint has."""


def read_images(folder: str | Path) -> ImagesConfig | None:
    """Return what config.json says of images; None: the model takes text only, or this package has no tower for it.

    Raises:
        FileNotFoundError: config.json does not exist.
        ValueError: a field is missing, of another type or out of its range.
    """
    fields = Fields.from_file(Path(folder) / "config.json")
    for name in fields.texts("architectures") or ():
        if name in _READ:
            try:
                return _READ[name](fields)
            except ValueError as error:
                raise error if fields.source in str(error) else ValueError(f"{fields.source}: {error}") from error
    return None


def _text_of(fields: Fields) -> Fields:
    """Return the fields of the decoder; old files have them outside."""
    return fields.section("text_config") or fields


def _gemma3(fields: Fields) -> ImagesConfig:
    vision = fields.section("vision_config") or fields.empty("vision_config")
    size = vision.integer("image_size", 224, low=1, high=_MOST)
    patch = vision.integer("patch_size", 16, low=1, high=_MOST)
    num_tokens = fields.integer("mm_tokens_per_image", 256, low=1, high=_MOST)
    side, num_patches = round(num_tokens**0.5), size // patch
    if side * side != num_tokens or num_patches % side or size % patch:
        raise ValueError(f"mm_tokens_per_image must be a square that divides {num_patches} squared, got {num_tokens}")
    tower = TowerConfig(
        kind="siglip",
        hidden_size=vision.integer("hidden_size", 768, low=1, high=_MOST),
        intermediate_size=vision.integer("intermediate_size", 3072, low=1, high=_MOST),
        num_blocks=vision.integer("num_hidden_layers", 12, low=1, high=LARGEST["num_layers"]),
        num_heads=vision.integer("num_attention_heads", 12, low=1, high=_MOST),
        patch_size=patch,
        merge=num_patches // side,
        out_size=_text_of(fields).integer("hidden_size", 2304, low=1, high=_MOST),
        activation=vision.text("hidden_act", "gelu_pytorch_tanh"),
        epsilon=vision.number("layer_norm_eps", 1e-6, low=1e-30, high=1),
        num_positions=num_patches**2,
        image_size=size,
    )
    return ImagesConfig(
        tower=tower,
        token=fields.integer(
            "image_token_index", fields.integer("image_token_id", 262_144, high=1 << 30), high=1 << 30
        ),
        begin=fields.integer("boi_token_index", 255_999, high=1 << 30),
        end=fields.integer("eoi_token_index", 256_000, high=1 << 30),
        see_each_other=True,
        prefixes=("vision_tower.", "model.vision_tower."),
    )


def _qwen_tower(vision: Fields, kind: Kind, *, patch: int) -> TowerConfig:
    """Return what the two towers of Qwen have in common."""
    return TowerConfig(
        kind=kind,
        hidden_size=vision.integer("hidden_size", low=1, high=_MOST),
        intermediate_size=vision.integer("intermediate_size", low=1, high=_MOST),
        num_blocks=vision.integer("depth", low=1, high=LARGEST["num_layers"]),
        num_heads=vision.integer("num_heads", 16, low=1, high=_MOST),
        patch_size=vision.integer("patch_size", patch, low=1, high=_MOST),
        merge=vision.integer("spatial_merge_size", 2, low=1, high=_MOST),
        out_size=vision.integer("out_hidden_size", 3584, low=1, high=_MOST),
        activation=vision.text("hidden_act", "silu"),
        num_frames=vision.integer("temporal_patch_size", 2, low=1, high=16),
        theta=(vision.section("rope_parameters") or vision).number("rope_theta", 1e4, low=2, high=1e12),
    )


def _qwen2(fields: Fields) -> ImagesConfig:
    vision = fields.section("vision_config") or fields.empty("vision_config")
    tower = _qwen_tower(vision, "qwen2.5", patch=14)
    pixels = vision.integer("window_size", 112, low=1, high=_MOST)
    tower = replace(
        tower,
        window=max(1, pixels // tower.side),
        whole_blocks=tuple(vision.integers("fullatt_block_indexes", high=tower.num_blocks - 1)),
    )
    sections = _sections(fields, [16, 24, 24])
    return ImagesConfig(
        tower=tower,
        token=fields.integer("image_token_id", 151_655, high=1 << 30),
        components=tuple(index for index, count in enumerate(sections) for _ in range(count)),
        prefixes=("visual.", "model.visual."),
    )


def _qwen3(fields: Fields) -> ImagesConfig:
    vision = fields.section("vision_config") or fields.empty("vision_config")
    tower = replace(
        _qwen_tower(vision, "qwen3", patch=16),
        activation=vision.text("hidden_act", "gelu_pytorch_tanh"),
        num_positions=vision.integer("num_position_embeddings", 2304, low=1, high=_MOST),
        deep_blocks=tuple(vision.integers("deepstack_visual_indexes", high=LARGEST["num_layers"])),
    )
    sections = _sections(fields, [24, 20, 20])
    components = [0] * sum(sections)
    for component in (1, 2):  # every third frequency, as many as its section has
        for index in range(component, min(3 * sections[component], len(components)), 3):
            components[index] = component
    return ImagesConfig(
        tower=tower,
        token=fields.integer("image_token_id", 151_655, high=1 << 30),
        components=tuple(components),
        prefixes=("model.visual.", "visual."),
    )


def _sections(fields: Fields, default: Sequence[int]) -> Sequence[int]:
    """Return how many frequencies each component has."""
    text = _text_of(fields)
    for name in ("rope_parameters", "rope_scaling"):
        rope = text.section(name)
        if rope is not None and "mrope_section" in rope.values:
            return [int(one) for one in rope.numbers("mrope_section", 3, low=0, high=_MOST)]
    return default


_READ: Mapping[str, Callable[[Fields], ImagesConfig]] = MappingProxyType(
    {
        "Gemma3ForConditionalGeneration": _gemma3,
        "Qwen2_5_VLForConditionalGeneration": _qwen2,
        "Qwen3VLForConditionalGeneration": _qwen3,
    }
)
"""By the class in config.json."""
