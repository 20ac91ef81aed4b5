"""Adapters on the CPU against PEFT's own, in fp32, with tiny random weights; and what no batch may change."""

# pyright: basic
# torch and peft are typed in part only.

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch

from adapter_folders import EXPERTS, changeable, linear_names, write_adapter
from adapter_kinds import COMPARED, KINDS, LAYOUTS, TOKENS
from families.case import build
from families.registry import CASES
from pagewood.engine.adapters import modules as adapter_modules
from pagewood.engine.adapters import peft_folder
from pagewood.engine.adapters.peft_folder import read_adapter
from pagewood.engine.model_folder.adapter_modules import model_modules
from pagewood.engine.model_folder.load import load_model
from pagewood.engine.runner.cpu.compiled.adapters import ADAPTERS
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.cpu.program import adapters as program_adapters
from pagewood.engine.runner.cpu.program.adapters import CPUAdapters
from pagewood.engine.runner.cpu.program.ops import CPUOps
from pagewood.engine.runner.cpu.runner import CPURunner
from pagewood.engine.runner.cpu.weights.packer import Packer
from pagewood.engine.runner.storage import storage_for
from pagewood.kvpool.memory import allocate
from row_driver import MOST_ROWS, DrivenSequence, RowDriver
from seeded_faults import Edit, seed_fault, slow_ones

Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A model with slots for adapters on a CPU runner."""

    adapters: CPUAdapters
    runner: CPURunner
    driver: RowDriver
    folder: Path

    def load(self, *folders: Path) -> None:
        """Make the adapters of folders known by their places, from 0 on."""
        modules = model_modules(self.folder)
        for number, folder in enumerate(folders):
            packed = self.adapters.pack(read_adapter(folder, modules, max_rank=self.adapters.max_rank))
            _HELD.append(packed)
            self.adapters.keep(number, packed)

    def add(self, prompt: Sequence[int], slot: int, number: int | None = None, start: int = 0) -> DrivenSequence:
        """Return a sequence with an adapter from `start` on, by default the one whose number is that of the slot."""
        return self.driver.add(prompt, adapter=(slot, slot if number is None else number, start))

    def logits(self, work: Sequence[tuple[DrivenSequence, int]]) -> list[Float32]:
        """Return the logits of the next positions of each sequence."""
        batch = self.driver.batch(work)
        return np.split(self.runner.forward(batch), np.cumsum(batch.counts)[:-1])


_HELD: list[Any] = []
"""Adapters that an engine would refer to."""


def bench(folder: Path, *, packer: Packer | None = None, num_threads: int = 2, max_rank: int = 40) -> Bench:
    adapters = CPUAdapters(num_slots=3, max_rank=max_rank, num_rows=12)
    ops = CPUOps(packer, adapters=adapters)
    model = load_model(folder, ops)
    config = model.config
    layout = config.memory_layout(page_size=4, dtype="float32", order="HND")
    kernel = warm_up(layout, head_dims=config.head_dims, packed=ops.variants, others=tuple(ops.units))
    states = None if config.states is None else allocate(config.states, 2 * MOST_ROWS)
    runner = CPURunner(
        model, storage_for(layout, 400), kernel, max_rows=12, max_length=160, num_threads=num_threads,
        adapters=adapters, states=states,
    )  # fmt: skip
    driver = RowDriver(
        runner, num_pages=400, page_size=4, short_length=model.short_length, has_states=states is not None
    )
    return Bench(adapters=adapters, runner=runner, driver=driver, folder=folder)


@torch.inference_mode()
def logits_of(reference: Any) -> Float32:
    return reference(torch.tensor(TOKENS)[None]).logits[0].numpy()


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one in LAYOUTS else pytest.mark.slow) for one in COMPARED]
)
def test_every_family_computes_what_peft_does(name: str, tmp_path: Path) -> None:
    """Two rows with the adapter, one without between them; modules are all that can be changed."""
    reference = build(CASES[name], tmp_path)
    own = bench(tmp_path)
    modules = model_modules(tmp_path)
    known = changeable(name, reference, modules)
    changed = write_adapter(copy.deepcopy(reference), tmp_path / "a", r=4, lora_alpha=6, **known)
    own.load(tmp_path / "a")
    sequences = [own.add(TOKENS, slot, number) for slot, number in ((1, 0), (-1, -1), (1, 0))]
    first, base, last = own.logits([(one, 100) for one in sequences])
    own.runner.close()
    expected = logits_of(changed)
    np.testing.assert_allclose(first, expected, atol=1e-4, rtol=0)
    np.testing.assert_allclose(base, logits_of(reference), atol=1e-4, rtol=0)
    assert np.array_equal(first, last)
    assert np.abs(expected - logits_of(reference)).max() > 1e-2


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("llama")
    return build(CASES["llama-biases"], folder), folder


@pytest.fixture(scope="module")
def shared(llama: tuple[Any, Path]) -> Iterator[Bench]:
    own = bench(llama[1])
    yield own
    own.runner.close()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_computes_what_peft_does(kind: str, llama: tuple[Any, Path], tmp_path: Path) -> None:
    own = bench(llama[1], max_rank=128 if kind == "whole modules" else 40)
    fields = {"target_modules": linear_names(llama[0]), **KINDS[kind]}
    changed = write_adapter(copy.deepcopy(llama[0]), tmp_path, **fields)
    own.load(tmp_path)
    start = 20 if "alora_invocation_tokens" in fields else 0
    [logits] = own.logits([(own.add(TOKENS, 2, 0, start), 100)])
    own.runner.close()
    assert np.abs(logits[start:] - logits_of(llama[0])[start:]).max() > 1e-2
    np.testing.assert_allclose(logits, logits_of(changed), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["both ends", "tokens", "whole modules"])
def test_ends_that_share_a_table(kind: str, tmp_path: Path) -> None:
    """The embeddings of this family are multiplied, and rows that are replaced are those of the projection too."""
    reference = build(CASES["gemma3"], tmp_path / "model")
    own = bench(tmp_path / "model", max_rank=128 if kind == "whole modules" else 40)
    changed = write_adapter(copy.deepcopy(reference), tmp_path / "adapter", **KINDS[kind])
    own.load(tmp_path / "adapter")
    logits, base = own.logits([(own.add(TOKENS, slot, number), 100) for slot, number in ((2, 0), (-1, -1))])
    own.runner.close()
    np.testing.assert_allclose(logits, logits_of(changed), atol=1e-4, rtol=0)
    np.testing.assert_allclose(base, logits_of(reference), atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def folders(llama: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Adapters of different ranks and modules."""
    folder, names = tmp_path_factory.mktemp("adapters"), linear_names(llama[0])
    made = [
        {"r": 4, "target_modules": names}, {"r": 36, "target_modules": ["q_proj", "down_proj"]},
        {"r": 3, "target_modules": names, "use_dora": True},
    ]  # fmt: skip
    for number, fields in enumerate(made):
        write_adapter(copy.deepcopy(llama[0]), folder / str(number), seed=number, **fields)
    return [folder / str(number) for number in range(len(made))]


