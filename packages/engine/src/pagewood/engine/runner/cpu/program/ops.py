"""The arithmetic of a decoder on a CPU, as instructions on a tape: activations in float32, weights in any form.

Legend: T tokens, E hidden_size, V vocab_size, P panels of a projection.
"""

# pyright: basic
# torch's conversions from and to numpy have no types.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pagewood.engine.models.expert_map import ExpertPlacement
from pagewood.engine.models.ops import (
    XIELU,
    ChosenExperts,
    Convolution,
    Embedding,
    ExpertMatrices,
    Gate,
    HeadSplit,
    LatentHeads,
    LatentShape,
    Linear,
    Norm,
    Placing,
    PlainActivation,
    Projection,
    RecurrentHeads,
    SharedGroup,
)
from pagewood.engine.models.parts.experts import RouterConfig
from pagewood.engine.models.parts.feed_forward import ExpertActivation, gated
from pagewood.engine.models.torch_ops import convolution_of
from pagewood.engine.runner.cpu.compiled import activations, rows
from pagewood.engine.runner.cpu.compiled.adapters import ADAPTERS
from pagewood.engine.runner.cpu.compiled.attention import heads
from pagewood.engine.runner.cpu.compiled.exchange import EXCHANGE
from pagewood.engine.runner.cpu.compiled.experts import route
from pagewood.engine.runner.cpu.compiled.experts.placing import PLACING
from pagewood.engine.runner.cpu.compiled.instruction import Instruction, Unit
from pagewood.engine.runner.cpu.compiled.products import matmul
from pagewood.engine.runner.cpu.compiled.products.dot import DotLevel, dot_level
from pagewood.engine.runner.cpu.compiled.products.packed_weights import (
    ProductLevel,
    WideLevel,
    look_up,
    multiply_packed,
)
from pagewood.engine.runner.cpu.compiled.products.pair_dot import PairLevel, pair_level
from pagewood.engine.runner.cpu.compiled.products.quantise import quantise
from pagewood.engine.runner.cpu.compiled.products.round_pairs import round_pairs
from pagewood.engine.runner.cpu.compiled.products.tile import WIDTH
from pagewood.engine.runner.cpu.compiled.products.weight_kind import WeightKind
from pagewood.engine.runner.cpu.compiled.recurrence import CHANNEL_RECURRENCE, RECURRENCE
from pagewood.engine.runner.cpu.program import experts
from pagewood.engine.runner.cpu.program.adapters import AdaptedExperts, CPUAdapters
from pagewood.engine.runner.cpu.program.exchange import Exchange
from pagewood.engine.runner.cpu.program.latent_attention import CPULatentHeads
from pagewood.engine.runner.cpu.program.norm_arrays import bias_of, weight_of
from pagewood.engine.runner.cpu.program.passes import side_by_side
from pagewood.engine.runner.cpu.program.tape import Buffer
from pagewood.engine.runner.cpu.weights.packer import Matrix, Packer
from pagewood.engine.runner.cpu.weights.packing import PackedWeight

Float32 = NDArray[np.float32]
_ACTIVATIONS: Mapping[PlainActivation, Instruction] = MappingProxyType(
    {
        "gelu": activations.gelu,
        "gelu_tanh": activations.gelu_tanh,
        "gelu_quick": activations.gelu_quick,
        "relu_squared": activations.relu_squared,
    }
)


class PanelLinear:
    """A projection, its weights in the panels of `compiled.products.matmul`.

    Invariant: a row of the result depends on the same row of the input only, to the last bit, however many rows there
    are and however many threads share the work.
    """

    __slots__ = ("_bias", "_size", "panels")

    def __init__(self, panels: Float32, size: int, bias: Tensor | None) -> None:
        """Keep `panels` `[P, in, 32]`, of which `size` outputs are used, and a copy of `bias` `[out]`."""
        self.panels = panels
        self._size = size
        self._bias: Float32 = np.zeros(len(panels) * WIDTH, np.float32)
        if bias is not None:
            self._bias[:size] = bias.numpy()

    def __call__(self, x: Buffer) -> Buffer:
        """Return `[T, out]` of `[T, in]`."""
        tape = x.tape
        packed, out = tape.buffer(x.rows, x.size), tape.buffer(x.rows, self._size)
        tape.write(matmul.pack, x.rows, x=x, packed=packed, size=x.size, depth=x.size, num_outputs=self._size)
        tape.write(
            matmul.multiply, x.rows, x=x, packed=packed, panels=self.panels, bias=self._bias, out=out, depth=x.size,
            size=self._size,
        )  # fmt: skip
        return out


