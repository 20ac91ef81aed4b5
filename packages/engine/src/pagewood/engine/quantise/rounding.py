"""Rounding of a matrix to codes with scales: number by number, or with feedback of errors.

Source: Frantar et al., GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers, 2022.
Legend: N outputs, K inputs, G groups of inputs of an output.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagewood.engine.quantise.scheme import Scheme
from pagewood.engine.weights.matrix_forms import quantise_int4, quantise_int8

_BLOCK = 32
"""Inputs whose errors are fed back one by one; inputs after a block get the errors of the whole block at once."""
_DAMPING = 0.01
"""Part of the mean of the Hessian's diagonal that is added to the diagonal, as in the paper."""
_MOST_DAMPING = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounded:
    """A matrix of codes: value = code * scale."""

    codes: Tensor
    """[N, K] int8"""
    scales: Tensor
    """[N, G], of the dtype in which they are stored"""

    def values(self) -> Tensor:
        """Return the matrix `[N, K]` as float32."""
        grouped = self.codes.float().view(*self.scales.shape, -1) * self.scales.float()[:, :, None]
        return grouped.view(self.codes.shape)


def fit_scales(weight: Tensor, scheme: Scheme, dtype: torch.dtype) -> Tensor:
    """Return scales `[N, G]` for `weight` `[N, K] float32`, rounded to `dtype`; codes are found afterwards.

    Raises:
        ValueError: not all numbers are finite.
    """
    if not bool(weight.isfinite().all()):
        raise ValueError(f"weights must be finite, got {int((~weight.isfinite()).sum())} numbers that are not")
    if scheme.format == "int4":
        scales = torch.from_numpy(quantise_int4(weight.numpy(), group=scheme.group(weight.shape[1])).scales)
    else:
        scales = torch.from_numpy(quantise_int8(weight.numpy()).scales)[:, None]
    stored = scales.to(dtype)
    stored[stored == 0] = 1.0  # numbers too small for a scale of this dtype: their codes are 0
    return stored


def round_to_nearest(weight: Tensor, scheme: Scheme, dtype: torch.dtype) -> Rounded:
    """Return `weight` `[N, K] float32`, each number rounded by itself, with scales of `dtype`.

    Raises:
        ValueError: see `fit_scales`.
    """
    scales = fit_scales(weight, scheme, dtype)
    ratios = weight.view(*scales.shape, -1) / scales.float()[:, :, None]
    return Rounded(codes=_codes(ratios, scheme).view(weight.shape), scales=scales)


def round_with_feedback(weight: Tensor, hessian: Tensor, scheme: Scheme, dtype: torch.dtype) -> Rounded:
    """Return `weight` rounded input by input; later inputs compensate the error of each input.

    Scales are those of `fit_scales`. Inputs that matter most come first, while most others are still free.

    Args:
        weight: `[N, K] float32`.
        hessian: `[K, K] float32`, the sum of x x' over the inputs x of calibration. An input that was always 0 is
            rounded by itself.
        scheme: of the codes.
        dtype: of the scales.

    Raises:
        ValueError: not all numbers are finite, or the Hessian has no inverse with any damping.
    """
    scales = fit_scales(weight, scheme, dtype)
    inputs = weight.shape[1]
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    factor = _factor(hessian[order][:, order])
    # Transposed, so that the numbers of an input lie side by side.
    rest = weight.T[order].contiguous()
    wide = scales.float().repeat_interleave(inputs // scales.shape[1], dim=1).T[order].contiguous()
    codes = torch.empty(rest.shape, dtype=torch.int8)
    for start in range(0, inputs, _BLOCK):
        end = min(start + _BLOCK, inputs)
        errors = torch.empty(end - start, len(weight))
        for at in range(start, end):
            code = _codes(rest[at] / wide[at], scheme)
            codes[at] = code
            torch.div(rest[at] - code * wide[at], factor[at, at], out=errors[at - start])
            rest[at + 1 : end].addr_(factor[at, at + 1 : end], errors[at - start], alpha=-1)
        rest[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1)
    in_place = torch.empty_like(codes)
    in_place[order] = codes
    return Rounded(codes=in_place.T.contiguous(), scales=scales)


def relative_error(weight: Tensor, rounded: Tensor, hessian: Tensor | None = None) -> float:
    """Return the norm of the error over the norm of `weight`; with `hessian`, the same for outputs with its inputs."""

    def squared(values: Tensor) -> float:
        return float((values * values).sum() if hessian is None else (values @ hessian * values).sum())

    return (max(squared(rounded - weight), 0.0) / max(squared(weight), 1e-30)) ** 0.5


def _codes(ratios: Tensor, scheme: Scheme) -> Tensor:
    return ratios.round().clamp(scheme.lowest, scheme.highest).to(torch.int8)


def _factor(hessian: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse of the damped Hessian.

    Raises:
        ValueError: it has none.
    """
    diagonal = hessian.diagonal()
    if not bool(hessian.isfinite().all()) or not bool((diagonal >= 0).all()):
        raise ValueError("inputs of calibration must be finite, got others")
    never = diagonal == 0
    mean = float(diagonal.mean())
    damping = _DAMPING
    while damping <= _MOST_DAMPING:
        damped = hessian.clone()
        damped.diagonal().add_(damping * mean)
        damped.diagonal()[never] = 1.0
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(failed):
                return upper
        damping *= 10
    raise ValueError(f"the Hessian must have an inverse with a damping of {_MOST_DAMPING}, got none")
