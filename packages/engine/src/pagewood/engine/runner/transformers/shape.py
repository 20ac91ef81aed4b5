"""What a model of `transformers` needs of memory, found by computing with it; and whether pages suffice for it."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagewood.engine.runner.cuda.attention import HostArrays, PageArrays, Places, offsets_of
from pagewood.engine.runner.transformers.interface import AttentionCall
from pagewood.engine.runner.transformers.model import TransformersModel
from pagewood.engine.runner.transformers.pages import PagedStep
from pagewood.kvpool import MultiHeadLayout
from pagewood.kvpool.storage import KVStorage

_TOKENS = 11
_CUTS = (4, 7)
"""A text of `_TOKENS` is computed whole, and in parts that end here; both must give the same states."""
_PAGE = 4
_TOLERANCE = {torch.float32: 1e-3}
_TOLERANCE_OF_HALVES = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundShape:
    """The shape of a model's memory and of its results."""

    num_layers: int
    """Calls of attention in a step, mostly one for each layer; each has keys and values of its own."""
    num_kv_heads: int
    """Key heads of the layer that has the most."""
    head_dim: int
    """Size of the longest key or value."""
    hidden_size: int
    vocab_size: int

    def layout(self, *, page_size: int, dtype: str) -> MultiHeadLayout:
        """Return the layout of a page; layers with fewer or smaller heads leave a part of their memory unused."""
        return MultiHeadLayout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=page_size,
            dtype=dtype,
            order="NHD",
        )


class _Watching:
    """Gets the calls of a step of one text, and notes their shapes."""

    def __init__(self, positions: Tensor) -> None:
        self.positions = positions
        self.texts = [(slice(0, len(positions)), 0)]
        self.shapes: list[tuple[int, int]] = []  # written by: attend, extend
        self.layers: list[int] = []  # written by: extend

    def extend(self, text: int, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Note what a layer adds to its cache; the result is the same."""
        self.layers.append(layer)
        self.shapes.append((max(len(k), len(v)), max(k.shape[-1], v.shape[-1])))
        return k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        """Note a call; the result is zeros."""
        seen = call.rule.seen(self.positions, self.positions)
        if seen.triu(1).any():
            raise ValueError("a token must see no later one, got an attention that is not causal")
        self.shapes.append((len(k), max(k.shape[-1], v.shape[-1])))
        return q.new_zeros(q.shape[1], len(q), v.shape[-1])


def find_shape(model: TransformersModel, *, device: torch.device) -> FoundShape:
    """Compute two tokens to find the shape of a model, and the layers of its caches if it attends by itself.

    Args:
        model: on `device`.
        device: where it computes.

    Raises:
        ValueError: keys and values in pages are not all that its layers need; the message says what it is.
    """
    step = _Watching(torch.arange(2, dtype=torch.int32, device=device))
    tokens = torch.ones(2, dtype=torch.int32, device=device)
    states, _ = model.states(tokens, (), step, torch.arange(2, device=device))
    if not step.shapes:
        raise ValueError("no layer attends to keys and values")
    if len(set(step.layers)) < len(step.layers):
        raise ValueError("a layer adds to its cache more than once in a step")
    try:
        logits = model.head(states)
    except (IndexError, AttributeError, TypeError) as error:
        raise ValueError("logits need more than the last states") from error
    return FoundShape(
        num_layers=model.set_cached_layers(step.layers) if model.attends_by_itself else len(step.shapes),
        num_kv_heads=max(heads for heads, _ in step.shapes),
        head_dim=max(size for _, size in step.shapes),
        hidden_size=states.shape[-1],
        vocab_size=logits.shape[-1],
    )


def check_parts(
    model: TransformersModel, shape: FoundShape, *, padding: int | None, dtype: torch.dtype, device: torch.device
) -> None:
    """Check that a text has the same states in parts, beside another text, and by the class alone without a cache.

    Raises:
        ValueError: it has not, so the layers keep more of a text than keys and values, or count its positions wrongly.
    """
    tokens = torch.arange(_TOKENS, dtype=torch.int32, device=device) * 7 % shape.vocab_size
    if padding is not None:
        tokens = torch.where(tokens == padding, tokens - 1, tokens).abs()
    layout = shape.layout(page_size=_PAGE, dtype=str(dtype).removeprefix("torch."))
    storage = KVStorage(layout, 8, device=device)
    whole = model.states_alone(tokens)
    parts: list[Tensor] = []
    for start, end in zip((0, *_CUTS), (*_CUTS, _TOKENS), strict=True):
        other = tokens[: end - start].flip(0)  # the other text begins anew in every step
        both = _states(
            model, storage, torch.cat([other, tokens[start:end]]), [(6, 0, len(other)), (3, start, end - start)]
        )
        parts.append(both[len(other) :])
    error = torch.linalg.vector_norm((torch.cat(parts) - whole).float()) / torch.linalg.vector_norm(whole.float())
    if not error <= _TOLERANCE.get(dtype, _TOLERANCE_OF_HALVES):
        raise ValueError(f"the states of a text in parts differ from those of the class by {float(error):.1%}")


def _states(
    model: TransformersModel, storage: KVStorage, tokens: Tensor, grants: Sequence[tuple[int, int, int]]
) -> Tensor:
    """Compute a step of grants (first page, start, count), whose pages follow each other."""
    device = tokens.device
    firsts, starts, counts = np.array(grants, np.int32).T
    pages = PageArrays.of(starts + counts, page_size=storage.layout.page_size)
    ids = [np.arange(num, dtype=np.int32) + first for num, first in zip(np.diff(pages.kv_indptr), firsts, strict=True)]
    positions = [np.arange(num, dtype=np.int32) + start for start, num in zip(starts, counts, strict=True)]

    def on_device(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    places = Places(
        grants=on_device(np.repeat(np.arange(len(grants), dtype=np.int32), counts)),
        positions=on_device(np.concatenate(positions)),
        kv_indptr=on_device(pages.kv_indptr),
        kv_indices=on_device(np.concatenate(ids)),
        last_page_len=on_device(pages.last_page_len),
    )
    host = HostArrays(
        is_decode=False,
        qo_indptr=torch.from_numpy(offsets_of(counts)),
        kv_indptr=torch.from_numpy(pages.kv_indptr),
        last_page_len=torch.from_numpy(pages.last_page_len),
        kv_lens=torch.from_numpy(np.ascontiguousarray(starts + counts)),
    )
    return model.states(tokens, (), PagedStep(storage, host, places), torch.arange(len(tokens), device=device))[0]
