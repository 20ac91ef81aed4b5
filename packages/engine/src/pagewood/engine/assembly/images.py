"""What an engine needs to take images: the tower of its model, in memory beside the weights, unless something rules it
out."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from pagewood.engine.api import EngineConfig
from pagewood.engine.core.images import NoImages
from pagewood.engine.images.recipe import ImageRecipe, read_recipe
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.images.tower import Tower
from pagewood.engine.models.images.tower_weights import TowerWeights
from pagewood.engine.models.parts.attention import AttentionConfig
from pagewood.engine.models.stored.tensor_files import TensorFiles, open_tensors
from pagewood.engine.runner.device_memory import tensors_of
from pagewood.engine.runner.row_images import ImagesOfRows
from pagewood.engine.runner.tower_encoder import TowerEncoder

_log = logging.getLogger(__name__)
_TEXT_ONLY = "the model takes text only"
_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageUseOfModel:
    """Whether an engine takes images."""

    recipe: ImageRecipe | None
    """How the model wants them; None: it gets none."""
    tower: Tower | None = None
    """With a recipe: what makes rows of them, once it is loaded."""
    dtype: torch.dtype = torch.float32
    """The dtype of the tower's weights and activations."""
    why_not: str = ""
    """Without a recipe: why, as the end of a sentence."""

    @classmethod
    def of(cls, config: EngineConfig, folder: Path, model: ModelConfig) -> ImageUseOfModel:
        """Return whether an engine takes images, without the tower.

        Raises:
            ValueError: it must, by its configuration, and cannot.
        """
        try:
            recipe = read_recipe(folder)
            why = config.why_no_images if recipe is not None else _TEXT_ONLY
            if recipe is not None and why is None:
                why = _why_not(config, recipe, model)
        except ValueError as error:
            recipe, why = None, str(error)
        return cls(recipe=recipe) if why is None else cls._without(config, why)

    @classmethod
    def _without(cls, config: EngineConfig, why: str) -> ImageUseOfModel:
        """Return that an engine takes no images, unless it must."""
        if config.images == "on":
            raise ValueError(f"images must be auto or off, because {why}, got 'on'")
        if why != _TEXT_ONLY:
            _log.info("images: none are taken, because %s", why)
        return cls(recipe=None, why_not=why)

    def loaded(
        self, config: EngineConfig, folder: Path, *, device: torch.device = _HOST, dtype: torch.dtype = torch.float32
    ) -> ImageUseOfModel:
        """Return the same with the tower in memory, if the engine takes images and the folder has all of its tensors.

        Raises:
            ValueError: it must take images, by its configuration, and cannot.
        """
        if self.recipe is None:
            return self
        own = replace(self, dtype=dtype)
        try:
            return replace(own, tower=own.read(open_tensors(folder), device=device))
        except ValueError as error:
            return self._without(config, str(error))

    def read(self, files: TensorFiles, *, device: torch.device = _HOST) -> Tower:
        """Return the tower with the tensors of some files.

        Raises:
            ValueError: a tensor is missing, or has another shape.
        """
        assert self.recipe is not None
        images = self.recipe.config
        tower = Tower(images.tower, TowerWeights(files, images.prefixes), self.recipe.colours)
        for one in tensors_of(tower):
            one.data = one.data.to(device, self.dtype)  # not ours
        return tower

    @property
    def see_each_other(self) -> bool:
        """Whether each token of an image sees all tokens of that image."""
        return self.recipe is not None and self.recipe.config.see_each_other

    @property
    def width(self) -> int:
        """Elements of what is made of a token of an image."""
        return 0 if self.recipe is None else self.recipe.config.tower.width

    def change(self, model: ModelConfig) -> ModelConfig:
        """Return the model as it is computed: the tokens of an image may see each other."""
        if not self.see_each_other:
            return model
        layers = [
            replace(layer, mixer=replace(layer.mixer, sees_images=True))
            if isinstance(layer.mixer, AttentionConfig)
            else layer
            for layer in model.layers
        ]
        return replace(model, layers=tuple(layers))

    def of_rows(self, num_rows: int) -> ImagesOfRows | None:
        """Return what a runner keeps the images of its rows in; None: there are none."""
        if self.recipe is None:
            return None
        images = self.recipe.config
        return ImagesOfRows(
            num_rows=num_rows,
            components=images.components,
            num_levels=len(images.tower.deep_blocks),
            see_each_other=images.see_each_other,
        )

    def encoder(
        self, config: EngineConfig, *, num_threads: int = 1, device: torch.device = _HOST
    ) -> TowerEncoder | NoImages:
        """Return what makes rows of images, in a thread that is started: on `num_threads`, or on a device."""
        if self.recipe is None or self.tower is None:
            return NoImages(self.why_not)
        _log.info(
            "images: the tower of the model is loaded, in %s; what it makes of images is kept up to %.2f GB",
            str(self.dtype).removeprefix("torch."),
            config.image_cache_gb,
        )
        size = int(config.image_cache_gb * 1e9)
        begin = partial(_begin, num_threads, device)
        return TowerEncoder(self.tower, self.recipe, cache_bytes=size, begin=begin)

    def compute_largest(self, max_length: int) -> None:
        """Compute the rows of a picture with as many tokens as a request may have, if the model allows that many."""
        if self.recipe is None or self.tower is None:
            return
        side, fixed = self.recipe.config.tower.side, self.recipe.config.tower.image_size
        most = math.isqrt(min(self.recipe.most_pixels // side**2, max_length))
        size = max(most, 1) * side if fixed is None else fixed
        with torch.inference_mode():
            self.tower(torch.zeros(size, size, 3, dtype=torch.uint8))


def _begin(num_threads: int, device: torch.device) -> None:
    """Let a thread compute on some cores, or on a stream of its own."""
    torch.set_num_threads(num_threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))


def _why_not(config: EngineConfig, recipe: ImageRecipe, model: ModelConfig) -> str | None:
    """Return what about the model or the sizes of steps rules images out; None: nothing does."""
    images, tower = recipe.config, recipe.config.tower
    if tower.out_size != model.hidden_size:
        return f"rows of the tower have {tower.out_size} elements, and those of the model {model.hidden_size}"
    if len(tower.deep_blocks) >= model.num_layers:
        return f"the tower makes parts for {len(tower.deep_blocks)} layers of {model.num_layers}"
    if model.states is not None or model.inputs is not None:
        return "the model has recurrent layers, or layers with inputs of their own"
    if images.components is not None:
        ropes = model.ropes
        if len(ropes) != 1 or len(model.position_configs) != 1 or len(images.components) != ropes[0].head_dim // 2:
            return f"mrope_section must name all frequencies of the model's only rope, got {len(images.components)}"
    if not images.see_each_other:
        return None
    size = tower.image_size
    num_tokens = recipe.num_tokens(size, size) if size is not None else 0
    windows = [window for window in model.windows if window is not None]
    if min(windows, default=num_tokens) < num_tokens:
        return f"an image has {num_tokens} tokens that see each other, more than the window {min(windows)}"
    if config.chunk_align > 1 or config.target_step_s is not None:
        return "chunks of prompts are cut elsewhere (chunk_align, target_step_s)"
    room = config.max_chunk_tokens // (8 if config.mixing == "stall-free" else 1)
    if num_tokens > room - room // 8:
        return f"an image has {num_tokens} tokens that a step computes together, and prompts get {room - room // 8}"
    return None
