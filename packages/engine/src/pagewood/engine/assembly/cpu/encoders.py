"""The configuration of an engine for an encoder, whose texts are computed whole, in one step each."""

from __future__ import annotations

import logging
from dataclasses import replace

from pagewood.engine.api import EngineConfig
from pagewood.engine.models.config import ModelConfig

_log = logging.getLogger(__name__)


def for_encoder(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """Return the configuration, for an encoder without what only decoders can use, and with room for whole texts.

    A token of an encoder sees later ones, so no prefix of a text can be reused, and a step has room for the longest
    text. A part of a prompt that does not end it would have to end at a multiple of that length, so no text is cut.

    Raises:
        ValueError: something is asked for that an encoder cannot do.
    """
    if not model.is_encoder:
        return config
    unusable = {
        "speculative": config.speculative != "off",
        "tensor_parallel_size": config.tensor_parallel_size > 1,
        "pipeline_parallel_size": config.pipeline_parallel_size > 1,
        "host_cache_gb": config.host_cache_gb is not None,
        "target_step_s": config.target_step_s is not None,
    }
    for name, is_asked in unusable.items():
        if is_asked:
            raise ValueError(
                f"{name} must be left out for an encoder such as {model.architecture}, got {getattr(config, name)}"
            )
    longest = min(config.max_length or model.max_position, model.max_position)
    least = (longest + longest // 7 + 1) * (8 if config.mixing == "stall-free" else 1)
    _log.info("%s is an encoder: it makes vectors and generates nothing; no prefix is cached", model.architecture)
    return replace(
        config,
        prefix_cache=False,
        chunk_align=longest,
        chunked_prefill_size=max(config.max_chunk_tokens, least),
    )
