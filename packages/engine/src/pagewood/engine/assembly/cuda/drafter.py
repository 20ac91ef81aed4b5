"""Finds, checks and loads the drafter on a CUDA device."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagewood.engine.api import EngineConfig, Progress
from pagewood.engine.model_folder.folder import FoundDrafter, find_drafter
from pagewood.engine.model_folder.load import check_draft, load_draft, load_head
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.decoder import Decoder
from pagewood.engine.models.head import Head
from pagewood.engine.models.head_config import HeadConfig
from pagewood.engine.models.parts.latent_attention import LatentAttentionConfig
from pagewood.engine.models.stored.tensor_files import TensorFiles
from pagewood.engine.runner.cuda.adapters import CUDAAdapters
from pagewood.engine.runner.cuda.device import Device
from pagewood.engine.runner.cuda.drafts.drafting_head import EagleDrafter
from pagewood.engine.runner.cuda.drafts.drafting_model import DraftModel
from pagewood.engine.runner.cuda.drafts.lookup import NgramDrafter
from pagewood.engine.runner.cuda.drafts.verify import Drafter
from pagewood.engine.runner.cuda.kernels.flashinfer_api import HEAD_DIMS, LATENT_DIMS, FlashInfer
from pagewood.engine.runner.cuda.ops import CUDAOps
from pagewood.engine.runner.storage import AnyLayout, AnyStorage


def drafter_of(config: EngineConfig, folder: Path) -> FoundDrafter | None:
    """Return the drafter for the model in `folder`; None: no drafter.

    "auto" skips a head or a draft model that ships with the model if FlashInfer has no kernels for it.

    Raises:
        ValueError: the drafter or its configuration is not supported on CUDA.
        FileNotFoundError: there is no such drafter.
    """
    if config.speculative == "off":
        return None
    if config.speculative == "suffix":
        raise ValueError(
            "speculative must be off, ngram, draft, eagle or auto on CUDA, got suffix: its index lies on the host"
        )
    if config.speculative_verify != "exact":
        raise ValueError(f"speculative_verify must be exact on CUDA, got {config.speculative_verify}")
    found = find_drafter(folder, config.speculative, speculative_model=config.speculative_model)
    if config.speculative != "auto":
        return found
    shipped = folder / "draft"
    if found.kind == "eagle" and _lacks_kernels(_layer_of(found, folder)) is not None and shipped.is_dir():
        found = FoundDrafter(kind="draft", folder=shipped)
    if found.folder is not None and _lacks_kernels(_layer_of(found, folder)) is not None:
        found = FoundDrafter(kind="ngram")
    return found


def drafter_needs(config: EngineConfig, found: FoundDrafter, folder: Path) -> ModelConfig | None:
    """Return the configuration of the drafter's attention layers for the model in `folder`; None: it has none.

    Raises:
        ValueError: FlashInfer has no kernels for them, or the draft model or the head does not fit the model.
    """
    if found.folder is None:
        return None
    layer = _layer_of(found, folder)
    lacking = _lacks_kernels(layer)
    if lacking is not None:
        what = "the head" if found.kind == "eagle" else "the draft model"
        names, rule, sizes = lacking
        raise ValueError(f"{names} of {what} must be {rule} on CUDA, where FlashInfer attends, got {sizes}")
    return layer


def _lacks_kernels(layer: ModelConfig) -> tuple[str, str, object] | None:
    """Return the names, the rule and the value of sizes for which there are no kernels; None: there are kernels."""
    for mixer in layer.paged:
        if isinstance(mixer, LatentAttentionConfig):
            sizes = mixer.shape.rank, mixer.shape.rope_dim
            if sizes != LATENT_DIMS:
                return "kv_lora_rank and qk_rope_head_dim", str(LATENT_DIMS), sizes
        elif mixer.head_dim not in HEAD_DIMS:
            return "head_dim", f"one of {HEAD_DIMS}", mixer.head_dim
    return None


def head_of(found: FoundDrafter, folder: Path) -> HeadConfig | None:
    """Return the head that drafts for the model in `folder`; None: a head does not."""
    if found.kind != "eagle" or found.folder is None:
        return None
    return HeadConfig.from_folder(found.folder, ModelConfig.from_folder(folder))


def _layer_of(found: FoundDrafter, folder: Path) -> ModelConfig:
    assert found.folder is not None
    head = head_of(found, folder)
    return check_draft(found.folder, folder) if head is None else head.layer


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedDrafter:
    """A drafter before it has KV memory: a draft model, a head, or neither for n-grams and for a head elsewhere."""

    model: Decoder[Tensor] | None = None
    head: Head[Tensor] | None = None
    max_position: int | None = None
    """The longest sequence for which it drafts; None: no limit."""
    drafts_ahead: bool = False
    """Whether it is the head behind the last of several stages, which drafts at the end of a step."""
    head_again: Callable[[Decoder[Tensor], TensorFiles], Head[Tensor]] | None = None
    """Returns the head on the host, with the tensors of other files, for the target with these; None: it is no part of
    the target's folder."""

    @classmethod
    def load(
        cls,
        found: FoundDrafter,
        folder: Path,
        target: Decoder[Tensor],
        ops: CUDAOps,
        *,
        dtype: str,
        device: torch.device,
        adapters: CUDAAdapters | None = None,
        progress: Progress | None,
    ) -> LoadedDrafter:
        """Load the drafter for `target`, the model in `folder`, or a stage of it; a head is loaded in the last one.

        It drafts as the model alone, without what `adapters` add to the embedding and the output projection. Errors are
        those of `load_draft` and `load_head`.
        """
        if found.folder is None:
            return cls()
        longest, stage = _layer_of(found, folder).max_position, target.stage
        options: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": device, "progress": progress}

        shared: dict[str, Any] = {} if adapters is None else {"alone": adapters.left_out}

        def again(target: Decoder[Tensor], files: TensorFiles) -> Head[Tensor]:
            return load_head(folder, target, ops, dtype=options["dtype"], files=files)

        if found.kind == "draft":
            model = load_draft(found.folder, folder, ops, shard=target.shard, **options)
            return cls(model=model, max_position=longest)
        return cls(
            head=load_head(found.folder, target, ops, **shared, **options) if stage.is_last else None,
            head_again=again if stage.is_last and found.folder == folder else None,
            max_position=longest,
            drafts_ahead=not (stage.is_first and stage.is_last),
        )

    def layout(self, target: AnyLayout) -> AnyLayout | None:
        """Return the layout of the drafter's KV, in the pages of `target`; None: it has no KV."""
        config = self._config
        return None if config is None else config.memory_layout(page_size=target.page_size, dtype=target.dtype)

    def make(
        self,
        storage: AnyStorage | None,
        flashinfer: FlashInfer,
        device: Device,
        *,
        max_rows: int,
        max_length: int,
        dtype: str,
        batch_invariant: bool,
        trusts_cached: bool,
    ) -> Drafter | None:
        """Return the drafter, with its KV memory; None: it is a head of another stage.

        For `trusts_cached` see `DraftModel`.
        """
        options: dict[str, Any] = {
            "max_rows": max_rows, "max_length": max_length, "dtype": dtype, "batch_invariant": batch_invariant
        }  # fmt: skip
        if self.model is not None and storage is not None:
            return DraftModel(self.model, storage, flashinfer, device, **options, trusts_cached=trusts_cached)
        if self.head is not None and storage is not None:
            return EagleDrafter(self.head, storage, flashinfer, device, **options)
        return None if self.drafts_ahead else NgramDrafter()

    @property
    def _config(self) -> ModelConfig | None:
        if self.model is not None:
            return self.model.config
        return None if self.head is None else self.head.config.layer
