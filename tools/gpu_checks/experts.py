"""Checks of mixtures of experts: the kernels in Triton, and FlashInfer's fused ones, against plain torch."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch

from gpu_checks.host import TOLERANCE, Failed, Host, Skipped
from pagewood.engine.models.ops import ExpertMatrices
from pagewood.engine.models.parts.experts import RouterConfig
from pagewood.engine.models.parts.feed_forward import Activation
from pagewood.engine.models.scaled_codes import ScaledCodes
from pagewood.engine.models.torch_experts import TorchExperts
from pagewood.engine.models.torch_experts import choose as choose_in_torch
from pagewood.engine.models.torch_ops import TorchOps
from pagewood.engine.runner.cuda.kernels.experts_flashinfer import FusedKernels
from pagewood.engine.runner.cuda.kernels.flashinfer_compile import compile_experts

_SIZES = ((128, 768, 2048, 8), (64, 1408, 2048, 6), (8, 70, 104, 2))
"""Experts, size of one, hidden size, chosen ones: of Qwen3 30B-A3B, of DeepSeek V2 Lite, and some that fill no tile."""
_TENSORS = ("gate_up", "down", "gate_up_bias", "down_bias")
_NUM_TOKENS = (1, 7, 300, 2500)
_ROUTERS = (
    RouterConfig(num_experts=128, num_chosen=8, renormalises=True),
    RouterConfig(num_experts=6, num_chosen=2, scores_chosen_only=True),
    RouterConfig(num_experts=60, num_chosen=4, score="sigmoid", scores_chosen_only=True, factor=2.5),
    RouterConfig(num_experts=160, num_chosen=6, num_groups=8, num_chosen_groups=3, factor=16.0),
    RouterConfig(
        num_experts=256, num_chosen=8, score="sigmoid", has_choice_bias=True, num_groups=8, num_chosen_groups=4,
        best_of_group=2, renormalises=True, epsilon=1e-20, factor=2.5,
    ),
    RouterConfig(num_experts=12, num_chosen=3, score="sigmoid", has_choice_bias=True, renormalises=True, least_sum=1.9),
)  # fmt: skip


def check_experts(host: Host) -> str:
    """Experts and their choice agree with plain torch, and a token has the same bits alone and among others."""
    if not host.is_gpu:
        raise Skipped("Triton comes only with torch for CUDA")
    return f"{compare_experts(host.where, _SIZES, _NUM_TOKENS)}; {compare_choices(host.where, _NUM_TOKENS)}"


def compare_experts(where: torch.device, sizes: Sequence[tuple[int, int, int, int]], nums_tokens: Sequence[int]) -> str:
    """Compare mixtures of some sizes, see `_SIZES`, in steps of some numbers of tokens; return how many agree."""
    from pagewood.engine.runner.cuda.kernels.experts_triton import TritonExperts

    torch.manual_seed(0)
    found: list[str] = []
    count = 0
    second = torch.bfloat16 if where.type == "cuda" else torch.float16  # Triton's interpreter has no bfloat16
    kinds: tuple[tuple[Activation, bool, bool], ...] = (
        ("silu", False, False),
        ("clamped", True, False),
        ("gelu_tanh", False, True),
    )
    plain = [(*one, 0) for one in zip((torch.float16, second, torch.float16), kinds, strict=True)]
    in_codes = [(second, kinds[0], 128), (torch.float16, kinds[1], 32), (torch.float16, kinds[2], 1 << 20)]
    for (num_experts, size, width, num_chosen), (dtype, (activation, has_bias, weighs_inputs), block) in product(
        sizes, plain + in_codes
    ):
        matrices = mixture(where, dtype, num_experts, size, width, has_bias=has_bias)
        exact = widened(matrices)
        if block:
            matrices, exact = _in_codes(matrices, block)
        mine = TritonExperts(matrices, activation, weighs_inputs=weighs_inputs)
        theirs = TorchExperts(exact, activation, TorchOps(), weighs_inputs=weighs_inputs)
        for num_tokens in nums_tokens:
            count += 1
            x, chosen, shares = random_step(where, dtype, num_tokens, num_experts, width, num_chosen)
            result = mine(x, chosen, shares)
            expected = theirs(x.float(), chosen, shares)
            what = f"{dtype} {block} {activation} {num_experts} experts of {size} x {width}, {num_tokens} tokens"
            worst = float((result.float() - expected).abs().max())
            if not worst <= TOLERANCE[str(dtype).removeprefix("torch.")] * max(1.0, float(expected.abs().max())):
                found.append(f"{what}: differs by {worst:.3g}")
            for row in (0, num_tokens // 2, num_tokens - 1):
                one = slice(row, row + 1)
                if not torch.equal(mine(x[one], chosen[one], shares[one])[0], result[row]):
                    found.append(f"{what}: token {row} has other bits alone")
            if num_tokens != nums_tokens[1]:
                continue
            parts = [TritonExperts(one, activation, weighs_inputs=weighs_inputs) for one in halves(matrices)]
            total = sum(part(x, chosen, shares).float() for part in parts)
            worst = float((total - expected).abs().max())
            if not worst <= 2 * TOLERANCE[str(dtype).removeprefix("torch.")] * max(1.0, float(expected.abs().max())):
                found.append(f"{what}: on two ranks differs by {worst:.3g}")
    if found:
        raise Failed(f"{len(found)} differ: " + "; ".join(found[:6]))
    return f"{count} mixtures agree"


def check_fused_experts(host: Host) -> str:
    """FlashInfer's fused experts agree with plain torch, have the same bits again, and in a graph."""
    if host.is_slow:
        raise Skipped("its kernels are not compiled for an emulated GPU")
    torch.manual_seed(2)
    kernels = FusedKernels(host.flashinfer, partial(compile_experts, host.where))
    sizes = _SIZES[:2] if host.is_gpu else ((6, 40, 24, 2),)
    kinds: tuple[tuple[Activation, bool], ...] = (("silu", False), ("clamped", True))
    count = 0
    for (num_experts, size, width, num_chosen), (activation, has_bias) in product(sizes, kinds):
        matrices = mixture(host.where, torch.bfloat16, num_experts, size, width, has_bias=has_bias)
        mine = kernels.experts(matrices, activation, weighs_inputs=False)
        if mine is None:
            raise Failed("FlashInfer does not take them; the log says why")
        theirs = TorchExperts(widened(matrices), activation, TorchOps())
        for num_tokens in _NUM_TOKENS if host.is_gpu else (1, 9):
            count += 1
            x, chosen, shares = random_step(host.where, torch.bfloat16, num_tokens, num_experts, width, num_chosen)
            result, expected = mine(x, chosen, shares), theirs(x.float(), chosen, shares)
            what = f"{activation} {num_experts} experts of {size} x {width}, {num_tokens} tokens"
            worst = float((result.float() - expected).abs().max())
            if not worst <= TOLERANCE["bfloat16"] * max(1.0, float(expected.abs().max())):
                raise Failed(f"{what}: differs by {worst:.3g}")
            if not torch.equal(mine(x, chosen, shares), result):
                raise Failed(f"{what}: other bits the second time")
            if host.is_gpu:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    captured = mine(x, chosen, shares)
                graph.replay()
                if not torch.equal(captured, result):
                    raise Failed(f"{what}: other bits in a graph")
    return f"{count} mixtures agree"