PACKERS = {
    "float32": Packer("float32"), "bfloat16": Packer("bfloat16"), "int8": Packer("int8"), "int4": Packer("int4"),
    "int8, widened": Packer("int8", activations="float32"),
}  # fmt: skip


@pytest.mark.parametrize("form", PACKERS)
def test_bits_do_not_depend_on_the_batch(form: str, llama: tuple[Any, Path], folders: list[Path]) -> None:
    """Each adapter alone in one chunk, then all beside each other in uneven chunks, with one thread and with two.

    Rows without an adapter, and those before the first position that it computes, have the bits of a model without.
    """
    alone: list[Float32] = []
    prompts = [TOKENS, TOKENS[::-1], TOKENS[5:40], TOKENS[:2] * 11]
    plain, before = (_without_adapters(llama[1], PACKERS[form], prompts[i]) for i in (3, 1))
    starts = (0, 23, 0, 0)
    for num_threads in (1, 2):
        own = bench(llama[1], packer=PACKERS[form], num_threads=num_threads)
        own.load(*folders)
        slots = (0, 1, 2, -1)
        if num_threads == 1:
            for prompt, slot, start in zip(prompts, slots, starts, strict=True):
                alone += own.logits([(own.add(prompt, slot, start=start), 100)])
            assert np.array_equal(alone[3], plain)
            assert np.array_equal(alone[1][:23], before[:23])
            assert (alone[1][23:] != before[23:]).any(axis=1).all()
            own.runner.close()
            continue
        mixed = [(prompts[i], slots[i], starts[i]) for i in (0, 3, 1, 2, 0, 3, 2, 1, 0)]
        sequences = [own.add(prompt, slot, start=start) for prompt, slot, start in mixed]
        parts: list[list[Float32]] = [[] for _ in mixed]
        step = 0
        while any(one.num_computed < len(one.tokens) for one in sequences):
            work = [(i, one) for i, one in enumerate(sequences) if one.num_computed < len(one.tokens)]
            grants = [(one, 1 + (step + 3 * i) % 9) for i, one in work]
            found = own.logits(grants)
            for (i, _), logits in zip(work, found, strict=True):
                parts[i].append(logits)
            step += 1
        own.runner.close()
        for (_, slot, _), logits in zip(mixed, parts, strict=True):
            assert np.array_equal(np.concatenate(logits), alone[slots.index(slot)])


