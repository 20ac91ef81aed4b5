"""Samples the next token of every sampled grant on a CUDA device: FlashInfer's filters, and a race of our own.

For one seed, FlashInfer's own draws depend on the place of a row in the batch. So tokens are drawn here, by the race
and the noise of `splitmix`, as on a CPU: for the same probabilities it is the same token, unless two tokens are tied to
within the rounding of float32. A race compares numbers and adds none, so it does not depend on the batch. In
batch-invariant mode the filters add integers, whose sum does not depend on the order of addition, because FlashInfer's
filters choose their order of summation by the number of rows.

Legend: S sampled grants, V vocab_size.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pagewood.engine.core.messages.result import EXCLUDED
from pagewood.engine.core.messages.sampling_table import NUM_SAMPLING_COLUMNS, SamplingArrays, SamplingColumn
from pagewood.engine.runner.cuda.drawing import race
from pagewood.engine.runner.cuda.kernels.flashinfer_api import FlashInfer

_FIRST = SamplingColumn.TEMPERATURE
_NO_NUMBER = -1
_MASS = float(1 << 40)  # the integer for probability 1; the sum of V such integers does not overflow 63 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """The sampling parameters of a step: facts about all rows for the host, and arrays on the device."""

    used: frozenset[SamplingColumn]
    """The columns that any row uses."""
    numbers: Tensor
    """[columns from TEMPERATURE on, S] int32; float32 columns are stored as their bits."""
    seeds: Tensor
    """[S] int64."""
    positions: Tensor
    """[S] int32, position of each token that is drawn."""

    @classmethod
    def of(cls, sampling: SamplingArrays, flat: Tensor, positions: Tensor) -> Sampler:
        """Return the sampler of some positions.

        Args:
            sampling: the parameters on the host, of any number of requests.
            flat: those of each position, on the device, see `SamplingArrays.flat`.
            positions: `[S] int32`, of the tokens that are drawn.
        """
        num = len(positions)
        return cls(
            used=sampling.used(),
            numbers=flat[_FIRST * num :].view(NUM_SAMPLING_COLUMNS - _FIRST, num),
            seeds=flat[: _FIRST * num].view(torch.int64),
            positions=positions,
        )

    def whole(self, column: SamplingColumn) -> Tensor:
        """Return a column of int32, `[S]`."""
        return self.numbers[column - _FIRST]

    def real(self, column: SamplingColumn) -> Tensor:
        """Return a column of float32, `[S]`."""
        return self.numbers[column - _FIRST].view(torch.float32)

    def tokens(self, filters: FlashInfer | None, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens, `[S] int64`, and the largest logit of each row, `[S]`.

        This logit is NaN if any logit of the row is, and minus infinity if all are; then the row has no token, see
        `marked`.

        Args:
            filters: has the softmax and the filters; None: batch-invariant ones of our own.
            logits: `[S, V]`.
        """
        largest, best = logits.max(-1)  # the maximum of a row with a NaN is NaN
        if SamplingColumn.TEMPERATURE in self.used:
            drawn = _first_to_arrive(logits.is_cuda)(self._weights(filters, logits), self.seeds, self.positions)
            best = torch.where(self.real(SamplingColumn.TEMPERATURE) > 0, drawn, best)
        return best, largest

    def log_probabilities(self, filters: FlashInfer | None, logits: Tensor) -> Tensor:
        """Return the logarithms of the probabilities with which tokens are drawn, `[S, V] float32`.

        Args:
            filters: see `tokens`.
            logits: `[S, V]`.
        """
        greedy = torch.zeros_like(logits, dtype=torch.float32).scatter_(1, logits.argmax(-1, keepdim=True), 1.0)
        if SamplingColumn.TEMPERATURE not in self.used:
            return greedy.log()
        weights = self._weights(filters, logits)
        weights = weights / weights.sum(-1, keepdim=True)
        return torch.where((self.real(SamplingColumn.TEMPERATURE) > 0)[:, None], weights, greedy).log()

    def _weights(self, filters: FlashInfer | None, logits: Tensor) -> Tensor:
        """Return numbers in proportion to the probabilities of rows that are not greedy, `[S, V] float32`."""
        scaled, temperatures = logits.float(), self.real(SamplingColumn.TEMPERATURE)
        temperatures = torch.where(temperatures > 0, temperatures, 1.0)
        if SamplingColumn.TOP_N_SIGMA in self.used:
            scaled = self._near_the_largest(scaled)
        if filters is None:
            weights = self._kept((scaled / temperatures[:, None]).softmax(-1))
        else:
            weights = self._probabilities(filters, scaled, temperatures)
        return self._typical(weights) if SamplingColumn.TYPICAL_P in self.used else weights

    def _near_the_largest(self, logits: Tensor) -> Tensor:
        """Return `logits` `[S, V] float32` with minus infinity where `top_n_sigma` drops a token.

        Distances from the largest logit are divided by the longest distance, and converted to integers, so that the
        sums are the same in every batch.
        """
        distances, is_finite = (logits.amax(-1, keepdim=True) - logits).double(), logits.isfinite()
        longest = torch.where(is_finite, distances, 0.0).amax(-1, keepdim=True)
        shares = torch.where(is_finite, distances / longest.clamp(min=torch.finfo(torch.float64).tiny), 0.0)
        num = is_finite.sum(-1, keepdim=True).double()
        means = (shares * _MASS).long().sum(-1, keepdim=True) / _MASS / num
        squares = torch.where(is_finite, (shares - means) ** 2, 0.0)
        deviations = ((squares * _MASS).long().sum(-1, keepdim=True) / _MASS / num).sqrt() * longest
        counts = self.real(SamplingColumn.TOP_N_SIGMA).double()[:, None]
        return logits.masked_fill((counts > 0) & (distances > counts * deviations), -torch.inf)

    def _kept(self, probs: Tensor) -> Tensor:
        """Return `probs` `[S, V] float32` with 0 where a filter drops a token, the same in every batch."""
        masses = (probs.double() * _MASS).long()
        size = probs.shape[1]
        if SamplingColumn.TOP_K in self.used or SamplingColumn.TOP_P in self.used:
            ordered = masses.sort(-1, descending=True).values
            if SamplingColumn.TOP_K in self.used:
                top_ks = self.whole(SamplingColumn.TOP_K)
                last = (torch.where(top_ks > 0, top_ks, size).clamp(max=size) - 1).long()
                limits = ordered.gather(1, last[:, None])
                masses = torch.where(masses >= limits, masses, 0)
                ordered = torch.where(ordered >= limits, ordered, 0)
            if SamplingColumn.TOP_P in self.used:
                top_ps, ends = self.real(SamplingColumn.TOP_P), ordered.cumsum(-1)
                wanted = (ends[:, -1].double() * top_ps.double()).long()
                kept = (
                    (ends - ordered < wanted[:, None]).sum(-1).clamp(min=1)
                )  # tokens before which the sum is too small
                limits = ordered.gather(1, (kept - 1)[:, None])
                masses = torch.where((masses >= limits) | (top_ps >= 1)[:, None], masses, 0)
        if SamplingColumn.MIN_P in self.used:
            limits = self.real(SamplingColumn.MIN_P).double() * masses.amax(-1).double()
            masses = torch.where(masses.double() >= limits[:, None], masses, 0)
        return torch.where(masses > 0, probs, 0.0)

    def _probabilities(self, flashinfer: FlashInfer, logits: Tensor, temperatures: Tensor) -> Tensor:
        """Return the filtered probabilities, `[S, V] float32`; a filter that is off for a row does not change it."""
        probs, size = flashinfer.softmax(logits, temperatures), logits.shape[1]
        if SamplingColumn.TOP_K in self.used:
            top_ks = self.whole(SamplingColumn.TOP_K)
            limits = torch.where(top_ks > 0, top_ks, size).clamp(max=size)
            kept = flashinfer.top_k_renorm_probs(probs, limits.int(), is_deterministic=True)
            probs = torch.where((top_ks > 0)[:, None], kept, probs)
        if SamplingColumn.TOP_P in self.used:
            top_ps = self.real(SamplingColumn.TOP_P)
            kept = flashinfer.top_p_renorm_probs(probs, top_ps, is_deterministic=True)
            probs = torch.where((top_ps < 1)[:, None], kept, probs)
        if SamplingColumn.MIN_P in self.used:
            limits = self.real(SamplingColumn.MIN_P)[:, None] * probs.amax(-1, keepdim=True)
            probs = torch.where(probs >= limits, probs, 0.0)
        return probs

    def _typical(self, weights: Tensor) -> Tensor:
        """Return `weights` `[S, V] float32` with 0 where a token is not locally typical, the same in every batch.

        Tokens are kept by the distance of their surprisal from the entropy, nearest first, until their mass reaches
        `typical_p`. Both are shifted by the logarithm of the row's sum, so weights need not be normalised.

        Source: Meister, Pimentel, Wiher and Cotterell, Locally typical sampling, 2022.
        """
        typical_ps, masses = self.real(SamplingColumn.TYPICAL_P), (weights.double() * _MASS).long()
        surprisals = torch.where(masses > 0, -weights.double().log(), 0.0)
        total = masses.sum(-1, keepdim=True).double()
        mean = (masses * surprisals).long().sum(-1, keepdim=True).double() / total
        distances = torch.where(masses > 0, (surprisals - mean).abs(), torch.inf)
        ordered, places = distances.sort(-1)
        taken = masses.gather(1, places)
        is_needed = (taken.cumsum(-1) - taken).double() < total * typical_ps.double()[:, None]
        radius = ordered.gather(1, is_needed.sum(-1, keepdim=True).clamp(min=1) - 1)
        is_kept = ((distances <= radius) & (masses > 0)) | (typical_ps >= 1)[:, None]
        return torch.where(is_kept, weights, 0.0)


def is_broken(largest: Tensor) -> Tensor:
    """Return whether no token can be drawn from rows with these largest logits, `[S] bool`."""
    return ~(largest > -torch.inf)  # NaN too


def marked(tokens: Tensor, largest: Tensor) -> Tensor:
    """Return `tokens` `[S] int32`, with a negative number (`core.messages.result.EXCLUDED`) where none was drawn.

    Args:
        tokens: `[S] int32`.
        largest: `[S]`, the largest logit of each row.
    """
    reasons = largest.float().nan_to_num(nan=_NO_NUMBER, neginf=EXCLUDED).int()
    return torch.where(is_broken(largest), reasons, tokens)


def _first_to_arrive(on_cuda: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return the race for a device: one kernel of Triton's on CUDA, elsewhere plain torch."""
    if on_cuda:
        return importlib.import_module("pagewood.engine.runner.cuda.drawing.race_triton").first_to_arrive
    return race.first_to_arrive
