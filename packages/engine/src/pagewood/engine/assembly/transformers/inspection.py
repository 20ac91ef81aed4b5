"""Describes a model on disk that `transformers` computes: its shape and its memory."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from pagewood.engine.model_folder.folder import model_folder, model_name
from pagewood.engine.model_folder.inspection import TokenizerSummary, tokenizer_summary
from pagewood.engine.models.stored.checkpoint_files import checkpoint_files

_PAGE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersInspection:
    """A model on disk that has no table here."""

    name: str
    architecture: str
    reason: str
    """Why `transformers` computes it."""
    has_own_attention: bool
    """Whether it attends by itself over a cache, for one request after the other; otherwise through the interface."""
    files: Sequence[tuple[str, int]]
    """Name and bytes of each file with weights."""
    num_parameters: int
    max_position: int
    """Longest text."""
    num_layers: int
    """Layers of the KV memory."""
    num_kv_heads: int
    """The largest number in any layer."""
    head_dim: int
    """Size of the longest key or value."""
    hidden_size: int
    vocab_size: int
    weights_bytes: dict[str, int]
    """Memory of all weights on a CPU, by form."""
    kv_bytes_per_token: dict[str, int]
    """Bytes of a token's KV in all layers, by the dtype of the KV memory."""
    tokenizer: TokenizerSummary | None
    """None: the folder has no tokenizer."""


def inspect_with_transformers(model: str, reason: str) -> TransformersInspection:
    """Load a model on the CPU, compute a short text to find its shape, and return its description.

    Args:
        model: a folder.
        reason: why `transformers` computes it.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the files are damaged, or the model is refused.
    """
    from pagewood.engine.runner.transformers.load import FoundModel, load  # imports transformers, which takes seconds

    folder = model_folder(model)
    found = FoundModel.of(folder)
    loaded, shape = load(found, dtype=torch.float32, device=torch.device("cpu"))
    return TransformersInspection(
        name=model_name(model),
        architecture=found.name,
        reason=reason,
        has_own_attention=loaded.attends_by_itself,
        files=[(path.name, path.stat().st_size) for path in map(Path.resolve, checkpoint_files(folder))],
        num_parameters=found.num_parameters,
        max_position=found.max_position,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        weights_bytes={"float32": 4 * found.num_parameters, "bfloat16": 2 * found.num_parameters},
        kv_bytes_per_token={
            dtype: shape.layout(page_size=_PAGE, dtype=dtype).bytes_per_page // _PAGE for dtype in ("float32", "int8")
        },
        tokenizer=tokenizer_summary(folder, found.end_tokens(shape.vocab_size)),
    )
