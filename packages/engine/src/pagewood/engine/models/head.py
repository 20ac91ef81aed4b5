"""One drafting head for EAGLE-3 and for multi-token prediction: their differences are data in `HeadConfig`.

A pair joins the token at position p + 1 with a hidden state of position p. It has the rope position and the KV slot p,
and its result predicts the token at position p + 2.

Legend: T pairs of a step, W pairs whose logits are wanted, C captured states, N target_hidden_size, E hidden_size of
the head, D output_size.

Source: Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test", 2025;
DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.2 (multi-token prediction).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol

import torch
from torch import Tensor

from pagewood.engine.models.head_config import HeadConfig
from pagewood.engine.models.ops import A, Attention, Embedding, Linear, Norm, Ops, RowDivision, Step, Weights
from pagewood.engine.models.parts.gathered import read_embedding, read_gathered
from pagewood.engine.models.parts.layer import Layer, add_and_norm
from pagewood.engine.models.parts.norm import read_norm
from pagewood.engine.models.parts.source import Source
from pagewood.engine.models.rope import position_table
from pagewood.engine.models.shard import WHOLE, Shard


class HeadWeights(Weights, Protocol):
    """The source of parameters and token ids."""

    def integers(self, name: str, rows: int) -> Tensor:
        """Return the tensor `name` `[rows]` as int64 on the CPU."""
        ...


class Head(Generic[A]):
    """A drafting head. Invariant: a call does not change it; all state is in the attention's memory.

    Like `Decoder`, it computes if A is a tensor, and writes instructions if A is the name of a future result.
    """

    __slots__ = (
        "_embedding", "_feature_norms", "_hidden_norm", "_layers", "_norm", "_ops", "_output", "_projection",
        "_token_norm", "config", "ropes", "token_map",
    )  # fmt: skip

    def __init__(
        self,
        config: HeadConfig,
        weights: HeadWeights,
        ops: Ops[A],
        *,
        embedding: Embedding[A],
        output: Linear[A],
        device: torch.device,
        shard: Shard = WHOLE,
    ) -> None:
        """Take every parameter from `weights` and hand it to `ops`, which keeps it.

        Args:
            config: of the head.
            weights: where the parameters come from.
            ops: the arithmetic of the device.
            embedding: the target's, used if the head has none of its own.
            output: the target's output projection, used if the head has none of its own.
            device: of the rotations.
            shard: the rank, that of the target.

        Raises:
            ValueError: the token map leads out of the target's vocabulary.
        """
        layer, names = config.layer, config.names
        self.config = config.for_shard(shard)
        self.ropes = [position_table(rope, device=device) for rope in layer.position_configs]
        self._ops = ops
        source = Source(weights=weights, ops=ops, hidden_size=layer.hidden_size, shard=shard)

        def norm(name: str, size: int = layer.hidden_size) -> Norm:
            return read_norm(layer.norm, source, name, size)

        states = len(config.captured) * config.target_hidden_size
        inputs = states if config.has_wide_attention else 2 * layer.hidden_size
        norm_size = states if len(names.feature_norms) == 1 else config.target_hidden_size
        self._feature_norms = [norm(name, norm_size) for name in names.feature_norms]
        self._projection: Linear[A] = read_gathered(  # of the rows that attention is computed for
            source.of_mixers, names.projection, layer.hidden_size, inputs
        )
        self._token_norm = None if names.token_norm is None else norm(names.token_norm)
        self._hidden_norm = norm(names.hidden_norm)
        self._layers = [
            Layer(
                layer.layers[index],
                source.below(prefix),
                mixer_inputs=2 * layer.hidden_size if config.has_wide_attention and index == 0 else None,
            )
            for index, prefix in enumerate(names.layers)
        ]
        self._norm = norm(names.norm)
        self._embedding, self._output = embedding, output
        if names.embedding is not None:
            self._embedding: Embedding[A] = read_embedding(source, names.embedding, layer.vocab_size, layer.hidden_size)
        if names.output is not None:
            self._output: Linear[A] = read_gathered(source, names.output, config.output_size, layer.hidden_size)
        self.token_map: Tensor | None = None
        """`[D] int64` on the CPU, the target's token for each of the head's; None: they are the same."""
        if names.token_map is not None:
            offsets = weights.integers(names.token_map, config.output_size)
            self.token_map = _token_map(offsets, names.token_map, layer.vocab_size)

    def features(self, captured: Sequence[A]) -> A:
        """Return the hidden states `[T, E]` for `captured`, `[T, N]` for each of the C states of the target."""
        ops = self._ops
        if not self.config.has_wide_attention:
            return captured[0]
        if len(self._feature_norms) > 1:
            parts = zip(captured, self._feature_norms, strict=True)
            captured = [ops.norm(state, norm) for state, norm in parts]
        joined = ops.concat(captured)
        if len(self._feature_norms) == 1:
            joined = ops.norm(joined, self._feature_norms[0])
        return self._projection(joined)

    def __call__(
        self,
        tokens: A,
        hidden: A,
        rotations: Sequence[tuple[A, A]],
        attention: Attention[A],
        wanted: A,
        *,
        division: RowDivision[A] | None = None,
    ) -> tuple[A, A]:
        """Compute a step of pairs.

        Args:
            tokens: `[T] int32`, ids in the target's vocabulary, of positions p + 1.
            hidden: `[T, E]`, hidden states of positions p: from `features`, or from the previous step. The caller must
                not read it again.
            rotations: for each of `ropes`, the rotation of each position p, made from the rope's values for it.
            attention: the attention of this step, over the KV memory of the head; a pair is stored at position p.
            wanted: `[W] int32`, the pairs whose results are wanted.
            division: of pairs among ranks: `tokens` are then those of all, and the other arguments those of this rank.
                None: this rank has all.

        Returns:
            `[W, D]`, logits over the head's vocabulary, see `token_map`, of all ranks; and `[W, E]`, hidden states for
            the next step, of this one.
        """
        normed, residual = self._advance(tokens, hidden, rotations, attention, wanted, division)
        return self._logits(normed, division), normed if self.config.feeds_norm else residual

    def advance(
        self,
        tokens: A,
        hidden: A,
        rotations: Sequence[tuple[A, A]],
        attention: Attention[A],
        wanted: A,
        *,
        division: RowDivision[A] | None = None,
    ) -> A:
        """Compute a step of pairs, see `__call__`, and return only the hidden states for the next step."""
        normed, residual = self._advance(tokens, hidden, rotations, attention, wanted, division)
        return normed if self.config.feeds_norm else residual

    def logits(self, hidden: A, *, division: RowDivision[A] | None = None) -> A:
        """Return the logits `[W, D]` that belong to the hidden states `[W, E]` of a step; see `__call__`."""
        return self._logits(hidden if self.config.feeds_norm else self._ops.norm(hidden, self._norm), division)

    def _logits(self, normed: A, division: RowDivision[A] | None) -> A:
        return self._output(normed if division is None else division.kept.gather(normed))

    def _advance(
        self,
        tokens: A,
        hidden: A,
        rotations: Sequence[tuple[A, A]],
        attention: Attention[A],
        wanted: A,
        division: RowDivision[A] | None,
    ) -> tuple[A, A]:
        """Return `[W, E]` after the last norm, and `[W, E]` before it, of this rank's pairs."""
        ops, config = self._ops, self.config
        step = Step(
            rotations=dict(zip(config.layer.position_configs, rotations, strict=True)),
            attention=attention,
            division=division,
        )
        embedded = self._embedding(tokens)
        if division is not None:
            embedded = division.own(embedded)
        if config.clears_first:
            embedded = ops.clear_first(embedded, rotations[0])
        first, last = self._layers[0], len(self._layers) - 1
        token_norm = first.input_norm if self._token_norm is None else self._token_norm
        assert token_norm is not None
        token = ops.norm(embedded, token_norm)
        normed = ops.norm(hidden, self._hidden_norm)
        x = ops.concat([normed, token] if config.hidden_first else [token, normed])
        if config.has_wide_attention:
            residual = normed if config.norm_before_residual else hidden
        else:
            residual = self._projection(x)
            x = first.enter(None, residual)
        pending: A | None = None
        for index, layer in enumerate(self._layers):
            if index > 0:
                x = layer.enter(pending, residual)
            # after the last layer, the other pairs are not needed any more
            pending, residual = layer(x, residual, step, index, wanted if index == last else None)
        return add_and_norm(ops, pending, residual, self._norm), residual


def _token_map(offsets: Tensor, name: str, vocab_size: int) -> Tensor:
    tokens = torch.arange(len(offsets)) + offsets
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise ValueError(
            f"{name} must lead to tokens in [0, {vocab_size}), got [{int(tokens.min())}, {int(tokens.max())}]"
        )
    return tokens
