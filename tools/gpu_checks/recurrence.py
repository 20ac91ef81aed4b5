"""Checks of recurrent layers: the kernels in Triton against plain torch, and against themselves in parts."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
_POSITIONS = 0, 32, 7, 15
"""Where each grant begins: at a border of blocks, or in a block, whose other tokens its row has."""
_SAVES = {14: 6, 30: 7, 43: 8}
"""Tokens behind which a copy is kept, at borders, and its place."""
_NUM_DRAFTS = 3
"""Tokens behind those of a part that are rejected."""

_Run = Callable[[RecurrentKernels, Tensor, Tensor, Tensor, StepStates], Tensor]
"""(kernels, tokens, states, rings of rows, step) -> results of these tokens."""


def check_recurrence(host: Host) -> str:
    """Convolutions and recurrences agree with plain torch, and a token has the same bits in any step."""
    if not host.is_gpu:
        raise Skipped("Triton comes only with torch for CUDA")
    return compare_recurrence(host.where, CONVOLUTIONS, HEADS) + _times(host.where)


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

    num_tokens, found = sum(_COUNTS), list[str]()
    cases = list[tuple[str, tuple[int, ...], tuple[int, int], int, int, torch.dtype, _Run]]()
    second = torch.bfloat16 if where.type == "cuda" else torch.float32  # Triton's interpreter has no bfloat16
    for dtype, block in ((torch.float16, 16), (second, 4)):
        for channels, width in convolutions:
            own = Convolution(weight=normal(width, channels), bias=normal(channels), activates=width == 4)
            x = normal(num_tokens, channels + 70).to(dtype)
            run = partial(_convolved, x, own)
            what, ring = f"{dtype} {width} of {channels} channels", (width - 1 + _NUM_DRAFTS, channels)
            cases.append((what, (width - 1, channels), ring, block, width - 1, dtype, run))
        for count, num_key_heads, key_dim, value_dim, more in heads:
            has_channels = "decays_by_channel" in more
            own = RecurrentHeads(
                num_heads=count, num_key_heads=num_key_heads, key_dim=key_dim, value_dim=value_dim,
                rate=-normal(count).exp(), bias=normal(count * key_dim if has_channels else count),
                skip=None if more["corrects"] else normal(count), **more,
            )  # fmt: skip
            x = normal(num_tokens, 2 * own.key_size + own.value_size).to(dtype)
            gates = 3 * normal(num_tokens, count * own.corrects + len(own.bias))
            gates[2::9] *= 100  # nothing is left of a state, or all of it
            run, opened = partial(_recurred, x, gates, own, block), own.key_size + len(own.bias) + own.value_size
            what = f"{dtype} {count} heads of {key_dim} x {value_dim}"
            cases.append((what, (count, key_dim, value_dim), (2 * block, opened), block, 0, dtype, run))
    for what, shape, ring, block, num_before, dtype, run in cases:
        step = _step(where, list(enumerate(_COUNTS)), _SOURCES, _POSITIONS, _SAVES)
        before = normal(_NUM_PLACES + 1, *shape), normal(len(_COUNTS) + 1, *ring).half().float()
        memory, expected = ([one.clone() for one in before] for _ in range(2))
        everything, kept = torch.arange(num_tokens, device=where), partial(_kept, block, num_before)
        results = run(recurrence_triton, everything, *memory, step)
        exact = run(recurrence, everything, *expected, step)
        differs = difference(results, exact, str(dtype).removeprefix("torch."))
        if differs is not None:
            found.append(f"{what}: {differs}")
        for left, right in zip(kept(*memory), kept(*expected), strict=True):
            if not torch.allclose(left, right, atol=1e-4, rtol=1e-4):
                found.append(f"{what}: states differ by {(left - right).abs().max():.1e}")
        for size, drafts in ((1, 0), (4, 0), (21, 0), (1, _NUM_DRAFTS), (4, _NUM_DRAFTS)):
            parts, named = [one.clone() for one in before], f"in parts of {size} with {drafts} drafts"
            if not torch.equal(_in_parts(partial(run, recurrence_triton), *parts, block, size, drafts), results):
                found.append(f"{what}: other results {named}")
            if not all(map(torch.equal, kept(*parts, has_states=not drafts), kept(*memory, has_states=not drafts))):
                found.append(f"{what}: other states {named}")
    if found:
        raise Failed(f"{len(found)} differ: " + "; ".join(found[:6]))
    return f"{len(cases)} recurrent layers agree"


def _times(where: torch.device) -> str:
    """Return how long one layer of each kind takes for a long prompt, and for a decode step of 64 requests."""
    from pagewood.engine.runner.cuda.kernels import recurrence_triton

    found = list[str]()
    for count, num_key_heads, key_dim, value_dim, more in HEADS:
        num_decays = count * key_dim if "decays_by_channel" in more else count
        zeros = {"device": where}
        own = RecurrentHeads(
            num_heads=count, num_key_heads=num_key_heads, key_dim=key_dim, value_dim=value_dim,
            rate=-torch.ones(count, **zeros), bias=torch.zeros(num_decays, **zeros), **more,
        )  # fmt: skip
        states = torch.zeros(65, count, key_dim, value_dim, **zeros)
        opened = torch.zeros(65, 16, own.key_size + num_decays + own.value_size, **zeros)
        took = list[str]()
        for num_grants, size in ((1, 8192), (64, 1)):
            num_tokens = num_grants * size
            x = torch.randn(num_tokens, 2 * own.key_size + own.value_size, **zeros).bfloat16()
            gates = torch.randn(num_tokens, count * own.corrects + num_decays, **zeros)
            grants = [(number, size) for number in range(num_grants)]
            step = _step(where, grants, range(num_grants), [0 if size > 1 else 7] * num_grants, {}, per_row=8192)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for time in range(11):
                if time == 1:  # the first one compiles
                    begin.record()
                recurrence_triton.recur(x, gates, own, states, opened, 16, step)
            end.record()
            end.synchronize()
            took.append(f"{100 * begin.elapsed_time(end):.0f}")
        found.append(f"{count} heads of {key_dim} x {value_dim}: {' and '.join(took)}")
    return "; us for a layer, a prompt of 8,192 tokens and 64 decoded ones: " + ", ".join(found)


def _kept(block: int, num_before: int, states: Tensor, rings: Tensor, *, has_states: bool = True) -> list[Tensor]:
    """Return what the grants leave: states, or only the copies, and of each its open block or last inputs."""
    found = [states[:-1] if has_states else states[sorted(_SAVES.values())]]
    for number, (start, count) in enumerate(zip(_POSITIONS, _COUNTS, strict=True)):
        end = start + count
        first = end - num_before if num_before else end // block * block
        found.append(rings[number, [position % rings.shape[1] for position in range(first, end)]])
    return found


def _convolved(
    x: Tensor, own: Convolution, kernels: RecurrentKernels, tokens: Tensor, states: Tensor, rings: Tensor,
    step: StepStates,
) -> Tensor:  # fmt: skip
    return kernels.convolve(x[tokens], 30, own, states, rings, step)


def _recurred(
    x: Tensor, gates: Tensor, own: RecurrentHeads, block: int, kernels: RecurrentKernels, tokens: Tensor,
    states: Tensor, rings: Tensor, step: StepStates,
) -> Tensor:  # fmt: skip
    return kernels.recur(x[tokens], gates[tokens], own, states, rings, block, step)


def _step(
    where: torch.device, counts: Sequence[tuple[int, int]], sources: Sequence[int], positions: Sequence[int],
    saves: Mapping[int, int], *, per_row: int = 100,
) -> StepStates:  # fmt: skip
    """Return a step of grants, which have the rows and leave their states in the places of their numbers.

    Args:
        where: device.
        counts: number of each grant, and how many tokens it has.
        sources: the place that each reads.
        positions: the first of each.
        saves: tokens with a copy, and its place.
        per_row: `StepStates.tokens_per_row`.
    """
    options = {"dtype": torch.int32, "device": where}
    lengths = [count for _, count in counts]
    firsts = [number * per_row + start for (number, _), start in zip(counts, positions, strict=True)]
    places = [place for (number, _), source in zip(counts, sources, strict=True) for place in (source, number)]
    return StepStates(
        places=torch.tensor(places, **options),
        saves=torch.tensor([saves.get(token, -1) for token in range(sum(lengths))], **options),
        grants=torch.tensor([index for index, count in enumerate(lengths) for _ in range(count)], **options),
        offsets=torch.tensor([sum(lengths[:index]) for index in range(len(lengths) + 1)], **options),
        sources=torch.tensor(
            [first + i for first, n in zip(firsts, lengths, strict=True) for i in range(n)], **options
        ),
        tokens_per_row=per_row,
        longest=max(lengths),
    )


def _in_parts(
    run: Callable[[Tensor, Tensor, Tensor, StepStates], Tensor], states: Tensor, rings: Tensor, block: int, size: int,
    num_drafts: int,
) -> Tensor:  # fmt: skip
    """Return the results of the grants one after the other, in steps of `size` tokens; the last grants come first.

    Behind them are `num_drafts` others that are rejected. If there are any, all tokens but the first may be.
    """
    found: dict[int, Tensor] = {}
    for number in reversed(range(len(_COUNTS))):
        first, source, border = sum(_COUNTS[:number]), _SOURCES[number], _POSITIONS[number] // block * block
        for start in range(first, first + _COUNTS[number], size):
            count, position = min(size, first + _COUNTS[number] - start), _POSITIONS[number] + start - first
            saves = {token - start: place for token, place in _SAVES.items() if token < start + count}
            step = _step(states.device, [(number, count + num_drafts)], [source], [position], saves)
            if num_drafts:
                one = torch.ones_like(step.places[:1])
                step = replace(step, borders=border * one, certain=one)
            tokens = torch.arange(start, start + count + num_drafts, device=states.device)
            tokens[count:] = torch.arange(num_drafts, device=states.device) + 3 * (first == 0)
            found[start] = run(tokens, states, rings, step)[:count]
            source, border = number, (position + 1) // block * block
    return torch.cat([found[start] for start in sorted(found)])
