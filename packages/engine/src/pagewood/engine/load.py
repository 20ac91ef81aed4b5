"""From a Hugging Face folder to a decoder that is ready to run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch

from pagewood.engine.api import Progress
from pagewood.engine.models.checkpoint import Checkpoint
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.decoder import A, Decoder, Ops


class _Headers:
    """`Weights` of which only the headers are read and compared."""

    __slots__ = ("_checkpoint",)

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def stack(self, parts: Sequence[tuple[str, int]], *columns: int) -> torch.Tensor:
        self._checkpoint.check(parts, *columns)
        return torch.empty(0)


class _NoLinear:
    """Stands for the operations of a decoder that is never called."""

    __slots__ = ()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class _NoOps:
    """The part of `Ops` that takes over weights."""

    __slots__ = ()

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> _NoLinear:
        return _NoLinear()

    def embedding(self, table: torch.Tensor) -> _NoLinear:
        return _NoLinear()

    def tied_embedding(self, table: torch.Tensor) -> tuple[_NoLinear, _NoLinear]:
        return _NoLinear(), _NoLinear()


def check_weights(folder: str | Path, config: ModelConfig) -> int:
    """Compare the headers of a folder's safetensors with what a configuration asks for; return the number of weights.

    Raises:
        FileNotFoundError: a file is missing, or there are only pickled weights.
        ValueError: the tensors are not those that the model needs.
    """
    checkpoint = Checkpoint(folder, dtype=torch.float32)
    Decoder(config, _Headers(checkpoint), cast("Ops[torch.Tensor]", _NoOps()), device=torch.device("cpu"))
    checkpoint.finish(ignored=lambda name: _is_redundant(name, config))
    return checkpoint.num_elements


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
        dtype: of the parameters; weights on disk are converted.
        device: where the parameters lie; each tensor goes there from the file. None: the CPU.
        progress: called for every tensor.

    Raises:
        FileNotFoundError: a file is missing, or there are only pickled weights.
        ValueError: the architecture is not supported, or the tensors are not those that the model needs. This is found
            out before memory is taken for any of them.
    """
    config = ModelConfig.from_folder(folder)
    check_weights(folder, config)
    device = device or torch.device("cpu")
    checkpoint = Checkpoint(folder, dtype=dtype, device=device, progress=progress)
    decoder = Decoder(config, checkpoint, ops, device=device)
    checkpoint.finish(ignored=lambda name: _is_redundant(name, config))
    return decoder


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Whether a tensor repeats what the configuration or another tensor says."""
    return name.endswith("rotary_emb.inv_freq") or (config.tied_embeddings and name == "lm_head.weight")
