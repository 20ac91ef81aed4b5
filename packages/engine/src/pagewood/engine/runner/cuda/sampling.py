"""The next token of every sampled grant on a CUDA device: FlashInfer's filters, and a draw that no neighbour changes.

FlashInfer's own draws depend, for one seed, on the place of a row in the batch. So the token is drawn here, by the hash
of seed and position that the CPU's sampling uses (`uniform`); and the distribution is walked in whole numbers, whose
sum is the same in whatever order a device adds them. In batch-invariant mode the filters count in whole numbers, too,
because FlashInfer's choose their order of summation by the number of rows.

Legend: S sampled grants, V vocab_size.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagewood.engine.core.sampling import SamplingArrays
from pagewood.engine.runner.cuda.flashinfer_api import FlashInfer
from pagewood.engine.runner.cuda.step_arrays import StepArrays

_MASS = float(1 << 40)  # what probability one is as a whole number: V of them cannot overflow 63 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """How the rows of a step choose: what the host knows of all of them, and each row's numbers on the device."""

    draws: bool
    """Whether a row is not greedy."""
    filters_top_k: bool
    filters_top_p: bool
    filters_min_p: bool
    temperatures: Tensor
    """[S] float32, 0 is greedy."""
    top_ks: Tensor
    """[S] int32, 0 is off."""
    top_ps: Tensor
    """[S] float32, 1 is off."""
    min_ps: Tensor
    """[S] float32, 0 is off."""
    uniforms: Tensor
    """[S] float64 in [0, 1), what each token is drawn by."""

    @classmethod
    def of(cls, sampling: SamplingArrays, step: StepArrays[Tensor]) -> Sampler:
        """Return the sampler of a batch from its parameters on the host, and its arrays on the device."""
        return cls(
            draws=bool((sampling.temperatures > 0).any()),
            filters_top_k=bool((sampling.top_ks > 0).any()),
            filters_top_p=bool((sampling.top_ps < 1).any()),
            filters_min_p=bool((sampling.min_ps > 0).any()),
            temperatures=step.sampling["temperatures"].view(torch.float32),
            top_ks=step.sampling["top_ks"],
            top_ps=step.sampling["top_ps"].view(torch.float32),
            min_ps=step.sampling["min_ps"].view(torch.float32),
            uniforms=step.uniforms.view(torch.float64),
        )

    def tokens(self, filters: FlashInfer | None, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return `[S] int64`, the tokens that `logits` choose, and `[S] bool`, whether there is none: one is NaN.

        Args:
            filters: whose softmax and filters are used; None: batch-invariant ones.
            logits: `[S, V]`, what to choose by.
        """
        largest, best = logits.max(-1)  # a NaN is the largest of all
        if self.draws:
            scaled, temperatures = logits.float(), torch.where(self.temperatures > 0, self.temperatures, 1.0)
            if filters is None:
                masses = self._masses((scaled / temperatures[:, None]).softmax(-1))
            else:
                masses = _whole(self._probabilities(filters, scaled, temperatures))
            drawn = _draw(masses, self.uniforms)
            best = torch.where(self.temperatures > 0, drawn, best)
        return best, largest.isnan()

    def _masses(self, probs: Tensor) -> Tensor:
        """Return `[S, V] int64`: what the filters leave of `probs` `[S, V] float32`, in whole numbers."""
        masses = _whole(probs)
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
                kept = (ends - ordered < wanted[:, None]).sum(-1).clamp(min=1)  # all before which too little is kept
                limits = ordered.gather(1, (kept - 1)[:, None])
                masses = torch.where((masses >= limits) | (self.top_ps >= 1)[:, None], masses, 0)
        if self.filters_min_p:
            limits = self.min_ps.double() * masses.amax(-1).double()
            masses = torch.where(masses.double() >= limits[:, None], masses, 0)
        return masses

    def _probabilities(self, flashinfer: FlashInfer, logits: Tensor, temperatures: Tensor) -> Tensor:
        """Return `[S, V] float32`; a row that a filter is off for is not touched by it."""
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


def _whole(probs: Tensor) -> Tensor:
    """Return `[S, V] int64`: `probs` `[S, V] float32` as parts of `_MASS`."""
    return (probs.double() * _MASS).long()


def _draw(masses: Tensor, uniform: Tensor) -> Tensor:
    """Return `[S] int64`: where `uniform` `[S] float64`, in [0, 1), falls in `masses` `[S, V] int64` of each row."""
    ends = masses.cumsum(-1)
    wanted = (uniform * ends[:, -1].double()).long()
    return torch.searchsorted(ends, wanted[:, None], right=True)[:, 0].clamp(max=masses.shape[1] - 1)
