"""Checks of recurrent layers: the kernels in Triton against plain torch, and against themselves in parts."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpu_checks.host import Failed, Host, Skipped, difference
from pagewood.engine.models.ops import Convolution, RecurrentHeads
from pagewood.engine.runner.cuda import recurrence
from pagewood.engine.runner.cuda.recurrence import RecurrentKernels, StepStates

CONVOLUTIONS = ((8192, 4), (2048, 3), (300, 4))
"""Channels, and tokens that it reads."""
_DELTA, _SPACE = {"corrects": True}, {"corrects": False, "values_first": True}
HEADS: Sequence[tuple[int, int, int, int, Mapping[str, Any]]] = (
    (32, 16, 128, 128, _DELTA),
    (30, 30, 96, 192, {**_DELTA, "most_strength": 2}),
    (48, 1, 128, 64, _SPACE),
    (32, 32, 128, 128, {**_DELTA, "decays_by_channel": True}),
)
"""Heads of values, of keys, elements of a key, of a value, and further fields of `RecurrentHeads`."""
_COUNTS = (5, 1, 37, 2)
"""Tokens of each grant: the first begins with zeros, the others at a state, the last two in place."""
_SOURCES, _NUM_PLACES = (-1, 5, 2, 3), 9
_SAVES = {3: 6, 20: 7, 42: 8}
"""Tokens behind which a copy is kept, and its place."""

_Run = Callable[[RecurrentKernels, slice, Tensor, StepStates], Tensor]
"""(kernels, tokens, states, step) -> results of these tokens."""


def check_recurrence(host: Host) -> str:
    """Convolutions and recurrences agree with plain torch, and a token has the same bits in any step."""
    if not host.is_gpu:
        raise Skipped("Triton comes only with torch for CUDA")
    return compare_recurrence(host.where, CONVOLUTIONS, HEADS)


def compare_recurrence(
    where: torch.device,
    convolutions: Sequence[tuple[int, int]],
    heads: Sequence[tuple[int, int, int, int, Mapping[str, Any]]],
) -> str:
    """Compare layers of some sizes, see `CONVOLUTIONS` and `HEADS`; return how many agree."""
    from pagewood.engine.runner.cuda.kernels import recurrence_triton

    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(where)

    num_tokens, found, cases = sum(_COUNTS), list[str](), list[tuple[str, tuple[int, ...], torch.dtype, _Run]]()
    second = torch.bfloat16 if where.type == "cuda" else torch.float32  # Triton's interpreter has no bfloat16
    for dtype in (torch.float16, second):
        for channels, width in convolutions:
            own = Convolution(weight=normal(width, channels), bias=normal(channels), activates=width == 4)
            x = normal(num_tokens, channels + 70).to(dtype)
            run = partial(_convolved, x, own)
            cases.append((f"{dtype} {width} of {channels} channels", (width - 1, channels), dtype, run))
        for count, num_key_heads, key_dim, value_dim, more in heads:
            has_channels = "decays_by_channel" in more
            own = RecurrentHeads(
                num_heads=count, num_key_heads=num_key_heads, key_dim=key_dim, value_dim=value_dim,
                rate=-normal(count).exp(), bias=normal(count * key_dim if has_channels else count),
                skip=None if more["corrects"] else normal(count), **more,
            )  # fmt: skip
            x = normal(num_tokens, 2 * own.key_size + own.value_size).to(dtype)
            gates = 3 * normal(num_tokens, count * own.corrects + len(own.bias))
            run = partial(_recurred, x, gates, own)
            cases.append((f"{dtype} {count} heads of {key_dim} x {value_dim}", (count, key_dim, value_dim), dtype, run))
    for what, shape, dtype, run in cases:
        before, step = normal(_NUM_PLACES + 1, *shape), _step(where, list(enumerate(_COUNTS)), _SOURCES, _SAVES)
        states, expected = before.clone(), before.clone()
        results = run(recurrence_triton, slice(None), states, step)
        exact = run(recurrence, slice(None), expected, step)
        differs = difference(results, exact, str(dtype).removeprefix("torch."))
        if differs is not None:
            found.append(f"{what}: {differs}")
        if not torch.allclose(states[:-1], expected[:-1], atol=1e-4, rtol=1e-4):
            found.append(f"{what}: states differ by {(states - expected)[:-1].abs().max():.1e}")
        for size in (1, 4):
            parts = before.clone()
            if not torch.equal(_in_parts(partial(run, recurrence_triton), parts, size), results):
                found.append(f"{what}: other results in parts of {size}")
            if not torch.equal(parts[:-1], states[:-1]):
                found.append(f"{what}: other states in parts of {size}")
    if found:
        raise Failed(f"{len(found)} differ: " + "; ".join(found[:6]))
    return f"{len(cases)} recurrent layers agree"


def _convolved(
    x: Tensor, own: Convolution, kernels: RecurrentKernels, tokens: slice, states: Tensor, step: StepStates
) -> Tensor:
    return kernels.convolve(x[tokens].clone(), 30, own, states, step)


def _recurred(
    x: Tensor, gates: Tensor, own: RecurrentHeads, kernels: RecurrentKernels, tokens: slice, states: Tensor,
    step: StepStates,
) -> Tensor:  # fmt: skip
    return kernels.recur(x[tokens].clone(), gates[tokens].clone(), own, states, step)


def _step(
    where: torch.device, counts: Sequence[tuple[int, int]], sources: Sequence[int], saves: Mapping[int, int]
) -> StepStates:
    """Return a step of grants, which leave their states in the places of their numbers.

    Args:
        where: device.
        counts: number of each grant, and how many tokens it has.
        sources: the place that each reads.
        saves: tokens with a copy, and its place.
    """
    options = {"dtype": torch.int32, "device": where}
    lengths = [count for _, count in counts]
    places = [place for (number, _), source in zip(counts, sources, strict=True) for place in (source, number)]
    return StepStates(
        places=torch.tensor(places, **options),
        saves=torch.tensor([saves.get(token, -1) for token in range(sum(lengths))], **options),
        grants=torch.tensor([index for index, count in enumerate(lengths) for _ in range(count)], **options),
        offsets=torch.tensor([sum(lengths[:index]) for index in range(len(lengths) + 1)], **options),
        longest=max(lengths),
    )


def _in_parts(run: Callable[[slice, Tensor, StepStates], Tensor], states: Tensor, size: int) -> Tensor:
    """Return the results of the grants one after the other, in steps of `size` tokens; the last grants come first."""
    found: dict[int, Tensor] = {}
    for number in reversed(range(len(_COUNTS))):
        first, source = sum(_COUNTS[:number]), _SOURCES[number]
        for start in range(first, first + _COUNTS[number], size):
            count = min(size, first + _COUNTS[number] - start)
            saves = {token - start: place for token, place in _SAVES.items()}
            step = _step(states.device, [(number, count)], [source], saves)
            found[start] = run(slice(start, start + count), states, step)
            source = number
    return torch.cat([found[start] for start in sorted(found)])