HALVED: list[dict[str, Any]] = [
    {"r": 16}, {"r": 20, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    {"r": 5, "rank_pattern": {"gate_proj": 36, "o_proj": 33}},
]  # fmt: skip
"""The ranks of adapters in bfloat16: their matrices A fill panels, narrow panels, or parts of them. Of the last, some
matrices B are float32, because their scale makes other numbers of theirs."""


def test_numbers_of_bfloat16_stay_halves_and_change_no_bit(
    llama: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, fields in enumerate(HALVED):
        fields = {"target_modules": linear_names(llama[0]), "lora_alpha": 2 * fields["r"], **fields}
        write_adapter(copy.deepcopy(llama[0]).bfloat16(), tmp_path / str(number), seed=number, **fields)
        path = tmp_path / str(number) / "adapter_model.safetensors"
        save_torch({name: one.bfloat16() for name, one in load_torch(path).items()}, path)
    folders = [tmp_path / str(number) for number in range(len(HALVED))]
    found: list[list[Float32]] = []
    sizes: list[list[int]] = []
    for is_halved in (True, False):
        if not is_halved:
            seed_fault([(program_adapters, "_panels", "if (words & 0xFFFF).any()", "if True")], monkeypatch)
        own = bench(llama[1])
        own.load(*folders)
        sizes.append([one.nbytes for one in _HELD[-len(folders) :]])
        sequences = [own.add(TOKENS, slot) for slot in (0, 1, 2, -1, 2, 1, 0, 0, 0)]
        grants = [20, 1, 9, 5, 30, 17, 1, 2, 3]
        found.append(own.logits(list(zip(sequences, grants, strict=True))))
        found[-1] += own.logits([(one, 1) for one in sequences])
        own.runner.close()
    assert all(np.array_equal(own, other) for own, other in zip(*found, strict=True))
    for half, whole, most in zip(*sizes, (0.52, 0.52, 0.7), strict=True):
        assert half < most * whole


def _without_adapters(folder: Path, packer: Packer, prompt: list[int]) -> Float32:
    ops = CPUOps(packer)
    model = load_model(folder, ops)
    layout = model.config.memory_layout(page_size=4, dtype="float32", order="HND")
    runner = CPURunner(
        model, storage_for(layout, 60), warm_up(layout, packed=ops.variants), max_rows=1, max_length=60, num_threads=1
    )
    driver = RowDriver(runner, num_pages=60, page_size=4)
    logits = runner.forward(driver.batch([(driver.add(prompt), 100)]))
    runner.close()
    return logits


def test_a_slot_gets_another_adapter_between_two_launched_steps(shared: Bench, folders: list[Path]) -> None:
    """Two steps in flight, the second of which loads into the slot of the first: each sees its own."""
    shared.load(*folders)
    one, other = (shared.logits([(shared.add(TOKENS, number), 100)])[0].argmax(-1)[-1] for number in range(2))
    steps: list[Any] = []
    for number in range(2):
        steps.append(shared.runner.launch(shared.driver.batch([(shared.add(TOKENS, 2, number), 100)])))
    assert [step.wait().tokens.tolist() for step in steps] == [[one], [other]]
    assert one != other


def check_a_mix(own: Bench, folders: list[Path], plain: Float32) -> None:
    """Rows with two adapters and without, beside each other, are those of each alone; then a slot gets another one."""
    own.load(*folders)
    one, base, other, later = own.logits(
        [(own.add(TOKENS, slot, start=start), 100) for slot, start in ((1, 0), (-1, 0), (0, 0), (0, 9))]
    )
    assert np.array_equal(later[:9], plain[:9])
    assert np.array_equal(base, plain)
    for slot, logits in ((1, one), (0, other)):
        assert np.array_equal(own.logits([(own.add(TOKENS, slot), 100)])[0], logits)
    assert np.array_equal(own.logits([(own.add(TOKENS, 1, 0), 100)])[0], other)


FAULTS = {
    "the rows of the model alone are touched": ("batch.adapters[:, 0]", "batch.adapters[:, 0].clip(0)"),
    "rows before the start of an adapter are touched": ("batch.adapters[:, 2]", "0"),
    "a row has the adapter of its neighbour": ("batch.adapters[:, 0]", "batch.adapters[::-1, 0]"),
    "a slot keeps the adapter before": ("is not packed", "is None"),
    "a slot is loaded for the first row only": ("batch.adapters.tolist()", "batch.adapters[:1].tolist()"),
}


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_a_mix_and_faults_that_are_found_in_it(
    fault: str | None, llama: tuple[Any, Path], folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, own = _without_adapters(llama[1], PACKERS["float32"], TOKENS), bench(llama[1])
    if fault is None:
        check_a_mix(own, folders, plain)
    else:
        seed_fault([(CPUAdapters, "admit", *FAULTS[fault])], monkeypatch)
        with pytest.raises(AssertionError):
            check_a_mix(own, folders, plain)
    own.runner.close()


def test_without_adapters_nothing_of_them_is_compiled(llama: tuple[Any, Path]) -> None:
    """And so no instruction of a program can be one of them: the kernel of a program has no place for it."""
    without, with_some = CPUOps(), CPUOps(adapters=CPUAdapters(num_slots=1, max_rank=1, num_rows=1))
    for ops in (without, with_some):
        load_model(llama[1], ops)
    assert ADAPTERS not in without.units
    assert ADAPTERS in with_some.units


MIXED: list[dict[str, Any]] = [
    {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj"], "target_parameters": EXPERTS},
    {"r": 3, "target_modules": [], "target_parameters": EXPERTS[1:]},
    {
        "r": 2, "target_modules": ["v_proj"], "target_parameters": EXPERTS[:1],
        "rank_pattern": {r".*\.1\..*gate_up_proj": 5}, "alpha_pattern": {"experts.gate_up_proj": 9},
    },
    {"r": 4, "target_modules": ["q_proj", "v_proj"]},
]  # fmt: skip
"""Both matrices of experts; the second one alone; the first one, with ranks of its own; none."""


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("mixture")
    return build(CASES["gpt-oss"], folder), folder


@pytest.fixture(scope="module")
def of_experts(mixture: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Float32]]:
    """Adapters, and the logits of PEFT's models."""
    found: list[tuple[Path, Float32]] = []
    for number, fields in enumerate(MIXED):
        folder = tmp_path_factory.mktemp("adapter")
        found.append((folder, logits_of(write_adapter(copy.deepcopy(mixture[0]), folder, seed=number, **fields))))
    return found


def check_mixed_experts(own: Bench, base: Float32, of_experts: list[tuple[Path, Float32]], tolerance: float) -> None:
    """All adapters, and none, beside each other in uneven chunks; each has the bits that it has alone."""
    own.load(*(folder for folder, _ in of_experts))
    expected = [base, *(logits for _, logits in of_experts)]
    alone = [own.logits([(own.add(TOKENS, slot), 100)])[0] for slot in range(-1, 3)]
    alone.append(own.logits([(own.add(TOKENS, 2, 3), 100)])[0])
    for logits, wanted in zip(alone, expected, strict=True):
        error = np.abs(logits - wanted)
        assert (error.max() if tolerance < 1e-3 else np.median(error)) < tolerance  # rounded, some choose other experts
    slots = [0, -1, 1, 2, 0, 1]
    sequences = [own.add(TOKENS, slot) for slot in slots]
    parts: list[list[Float32]] = [[] for _ in slots]
    for step in range(len(TOKENS)):
        work = [(number, one) for number, one in enumerate(sequences) if one.num_computed < len(one.tokens)]
        found = own.logits([(one, 1 + (step + 3 * number) % 9) for number, one in work]) if work else []
        for (number, _), logits in zip(work, found, strict=True):
            parts[number].append(logits)
    for slot, logits in zip(slots, parts, strict=True):
        assert np.array_equal(np.concatenate(logits), alone[1 + slot])


EXPERT_FAULTS: dict[str, Edit] = {
    "B is seen as experts by ranks": (
        peft_folder._Reader, "_of_experts", "reshape(b_size, rank, stack.count)",
        "reshape(b_size, stack.count, rank).swapaxes(1, 2)",
    ),
    "the rows of gate and up do not take turns": (peft_folder._Reader, "_of_experts", "if own.has_bias", "if False"),
    "every expert has the matrices of the first": (
        adapter_modules.ExpertStack, "modules", "{expert}", "{0}",
    ),
    "the second product has the table of the first": (
        program_adapters.AdaptedExperts, "__init__", "self.down = down", "self.down = gate_up",
    ),
    "adapters that change the second product alone are left out": (
        program_adapters.AdaptedExperts, "group", "down=self.down.number", "down=self.gate_up.number",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", slow_ones(("none", "int8", *EXPERT_FAULTS), "int8"))
def test_a_mix_with_experts_and_faults_that_are_found_in_it(
    fault: str,
    mixture: tuple[Any, Path],
    of_experts: list[tuple[Path, Float32]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if fault in EXPERT_FAULTS:
        seed_fault([EXPERT_FAULTS[fault]], monkeypatch)
    own = bench(mixture[1], packer=PACKERS["int8" if fault == "int8" else "float32"])
    with pytest.raises((AssertionError, ValueError)) if fault in EXPERT_FAULTS else nullcontext():
        check_mixed_experts(own, logits_of(mixture[0]), of_experts, 0.1 if fault == "int8" else 1e-4)
    own.runner.close()


def test_experts_named_one_by_one(tmp_path: Path) -> None:
    """As folders of PEFT for `transformers` 4 name them, from which PEFT now makes parameters of twice the rank."""
    reference = build(CASES["qwen3-moe"], tmp_path / "model")
    fields = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]}
    changed = write_adapter(copy.deepcopy(reference), tmp_path / "a", **fields)
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert sorted(config["target_parameters"]) == ["down_proj", "gate_up_proj"]
    modules, expected = model_modules(tmp_path / "model"), logits_of(changed)
    whole = read_adapter(tmp_path / "a", modules, max_rank=8)
    (tmp_path / "b").mkdir()
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    tensors = {name: one for name, one in tensors.items() if ".experts." not in name}
    for name, change in whole.changes.items():
        if ".experts." in name:
            assert change.a is not None
            assert change.b is not None
            tensors[f"base_model.model.{name}.lora_A.weight"] = change.a
            tensors[f"base_model.model.{name}.lora_B.weight"] = np.ascontiguousarray(change.b)
    save_file(tensors, tmp_path / "b" / "adapter_model.safetensors")
    ranks = {r".*\.(gate|up)_proj": 8, r".*\.experts\..*": 4}
    old = {**config, "target_parameters": None, "target_modules": fields["target_modules"], "rank_pattern": ranks}
    old["alpha_pattern"] = {r".*\.(gate|up)_proj": 8, r".*\.experts\..*": 4}  # B is scaled already
    (tmp_path / "b" / "adapter_config.json").write_text(json.dumps(old))
    own = bench(tmp_path / "model")
    own.load(tmp_path / "a", tmp_path / "b")
    found = own.logits([(own.add(TOKENS, slot), 100) for slot in range(2)])
    own.runner.close()
    np.testing.assert_allclose(found[0], expected, atol=1e-4, rtol=0)
    assert np.array_equal(found[0], found[1])


def test_experts_that_do_not_fit_are_refused(
    mixture: tuple[Any, Path], of_experts: list[tuple[Path, Float32]], tmp_path: Path
) -> None:
    (tmp_path / "adapter_model.safetensors").symlink_to(of_experts[0][0] / "adapter_model.safetensors")
    own = json.loads((of_experts[0][0] / "adapter_config.json").read_text())
    for config, error in (
        ({"target_parameters": ["mlp.router.weight"]}, "target_parameters must be gate_up_proj and down_proj"),
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters must name .*experts.gate_up_proj"),
        ({"r": 2}, "must have shape"),
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps({**own, **config}))
        with pytest.raises(ValueError, match=error):
            read_adapter(tmp_path, model_modules(mixture[1]), max_rank=8)
