"""A Hugging Face folder as a decoder that is ready to run."""

from __future__ import annotations

from pathlib import Path

import torch

from pagewood.engine.models.checkpoint import Checkpoint, Progress
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.decoder import A, Decoder, Ops


def load_model(
    folder: str | Path,
    ops: Ops[A],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    progress: Progress | None = None,
) -> Decoder[A]:
    """Read the weights of `folder` straight into the decoder's fused parameters.

    Args:
        folder: holds config.json and safetensors.
        ops: the arithmetic of the device, which keeps the weights in the form that it computes with.
        dtype: of the parameters; what lies on disk is converted.
        device: where the parameters lie; each tensor goes there from the file. None: the CPU.
        progress: is told of every tensor.

    Raises:
        FileNotFoundError: a file is missing, or the weights are only there as pickles.
        ValueError: the architecture is not supported, or the tensors are not those that it needs.
    """
    config = ModelConfig.from_folder(folder)
    device = device or torch.device("cpu")
    checkpoint = Checkpoint(folder, dtype=dtype, device=device, progress=progress)
    decoder = Decoder(config, checkpoint, ops, device=device)
    checkpoint.finish(ignored=lambda name: _is_redundant(name, config))
    return decoder


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Whether a tensor repeats what the configuration or another tensor says."""
    return name.endswith("rotary_emb.inv_freq") or (config.tied_embeddings and name == "lm_head.weight")
