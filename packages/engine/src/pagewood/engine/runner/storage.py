"""The KV memory of a model: of heads, or of latents."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from pagewood.kvpool import LatentLayout, MultiHeadLayout
from pagewood.kvpool.latent_storage import LatentStorage
from pagewood.kvpool.memory import PageMemory
from pagewood.kvpool.storage import KVStorage

AnyLayout = MultiHeadLayout | LatentLayout
AnyStorage = KVStorage | LatentStorage
_STORAGES: Mapping[type[AnyLayout], Callable[..., AnyStorage]] = {
    MultiHeadLayout: KVStorage,
    LatentLayout: LatentStorage,
}


def storage_for(
    layout: AnyLayout, num_pages: int, *, device: str | torch.device = "cpu", memory: PageMemory | None = None
) -> AnyStorage:
    """Return memory for `num_pages` pages; see `KVStorage` for the arguments and errors."""
    return _STORAGES[type(layout)](layout, num_pages, device=device, memory=memory)
