"""Routing and experts on a CPU: against plain torch, and a token's bits against its neighbours, in every form."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagewood.engine.api import ActivationFormat
from pagewood.engine.models.expert_map import ExpertPlacement
from pagewood.engine.models.ops import ExpertMatrices
from pagewood.engine.models.parts.experts import RouterConfig
from pagewood.engine.models.torch_experts import TorchExperts, TorchPlacing, choose
from pagewood.engine.models.torch_ops import TorchOps
from pagewood.engine.runner.cpu.compiled.experts import route
from pagewood.engine.runner.cpu.compiled.products.pair_dot import pair_levels
from pagewood.engine.runner.cpu.compiled.products.weight_kind import WeightKind
from pagewood.engine.runner.cpu.compiled.step import StepKernel
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.cpu.program.experts import group
from pagewood.engine.runner.cpu.program.ops import CPUOps
from pagewood.engine.runner.cpu.program.tape import Buffer
from pagewood.engine.runner.cpu.weights.packer import Packer
from pagewood.engine.weights.matrix_forms import Float32, Weight, rows_of, to_bfloat16
from stand_ins.tapes import write_down
from weight_makers import MAKERS

NUM_EXPERTS, NUM_CHOSEN, SIZE, WIDTH = 5, 2, 64, 64
FORMS: dict[str, WeightKind | None] = {"float32": None} | {kind.name.lower(): kind for kind in MAKERS}
USUAL = ("float32", "bfloat16", "int8", "int4")
"""Forms whose kernels are compiled in every run of the tests."""


@functools.cache
def step_kernel(variants: frozenset[Any], units: tuple[Any, ...]) -> StepKernel:
    return warm_up(16, packed=variants, others=units)


def compute(operation: Any, ops: CPUOps, *inputs: Tensor, num_threads: int = 2) -> Tensor:
    kernel = step_kernel(frozenset(ops.variants), tuple(ops.units))
    return torch.from_numpy(
        write_down(operation, *(x.numpy() for x in inputs), kernel=kernel, num_threads=num_threads)().copy()
    )


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def matrices(make: Any, *, size: int = SIZE, width: int = WIDTH, count: int = NUM_EXPERTS) -> list[Weight]:
    return [
        make(randn(count * rows, inputs, seed=seed).numpy() * 0.2)
        for seed, rows, inputs in ((1, 2 * size, width), (2, width, size))
    ]


def routes(num_rows: int, *, count: int = NUM_EXPERTS, num_chosen: int = NUM_CHOSEN) -> tuple[Tensor, Tensor]:
    logits = randn(num_rows, count, seed=3) * 2
    chosen, shares = choose(logits, RouterConfig(num_experts=count, num_chosen=num_chosen), None)
    return chosen, shares


def widened(weights: Sequence[Weight], count: int = NUM_EXPERTS) -> ExpertMatrices:
    gate_up, down = (torch.from_numpy(weight.dequantised()) for weight in weights)
    return ExpertMatrices(count=count, gate_up=gate_up, down=down)


def test_experts_of_float32_are_those_of_torch() -> None:
    """Sizes that panels do not divide, more rows than a run has, biases, and shares that multiply inputs."""
    for size, width, count in ((40, 24, 3), (32, 64, 4), (1, 5, 2)):
        own = matrices(lambda x: Float32(x), size=size, width=width, count=count)
        biases = {"gate_up_bias": randn(count * 2 * size, seed=5), "down_bias": randn(count * width, seed=6)}
        for num_rows in (1, 7, 300):
            x, (chosen, shares) = randn(num_rows, width), routes(num_rows, count=count)
            for has_bias, weighs_inputs in ((False, False), (True, True)):
                wide = widened(own, count)
                wide = replace(wide, **biases) if has_bias else wide
                ops = CPUOps()
                found = compute(
                    ops.experts(wide, "silu", weighs_inputs=weighs_inputs), ops, x, chosen, shares, num_threads=3
                )
                expected = TorchExperts(wide, "silu", TorchOps(), weighs_inputs=weighs_inputs)(x, chosen, shares)
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "form", [form if form in USUAL else pytest.param(form, marks=pytest.mark.slow) for form in FORMS]
)
def test_every_form_of_weights_computes_close_to_its_numbers(form: str) -> None:
    """With float32 activations to the last bits, and with those of eight bits to a few percent."""
    kind = FORMS[form]
    own = matrices(MAKERS[kind] if kind is not None else lambda x: Float32(x))
    x, (chosen, shares) = randn(40, WIDTH), routes(40)
    expected = TorchExperts(widened(own), "silu", TorchOps())(x, chosen, shares)
    limits: dict[ActivationFormat, float] = {"float32": 1e-5, "auto": 0.05}
    for activations, limit in limits.items():
        ops = CPUOps(Packer("auto", activations=activations))
        given = ExpertMatrices(count=NUM_EXPERTS, gate_up=own[0], down=own[1])  # pyright: ignore[reportArgumentType]
        found = compute(ops.experts(given, "silu"), ops, x, chosen, shares)
        error = torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected)
        assert error < limit, (activations, float(error))


@pytest.mark.parametrize(
    ("form", "size"),
    [
        *((form, size) for form in ("float32", "bfloat16", "int8", "int4") for size in (SIZE, 48)),
        *(pytest.param(form, SIZE, marks=pytest.mark.slow) for form in FORMS if form not in USUAL),
    ],
)
def test_a_tokens_bits_do_not_depend_on_the_other_tokens(form: str, size: int) -> None:
    """Alone, in pairs and among 300, on one thread or three; experts of 48 share panels."""
    make = MAKERS[kind] if (kind := FORMS[form]) is not None else lambda x: Float32(x)
    if form in ("int8", "int4") and size % 32:
        size = 96
    own = matrices(make, size=size)
    ops = CPUOps(Packer("auto", activations="bfloat16" if form == "bfloat16" and len(pair_levels()) else "auto"))
    given = ExpertMatrices(count=NUM_EXPERTS, gate_up=own[0], down=own[1])  # pyright: ignore[reportArgumentType]
    experts = ops.experts(given, "silu")
    x, (chosen, shares) = randn(300, WIDTH), routes(300)
    together = compute(experts, ops, x, chosen, shares, num_threads=3)
    for first, last in ((0, 1), (1, 3), (3, 12), (12, 60), (60, 300)):
        rows = slice(first, last)
        alone = compute(experts, ops, x[rows], chosen[rows].clone(), shares[rows].clone(), num_threads=1)
        assert torch.equal(alone, together[rows])


ROUTERS = {
    "softmax": RouterConfig(num_experts=12, num_chosen=3),
    "renormalised": RouterConfig(num_experts=12, num_chosen=3, renormalises=True, factor=2.5),
    "of-chosen": RouterConfig(num_experts=12, num_chosen=3, scores_chosen_only=True),
    "sigmoid-of-chosen": RouterConfig(num_experts=12, num_chosen=1, score="sigmoid", scores_chosen_only=True),
    "sigmoid-biased": RouterConfig(
        num_experts=12, num_chosen=3, score="sigmoid", has_choice_bias=True, renormalises=True, epsilon=1e-20,
        factor=1.8,
    ),
    "groups-of-two": RouterConfig(
        num_experts=12, num_chosen=4, score="sigmoid", has_choice_bias=True, num_groups=4, num_chosen_groups=2,
        best_of_group=2, renormalises=True, epsilon=1e-20,
    ),
    "groups-of-best": RouterConfig(num_experts=12, num_chosen=2, num_groups=3, num_chosen_groups=1),
    "least-sum": RouterConfig(num_experts=12, num_chosen=2, has_choice_bias=True, renormalises=True, least_sum=0.9),
    "all": RouterConfig(num_experts=12, num_chosen=12),
}  # fmt: skip


@pytest.mark.parametrize("name", ROUTERS)
def test_choices_are_those_of_torch(name: str) -> None:
    router, ops = ROUTERS[name], CPUOps()
    ops.units[route.ROUTING] = None
    logits, bias = randn(200, 12) * 2, randn(12, seed=1) if router.has_choice_bias else None
    expected = choose(logits, router, bias)
    found = [compute(lambda x, i=i: ops.choose(x, router, bias)[i], ops, logits) for i in range(2)]
    assert torch.equal(found[0].view(torch.int32), expected[0])
    torch.testing.assert_close(found[1], expected[1], atol=1e-6, rtol=1e-5)
    if bias is not None:  # a router that picks by the unbiased scores is another one
        assert not torch.equal(choose(logits, router, None)[0], expected[0])


def test_shares_are_multiplied_by_the_factors_of_their_experts() -> None:
    router, ops = RouterConfig(num_experts=12, num_chosen=3), CPUOps()
    ops.units[route.ROUTING] = None
    logits, factors = randn(200, 12) * 2, randn(12, seed=1)
    chosen, shares = choose(logits, router, None)

    def scaled(logits: Buffer) -> Buffer:
        own, own_shares = ops.choose(logits, router, None)
        return ops.scale_chosen(own_shares, own, factors)

    torch.testing.assert_close(compute(scaled, ops, logits), shares * factors[chosen.long()], atol=1e-6, rtol=1e-5)


def test_of_equal_experts_the_first_is_chosen_and_nan_chooses_some() -> None:
    router, ops = RouterConfig(num_experts=12, num_chosen=3), CPUOps()
    ops.units[route.ROUTING] = None
    logits = torch.zeros(3, 12)
    logits[1, 4:] = 1.0
    logits[2] = torch.nan
    found = compute(lambda x: ops.choose(x, router, None)[0], ops, logits).view(torch.int32)
    assert found[:2].tolist() == [[0, 1, 2], [4, 5, 6]]
    assert len(set(found[2].tolist())) == 3
    assert all(0 <= expert < 12 for expert in found[2].tolist())


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 400), st.integers(1, 4), st.integers(0, 50))
def test_every_pair_of_a_token_and_an_expert_has_a_slot_in_a_run_of_its_expert(
    num_rows: int, num_chosen: int, seed: int
) -> None:
    count, ops = 4, CPUOps()
    ops.units[route.ROUTING] = None
    generator = np.random.default_rng(seed)
    chosen = np.stack([generator.permutation(count)[:num_chosen] for _ in range(num_rows)]).astype(np.int32)
    chosen[: num_rows // 2] = np.arange(num_chosen)  # some experts have many rows, others few or none

    own = {
        name: compute(lambda x, name=name: getattr(group(x, count), name), ops, torch.from_numpy(chosen))
        .view(torch.int32)
        .numpy()
        for name in ("places", "slots", "runs")
    }
    places, slots, runs = own["places"].flatten(), own["slots"].flatten(), own["runs"].reshape(-1, 3)
    assert (places[slots] == np.arange(num_rows * num_chosen)).all()
    covered = 0
    for expert, first, num in runs.tolist():
        if covered == len(places):
            break  # behind the last run
        assert first == covered
        assert 1 <= num <= route.RUN
        assert (chosen.flatten()[places[first : first + num]] == expert).all()
        assert (np.diff(places[first : first + num]) > 0).all()  # in the order of tokens
        covered += num
    assert covered == len(places)


def test_results_are_added_in_the_order_of_the_choice() -> None:
    """Three results whose sum depends on the order, by expert id another one than by rank."""
    ops = CPUOps()
    ops.units[route.ROUTING] = None
    bias = torch.tensor([1.0, 1e8, -1e8])[:, None].expand(3, WIDTH).flatten()
    own = ExpertMatrices(
        count=3, gate_up=torch.zeros(6 * SIZE, WIDTH), down=torch.zeros(3 * WIDTH, SIZE), down_bias=bias.contiguous()
    )
    experts, x, shares = ops.experts(own, "silu"), torch.zeros(2, WIDTH), torch.ones(2, 3)
    chosen = torch.tensor([[1, 2, 0], [0, 1, 2]], dtype=torch.int32)
    found = compute(experts, ops, x, chosen, shares)
    assert found[:, 0].tolist() == [1.0, 0.0]
    assert torch.equal(found, TorchExperts(own, "silu", TorchOps())(x, chosen, shares))


def test_decoding_reads_the_chosen_experts_only() -> None:
    """The others are NaN, and a token that does not choose them is not touched by them."""
    own = widened(matrices(lambda x: Float32(x)))
    own.gate_up.view(NUM_EXPERTS, -1)[[1, 3]] = torch.nan
    own.down.view(NUM_EXPERTS, -1)[[1, 3]] = torch.nan
    ops = CPUOps()
    chosen = torch.tensor([[4, 2]], dtype=torch.int32)
    assert compute(ops.experts(own, "silu"), ops, randn(1, WIDTH), chosen, torch.ones(1, 2)).isfinite().all()


@pytest.mark.parametrize("gated", [False, True])
def test_shared_experts_are_added(gated: bool) -> None:
    ops = CPUOps()
    ops.units[route.ROUTING] = None
    x, y, gate = randn(9, 24), randn(9, 24, seed=1), randn(9, 1, seed=2)
    found = compute(lambda x, y, gate: ops.add_gated(x, y, gate if gated else None), ops, x.clone(), y, gate)
    torch.testing.assert_close(found, TorchOps().add_gated(x, y, gate if gated else None))


def test_bfloat16_experts_of_one_row_and_of_many_are_the_same() -> None:
    """One row takes two panels at a time where both belong to its expert."""
    for width in (64, 48):
        own = matrices(to_bfloat16, size=width, width=64)
        ops = CPUOps(Packer("auto", activations="float32"))
        given = ExpertMatrices(count=NUM_EXPERTS, gate_up=own[0], down=own[1])  # pyright: ignore[reportArgumentType]
        experts, x = ops.experts(given, "silu"), randn(30, 64)
        chosen, shares = routes(30)
        chosen[:] = torch.tensor([0, 4], dtype=torch.int32)
        together = compute(experts, ops, x, chosen, shares)
        alone = torch.cat([compute(experts, ops, x[i : i + 1], chosen[:1], shares[i : i + 1]) for i in range(30)])
        assert torch.equal(alone, together)


@pytest.mark.parametrize("form", ["float32", "int8", "int4"])
def test_parts_of_ranks_add_up_to_all_experts(form: str) -> None:
    """Three ranks of five experts, of which the last has one without rows; each row alone has the same bits."""
    own = matrices(MAKERS[kind] if (kind := FORMS[form]) is not None else lambda x: Float32(x))
    x, (chosen, shares) = randn(40, WIDTH), routes(40)
    chosen = torch.where(chosen == 4, 0, chosen)
    ops = CPUOps(Packer("auto"))
    given = ExpertMatrices(count=NUM_EXPERTS, gate_up=own[0], down=own[1])  # pyright: ignore[reportArgumentType]
    whole = compute(ops.experts(given, "silu"), ops, x, chosen, shares)
    total = torch.zeros_like(whole)
    for first, last in ((0, 2), (2, 4), (4, 5)):
        gate_up, down = (
            rows_of(weight, slice(first * size, last * size))
            for weight, size in zip(own, (2 * SIZE, WIDTH), strict=True)
        )
        ops = CPUOps(Packer("auto"))
        own_part: Any = {"gate_up": gate_up, "down": down}
        part = ops.experts(
            ExpertMatrices(count=last - first, first=first, num_placed=NUM_EXPERTS, counted_as=7, **own_part), "silu"
        )
        found = compute(part, ops, x, chosen, shares, num_threads=3)
        is_here = ((chosen >= first) & (chosen < last)).any(1)
        assert found[is_here].any() if first < 4 else not is_here.any()
        assert not found[~is_here].any()
        assert ops.expert_rows[7].tolist() == torch.bincount(chosen.flatten(), minlength=NUM_EXPERTS).tolist()
        alone = [compute(part, ops, x[i : i + 1], chosen[i : i + 1], shares[i : i + 1]) for i in range(4)]
        assert torch.equal(torch.cat(alone), found[:4])
        total += found
    torch.testing.assert_close(total, whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_copies", [1, 3])
def test_placed_experts_are_those_of_torch(num_copies: int) -> None:
    ranks = ((2,), (0,), (0, 1, 2)[:num_copies], (1,), (0, 2)[:num_copies])
    placement, ops = ExpertPlacement(num_ranks=3, ranks=ranks), CPUOps()
    ops.units[route.ROUTING] = None
    router, logits = RouterConfig(num_experts=NUM_EXPERTS, num_chosen=3), randn(200, NUM_EXPERTS)
    chosen, _ = choose(logits, router, None)
    place = ops.placing(placement, near=logits)
    found = compute(lambda x: place(ops.choose(x, router, None)[0], x), ops, logits).view(torch.int32)
    assert torch.equal(found, TorchPlacing(placement, logits.device)(chosen, logits))