def mixture(
    where: torch.device, dtype: torch.dtype, num_experts: int, size: int, width: int, *, has_bias: bool
) -> ExpertMatrices:
    """Return random experts."""

    def randn(*shape: int, scale: float) -> torch.Tensor:
        return (torch.randn(*shape, device=where) * scale).to(dtype)

    return ExpertMatrices(
        count=num_experts,
        gate_up=randn(num_experts * 2 * size, width, scale=width**-0.5),
        down=randn(num_experts * width, size, scale=size**-0.5),
        gate_up_bias=randn(num_experts * 2 * size, scale=0.3) if has_bias else None,
        down_bias=randn(num_experts * width, scale=0.3) if has_bias else None,
    )


def random_step(
    where: torch.device, dtype: torch.dtype, num_tokens: int, num_experts: int, width: int, num_chosen: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random tokens, their experts, of which one is chosen often, and their shares."""
    x, scores = torch.randn(num_tokens, width, device=where), torch.rand(num_tokens, num_experts, device=where)
    scores[:, 0] += 0.5
    shares, chosen = scores.topk(num_chosen)
    return x.to(dtype), chosen.int(), shares


def halves(matrices: ExpertMatrices) -> list[ExpertMatrices]:
    """Return the experts of two ranks, the second of which has one more if they are odd."""
    middle = matrices.count // 2

    def part(tensor: torch.Tensor | None, first: int, last: int) -> Any:
        if isinstance(tensor, ScaledCodes):
            return replace(tensor, codes=part(tensor.codes, first, last), scales=part(tensor.scales, first, last))
        return None if tensor is None else tensor.unflatten(0, (matrices.count, -1))[first:last].flatten(0, 1)

    return [
        ExpertMatrices(
            count=last - first,
            first=first,
            num_placed=matrices.count,
            **{name: part(getattr(matrices, name), first, last) for name in _TENSORS},
        )
        for first, last in ((0, middle), (middle, matrices.count))
    ]


def compare_choices(where: torch.device, nums_tokens: Sequence[int]) -> str:
    """Compare choices of experts by every kind of router, also between equal scores; return how many agree."""
    from pagewood.engine.runner.cuda.kernels.experts_triton import choose

    torch.manual_seed(1)
    for router, num_tokens in product(_ROUTERS, nums_tokens):
        logits = torch.randn(num_tokens, router.num_experts, device=where)
        logits[::2] = (logits[::2] * 2).round()  # many are equal
        bias = torch.randn(router.num_experts, device=where) if router.has_choice_bias else None
        if bias is not None:
            bias = bias.round()
        chosen, shares = choose(logits, router, bias)
        expected, expected_shares = choose_in_torch(logits, router, bias)
        same = (chosen == expected).all(1)
        if not same[::2].all() if bias is None else not same.float().mean() > 0.9:
            raise Failed(f"{router}: other experts of {num_tokens} tokens")
        if not torch.allclose(shares[same], expected_shares[same], rtol=1e-5, atol=1e-6):
            raise Failed(f"{router}: other shares of {num_tokens} tokens")
    return f"{len(_ROUTERS)} routers choose alike"


def _in_codes(matrices: ExpertMatrices, block: int) -> tuple[ExpertMatrices, ExpertMatrices]:
    """Return experts in codes with a scale for each block of each matrix, and the numbers that they stand for."""

    def coded(stacked: torch.Tensor, count: int) -> tuple[Any, torch.Tensor]:
        rows, columns = len(stacked) // count, stacked.shape[1]
        high, wide = min(block, rows), min(block, columns)
        grid = torch.rand(count, -(-rows // high), -(-columns // wide), device=stacked.device) * 0.01 + 0.001
        scales = grid.repeat_interleave(high, 1)[:, :rows].flatten(0, 1)
        every = scales.repeat_interleave(wide, 1)[:, :columns]
        codes = (stacked.float() / every).to(torch.float8_e4m3fn)
        return ScaledCodes(codes=codes, scales=scales, group=wide), codes.float() * every

    (gate_up, exact_gate_up), (down, exact_down) = (
        coded(matrices.gate_up, 2 * matrices.count), coded(matrices.down, matrices.count)
    )  # fmt: skip
    exact = replace(widened(matrices), gate_up=exact_gate_up, down=exact_down)
    return replace(matrices, gate_up=gate_up, down=down), exact


def widened(matrices: ExpertMatrices) -> ExpertMatrices:
    """Return the same experts in float32."""
    tensors = {name: getattr(matrices, name) for name in _TENSORS}
    return replace(matrices, **{name: None if one is None else one.float() for name, one in tensors.items()})
