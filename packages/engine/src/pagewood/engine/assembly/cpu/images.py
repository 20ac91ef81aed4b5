"""What an engine needs to take images: the tower of its model, in memory beside the weights, unless something rules it
out."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from pagewood.engine.api import EngineConfig
from pagewood.engine.core.images import ImageEncoder, NoImages
from pagewood.engine.images.recipe import ImageRecipe, read_recipe
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.images.tower import Tower
from pagewood.engine.models.images.tower_weights import TowerWeights
from pagewood.engine.models.parts.attention import AttentionConfig
from pagewood.engine.models.stored.tensor_files import open_tensors
from pagewood.engine.runner.cpu.program.images import CPUImages
from pagewood.engine.runner.cpu.tower_encoder import TowerEncoder

_log = logging.getLogger(__name__)
_TEXT_ONLY = "the model takes text only"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageUseOfModel:
    """Whether an engine takes images."""

    recipe: ImageRecipe | None
    """How the model wants them; None: it gets none."""
    tower: Tower | None = None
    """With a recipe: what makes rows of them."""
    why_not: str = ""
    """Without a recipe: why, as the end of a sentence."""

    @classmethod
    def of(cls, config: EngineConfig, folder: Path, model: ModelConfig) -> ImageUseOfModel:
        """Return whether an engine takes images, with the tower in memory if it does.

        Raises:
            ValueError: it must, by its configuration, and cannot.
        """
        tower: Tower | None = None
        try:
            recipe = read_recipe(folder)
            why = config.why_no_images if recipe is not None else _TEXT_ONLY
            if recipe is not None and why is None:
                why = _why_not(config, recipe, model)
            if recipe is not None and why is None:
                weights = TowerWeights(open_tensors(folder), recipe.config.prefixes)
                tower = Tower(recipe.config.tower, weights, recipe.colours)
        except ValueError as error:
            recipe, why = None, str(error)
        if recipe is None or why is not None:
            if config.images == "on":
                raise ValueError(f"images must be auto or off, because {why}, got 'on'")
            if why != _TEXT_ONLY:
                _log.info("images: none are taken, because %s", why)
            return cls(recipe=None, why_not=why or "")
        return cls(recipe=recipe, tower=tower)

    def change(self, model: ModelConfig) -> ModelConfig:
        """Return the model as it is computed: the tokens of an image may see each other."""
        if self.recipe is None or not self.recipe.config.see_each_other:
            return model
        layers = [
            replace(layer, mixer=replace(layer.mixer, sees_images=True))
            if isinstance(layer.mixer, AttentionConfig)
            else layer
            for layer in model.layers
        ]
        return replace(model, layers=tuple(layers))

    def for_runner(self) -> CPUImages | None:
        """Return what the runner does with images; None: nothing."""
        if self.recipe is None:
            return None
        config = self.recipe.config
        return CPUImages(
            components=config.components,
            num_levels=len(config.tower.deep_blocks),
            see_each_other=config.see_each_other,
        )

    def encoder(self, config: EngineConfig, *, num_threads: int) -> ImageEncoder:
        """Return what makes rows of images, in a thread that is started."""
        if self.recipe is None or self.tower is None:
            return NoImages(self.why_not)
        _log.info(
            "images: the tower of the model is loaded, in float32; what it makes of images is kept up to %.2f GB",
            config.image_cache_gb,
        )
        size = int(config.image_cache_gb * 1e9)
        return TowerEncoder(self.tower, self.recipe, cache_bytes=size, num_threads=num_threads)


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
