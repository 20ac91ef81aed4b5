"""What drafts on a CUDA device: found, checked and loaded."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from pagewood.engine.api import EngineConfig, Progress
from pagewood.engine.folder import FoundDrafter, find_drafter
from pagewood.engine.load import check_draft, load_draft
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.decoder import Decoder
from pagewood.engine.runner.cuda.device import Device
from pagewood.engine.runner.cuda.draft_model import DraftModel
from pagewood.engine.runner.cuda.flashinfer_api import HEAD_DIMS, FlashInfer
from pagewood.engine.runner.cuda.lookup import NgramDrafter
from pagewood.engine.runner.cuda.ops import CUDAOps
from pagewood.engine.runner.cuda.verify import Drafter
from pagewood.kvpool import MultiHeadLayout
from pagewood.kvpool.storage import KVStorage


def drafter_of(config: EngineConfig, folder: Path) -> FoundDrafter | None:
    """Return what drafts for the model in `folder`; None: nothing.

    "auto" is the draft model that ships with the model, if FlashInfer has kernels for it, otherwise n-grams.

    Raises:
        ValueError: the drafter, or how it is to be used, is not supported on CUDA.
        FileNotFoundError: there is no such drafter.
    """
    if config.speculative == "off":
        return None
    if config.speculative in ("suffix", "eagle"):
        why = "its index lies on the host" if config.speculative == "suffix" else "heads are not supported there"
        raise ValueError(f"speculative must be off, ngram, draft or auto on CUDA, got {config.speculative}: {why}")
    if config.speculative_topk > 1:
        raise ValueError(f"speculative_topk must be 1 on CUDA, which verifies chains, got {config.speculative_topk}")
    if config.speculative_verify != "exact":
        raise ValueError(f"speculative_verify must be exact on CUDA, got {config.speculative_verify}")
    kind: Literal["ngram", "draft"] = "draft" if config.speculative == "draft" else "ngram"
    shipped = folder / "draft"
    if config.speculative == "auto" and shipped.is_dir() and ModelConfig.from_folder(shipped).head_dim in HEAD_DIMS:
        kind = "draft"
    found = find_drafter(folder, kind, speculative_model=config.speculative_model)
    if found.folder is not None:
        check_draft(found.folder, folder)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedDrafter:
    """A drafter before it has KV memory."""

    model: Decoder[Tensor] | None
    """The draft model; None: n-grams."""

    @classmethod
    def load(
        cls,
        found: FoundDrafter,
        folder: Path,
        ops: CUDAOps,
        *,
        dtype: str,
        device: torch.device,
        progress: Progress | None,
    ) -> LoadedDrafter:
        """Load what drafts for the model in `folder`; errors as in `load_draft`."""
        if found.folder is None:
            return cls(model=None)
        return cls(
            model=load_draft(found.folder, folder, ops, dtype=getattr(torch, dtype), device=device, progress=progress)
        )

    def layout(self, target: MultiHeadLayout) -> MultiHeadLayout | None:
        """Return the layout of the drafter's KV, in the pages of `target`; None: it has none."""
        if self.model is None:
            return None
        config = self.model.config
        return MultiHeadLayout(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            page_size=target.page_size,
            dtype=target.dtype,
        )

    def make(
        self,
        storage: KVStorage | None,
        flashinfer: FlashInfer,
        device: Device,
        *,
        max_rows: int,
        max_length: int,
        dtype: str,
        batch_invariant: bool,
    ) -> Drafter:
        """Return the drafter, with its KV memory."""
        if self.model is None or storage is None:
            return NgramDrafter()
        return DraftModel(
            self.model,
            storage,
            flashinfer,
            device,
            max_rows=max_rows,
            max_length=max_length,
            dtype=dtype,
            batch_invariant=batch_invariant,
        )
