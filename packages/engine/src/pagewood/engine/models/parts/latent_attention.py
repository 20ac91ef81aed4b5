"""Multi-head latent attention: one vector a token stands for the keys and values of all heads.

It is computed in the absorbed form: a query is multiplied with the matrix that would make keys of latents, and the sum
of latents with the one that would make values. So no key or value of a head ever exists. All tokens are computed in
this form, because a token's bits must not depend on how many were computed with it.

Legend: T tokens of a step, W wanted tokens, E hidden_size, H heads, N and R elements of a head without and with
rotation, V elements of a value, C elements of a latent before its rotated key.
Source: DeepSeek-AI, DeepSeek-V2, 2024, section 2.1 and appendix C.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, Literal

import numpy as np

from pagewood.engine.models.limits import check_size
from pagewood.engine.models.ops import A, LatentShape, Linear, Norm, Step
from pagewood.engine.models.parts.linear import read_linear
from pagewood.engine.models.parts.norm import NormConfig, read_norm
from pagewood.engine.models.parts.rope import PositionConfig, RopeConfig
from pagewood.engine.models.parts.source import Source
from pagewood.engine.models.shard import Shard
from pagewood.engine.models.stored.head_order import RowOrder
from pagewood.kvpool import LatentLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionConfig:
    """The numbers of a latent attention.

    Raises:
        ValueError: a number is out of its range, or two numbers contradict each other.
    """

    shape: LatentShape
    rope: RopeConfig
    """Rotation of the R rotated elements."""
    scale: float
    """Multiplies the products of queries and keys."""
    norm: NormConfig
    """Norm of latents and of compressed queries."""
    query_rank: int | None = None
    """Elements of a compressed query; None: queries are not compressed."""
    has_bias: bool = False
    """Whether the projections to latents and to compressed queries have biases, and the output."""
    longest: int | None = None
    """Positions up to which a checkpoint's choice of tokens is all of them; None: it has no such choice."""

    def __post_init__(self) -> None:
        shape = self.shape
        check_size("num_heads", shape.num_heads)
        for name, size in (("kv_lora_rank", shape.rank), ("qk_rope_head_dim", shape.rope_dim)):
            if size < 4 or size % 4:
                raise ValueError(f"{name} must be a multiple of 4, got {size}")
        for name, size in (("qk_nope_head_dim", shape.plain_dim), ("v_head_dim", shape.value_dim)):
            if size < 1:
                raise ValueError(f"{name} must be >= 1, got {size}")
        if self.rope.head_dim != shape.rope_dim:
            raise ValueError(f"rope must be of qk_rope_head_dim {shape.rope_dim}, got {self.rope.head_dim}")

    @property
    def position_configs(self) -> tuple[PositionConfig, ...]:
        """What it needs to know of positions."""
        return (self.rope,)

    def for_length(self, length: int) -> LatentAttentionConfig:
        """Return the attention of a model whose sequences have at most `length` positions."""
        return replace(self, rope=self.rope.for_length(length))

    def for_shard(self, shard: Shard) -> LatentAttentionConfig:
        """Return the attention of a rank, which has all latents and some heads.

        Raises:
            ValueError: heads cannot be divided among the ranks.
        """
        heads = shard.part("num_attention_heads", self.shape.num_heads)
        return replace(self, shape=replace(self.shape, num_heads=len(heads)))

    @property
    def window(self) -> None:
        """None: a token sees all positions before it."""
        return None

    @property
    def q_size(self) -> int:
        """Elements of all absorbed queries of a token."""
        return self.shape.num_heads * self.shape.latent_size

    def memory(self, *, page_size: int, dtype: str, order: Literal["NHD", "HND"]) -> LatentLayout:
        """Return the layout of its latents, which have no heads to put in an `order`."""
        return LatentLayout(
            num_layers=1, latent_dim=self.shape.rank, rope_dim=self.shape.rope_dim, page_size=page_size, dtype=dtype
        )


class LatentAttention(Generic[A]):
    """A latent attention with its parameters."""

    __slots__ = ("_config", "_heads", "_latent", "_norm", "_ops", "_output", "_query", "_query_norm", "_wide_query")

    def __init__(self, config: LatentAttentionConfig, source: Source[A]) -> None:
        """Take the parameters of a rank."""
        shape, rank, shard = config.shape, config.query_rank, source.shard
        own = config.for_shard(shard)
        self._config = own
        self._ops = source.ops

        def rows(size: int) -> RowOrder | None:
            """Return those of the rank's heads, of `size` each; None: all."""
            return None if shard.is_whole else np.asarray(shard.inputs("num_attention_heads", shape.num_heads, size))

        query_dim = shape.plain_dim + shape.rope_dim
        self._query_norm: Norm | None = None
        self._wide_query: Linear[A] | None = None
        if rank is None:
            query = [("q_proj", shape.query_size)]
            self._query: Linear[A] = read_linear(source, query, order=rows(query_dim))
        else:
            query = [("q_a_proj", rank)]
            self._query: Linear[A] = read_linear(source, query, has_bias=config.has_bias)
            self._query_norm = read_norm(config.norm, source, "q_a_layernorm", rank)
            wide = [("q_b_proj", shape.query_size)]
            self._wide_query = read_linear(source, wide, rank, order=rows(query_dim))
        latent = [("kv_a_proj_with_mqa", shape.latent_size)]
        self._latent: Linear[A] = read_linear(source, latent, has_bias=config.has_bias)
        self._norm = read_norm(config.norm, source, "kv_a_layernorm", shape.rank).folded()
        order = rows(shape.plain_dim + shape.value_dim)
        name = f"{source.prefix}kv_b_proj.weight"
        matrix = source.weights.numbers(name, shape.head_rows, shape.rank, order=order)
        self._heads = source.ops.latent_heads(matrix, own.shape)
        self._output: Linear[A] = read_linear(
            source,
            [("o_proj", source.hidden_size)],
            shape.num_heads * shape.value_dim,
            has_bias=config.has_bias,
            part=shard.inputs("num_attention_heads", shape.num_heads, shape.value_dim),
        )

    def __call__(self, x: A, step: Step[A], layer: int, wanted: A | None = None) -> A:
        """Return `[T, E]`, or `[W, E]` for the tokens that are `wanted`, a part of the sum over ranks.

        `layer` is the number of its memory.
        """
        rotation = step.rotations[self._config.rope]
        query = self._query(x)
        if self._wide_query is not None and self._query_norm is not None:
            query = self._wide_query(self._ops.norm(query, self._query_norm))
        query, latents = self._heads.absorb(query, self._latent(x), rotation, self._norm)
        attended = step.attention.run(query, latents, None, layer)
        if wanted is not None:
            attended = self._ops.take(attended, wanted)
        return self._output(self._heads.values(attended))
