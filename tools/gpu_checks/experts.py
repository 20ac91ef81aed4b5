"""Checks of the grouped product of experts, in Triton, against products row by row."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import torch

from gpu_checks.host import Failed, Host, Skipped, difference
from pagewood.engine.runner.cuda.experts import grouped_by_row

_SIZES = ((128, 1536, 2048), (64, 2048, 1408), (8, 70, 100))
"""Experts, outputs, inputs: of Qwen3 30B-A3B to an expert, of DeepSeek V2 Lite from one, and some that fill no tile."""
_NUM_SLOTS = (1, 7, 300, 2500)


def check_experts(host: Host) -> str:
    """Grouped products of experts agree with products row by row, and do not depend on other rows."""
    if not host.is_gpu:
        raise Skipped("Triton comes only with torch for CUDA")
    from pagewood.engine.runner.cuda.kernels.grouped_triton import grouped

    torch.manual_seed(0)
    found: list[str] = []
    for count, outputs, inputs in _SIZES:
        for dtype in (torch.float16, torch.bfloat16):
            weight = (torch.randn(count, outputs, inputs, device=host.where) * inputs**-0.5).to(dtype)
            bias = torch.randn(count, outputs, device=host.where).to(dtype)
            for num_slots in _NUM_SLOTS:
                experts = torch.randint(count, (num_slots,), device=host.where, dtype=torch.int32).sort().values
                x = torch.randn(num_slots, inputs, device=host.where).to(dtype)
                mine = grouped(x, weight, bias, experts)
                theirs = torch.cat(
                    [
                        grouped_by_row(x[i : i + 100].float(), weight.float(), bias.float(), experts[i : i + 100])
                        for i in range(0, num_slots, 100)
                    ]
                )
                what = f"{dtype} {count} experts of {outputs} x {inputs}, {num_slots} rows"
                if problem := difference(mine, theirs.cpu(), str(dtype).removeprefix("torch.")):
                    found.append(f"{what}: {problem}")
                for row in (0, num_slots // 2, num_slots - 1):
                    alone = grouped(x[row : row + 1], weight, bias, experts[row : row + 1])
                    if not torch.equal(alone[0], mine[row]):
                        found.append(f"{what}: row {row} has other bits alone")
    if found:
        raise Failed("; ".join(found[:6]))
    return f"{len(_SIZES) * 2 * len(_NUM_SLOTS)} products agree"
