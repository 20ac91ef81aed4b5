"""Samples the next token of every sampled grant on a CUDA device: FlashInfer's filters, and a race of our own.

FlashInfer's own draws depend, for one seed, on the place of a row in the batch. So tokens are drawn here, by the race
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

from pagewood.engine.core.result import EXCLUDED
from pagewood.engine.core.sampling import SamplingArrays
from pagewood.engine.runner.cuda.drawing import race
from pagewood.engine.runner.cuda.kernels.flashinfer_api import FlashInfer
from pagewood.engine.runner.cuda.step_arrays import StepArrays

_NO_NUMBER = -1
_MASS = float(1 << 40)  # the integer for probability 1; the sum of V such integers does not overflow 63 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """The sampling parameters of a step: facts about all rows for the host, and arrays on the device."""

    draws: bool
    """Whether any row is not greedy."""
    filters_top_k: bool
    filters_top_p: bool
    filters_min_p: bool
    filters_typical_p: bool
    temperatures: Tensor
    """[S] float32, 0 is greedy."""
    top_ks: Tensor
    """[S] int32, 0 is off."""
    top_ps: Tensor
    """[S] float32, 1 is off."""
    min_ps: Tensor
    """[S] float32, 0 is off."""
    typical_ps: Tensor
    """[S] float32, 1 is off."""
    seeds: Tensor
    """[S] int64."""
    positions: Tensor
    """[S] int32, position of each token that is drawn."""

    @classmethod
    def of(cls, sampling: SamplingArrays, step: StepArrays[Tensor]) -> Sampler:
        """Return the sampler of a batch from its parameters on the host, and its arrays on the device."""
        return cls(
            draws=bool((sampling.temperatures > 0).any()),
            filters_top_k=bool((sampling.top_ks > 0).any()),
            filters_top_p=bool((sampling.top_ps < 1).any()),
            filters_min_p=bool((sampling.min_ps > 0).any()),
            filters_typical_p=bool((sampling.typical_ps < 1).any()),
            temperatures=step.sampling["temperatures"].view(torch.float32),
            top_ks=step.sampling["top_ks"],
            top_ps=step.sampling["top_ps"].view(torch.float32),
            min_ps=step.sampling["min_ps"].view(torch.float32),
            typical_ps=step.sampling["typical_ps"].view(torch.float32),
            seeds=step.sampling["seeds"].view(torch.int64),
            positions=step.drawn_positions,
        )

    def tokens(self, filters: FlashInfer | None, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens, `[S] int64`, and the largest logit of each row, `[S]`; the row has a token if it is one.

        It is NaN if any of the row is, and minus infinity if all are; see `marked`.

        Args:
            filters: has the softmax and the filters; None: batch-invariant ones of our own.
            logits: `[S, V]`.
        """
        largest, best = logits.max(-1)  # the maximum of a row with a NaN is NaN
        if self.draws:
            drawn = _first_to_arrive(logits.is_cuda)(self._weights(filters, logits), self.seeds, self.positions)
            best = torch.where(self.temperatures > 0, drawn, best)
        return best, largest

    def log_probabilities(self, filters: FlashInfer | None, logits: Tensor) -> Tensor:
        """Return the logarithms of the probabilities with which tokens are drawn, `[S, V] float32`.

        Args:
            filters: see `tokens`.
            logits: `[S, V]`.
        """
        greedy = torch.zeros_like(logits, dtype=torch.float32).scatter_(1, logits.argmax(-1, keepdim=True), 1.0)
        if not self.draws:
            return greedy.log()
        weights = self._weights(filters, logits)
        weights = weights / weights.sum(-1, keepdim=True)
        return torch.where((self.temperatures > 0)[:, None], weights, greedy).log()

    def _weights(self, filters: FlashInfer | None, logits: Tensor) -> Tensor:
        """Return numbers in proportion to the probabilities of rows that are not greedy, `[S, V] float32`."""
        scaled, temperatures = logits.float(), torch.where(self.temperatures > 0, self.temperatures, 1.0)
        if filters is None:
            weights = self._kept((scaled / temperatures[:, None]).softmax(-1))
        else:
            weights = self._probabilities(filters, scaled, temperatures)
        return self._typical(weights) if self.filters_typical_p else weights

    def _kept(self, probs: Tensor) -> Tensor:
        """Return `probs` `[S, V] float32` with 0 where a filter drops a token, the same in every batch."""
        masses = (probs.double() * _MASS).long()
        if self.filters_top_k or self.filters_top_p:
            ordered = masses.sort(-1, descending=True).values
            if self.filters_top_k:
                last = (torch.where(self.top_ks > 0, self.top_ks, probs.shape[1]).clamp(max=probs.shape[1]) - 1).long()
                limits = ordered.gather(1, last[:, None])
                masses = torch.where(masses >= limits, masses, 0)
                ordered = torch.where(ordered >= limits, ordered, 0)
            if self.filters_top_p:
                ends = ordered.cumsum(-1)
                wanted = (ends[:, -1].double() * self.top_ps.double()).long()
                kept = (
                    (ends - ordered < wanted[:, None]).sum(-1).clamp(min=1)
                )  # tokens before which the sum is too small
                limits = ordered.gather(1, (kept - 1)[:, None])
                masses = torch.where((masses >= limits) | (self.top_ps >= 1)[:, None], masses, 0)
        if self.filters_min_p:
            limits = self.min_ps.double() * masses.amax(-1).double()
            masses = torch.where(masses.double() >= limits[:, None], masses, 0)
        return torch.where(masses > 0, probs, 0.0)

    def _probabilities(self, flashinfer: FlashInfer, logits: Tensor, temperatures: Tensor) -> Tensor:
        """Return the filtered probabilities, `[S, V] float32`; a filter that is off for a row does not change it."""
        probs = flashinfer.softmax(logits, temperatures)
        if self.filters_top_k:
            top_ks = torch.where(self.top_ks > 0, self.top_ks, logits.shape[1]).clamp(max=logits.shape[1])
            kept = flashinfer.top_k_renorm_probs(probs, top_ks.int(), is_deterministic=True)
            probs = torch.where((self.top_ks > 0)[:, None], kept, probs)
        if self.filters_top_p:
            kept = flashinfer.top_p_renorm_probs(probs, self.top_ps, is_deterministic=True)
            probs = torch.where((self.top_ps < 1)[:, None], kept, probs)
        if self.filters_min_p:
            limits = self.min_ps[:, None] * probs.amax(-1, keepdim=True)
            probs = torch.where(probs >= limits, probs, 0.0)
        return probs

    def _typical(self, weights: Tensor) -> Tensor:
        """Return `weights` `[S, V] float32` with 0 where a token is not locally typical, the same in every batch.

        Tokens are kept in the order of how near their surprisal is to the entropy, until their mass reaches
        `typical_ps`. Both are shifted by the logarithm of the row's sum, so weights need not be normalised.

        Source: Meister, Pimentel, Wiher and Cotterell, Locally typical sampling, 2022.
        """
        masses = (weights.double() * _MASS).long()
        surprisals = torch.where(masses > 0, -weights.double().log(), 0.0)
        total = masses.sum(-1, keepdim=True).double()
        mean = (masses * surprisals).long().sum(-1, keepdim=True).double() / total
        distances = torch.where(masses > 0, (surprisals - mean).abs(), torch.inf)
        ordered, places = distances.sort(-1)
        taken = masses.gather(1, places)
        is_needed = (taken.cumsum(-1) - taken).double() < total * self.typical_ps.double()[:, None]
        radius = ordered.gather(1, is_needed.sum(-1, keepdim=True).clamp(min=1) - 1)
        is_kept = ((distances <= radius) & (masses > 0)) | (self.typical_ps >= 1)[:, None]
        return torch.where(is_kept, weights, 0.0)


def is_broken(largest: Tensor) -> Tensor:
    """Return whether no token can be drawn from rows with these largest logits, `[S] bool`."""
    return ~(largest > -torch.inf)  # NaN too


def marked(tokens: Tensor, largest: Tensor) -> Tensor:
    """Return `tokens` `[S] int32`, with a negative number as in `core.result.EXCLUDED` where there is none.

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
