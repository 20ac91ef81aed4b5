"""The attention that modules of `transformers` call: it finds the step in which it was called, and lets that attend.

A mask is a rule about positions instead of a matrix: a step has rows of several requests, each from a position of its
own, and a matrix for all of its tokens would say nothing about the keys that lie in pages.

Legend: T tokens of a step, H query heads, K KV heads, D size of a key, C size of a value.
"""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "pagewood_pages"
"""The value of `attn_implementation` for models whose attention is computed here."""
_TENSORS = ("attention_mask", "cache_position", "position_ids")
"""Arguments of the interface that are tensors and change nothing here: a step knows the positions of its tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class MaskRule:
    """Which positions a token sees, for one kind of layers. Two rules are equal if they are one object."""

    function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    """(batch, head, position of the query, position of the key) -> whether it is seen, for arrays of one shape."""

    def seen(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return which of the positions `keys` `[L]` a token at each of `queries` `[n]` sees, `[n, L] bool`."""
        zero = torch.zeros_like(queries[:1, None])
        return self.function(zero, zero, queries[:, None], keys[None]).expand(len(queries), len(keys))


CAUSAL = MaskRule(lambda batch, head, query, key: key <= query)
"""The rule of a module that passes no mask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """What a module asks for beside queries, keys and values."""

    rule: MaskRule
    scale: float
    soft_cap: float | None = None
    """Caps the products of queries and keys, before the mask; None: no cap."""
    sinks: Tensor | None = None
    """[H], a logit of each head that takes a share of the weights and adds nothing; None: no sinks."""


class Step(Protocol):
    """Gets the calls of a step, one for each layer, in order."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        """Return the attention `[T, H, C]` of `q` `[H, T, D]`, given the step's `k` `[K, T, D]` and `v` `[K, T, C]`."""
        ...


_STEP: ContextVar[Step] = ContextVar("step")


@contextmanager
def attending(step: Step) -> Generator[None]:
    """Let `step` get the calls of modules that are computed in this context."""
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute what a module asks for; see `transformers.AttentionInterface`.

    Raises:
        ValueError: it asks for something that pages cannot give.
    """
    unknown = sorted(name for name, value in others.items() if name not in _TENSORS and isinstance(value, Tensor))
    if unknown:
        raise ValueError(
            f"attention must need no tensors but queries, keys, values and sinks, got {', '.join(unknown)}"
        )
    if attention_mask is not None and not isinstance(attention_mask, MaskRule):
        raise ValueError("attention must use the masks of transformers.masking_utils, got one of the model's own")
    if attention_mask is None and (is_causal is False or not getattr(module, "is_causal", True)):
        raise ValueError("a token must see no later one, got an attention that is not causal")
    rule = CAUSAL if attention_mask is None else attention_mask
    if attention_mask is None and sliding_window is not None:
        rule = MaskRule(lambda batch, head, query, key: (key <= query) & (query - key < sliding_window))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = AttentionCall(rule=rule, scale=float(scale), soft_cap=softcap, sinks=s_aux)
    return _STEP.get().attend(query[0], key[0], value[0], call).contiguous()[None], None


def _rule(mask_function: Callable[..., Tensor], **_others: Any) -> MaskRule:
    """Return the mask of a kind of layers; see `transformers.AttentionMaskInterface`."""
    return MaskRule(mask_function)


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _rule)
