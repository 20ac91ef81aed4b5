"""Mixtures of experts by FlashInfer's fused kernels, for `EngineConfig.expert_kernels`.

Legend: T tokens, N experts, K chosen experts of a token, E hidden_size, I size of an expert.
Source: csrc/fused_moe/cutlass_backend of flashinfer-python 0.7.2.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pagewood.engine.models.ops import CLAMP_ALPHA, CLAMP_LIMIT, ChosenExperts, ExpertMatrices
from pagewood.engine.models.parts.feed_forward import Activation
from pagewood.engine.models.scaled_codes import ScaledCodes
from pagewood.engine.runner.cuda.kernels.flashinfer_api import FlashInfer

_log = logging.getLogger(__name__)

_ALIGNMENT = 8
"""Rows of matrices are multiples of the 128 bits that a kernel loads at once."""
_ACTIVATIONS = ("silu", "clamped")
Fused = Callable[..., list[Tensor] | Tensor]
"""`FlashInfer.cutlass_fused_moe`."""


class FusedExperts:
    """`models.ops.ChosenExperts`. A token's bits may depend on the size of its step, by which tiles are chosen.

    Invariant: a token's results are added in the order of `chosen`; FlashInfer's faster sum has no order.
    """

    __slots__ = ("_down", "_down_bias", "_fused", "_gate_up", "_gate_up_bias", "_limits")

    def __init__(self, matrices: ExpertMatrices, activation: Activation, fused: Fused) -> None:
        """Take `matrices`, for which `refusal` has no reason; `fused` is FlashInfer's function."""
        count, width, size = matrices.count, matrices.gate_up.shape[1], matrices.down.shape[1]
        self._fused = fused
        self._gate_up = _gate_last(matrices.gate_up, count, size, width)
        self._down = matrices.down.view(count, width, size)
        self._gate_up_bias = self._down_bias = None
        if matrices.gate_up_bias is not None:  # FlashInfer wants both, but one rank has the second
            self._gate_up_bias = _gate_last(matrices.gate_up_bias, count, size)
            zeros = matrices.gate_up_bias.new_zeros(count * width)
            self._down_bias = (zeros if matrices.down_bias is None else matrices.down_bias).view(count, width)
        self._limits: Mapping[str, Tensor] = {}
        if activation == "clamped":
            numbers = {"swiglu_alpha": CLAMP_ALPHA, "swiglu_beta": 1.0, "swiglu_limit": CLAMP_LIMIT}
            where = matrices.down.device
            self._limits = {name: torch.full((count,), number, device=where) for name, number in numbers.items()}

    def __call__(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """Return `[T, E]`."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if len(x):
            self._fused(
                x.contiguous(), chosen.contiguous(), shares.contiguous(), self._gate_up, self._down, x.dtype, None,
                fc1_expert_biases=self._gate_up_bias, fc2_expert_biases=self._down_bias, **self._limits, output=out,
                use_fused_finalize=False,
            )  # fmt: skip
        return out


class FusedKernels:
    """Makes `FusedExperts` of the mixtures that FlashInfer takes; of others, a line in the log says why it does not.

    Invariant: kernels are compiled once, before the first mixture is made, and none is made if that fails.
    """

    __slots__ = ("_compile", "_failure", "_fused", "_is_tried", "_reasons")

    def __init__(self, flashinfer: FlashInfer, compile_fused: Callable[[], None]) -> None:
        """Use `flashinfer`, the module or an object with the same functions; `compile_fused` compiles its kernels.

        Args:
            flashinfer: has the function, unless its version lacks it.
            compile_fused: raises an exception if the kernels cannot be compiled here.
        """
        self._fused: Fused | None = getattr(flashinfer, "cutlass_fused_moe", None)
        self._compile = compile_fused
        self._is_tried = False  # written by: _prepared
        self._failure: str | None = None  # written by: _prepared
        self._reasons: set[str] = set()  # written by: experts
        """What the log says already."""

    def experts(
        self, matrices: ExpertMatrices, activation: Activation, *, weighs_inputs: bool
    ) -> ChosenExperts[Tensor] | None:
        """Return the experts; None: other kernels must compute them."""
        reason = refusal(matrices, activation, weighs_inputs=weighs_inputs)
        if reason is None and (fused := self._prepared()) is not None:
            return FusedExperts(matrices, activation, fused)
        reason = reason or self._failure or ""
        if reason not in self._reasons:
            self._reasons.add(reason)
            _log.warning("experts are computed by kernels of Pagewood, not by FlashInfer's fused ones: %s", reason)
        return None

    def _prepared(self) -> Fused | None:
        """Return FlashInfer's function with its kernels compiled; None: there is none."""
        if not self._is_tried:
            self._is_tried = True
            self._failure = self._lack()
            try:
                if self._failure is None:
                    self._compile()
            except (RuntimeError, ValueError, ImportError, AttributeError, OSError) as error:  # a compiler lacks much
                self._failure = f"they cannot be compiled here: {error}"
        return None if self._failure else self._fused

    def _lack(self) -> str | None:
        """Return what this version of FlashInfer lacks; None: nothing."""
        if self._fused is None:
            return "FlashInfer has no cutlass_fused_moe"
        wanted = inspect.signature(FlashInfer.cutlass_fused_moe).parameters.keys() - {"self"}
        lacking = sorted(wanted - inspect.signature(self._fused).parameters.keys())
        return f"FlashInfer's cutlass_fused_moe has no {', '.join(lacking)}" if lacking else None


def refusal(matrices: ExpertMatrices, activation: Activation, *, weighs_inputs: bool) -> str | None:
    """Return why FlashInfer does not compute a mixture; None if it does."""
    sizes = matrices.gate_up.shape[1], matrices.down.shape[1]
    if ScaledCodes in map(type, (matrices.gate_up, matrices.down)):
        return "experts must be of 16 bits, because its kernels for FP8 round activations to FP8 too"
    if activation not in _ACTIVATIONS:
        return f"the activation of experts must be {' or '.join(_ACTIVATIONS)}, got {activation}"
    if weighs_inputs:
        return "the shares of experts must multiply results, but those of this model multiply inputs"
    if matrices.is_part:
        return "all experts must be on this rank, but ranks have experts of their own"
    if any(size % _ALIGNMENT for size in sizes):
        return f"sizes of experts must be multiples of {_ALIGNMENT}, got {sizes[0]} and {sizes[1]}"
    return None


def _gate_last(tensor: Tensor, count: int, size: int, *widths: int) -> Tensor:
    """Return `[N, 2I, ...]` of `[N * 2I, ...]` with the gate of each expert behind its other projection."""
    return tensor.view(count, 2, size, *widths).flip(1).view(count, 2 * size, *widths)
