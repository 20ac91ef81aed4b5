"""Experts in plain torch: the oracle of routing and of sums over chosen experts.

Legend: T tokens, N experts, K chosen experts of a token, E hidden_size.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pagewood.engine.models.expert_map import TURN, ExpertPlacement
from pagewood.engine.models.ops import CLAMP_ALPHA, CLAMP_LIMIT, ExpertMatrices
from pagewood.engine.models.parts.experts import RouterConfig
from pagewood.engine.models.parts.feed_forward import ExpertActivation, gated

if TYPE_CHECKING:
    from pagewood.engine.models.torch_ops import TorchOps


def choose(logits: Tensor, router: RouterConfig, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the chosen experts `[T, K] int32` and their shares `[T, K] float32`; see `Ops.choose`. It never waits."""
    logits = logits.float()
    scores = logits if router.scores_chosen_only else _scores(logits, router)
    ranked = scores if bias is None else scores + bias
    if router.num_groups > 1:
        groups = ranked.unflatten(1, (router.num_groups, -1))
        of_groups = groups.topk(router.best_of_group, dim=-1).values.sum(-1)
        best = of_groups.sort(dim=-1, descending=True, stable=True).indices[:, : router.num_chosen_groups]
        kept = torch.zeros_like(of_groups, dtype=torch.bool).scatter(1, best, True)
        ranked = groups.masked_fill(~kept[:, :, None], -torch.inf).flatten(1)
    chosen = ranked.sort(dim=-1, descending=True, stable=True).indices[:, : router.num_chosen]
    shares = scores.gather(1, chosen)
    if router.scores_chosen_only:
        shares = _scores(shares, router)
    if router.renormalises:
        shares = shares / (shares.sum(-1, keepdim=True) + router.epsilon).clamp(min=router.least_sum)
    return chosen.int(), shares * router.factor


def _scores(logits: Tensor, router: RouterConfig) -> Tensor:
    return logits.softmax(-1) if router.score == "softmax" else logits.sigmoid()


def clamped_mul(gate_up: Tensor) -> Tensor:
    """Return `[T, I]` of `[T, 2I]`; see `Ops.clamped_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=CLAMP_LIMIT), up.clamp(-CLAMP_LIMIT, CLAMP_LIMIT)
    return gate * torch.sigmoid(gate * CLAMP_ALPHA) * (up + 1)


class TorchPlacing:
    """`models.ops.Placing`; it never waits for the device of its tables."""

    __slots__ = ("_num_ranks", "_ranks", "_table")

    def __init__(self, placement: ExpertPlacement, device: torch.device) -> None:
        """Put the tables of `placement` on a device."""
        self._table = torch.from_numpy(placement.table()).to(device)
        self._ranks = torch.from_numpy(placement.placed_ranks()).to(device).long()
        self._num_ranks = placement.num_ranks

    def __call__(self, chosen: Tensor, logits: Tensor) -> Tensor:
        """Return the placed experts `[T, K] int32`."""
        own = self._table[chosen.long()]  # [T, K, M]
        placed, most_copies = own[..., 0].contiguous(), own.shape[2]
        if most_copies == 1:
            return placed
        counts = (own >= 0).sum(-1)
        has_copies = counts > 1
        bits = logits.float().view(torch.int32).gather(1, chosen.long()).long() & 0xFFFFFFFF
        turns = ((bits * TURN & 0xFFFFFFFF) >> 16)[..., None] + torch.arange(most_copies, device=chosen.device)
        copies = own.gather(2, turns % counts[..., None]).long()  # in the order of a token's turn, some of them twice
        loads = torch.zeros(len(chosen), self._num_ranks, dtype=torch.long, device=chosen.device)
        loads.scatter_add_(1, self._ranks[placed.long()], (~has_copies).long())
        for k in range(chosen.shape[1]):
            busy = loads.gather(1, self._ranks[copies[:, k]]).sort(dim=1, stable=True).indices
            best = copies[:, k].gather(1, busy[:, :1])
            placed[:, k] = torch.where(has_copies[:, k], best[:, 0].int(), placed[:, k])
            loads.scatter_add_(1, self._ranks[best], has_copies[:, k, None].long())
        return placed


class TorchExperts:
    """`models.ops.ChosenExperts`, expert by expert."""

    __slots__ = ("_activation", "_down", "_first", "_gate_up", "_ops", "_weighs_inputs")

    def __init__(
        self, matrices: ExpertMatrices, activation: ExpertActivation, ops: TorchOps, *, weighs_inputs: bool = False
    ) -> None:
        """Make the projections of each expert with `ops`."""

        def each(weight: Tensor, bias: Tensor | None) -> list:
            if not len(weight):  # only headers are read
                return []
            biases = [None] * matrices.count if bias is None else bias.chunk(matrices.count)
            return [ops.linear(one, own) for one, own in zip(weight.chunk(matrices.count), biases, strict=True)]

        self._gate_up = each(matrices.gate_up, matrices.gate_up_bias)
        self._down = each(matrices.down, matrices.down_bias)
        self._first = matrices.first
        self._activation: ExpertActivation = activation
        self._ops = ops
        self._weighs_inputs = weighs_inputs

    def __call__(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """Return `[T, E]`; the results of a token are added in the order of `chosen`."""
        results = x.new_zeros(*chosen.shape, x.shape[1])
        for expert in range(len(self._down)):
            tokens, ranks = (chosen == self._first + expert).nonzero(as_tuple=True)
            if not len(tokens):
                continue
            own = shares[tokens, ranks, None].to(x.dtype)
            inputs = x[tokens] * own if self._weighs_inputs else x[tokens]
            found = self._down[expert](gated(self._ops, self._activation, self._gate_up[expert](inputs)))
            results[tokens, ranks] = found if self._weighs_inputs else found * own
        total = results[:, 0]
        for rank in range(1, chosen.shape[1]):
            total = total + results[:, rank]
        return total
