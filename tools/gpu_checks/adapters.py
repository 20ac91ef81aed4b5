"""Checks of adapters: the kernels in Triton against plain torch."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch

from gpu_checks.experts import halves, mixture, random_step, widened
from gpu_checks.host import Failed, Host, Skipped, difference
from pagewood.engine.models.ops import ExpertMatrices, Projection
from pagewood.engine.models.parts.feed_forward import Activation
from pagewood.engine.models.torch_experts import TorchExperts
from pagewood.engine.models.torch_ops import TorchOps
from pagewood.engine.runner.cuda.adapters import AdaptedExperts, CUDAAdapters
from pagewood.engine.runner.cuda.low_rank import Site, TorchLowRank

_SIZES = (((4096, 1024, 1024), 4096, 64, 8), ((2048,), 5632, 16, 3), ((70, 40), 100, 32, 1))
"""Outputs of each module, inputs, the largest rank, slots; the last ones fill no tile."""
_NUM_ROWS = (1, 9, 300, 2500)
_MIXTURES = ((128, 768, 2048, 8, 16, 4), (6, 70, 104, 2, 32, 3))
"""Experts, size of one, hidden size, chosen ones, the largest rank, slots."""


def check_adapters(host: Host) -> str:
    """What adapters add agrees with plain torch, and a row has the same bits alone and among others."""
    if not host.is_gpu:
        raise Skipped("Triton comes only with torch for CUDA")
    return f"{compare_adapters(host.where, _SIZES, _NUM_ROWS)}; {compare_experts(host.where, _MIXTURES, _NUM_ROWS)}"


def compare_adapters(
    where: torch.device, sizes: Sequence[tuple[Sequence[int], int, int, int]], nums_rows: Sequence[int]
) -> str:
    """Compare projections of some sizes, see `_SIZES`, in steps of some numbers of rows; return how many agree."""
    from pagewood.engine.runner.cuda.kernels import adapters_triton

    torch.manual_seed(0)
    reference, found, count = TorchLowRank(), list[str](), 0
    second = torch.bfloat16 if where.type == "cuda" else torch.float32  # Triton's interpreter has no bfloat16
    for (outputs, inputs, rank, num_slots), dtype, num_rows in product(sizes, (torch.float16, second), nums_rows):
        count += 1
        total = sum(outputs)
        options = {"dtype": dtype, "device": where}
        site = Site(
            a=torch.randn(num_slots, len(outputs) * rank, inputs, **options) * inputs**-0.5,
            b=torch.randn(num_slots, total, rank, **options) * rank**-0.5,
            factors=torch.rand(num_slots, total, device=where),
            bias=torch.randn(num_slots, total, device=where),
            sizes=outputs,
            takes_tokens=False,
        )
        x, before = torch.randn(num_rows, inputs, **options), torch.randn(num_rows, total, **options)
        slots = torch.randint(0, num_slots + 1, (num_rows,), dtype=torch.int32, device=where)
        what = f"{dtype} {outputs} of {inputs}, rank {rank}, {num_slots} slots, {num_rows} rows"
        results: list[torch.Tensor] = []
        for kernels in (adapters_triton, reference):
            rows, out = kernels.arrange(slots, num_slots), before.clone()
            kernels.expand(kernels.shrink(x, site, rows), out, site, rows)
            results.append(out)
        differs = difference(results[0], results[1], str(dtype).removeprefix("torch."))
        if differs is not None:
            found.append(f"{what}: {differs}")
        alone = slots == num_slots
        if not torch.equal(results[0][alone], before[alone]):
            found.append(f"{what}: a row without an adapter is changed")
        for row in (0, num_rows // 2, num_rows - 1):
            one = slice(row, row + 1)
            rows, out = adapters_triton.arrange(slots[one], num_slots), before[one].clone()
            adapters_triton.expand(adapters_triton.shrink(x[one], site, rows), out, site, rows)
            exact = where.type == "cuda" or dtype == torch.float16  # numpy, which interprets, multiplies by shape
            if exact and not torch.equal(out[0], results[0][row]):
                found.append(f"{what}: row {row} has other bits alone")
    if found:
        raise Failed(f"{len(found)} differ: " + "; ".join(found[:6]))
    return f"{count} projections with adapters agree"


def compare_experts(
    where: torch.device, sizes: Sequence[tuple[int, int, int, int, int, int]], nums_tokens: Sequence[int]
) -> str:
    """Compare mixtures with adapters of some sizes, see `_MIXTURES`; return how many agree."""
    from pagewood.engine.runner.cuda.kernels.experts_triton import TritonExperts

    torch.manual_seed(1)
    second = torch.bfloat16 if where.type == "cuda" else torch.float16  # Triton's interpreter has no bfloat16
    kinds: tuple[tuple[torch.dtype, Activation, bool], ...] = (
        (torch.float16, "silu", False), (second, "clamped", True), (torch.float16, "gelu_tanh", False),
    )  # fmt: skip
    found: list[str] = []
    for (count, size, width, num_chosen, rank, num_slots), (dtype, activation, has_bias) in product(sizes, kinds):
        whole, weighs = mixture(where, dtype, count, size, width, has_bias=has_bias), activation == "gelu_tanh"
        for matrices, num_tokens in [*product([whole], nums_tokens), *product(halves(whole), nums_tokens[1:2])]:
            what = f"{dtype} {activation} {matrices.count} experts of {size} x {width}, {num_tokens} tokens"
            adapters, adapted, sites = _slots(where, matrices, rank, num_slots)
            ours = TritonExperts(matrices, activation, weighs_inputs=weighs, adapted=adapted)
            step = random_step(where, dtype, num_tokens, count, width, num_chosen)
            slots = torch.arange(num_tokens, 0, -1, device=where) % (num_slots + 1)
            adapters.begin(slots, 1)  # each token is the only one of a row, whose number is that of its slot
            result = ours(*step)
            for slot in range(num_slots + 1):
                own = slots == slot
                if not own.any():
                    continue
                merged = _merged(matrices, sites, slot) if slot < num_slots - 1 else widened(matrices)
                theirs = TorchExperts(merged, activation, TorchOps(), weighs_inputs=weighs)
                x, chosen, shares = (one[own] for one in step)
                differs = difference(result[own], theirs(x.float(), chosen, shares), str(dtype).removeprefix("torch."))
                if differs is not None:
                    found.append(f"{what}, slot {slot}: {differs}")
            plain = TritonExperts(matrices, activation, weighs_inputs=weighs)(*step)
            if not torch.equal(result[slots >= num_slots - 1], plain[slots >= num_slots - 1]):
                found.append(f"{what}: a token without an adapter of experts has other bits")
            for row in {0, num_tokens // 2, num_tokens - 1}:
                one = slice(row, row + 1)
                adapters.begin(slots[one], 1)
                if not torch.equal(ours(*(each[one] for each in step))[0], result[row]):
                    found.append(f"{what}: token {row} has other bits alone")
    if found:
        raise Failed(f"{len(found)} differ: " + "; ".join(found[:6]))
    return f"{len(sizes) * len(kinds)} mixtures with adapters agree"


def _slots(
    where: torch.device, matrices: ExpertMatrices, rank: int, num_slots: int
) -> tuple[CUDAAdapters, AdaptedExperts, Sequence[Site]]:
    """Return random adapters, of which row i has slot i; the last one changes no expert, and row S has none."""
    from pagewood.engine.runner.cuda.kernels import adapters_triton

    device: Any = SimpleNamespace(torch_device=where)
    adapters = CUDAAdapters(
        num_slots=num_slots, max_rank=rank, max_expert_rank=rank, num_rows=num_slots, device=device,
        dtype=matrices.down.dtype, kernels=adapters_triton,
    )  # fmt: skip
    width, size = matrices.gate_up.shape[1], matrices.down.shape[1]
    gate_up = Projection(parts=[("gate", size), ("up", size)], inputs=width)
    down = Projection(parts=[("down", width)], inputs=size)
    count = matrices.count
    parts = replace(matrices, gate_up_parts=[gate_up] * count, down_parts=[down] * count)
    adapted = adapters.add_experts(parts)
    assert adapted is not None
    sites = [site for _, site in adapters.sites]
    for site in sites:
        site.a.normal_(std=site.a.shape[2] ** -0.5)
        site.b.normal_(std=rank**-0.5)
        site.factors.uniform_()
        site.bias.normal_()
    rows = torch.arange(num_slots, dtype=torch.int32, device=where)
    adapters.note_rows(rows.long(), rows, torch.zeros_like(rows))
    adapters.expert_slots[: num_slots - 1] = rows[:-1]
    return adapters, adapted, sites


def _merged(matrices: ExpertMatrices, sites: Sequence[Site], slot: int) -> ExpertMatrices:
    """Return experts with what a slot adds in their weights."""
    found: dict[str, torch.Tensor] = {}
    for name, site in zip(("gate_up", "down"), sites, strict=True):
        count, rank = matrices.count, site.b.shape[2]
        a, b, factors, shift = (
            one[slot * count :][:count].float() for one in (site.a, site.b, site.factors, site.bias)
        )
        own = zip(b.split(list(site.sizes), 1), a.split(rank, 1), strict=True)
        added = torch.cat([left @ right for left, right in own], 1)
        plain, bias = getattr(matrices, name).float(), getattr(matrices, f"{name}_bias")
        found[name] = plain * factors.flatten()[:, None] + added.flatten(0, 1)
        bias = 0.0 if bias is None else bias.float()
        found[f"{name}_bias"] = bias * factors.flatten() + shift.flatten()
    return replace(matrices, **found)
