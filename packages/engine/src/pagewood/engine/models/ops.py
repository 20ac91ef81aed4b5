"""Interfaces for the parts of a model: the arithmetic of a device, its attention, and the source of parameters.

Legend: T tokens of a step, W tokens whose hidden state is wanted, E hidden_size, Q and K elements of all query and key
heads of a token, I size of a feed-forward, F elements of a head / 2, V vocab_size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, Literal, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from pagewood.engine.models.expert_map import ExpertPlacement
    from pagewood.engine.models.parts.experts import RouterConfig
    from pagewood.engine.models.parts.feed_forward import ExpertActivation
    from pagewood.engine.models.parts.rope import PositionConfig
    from pagewood.engine.models.stored.head_order import RowOrder

CLAMP_ALPHA, CLAMP_LIMIT = 1.702, 7.0
"""Numbers of `Ops.clamped_mul`."""
A = TypeVar("A")
"""An operand on a device: a tensor, or the name of a tensor that will be computed."""
GivenA = TypeVar("GivenA", contravariant=True)
"""The same, where nothing of it is returned."""


class Linear(Protocol[A]):
    """A projection that holds its weights, in the form that is fastest on its device."""

    def __call__(self, x: A, /) -> A:
        """Return `[T, out]` of `[T, in]`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """What a projection is made of, for adapters, which change modules by name."""

    parts: Sequence[tuple[str, int]]
    """Name and outputs of each module whose matrix is a part, one below the other, as the checkpoint has them."""
    inputs: int
    """Inputs of the modules, on all ranks together."""
    order: RowOrder | None = None
    """The outputs of all modules that are here, in their order, see `Weights.stack`; each module keeps its own part.
    None: all."""
    part: range | None = None
    """The inputs that are here, so that results are parts of a sum over ranks; None: all."""
    has_bias: bool = False
    """Whether the modules have biases."""
    adds_bias: bool = True
    """Whether this rank adds biases to its part of a sum."""
    takes_tokens: bool = False
    """Whether it is an embedding: its inputs are ids of tokens, below `inputs`."""
    table: str | None = None
    """The embedding whose table its matrix is; None: it has its own."""

    def rows_here(self) -> list[RowOrder | None]:
        """Return the outputs of each module that are here, in the order of the projection; None: all."""
        start, found = 0, list["RowOrder | None"]()
        for _, size in self.parts:
            is_own = None if self.order is None else (self.order >= start) & (self.order < start + size)
            found.append(None if self.order is None else self.order[is_own] - start)
            start += size
        return found

    def sizes_here(self) -> list[int]:
        """Return how many outputs of each module are here."""
        return [
            size if rows is None else len(rows) for (_, size), rows in zip(self.parts, self.rows_here(), strict=True)
        ]