class TableEmbedding:
    """An embedding table of its own, `[V, E]`."""

    __slots__ = ("_table",)

    def __init__(self, table: Float32) -> None:
        self._table = table

    def __call__(self, tokens: Buffer) -> Buffer:
        """Return `[T, E]`."""
        size = self._table.shape[1]
        out = tokens.tape.buffer(tokens.rows, size)
        tokens.tape.write(rows.gather, tokens.rows, tokens=tokens, table=self._table, out=out, size=size)
        return out


class TiedEmbedding:
    """The weights of a projection as an embedding table, so that there is one copy of both."""

    __slots__ = ("_projection",)

    def __init__(self, projection: PanelLinear) -> None:
        self._projection = projection

    def __call__(self, tokens: Buffer) -> Buffer:
        """Return `[T, E]`."""
        panels = self._projection.panels
        size = panels.shape[1]
        out = tokens.tape.buffer(tokens.rows, size)
        tokens.tape.write(rows.gather_panels, tokens.rows, tokens=tokens, panels=panels, out=out, size=size)
        return out


class PackedLinear:
    """A projection whose weights are in a packed layout. Invariant: the same as that of `PanelLinear`."""

    __slots__ = ("_bias", "_level", "weight")

    def __init__(self, weight: PackedWeight, bias: Tensor | None, level: ProductLevel) -> None:
        """Keep `weight` and a copy of `bias` `[out]`; `level` says what activations are in the product."""
        self.weight = weight
        self._level = level
        self._bias: Float32 = np.zeros(weight.shape.num_panels * WIDTH, np.float32)
        if bias is not None:
            self._bias[: len(bias)] = bias.float().numpy()

    def __call__(self, x: Buffer) -> Buffer:
        """Return `[T, out]` of `[T, in]`."""
        tape, shape = x.tape, self.weight.shape
        sums, row_scales = None, None
        if isinstance(self._level, DotLevel):
            source = packed = tape.buffer(x.rows, shape.depth // 4)
            sums, row_scales = tape.buffer(x.rows, shape.depth // shape.group), tape.buffer(x.rows, 1)
            tape.write(
                quantise, x.rows, x=x, out=packed, sums=sums, scales=row_scales, size=shape.inputs, depth=shape.depth,
                group=shape.group, factor=shape.kind.factor,
            )  # fmt: skip
        elif isinstance(self._level, PairLevel):
            source = packed = tape.buffer(x.rows, shape.depth // 2)
            tape.write(round_pairs, x.rows, x=x, out=packed, size=shape.inputs, depth=shape.depth)
        else:
            packed = tape.buffer(x.rows, shape.depth)
            source = x if shape.depth == x.size else packed
            tape.write(matmul.pack, x.rows, x=x, packed=packed, size=x.size, depth=shape.depth, num_outputs=shape.size)
        out = tape.buffer(x.rows, shape.size)
        tape.write(
            multiply_packed(shape.kind, self._level), x.rows, x=source, packed=packed, sums=sums,
            row_scales=row_scales, panels=self.weight.panels, scales=self.weight.scales, bias=self._bias, out=out,
            depth=shape.depth, size=shape.size, group=shape.group,
        )  # fmt: skip
        return out


class PackedEmbedding:
    """Packed weights as an embedding table; a row is widened to float32 when it is looked up."""

    __slots__ = ("_weight",)

    def __init__(self, weight: PackedWeight) -> None:
        self._weight = weight

    def __call__(self, tokens: Buffer) -> Buffer:
        """Return `[T, E]`."""
        shape = self._weight.shape
        out = tokens.tape.buffer(tokens.rows, shape.inputs)
        tokens.tape.write(
            look_up(shape.kind), tokens.rows, tokens=tokens, panels=self._weight.panels, scales=self._weight.scales,
            out=out, size=shape.inputs, depth=shape.depth, group=shape.group,
        )  # fmt: skip
        return out


class CPUExperts:
    """Experts, each with two matrices. Invariant: a token's result depends on that token only, to the last bit."""

    __slots__ = ("_activation", "_adapted", "_count", "_down", "_first", "_gate_up", "_ops", "_rows", "_weighs_inputs")

    def __init__(
        self,
        gate_up: experts.PanelExperts | experts.PackedExperts,
        down: experts.PanelExperts | experts.PackedExperts,
        ops: CPUOps,
        *,
        count: int,
        first: int,
        rows: NDArray[np.int64] | None,
        activation: ExpertActivation,
        weighs_inputs: bool,
        adapted: AdaptedExperts | None,
    ) -> None:
        """Take the matrices of `count` experts.

        Args:
            gate_up: of the first product.
            down: of the second.
            ops: writes the activation.
            count: experts here.
            first: see `ExpertMatrices`.
            rows: where the rows of each placed expert are counted; None: they are not.
            activation: see `Ops.experts`.
            weighs_inputs: likewise.
            adapted: what adapters add; None: nothing.
        """
        self._adapted = adapted
        self._gate_up = gate_up
        self._down = down
        self._ops = ops
        self._count = count
        self._first = first
        self._rows = rows
        self._activation: ExpertActivation = activation
        self._weighs_inputs = weighs_inputs

    def __call__(self, x: Buffer, chosen: Buffer, shares: Buffer) -> Buffer:
        """Return `[T, E]` of `[T, E]`."""
        before, behind = (shares, None) if self._weighs_inputs else (None, shares)
        if self._rows is not None:
            experts.count_rows(chosen, self._rows)
        grouping = experts.group(chosen, self._count, self._first)
        own = experts.spread(x, grouping, before, self._gate_up.depth)
        gate_up, adapted = self._gate_up(own, grouping), self._adapted
        if adapted is None:
            down = self._down(gated(self._ops, self._activation, gate_up), grouping)
            return experts.collect(down, grouping, behind)
        groups = adapted.group(x, grouping)
        adapted.gate_up.adapt(own, gate_up, groups)
        own = gated(self._ops, self._activation, gate_up)
        down = self._down(own, grouping)
        adapted.down.adapt(own, down, groups)
        return experts.collect(down, grouping, behind)


class CPUOps:
    """`models.ops.Ops` with float32 between operations: writes instructions to the tape of its arguments.

    The rotation of a step is (cosines, sines), each `[T, head_dim / 2] float32`.
    """

    __slots__ = ("_adapters", "_exchange", "_level", "_packer", "_pair_level", "expert_rows", "units", "variants")

    def __init__(
        self,
        packer: Packer | None = None,
        *,
        level: DotLevel | None = None,
        pair_level: PairLevel | None = None,
        exchange: Exchange | None = None,
        adapters: CPUAdapters | None = None,
        expert_rows: Mapping[int, NDArray[np.int64]] | None = None,
    ) -> None:
        """Choose the form of weights.

        Args:
            packer: lays them out; None: all are float32.
            level: instructions for products of bytes; None: the fastest of this processor.
            pair_level: the same for products of bfloat16 numbers.
            exchange: with the other ranks of the model; None: it is whole.
            adapters: of the projections; None: there are none.
            expert_rows: of the same model with other weights, to be counted on; None: rows are counted anew.
        """
        self._exchange = exchange
        self._adapters = adapters
        self._packer = Packer("float32") if packer is None else packer
        self._level = level
        self._pair_level = pair_level
        self.variants: set[tuple[WeightKind, ProductLevel]] = set()
        """Kernels that the weights so far need; see `warm_up`."""  # written by: linear, embedding, tied_embedding
        self.units: dict[Unit, None] = {} if exchange is None else {EXCHANGE: None}
        """Further kernels that the parts so far need, in the order of their first use."""
        # written by: adaptable, experts, placing, convolution, channel_heads
        self.expert_rows: dict[int, NDArray[np.int64]] = dict(expert_rows or {})
        """By layer, how many rows each placed expert has had, where they are counted."""  # written by: experts

    def linear(self, weight: Matrix, bias: Tensor | None) -> Linear[Buffer]:
        """Lay out `weight` `[out, in]` in panels; it is not kept."""
        packed = self._packer.pack(weight)
        if packed is None:
            return PanelLinear(self._packer.panels(weight), weight.shape[0], bias)
        return PackedLinear(packed, bias, self._level_of(packed))

    def adaptable(self, linear: Linear[Buffer], projection: Projection) -> Linear[Buffer]:
        """Return `linear`, or with adapters a projection to which they add."""
        if self._adapters is None:
            return linear
        self.units[ADAPTERS] = None
        return self._adapters.add(linear, projection)

    def exact_linear(self, weight: Tensor, bias: Tensor | None) -> Linear[Buffer]:
        """Lay out `weight` `[out, in]` in panels of float32."""
        return PanelLinear(self._packer.panels(weight), len(weight), bias)

    def embedding(self, table: Matrix) -> Embedding[Buffer]:
        """Keep a copy of `table` `[V, E]`."""
        packed = self._packer.pack(table)
        if packed is None:
            return TableEmbedding(self._packer.table(table))
        self._level_of(packed)
        return PackedEmbedding(packed)

    def tied_embedding(self, table: Matrix, bias: Tensor | None = None) -> tuple[Embedding[Buffer], Linear[Buffer]]:
        """Lay out `table` `[V, E]` in panels, which the embedding and the projection share."""
        packed = self._packer.pack(table)
        if packed is None:
            projection = PanelLinear(self._packer.panels(table), table.shape[0], bias)
            return TiedEmbedding(projection), projection
        return PackedEmbedding(packed), PackedLinear(packed, bias, self._level_of(packed))

    def _level_of(self, weight: PackedWeight) -> ProductLevel:
        kind = weight.shape.kind
        level: ProductLevel
        if kind == WeightKind.BFLOAT16_PAIRS:
            level = self._pair_level = pair_level() if self._pair_level is None else self._pair_level
        elif kind.has_codes and self._packer.activations != "float32":
            level = self._level = dot_level() if self._level is None else self._level
        else:
            level = WideLevel.FLOAT32
        self.variants.add((kind, level))
        return level

    def norm(self, x: Buffer, norm: Norm) -> Buffer:
        """Return the norm of `x` `[T, E]`."""
        if norm.is_centred:
            return _layer_norm(None, x, norm)
        out = x.tape.buffer(x.rows, x.size)
        x.tape.write(rows.norm, x.rows, x=x, weight=weight_of(norm, x.size), out=out, size=x.size, epsilon=norm.epsilon)
        return out

    def add_norm(self, x: Buffer, residual: Buffer, norm: Norm) -> Buffer:
        """Add `x` to `residual` and return the norm of the sum."""
        if norm.is_centred:
            return _layer_norm(x, residual, norm)
        out = x.tape.buffer(x.rows, x.size)
        x.tape.write(
            rows.add_norm, x.rows, x=x, residual=residual, weight=weight_of(norm, x.size), out=out, size=x.size,
            epsilon=norm.epsilon,
        )  # fmt: skip
        return out

    def norm_add(self, x: Buffer, residual: Buffer, norm: Norm) -> None:
        """Add the norm of `x` to `residual`."""
        if norm.is_centred:
            self.add(_layer_norm(None, x, norm), residual)
            return
        x.tape.write(
            rows.norm_add, x.rows, x=x, weight=weight_of(norm, x.size), residual=residual, size=x.size,
            epsilon=norm.epsilon,
        )  # fmt: skip

    def add(self, x: Buffer, residual: Buffer) -> None:
        """Add `x` to `residual`."""
        x.tape.write(rows.add, x.rows, x=x, residual=residual, size=x.size)

    def norm_heads(self, x: Buffer, norm: Norm, size: int) -> Buffer:
        """Return `x`, every `size` elements normed on their own, in its memory."""
        x.tape.write(
            rows.norm_heads, x.rows, x=x, weight=weight_of(norm, size), x_size=x.size, column=0, size=x.size, dim=size,
            epsilon=norm.epsilon,
        )  # fmt: skip
        return x

    def split_heads(
        self, qkv: Buffer, rotation: tuple[Buffer, Buffer] | None, split: HeadSplit
    ) -> tuple[Buffer, Buffer, Buffer] | tuple[Buffer, None, None]:
        """Return rotated q and k, and v."""
        tape = qkv.tape
        if split.norms_are_whole:
            if split.num_ranks > 1:
                self._norm_over_ranks(qkv, split)
            else:
                _norm_heads(qkv, split.q_norm, 0, split.q_size, split)
                _norm_heads(qkv, split.k_norm, split.q_size, split.kv_size, split)
            split = replace(split, q_norm=None, k_norm=None, norms_are_whole=False)
        q = tape.buffer(qkv.rows, split.q_size)
        k, v = (tape.buffer(qkv.rows, split.kv_size) if split.kv_size else None for _ in range(2))
        sizes = {
            "q_size": split.q_size, "k_size": split.kv_size, "size": qkv.size,
            "v_column": split.q_size if split.values_are_keys else split.q_size + split.kv_size,
        }  # fmt: skip
        follows = split.q_norm is not None and (split.norms_follow or rotation is None)
        if rotation is None:
            tape.write(rows.split, qkv.rows, qkv=qkv, q=q, k=k, v=v, **sizes)
        else:
            q_norm, k_norm = (
                None if norm is None or follows else weight_of(norm, split.head_dim)
                for norm in (split.q_norm, split.k_norm)
            )
            tape.write(
                heads.split(split.head_dim), qkv.rows, qkv=qkv, cosines=rotation[0], sines=rotation[1],
                q_norm=q_norm, k_norm=k_norm, q=q, k=k, v=v, **sizes,
                epsilon=0.0 if split.q_norm is None else split.q_norm.epsilon,
            )  # fmt: skip
        if follows:
            _norm_heads(q, split.q_norm, 0, split.q_size, split)
        if k is None or v is None:
            return q, None, None
        if follows:
            _norm_heads(k, split.k_norm, 0, split.kv_size, split)
        return q, k, v

    def _norm_over_ranks(self, qkv: Buffer, split: HeadSplit) -> None:
        """Norm all queries, and all keys, by the squares of the heads of all ranks; their sums are exchanged."""
        places = ((split.q_norm, 0, split.q_size), (split.k_norm, split.q_size, split.kv_size))
        sums = self._sums_over_ranks(qkv, [(column, size) for _, column, size in places])
        for place, (norm, column, size) in enumerate(places):
            assert norm is not None
            qkv.tape.write(
                rows.norm_columns_by, qkv.rows, x=qkv, weight=weight_of(norm, size), sums=sums, x_size=qkv.size,
                column=column, size=size, sums_size=len(places), place=place, num_squares=size * split.num_ranks,
                epsilon=norm.epsilon,
            )  # fmt: skip

    def _sums_over_ranks(self, x: Buffer, spans: Sequence[tuple[int, int]]) -> Buffer:
        """Return the sums over ranks of the squares of some columns of `x`: the first, and how many, may be none."""
        sums = x.tape.buffer(x.rows, len(spans))
        for place, (column, size) in enumerate(spans):
            x.tape.write(
                rows.sum_squares, x.rows, x=x, out=sums, x_size=x.size, column=column, size=size, out_size=len(spans),
                place=place,
            )  # fmt: skip
        return self.sum_ranks(sums)

    def scale_rows(self, x: Buffer, factors: tuple[Buffer, Buffer]) -> Buffer:
        """Return each row times its factor, in its memory."""
        x.tape.write(rows.scale_rows, x.rows, x=x, factors=factors[0], size=x.size)
        return x

    def silu_mul(self, gate_up: Buffer) -> Buffer:
        """Return silu of the first half times the second half."""
        out = gate_up.tape.buffer(gate_up.rows, gate_up.size // 2)
        gate_up.tape.write(rows.silu_mul, gate_up.rows, gate_up=gate_up, out=out, size=out.size)
        return out

    def gelu_mul(self, gate_up: Buffer) -> Buffer:
        """Return gelu, with a hyperbolic tangent, of the first half times the second half."""
        out = gate_up.tape.buffer(gate_up.rows, gate_up.size // 2)
        gate_up.tape.write(rows.gelu_mul, gate_up.rows, gate_up=gate_up, out=out, size=out.size)
        return out

    def erf_gelu_mul(self, gate_up: Buffer) -> Buffer:
        """Return gelu of the first half times the second half."""
        out = gate_up.tape.buffer(gate_up.rows, gate_up.size // 2)
        gate_up.tape.write(activations.gelu_mul, gate_up.rows, gate_up=gate_up, out=out, size=out.size)
        return out

    def activate(self, x: Buffer, activation: PlainActivation) -> Buffer:
        """Return an activation of `x`, in its memory."""
        if isinstance(activation, XIELU):
            parameters = (activation.positive, activation.negative, activation.beta, activation.epsilon)
            positive, negative, beta, epsilon = map(float, parameters)
            x.tape.write(
                activations.xielu, x.rows, x=x, size=x.size, positive=positive, negative=negative, beta=beta,
                epsilon=epsilon,
            )  # fmt: skip
        else:
            x.tape.write(_ACTIVATIONS[activation], x.rows, x=x, size=x.size)
        return x

    def soft_cap(self, x: Buffer, cap: float) -> Buffer:
        """Return `cap` times the hyperbolic tangent of `x` over `cap`, in its memory."""
        x.tape.write(activations.soft_cap, x.rows, x=x, size=x.size, cap=cap)
        return x

    def clamped_mul(self, gate_up: Buffer) -> Buffer:
        """Return the product of the two halves, which are limited first."""
        out = gate_up.tape.buffer(gate_up.rows, gate_up.size // 2)
        gate_up.tape.write(route.clamped_mul, gate_up.rows, gate_up=gate_up, out=out, size=out.size)
        return out

    def choose(self, logits: Buffer, router: RouterConfig, bias: Tensor | None) -> tuple[Buffer, Buffer]:
        """Return the chosen experts and their shares."""
        return experts.choose(logits, router, None if bias is None else np.ascontiguousarray(bias, np.float32))

    def experts(
        self, matrices: ExpertMatrices, activation: ExpertActivation, *, weighs_inputs: bool = False
    ) -> ChosenExperts[Buffer]:
        """Lay out the matrices of all experts in panels, one expert below the other."""
        gate_up, down = (
            self._one_of_each(weight, weight.shape[0] // matrices.count, bias)
            for weight, bias in ((matrices.gate_up, matrices.gate_up_bias), (matrices.down, matrices.down_bias))
        )
        self.units |= dict.fromkeys((route.ROUTING, gate_up.unit, down.unit))
        counts: NDArray[np.int64] | None = None
        if matrices.counted_as is not None:
            self.units[PLACING] = None
            size = matrices.num_placed or matrices.count
            counts = self.expert_rows.setdefault(matrices.counted_as, np.zeros(size, np.int64))
        adapted = None
        if self._adapters is not None and matrices.gate_up_parts:
            self.units[ADAPTERS] = None
            adapted = self._adapters.add_experts(matrices.gate_up_parts, matrices.down_parts)
        return CPUExperts(
            gate_up, down, self, count=matrices.count, first=matrices.first, rows=counts, activation=activation,
            weighs_inputs=weighs_inputs, adapted=adapted,
        )  # fmt: skip

    def _one_of_each(
        self, weight: Matrix, size: int, bias: Tensor | None
    ) -> experts.PanelExperts | experts.PackedExperts:
        packed = self._packer.pack(weight)
        if packed is None:
            return experts.PanelExperts(self._packer.panels(weight), size, bias)
        return experts.PackedExperts(packed, size, bias, self._level_of(packed))

    def scale_chosen(self, shares: Buffer, chosen: Buffer, factors: Tensor) -> Buffer:
        """Return `shares`, each times the factor of its expert, in their memory."""
        own = np.ascontiguousarray(factors, np.float32)
        shares.tape.write(
            route.scale_chosen, shares.rows, shares=shares, chosen=chosen, factors=own, num_chosen=shares.size
        )
        return shares

    def placing(self, placement: ExpertPlacement, *, near: Tensor) -> Placing[Buffer]:
        """Return what finds placed experts."""
        del near
        self.units[PLACING] = None
        return experts.CPUPlacing(placement)

    def multiply_columns(self, x: Buffer, y: Buffer, column: int, gate: Gate | None = None) -> Buffer:
        """Return `x` times as many columns of `y` from `column` on, or times a function of them, in its memory."""
        if gate is not None:
            x.tape.write(
                activations.multiply_gate, x.rows, x=x, y=y, size=x.size, y_size=y.size, column=column,
                is_silu=int(gate == "silu"),
            )  # fmt: skip
            return x
        x.tape.write(rows.multiply_columns, x.rows, x=x, y=y, size=x.size, y_size=y.size, column=column)
        return x

    def columns(self, x: Buffer, column: int, size: int) -> Buffer:
        """Return columns of `x` in new memory."""
        out = x.tape.buffer(x.rows, size)
        x.tape.write(rows.columns, x.rows, x=x, out=out, size=x.size, out_size=size, column=column)
        return out

    def norm_groups(self, x: Buffer, norm: Norm, size: int, shared: SharedGroup | None = None) -> Buffer:
        """Return `x`, every `size` elements normed on their own, in its memory."""
        weight = weight_of(norm, x.size)
        if shared is not None:
            sums = self._sums_over_ranks(x, [(0, x.size * (one == shared.number)) for one in range(shared.count)])
            x.tape.write(
                rows.norm_columns_by, x.rows, x=x, weight=weight, sums=sums, x_size=x.size, column=0, size=x.size,
                sums_size=shared.count, place=shared.number, num_squares=size, epsilon=norm.epsilon,
            )  # fmt: skip
            return x
        for column in range(0, x.size, size):
            x.tape.write(
                rows.norm_columns, x.rows, x=x, weight=weight[column : column + size], x_size=x.size, column=column,
                size=size, epsilon=norm.epsilon,
            )  # fmt: skip
        return x

    def add_gated(self, x: Buffer, y: Buffer, gate: Buffer | None) -> Buffer:
        """Return `x` plus `y`, times the sigmoid of `gate` if there is one, in the memory of `x`."""
        x.tape.write(route.add_gated, x.rows, x=x, y=y, gate=gate, size=x.size)
        return x

    def positions(self, numbers: tuple[Buffer, Buffer]) -> Buffer:
        """Return the position of each token, whose bits stand in the place of cosines."""
        return numbers[0]

    def convolution(self, weight: Tensor, bias: Tensor | None, *, activates: bool = True) -> Convolution:
        """Return a convolution with `weight` `[C, 1, W]`."""
        self.units[RECURRENCE] = None
        return convolution_of(weight, bias, activates=activates)

    def channel_heads(self, heads: RecurrentHeads) -> RecurrentHeads:
        """Return `heads`, whose kernel is needed."""
        self.units[CHANNEL_RECURRENCE] = None
        return heads

    def scale(self, x: Buffer, factor: float) -> Buffer:
        """Return `x` times `factor`, in its memory."""
        x.tape.write(rows.scale, x.rows, x=x, size=x.size, factor=factor)
        return x

    def take(self, x: Buffer, wanted: Buffer) -> Buffer:
        """Return the rows of `x` at `wanted`."""
        out = x.tape.buffer(wanted.rows, x.size)
        x.tape.write(rows.take, wanted.rows, x=x, places=wanted, out=out, size=x.size)
        return out

    def concat(self, parts: Sequence[Buffer]) -> Buffer:
        """Return the columns of all `parts` side by side, in new memory."""
        return side_by_side(parts)

    def latent_heads(self, weight: Tensor, shape: LatentShape) -> LatentHeads[Buffer]:
        """Lay out `weight` `[H (N + V), C]` in panels; it is not kept."""
        return CPULatentHeads(weight, shape, self._packer)

    def clear_first(self, x: Buffer, rotation: tuple[Buffer, Buffer]) -> Buffer:
        """Return `x` with zeros in the rows of tokens at position 0, whose sines are all zero."""
        sines = rotation[1]
        x.tape.write(rows.clear_first, x.rows, x=x, sines=sines, size=x.size, num_sines=sines.size)
        return x

    def sum_ranks(self, x: Buffer) -> Buffer:
        """Return the sum of the `x` of all ranks, in its memory."""
        assert self._exchange is not None
        return self._exchange.sum_ranks(x)

    def gather_ranks(self, x: Buffer, size: int) -> Buffer:
        """Return the first `size` columns of the `x` of all ranks."""
        assert self._exchange is not None
        return self._exchange.gather_ranks(x, size)


def _layer_norm(added: Buffer | None, x: Buffer, norm: Norm) -> Buffer:
    """Return the norm of `x` around its mean, after `added` was added to it."""
    out = x.tape.buffer(x.rows, x.size)
    x.tape.write(
        rows.layer_norm, x.rows, added=added, x=x, weight=weight_of(norm, x.size), bias=bias_of(norm, x.size), out=out,
        size=x.size, epsilon=norm.epsilon,
    )  # fmt: skip
    return out


def _norm_heads(x: Buffer, norm: Norm | None, column: int, size: int, split: HeadSplit) -> None:
    """Write the instruction that norms `size` columns of `x` from `column` on, as whole rows or head by head."""
    assert norm is not None
    if split.norms_are_whole:
        x.tape.write(
            rows.norm_columns, x.rows, x=x, weight=weight_of(norm, size), x_size=x.size, column=column, size=size,
            epsilon=norm.epsilon,
        )  # fmt: skip
    else:
        x.tape.write(
            rows.norm_heads, x.rows, x=x, weight=weight_of(norm, split.head_dim), x_size=x.size, column=column,
            size=size, dim=split.head_dim, epsilon=norm.epsilon,
        )  # fmt: skip
