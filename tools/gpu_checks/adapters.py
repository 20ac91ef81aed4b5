"""Checks of adapters: the kernels in Triton against plain torch."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch

from gpu_checks.host import Failed, Host, Skipped, difference
from pagewood.engine.runner.cuda.adapters import Site, TorchLowRank

_SIZES = (((4096, 1024, 1024), 4096, 64, 8), ((2048,), 5632, 16, 3), ((70, 40), 100, 32, 1))
"""Outputs of each module, inputs, the largest rank, slots; the last ones fill no tile."""
_NUM_ROWS = (1, 9, 300, 2500)


def check_adapters(host: Host) -> str:
    """What adapters add agrees with plain torch, and a row has the same bits alone and among others."""
    if not host.is_gpu:
        raise Skipped("Triton comes only with torch for CUDA")
    return compare_adapters(host.where, _SIZES, _NUM_ROWS)


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