class Embedding(Protocol[A]):
    """A table that holds the embedding of every token."""

    def __call__(self, tokens: A, /) -> A:
        """Return `[T, E]` of token ids `[T] int32`, each in [0, V)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """A norm of rows: a row over its root mean square, times `weight` + `offset`, plus `bias`.

    With `is_centred`, the mean of the row is subtracted from it first.
    """

    weight: Tensor | None
    """`[E]`; None: ones."""
    epsilon: float
    offset: float = 0.0
    is_centred: bool = False
    bias: Tensor | None = None
    """`[E]`; None: zeros."""

    def folded(self) -> Norm:
        """Return the same norm without an offset; the sum is rounded to the dtype of the weights."""
        if self.weight is None or not self.offset:
            return self
        return replace(self, weight=self.weight + self.offset, offset=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSplit:
    """The split of a fused projection into heads, and the norms of the heads."""

    head_dim: int
    q_size: int
    kv_size: int
    q_norm: Norm | None
    """`[head_dim]`, the norm of each query head, without an offset; None: no norm."""
    k_norm: Norm | None
    norms_are_whole: bool = False
    """Whether the norms are `[q_size]` and `[kv_size]`, each of all heads together."""
    num_ranks: int = 1
    """Ranks that have as many heads each, over which `norms_are_whole`: their sums of squares are added up."""
    norms_follow: bool = False
    """Whether heads are normed behind their rotation rather than before."""
    values_are_keys: bool = False
    """Whether values are the keys as they are before their norm and rotation; the projection has no others."""

    @property
    def sizes(self) -> list[int]:
        """Columns of the projection: of queries, of keys, and of values."""
        return [self.q_size, self.kv_size, 0 if self.values_are_keys else self.kv_size]


@dataclass(frozen=True, slots=True, kw_only=True)
class XIELU:
    """p x^2 + b x for x > 0, otherwise n (e^min(x, e) - 1 - x) + b x, with parameters of `[1]` each.

    Source: Huang and Schlag, Deriving Activation Functions Using Integration, 2024.
    """

    positive: Tensor
    """p"""
    negative: Tensor
    """n"""
    beta: Tensor
    """b"""
    epsilon: Tensor
    """e, just below 0."""


PlainActivation = Literal["gelu", "gelu_tanh", "gelu_quick", "relu_squared"] | XIELU
"""gelu with the error function; with its approximation by a hyperbolic tangent; x times the logistic function of
1.702 x; the square of max(x, 0)."""


Gate = Literal["silu", "sigmoid"]
"""Functions of `Ops.multiply_columns`: x times its logistic function, and the logistic function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """The sizes of a latent attention: H heads, N elements without and R with rotation, V of values, C of latents."""

    num_heads: int
    plain_dim: int
    """N"""
    rope_dim: int
    """R"""
    value_dim: int
    """V"""
    rank: int
    """C"""
    has_pairs: bool = False
    """Whether elements 2i and 2i + 1 are rotated together, rather than i and i + R / 2."""

    @property
    def query_size(self) -> int:
        """Elements of all queries of a token, before they are absorbed."""
        return self.num_heads * (self.plain_dim + self.rope_dim)

    @property
    def latent_size(self) -> int:
        """Elements of a latent with its rotated key."""
        return self.rank + self.rope_dim

    @property
    def head_rows(self) -> int:
        """Rows of the matrix that would make keys and values of latents."""
        return self.num_heads * (self.plain_dim + self.value_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentHeads:
    """The heads of a recurrence: H heads of values `[V]`, which share G heads of queries and keys `[K]`.

    The state of a head is a matrix S `[K, V]`. A token with query q, key k and value v changes it to
    e^g S + k d^T, where d = b (v - e^g S^T k) if it `corrects`, otherwise b v. The result is S^T q, plus `skip` v.
    g is `rate` times softplus(a + `bias`). The strength b is the logistic function of a number of its own times
    `most_strength`, or that softplus. Head h has query and key number h // (H / G). If a head `decays_by_channel`, each
    of the K rows of S has a g of its own, of its own a and bias.
    """

    num_heads: int
    """H."""
    num_key_heads: int
    """G."""
    key_dim: int
    """K."""
    value_dim: int
    """V."""
    corrects: bool
    """Whether the state's own answer to the key is subtracted from the value. Then queries and keys have norm 1,
    queries are divided by the root of K, and b is a number of its own."""
    most_strength: int = 1
    decays_by_channel: bool = False
    """Only of heads that correct and have queries and keys of their own."""
    values_first: bool = False
    """Whether a token has its values before its keys, and its queries last; otherwise queries, keys and values."""
    rate: Tensor
    """`[H] float32`, below 0."""
    bias: Tensor
    """`[H] float32`, or `[H K]` of channels."""
    skip: Tensor | None = None
    """`[H] float32`; None: zeros."""

    @property
    def key_size(self) -> int:
        """Elements of all keys of a token."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Elements of all values of a token."""
        return self.num_heads * self.value_dim

    @property
    def columns(self) -> tuple[int, int, int]:
        """First column of queries, of keys and of values."""
        if self.values_first:
            return self.value_size + self.key_size, self.value_size, 0
        return 0, self.key_size, 2 * self.key_size


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedGroup:
    """A group of elements with one norm, of which several ranks have a part each."""

    number: int
    """Number of this rank's group, from 0 on."""
    count: int
    """Groups of all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """A convolution of each of C columns over the last W tokens of a request."""

    weight: Tensor
    """`[W, C] float32`, the last row for a token itself, the first for W - 1 tokens before it."""
    bias: Tensor | None
    """`[C] float32`; None: zeros."""
    activates: bool
    """Whether results are multiplied by their logistic function."""

    @property
    def channels(self) -> int:
        """C."""
        return self.weight.shape[1]


class LatentHeads(Protocol[A]):
    """The matrix `[H (N + V), C]` that would make the keys and values of all heads of latents, absorbed on both sides.

    The rotation is that of `Ops.split_heads`. The order in which a device leaves rotated elements is the same in
    queries and latents, so that it does not change their products.
    """

    def absorb(self, q: A, x: A, rotation: tuple[A, A], norm: Norm) -> tuple[A, A]:
        """Return the queries of latents and the latents of some tokens.

        Args:
            q: `[T, H (N + R)]`, the last R elements of each head not rotated yet; not read again.
            x: `[T, C + R]`, latents that are neither normed nor rotated yet; not read again.
            rotation: of each token.
            norm: of the first C elements of latents.

        Returns:
            `[T, H (C + R)]` and `[T, C + R]`.
        """
        ...

    def values(self, attended: A) -> A:
        """Return `[T, H V]` of sums of latents `[T, H C]`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMatrices:
    """The weights of the experts of a layer that are here, one below the other.

    Matrices may be what `Weights.stack` returns in place of a tensor, such as `models.scaled_codes.ScaledCodes`.

    Legend: N experts, E hidden_size, I size of an expert.
    """

    count: int
    """N."""
    first: int = 0
    """The number of the first of them among the placed experts of all ranks, which follow each other; see
    `models.expert_map`. Rows of others are left out."""
    num_placed: int | None = None
    """Placed experts of all ranks; None: those that are here."""
    counted_as: int | None = None
    """Number of the layer under which `Ops` that can count the rows of each placed expert; None: they are not."""
    gate_up: Tensor
    """`[N * 2I, E]`, of each expert the gate and below it the other projection; `[N * I, E]` of those without gates."""
    down: Tensor
    """`[N * E, I]`"""
    gate_up_bias: Tensor | None = None
    """`[N * 2I]`, or `[N * I]`"""
    down_bias: Tensor | None = None
    """`[N * E]`"""
    gate_up_parts: Sequence[Projection] = ()
    """For adapters, of each expert, as `down_parts`; empty: they cannot change experts."""
    down_parts: Sequence[Projection] = ()

    @property
    def is_part(self) -> bool:
        """Whether other ranks have other experts."""
        return self.num_placed is not None and self.num_placed > self.count


class ChosenExperts(Protocol[A]):
    """Experts that hold their weights, in the form that is fastest on their device."""

    def __call__(self, x: A, chosen: A, shares: A) -> A:
        """Return `[T, E]`: the results of the `chosen` experts `[T, K] int32` of each row of `x` `[T, E]`, added up.

        Each is multiplied by its share of `shares` `[T, K] float32`. The sum is in the order of `chosen`. Where other
        ranks have other experts, `chosen` are placed experts, and the sum is over those that are here.
        """
        ...


class Placing(Protocol[A]):
    """Finds who computes the chosen experts of a layer, where ranks have whole experts; see `models.expert_map`."""

    def __call__(self, chosen: A, logits: A) -> A:
        """Return the placed expert `[T, K] int32` for each of the `chosen` experts `[T, K] int32`.

        It depends on the row only. The outputs of the router are `logits` `[T, experts] float32`.
        """
        ...


class Ops(Protocol[A]):
    """The arithmetic of a device.

    `residual` is written in place. A result may lie in the memory of the first argument, which the caller must not read
    again. `norm`, `take`, `concat`, `choose` and projections leave their first argument unchanged.
    """

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear[A]:
        """Take over `weight` `[out, in]` and `bias` `[out]`; the caller must drop both."""
        ...

    def adaptable(self, linear: Linear[A], projection: Projection) -> Linear[A]:
        """Return `linear`, or a projection to whose results the adapters of requests add."""
        ...

    def exact_linear(self, weight: Tensor, bias: Tensor | None) -> Linear[A]:
        """Like `linear`; the weights are not rounded, and the result is float32."""
        ...

    def embedding(self, table: Tensor) -> Embedding[A]:
        """Take over `table` `[V, E]`; the caller must drop it."""
        ...

    def tied_embedding(self, table: Tensor, bias: Tensor | None = None) -> tuple[Embedding[A], Linear[A]]:
        """Take over `table` `[V, E]`, which is also the weight of a projection with `bias` `[V]`; the caller must drop
        both."""
        ...

    def norm(self, x: A, norm: Norm) -> A:
        """Return the norm of `x` `[T, E]`."""
        ...

    def add_norm(self, x: A, residual: A, norm: Norm) -> A:
        """Add `x` `[T, E]` to `residual` in place and return the norm of the sum."""
        ...

    def norm_add(self, x: A, residual: A, norm: Norm) -> None:
        """Add the norm of `x` `[T, E]` to `residual` in place; `x` is not read again."""
        ...

    def add(self, x: A, residual: A) -> None:
        """Add `x` `[T, E]` to `residual` in place."""
        ...

    def norm_heads(self, x: A, norm: Norm, size: int) -> A:
        """Return `x` `[T, n]`, every `size` elements of a row normed on their own; `norm` has no offset."""
        ...

    def split_heads(
        self, qkv: A, rotation: tuple[A, A] | None, split: HeadSplit
    ) -> tuple[A, A, A] | tuple[A, None, None]:
        """Return q `[T, Q]`, k and v `[T, K]` of `qkv` `[T, Q + 2K]`; q and k normed (if `split` has norms), rotated.

        Args:
            qkv: all query heads, then all key heads, then all value heads. If K is 0, there are only queries.
            rotation: two operands with the rotation of each token; element i of a head is rotated with element i + F.
                Their contents depend on the device: see its `Ops`. None: nothing is rotated.
            split: sizes and norms.
        """
        ...

    def scale_rows(self, x: A, factors: tuple[A, A]) -> A:
        """Return `x` `[T, n]`, each row times the factor of its token; `factors` is like a rotation with F = 1."""
        ...

    def silu_mul(self, gate_up: A) -> A:
        """Return `[T, I]`: silu of the first half of `gate_up` `[T, 2I]` times the second half."""
        ...

    def gelu_mul(self, gate_up: A) -> A:
        """Like `silu_mul` with gelu, whose error function is approximated by a hyperbolic tangent."""
        ...

    def erf_gelu_mul(self, gate_up: A) -> A:
        """Like `silu_mul` with gelu."""
        ...

    def activate(self, x: A, activation: PlainActivation) -> A:
        """Return an activation of `x` `[T, I]`, element by element."""
        ...

    def soft_cap(self, x: A, cap: float) -> A:
        """Return c tanh(x / c) of `x`, where c is `cap`."""
        ...

    def clamped_mul(self, gate_up: A) -> A:
        """Return `[T, I]`: g times the sigmoid of `CLAMP_ALPHA` g, times u + 1.

        g is the first half of `gate_up` `[T, 2I]`, at most `CLAMP_LIMIT`, and u the second, with at most this size.
        """
        ...

    def choose(self, logits: A, router: RouterConfig, bias: Tensor | None) -> tuple[A, A]:
        """Return the chosen experts `[T, K] int32` of each token, the best first, and their shares `[T, K] float32`.

        Of experts that are equally good the first is chosen.

        Args:
            logits: `[T, experts] float32`, the outputs of the router.
            router: how to choose.
            bias: `[experts]`, added to scores for the choice only; None: scores alone choose.
        """
        ...

    def experts(
        self, matrices: ExpertMatrices, activation: ExpertActivation, *, weighs_inputs: bool = False
    ) -> ChosenExperts[A]:
        """Take over `matrices`; the caller must drop them.

        Args:
            matrices: of all experts.
            activation: between the two products.
            weighs_inputs: whether the share multiplies the input of an expert, and not its result.
        """
        ...

    def scale_chosen(self, shares: A, chosen: A, factors: Tensor) -> A:
        """Return `shares` `[T, K] float32`, each times the factor of its expert.

        Args:
            shares: of the chosen experts.
            chosen: `[T, K] int32`, these experts.
            factors: `[experts]`, one of each expert.
        """
        ...

    def placing(self, placement: ExpertPlacement, *, near: Tensor) -> Placing[A]:
        """Return what finds placed experts; its tables lie on the device of `near`."""
        ...

    def multiply_columns(self, x: A, y: A, column: int, gate: Gate | None = None) -> A:
        """Return `x` `[T, n]` times the n columns of `y` from `column` on, element by element.

        With a `gate`, x is multiplied by this function of them.
        """
        ...

    def columns(self, x: A, column: int, size: int) -> A:
        """Return `[T, size]` in new memory: the columns of `x` from `column` on."""
        ...

    def norm_groups(self, x: A, norm: Norm, size: int, shared: SharedGroup | None = None) -> A:
        """Return `x` `[T, n]`, every `size` elements of a row normed on their own; `norm` has weights `[n]`.

        If the group is `shared`, `size` are the elements of all ranks together.
        """
        ...

    def add_gated(self, x: A, y: A, gate: A | None) -> A:
        """Return `x` plus `y`, both `[T, E]`; with `gate` `[T, 1] float32`, `y` is multiplied by its sigmoid."""
        ...

    def positions(self, numbers: tuple[A, A]) -> A:
        """Return the position of each token, `[T] int32`; `numbers` is like a rotation, of `PositionNumbers`."""
        ...

    def convolution(self, weight: Tensor, bias: Tensor | None, *, activates: bool = True) -> Convolution:
        """Return a convolution for `Recurrence.convolve` with `weight` `[C, 1, W] float32` and `bias` `[C] float32`."""
        ...

    def channel_heads(self, heads: RecurrentHeads) -> RecurrentHeads:
        """Return `heads`, which decay by channel, for `Recurrence.recur`."""
        ...

    def scale(self, x: A, factor: float) -> A:
        """Return `x` times `factor`, which is rounded to the dtype of `x`."""
        ...

    def take(self, x: A, wanted: A) -> A:
        """Return `[W, n]`, the rows of `x` `[T, n]` at `wanted` `[W] int32`."""
        ...

    def concat(self, parts: Sequence[A]) -> A:
        """Return `[T, sum of n]` in new memory: the columns of all `parts` `[T, n]`, side by side."""
        ...

    def latent_heads(self, weight: Tensor, shape: LatentShape) -> LatentHeads[A]:
        """Take over `weight` `[H (N + V), C]`, of each head the rows of keys, then those of values."""
        ...

    def clear_first(self, x: A, rotation: tuple[A, A]) -> A:
        """Return `x` `[T, E]` with zeros in the rows of tokens at position 0; `rotation` as in `split_heads`."""
        ...

    def sum_ranks(self, x: A) -> A:
        """Return the sum of the `x` `[T, n]` of all ranks, in the memory of `x`; see `models.shard`.

        It has the same bits on every rank, whatever their timing. It is added in the order of the ranks, except by
        NCCL; see `runner.cuda.exchange`. Only called where there are several.
        """
        ...

    def gather_ranks(self, x: A, size: int) -> A:
        """Return `[T, size]`, the first `size` columns of the `x` `[T, n]` of all ranks, side by side in their order.

        Only called where there are several ranks; n is the same on each.
        """
        ...


class Attention(Protocol[A]):
    """Attention of one step. It knows the request and the position of each of the T tokens."""

    def run(
        self, q: A, k: A | None, v: A | None, layer: int, sinks: Tensor | None = None, biases: Tensor | None = None
    ) -> A:
        """Store `k` and `v` `[T, K]` in the KV memory of `layer`, and return the attention `[T, Q]` of `q` `[T, Q]`.

        In a layer of latents `v` is None, because latents `k` `[T, C + R]` are keys, and their first C elements values.
        The attention is then `[T, H C]` of `q` `[T, H (C + R)]`. In a layer that reads the memory of an earlier one,
        `k` and `v` are None.

        Args:
            q: queries.
            k: keys of the same tokens.
            v: values of the same tokens.
            layer: number of its memory; its numbers, such as a window or a soft cap, are known for it.
            sinks: `[heads]`, a score of each query head that takes its share of the softmax, but has no value.
            biases: `[NUM_DISTANCES, heads]`, added to scores by the distance of their key; see `parts.distances`.
        """
        ...


class Recurrence(Protocol[A]):
    """What recurrent layers do in one step. It knows the request and the position of each of the T tokens.

    A request has a state in each recurrent layer. Its tokens change it one after the other, in one order of operations,
    so that its bits depend neither on chunks nor on what else is in a step. Before position 0 it is all zeros.
    """

    def convolve(self, x: A, column: int, convolution: Convolution, layer: int) -> A:
        """Return `[T, C]`: columns of `x` `[T, n]` from `column` on, convolved.

        The last W - 1 rows of these are the state of a request. `layer` is the number of its memory.
        """
        ...

    def recur(self, x: A, gates: A, heads: RecurrentHeads, layer: int) -> A:
        """Return `[T, H V]`, the results of all heads.

        Args:
            x: `[T, 2 G K + H V]`, queries, keys and values.
            gates: `[T, H] float32`, or `[T, H K]` of channels: a of each; if heads correct, behind the numbers of b, of
                which each head has one.
            heads: their numbers.
            layer: number of its memory.
        """
        ...


class Visual(Protocol[GivenA]):
    """The rows of images in one step: it knows which of the T tokens stand for images."""

    @property
    def num_levels(self) -> int:
        """The first layers behind which something is added."""
        ...

    def replace(self, x: GivenA) -> None:
        """Put rows in the place of the embeddings `x` `[T, E]` of their tokens."""
        ...

    def add(self, x: GivenA, level: int) -> None:
        """Add to `x` `[T, E]` what belongs behind layer `level`."""
        ...


class RowDivision(Protocol[A]):
    """How the rows of a step are divided among ranks: each has those of its own requests, and some have none.

    Rows are tokens, or the wanted ones of a step. All ranks call the same methods in the same order.
    """

    @property
    def kept(self) -> RowDivision[A]:
        """The division of the wanted rows."""
        ...

    def own(self, x: A) -> A:
        """Return the rows of this rank of the rows `x` of all ranks."""
        ...

    def gather(self, x: A) -> A:
        """Return the rows of all ranks, in the order of the step; `x` are those of this one."""
        ...

    def sum_own(self, x: A) -> A:
        """Return the sums over ranks of the rows of this rank, added in the order of ranks; `x` are parts of all rows.

        A row's sum has the same bits whichever rank gets it.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Generic[A]):
    """The data about the tokens of a step that the parts of all layers share."""

    rotations: Mapping[PositionConfig, tuple[A, A]]
    """The rotation of each token for every rope of the model, see `Ops.split_heads`, and its factor for temperatures,
    see `Ops.scale_rows`."""
    attention: Attention[A]
    recurrence: Recurrence[A] | None = None
    """What recurrent layers do; None: there are none."""
    inputs: A | None = None
    """`[T, n]`, what layers add of each token beside its embedding, side by side; None: they add nothing."""
    division: RowDivision[A] | None = None
    """How the tokens are divided among ranks; None: every rank has all."""


class Weights(Protocol):
    """The source of parameters."""

    def stack(
        self,
        parts: Sequence[tuple[str, int]],
        *columns: int,
        order: RowOrder | None = None,
        inputs: range | None = None,
    ) -> Tensor:
        """Return the named tensors, each `[rows, *columns]`, one below the other in one new tensor.

        Args:
            parts: name and number of rows of each.
            columns: of all.
            order: row i of the result is row `order[i]` of these; rows that are not named are not read. None: all rows
                in their order.
            inputs: the columns of the result, of matrices only; None: all.
        """
        ...

    def numbers(self, name: str, rows: int, columns: int, *, order: RowOrder | None = None) -> Tensor:
        """Return the matrix `name` `[rows, columns]` as numbers in memory, in whatever form it is stored.

        `order` names the rows of the result, as in `stack`.
        """
        ...

    def exact(self, name: str, rows: int, *columns: int, order: RowOrder | None = None) -> Tensor:
        """Return a small tensor `[rows, *columns]` as float32, where numbers must not be rounded further.

        `order` names the rows of the result, as in `stack`.
        """
        ...
