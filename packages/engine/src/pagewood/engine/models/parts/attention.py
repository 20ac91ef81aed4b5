"""Causal attention of grouped heads with rotated positions.

Legend: T tokens of a step, W wanted tokens, E hidden_size.
Source: Vaswani et al., Attention Is All You Need, 2017; Ainslie et al., GQA, 2023; Su et al., RoFormer, 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal

from pagewood.engine.models.limits import check_size
from pagewood.engine.models.ops import A, HeadSplit, Linear, Ops, Step, Weights
from pagewood.engine.models.parts.linear import read_linear
from pagewood.engine.models.parts.norm import NormConfig, read_norm
from pagewood.engine.models.parts.rope import RopeConfig
from pagewood.kvpool import MultiHeadLayout

Order = Literal["NHD", "HND"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """The numbers of an attention.

    Raises:
        ValueError: a number is out of its range, or two numbers contradict each other.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    scale: float
    """Multiplies the products of queries and keys."""
    window: int | None = None
    """Number of positions that a token sees, itself included; None: itself and all before it."""
    is_chunked: bool = False
    """Whether the window does not slide: a token sees only the positions of its own chunk, of `window` positions."""
    soft_cap: float | None = None
    """Scaled products s of queries and keys become c tanh(s / c), where c is this number; None: they stay."""
    sinks: bool = False
    """Whether every query head has a score without a value in its softmax, the parameter `sinks`."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: NormConfig | None = None
    """The norm of each head of q and k before rotation; None: there is no norm."""
    qk_norm_is_whole: bool = False
    """Whether that norm is of all heads together."""

    def __post_init__(self) -> None:
        check_size("num_heads", self.num_heads)
        check_size("num_kv_heads", self.num_kv_heads)
        check_size("head_dim", self.head_dim)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads {self.num_kv_heads}, got {self.num_heads}")
        if self.head_dim < 4 or self.head_dim % 4:
            raise ValueError(f"head_dim must be a multiple of 4, got {self.head_dim}")
        if self.qk_norm_is_whole and self.qk_norm is None:
            raise ValueError("qk_norm_is_whole must be False without qk_norm, got True")
        if self.window is not None and self.window < 1:
            raise ValueError(f"windows must be >= 1, got {self.window}")
        if self.is_chunked and self.window is None:
            raise ValueError("is_chunked must be False without window, got True")
        if self.soft_cap is not None and not 0 < self.soft_cap < 1e6:
            raise ValueError(f"soft_cap must be in (0, 1e6), got {self.soft_cap}")

    @property
    def q_size(self) -> int:
        """Elements of all query heads of a token."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of all key heads (or value heads) of a token."""
        return self.num_kv_heads * self.head_dim

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.num_heads // self.num_kv_heads

    def memory(self, *, page_size: int, dtype: str, order: Order) -> MultiHeadLayout:
        """Return the layout of its keys and values; see `MultiHeadLayout` for the arguments."""
        return MultiHeadLayout(
            num_layers=1,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=page_size,
            dtype=dtype,
            order=order,
        )


class SelfAttention(Generic[A]):
    """An attention with its parameters."""

    __slots__ = ("_config", "_ops", "_output", "_qkv", "_sinks", "_split")

    def __init__(
        self,
        config: AttentionConfig,
        weights: Weights,
        ops: Ops[A],
        prefix: str,
        *,
        hidden_size: int,
        inputs: int | None = None,
    ) -> None:
        """Take the parameters from `weights`.

        Args:
            config: of the attention.
            weights: source of the parameters.
            ops: keeps them.
            prefix: of their names, with the dot at its end.
            hidden_size: E.
            inputs: columns of the projections to q, k and v; None: E.
        """
        qkv = [("q_proj", config.q_size), ("k_proj", config.kv_size), ("v_proj", config.kv_size)]
        self._config = config
        self._ops = ops
        self._qkv = read_linear(weights, ops, prefix, qkv, inputs or hidden_size, has_bias=config.qkv_bias)
        sizes = (config.q_size, config.kv_size) if config.qk_norm_is_whole else (config.head_dim, config.head_dim)
        norms = [
            None if config.qk_norm is None else read_norm(config.qk_norm, weights, f"{prefix}{name}", size).folded()
            for name, size in zip(("q_norm", "k_norm"), sizes, strict=True)
        ]
        self._split = HeadSplit(
            q_size=config.q_size,
            kv_size=config.kv_size,
            q_norm=norms[0],
            k_norm=norms[1],
            norms_are_whole=config.qk_norm_is_whole,
        )
        self._sinks = weights.stack([(f"{prefix}sinks", config.num_heads)]) if config.sinks else None
        self._output: Linear[A] = read_linear(
            weights, ops, prefix, [("o_proj", hidden_size)], config.q_size, has_bias=config.output_bias
        )

    def __call__(self, x: A, step: Step[A], layer: int, wanted: A | None = None) -> A:
        """Return `[T, E]`, or `[W, E]` for the tokens that are `wanted`; `layer` is the number of its KV memory."""
        q, k, v = self._ops.split_heads(self._qkv(x), step.rotations[self._config.rope], self._split)
        attended = step.attention.run(q, k, v, layer, self._sinks)
        if wanted is not None:
            attended = self._ops.take(attended, wanted)
        return self._output(attended)
