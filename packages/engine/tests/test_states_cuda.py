"""Recurrent layers on CUDA, with stand-ins: kernels, steps, whole engines.

`test_parity.py` compares the runner's logits with those of `transformers`, for every family.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import speculating
from answered import answers_to, request, tokens_of
from families.case import build
from families.changed import with_next_prediction
from families.registry import CASES
from pagewood.engine.api import EngineConfig, SamplingParams
from pagewood.engine.assembly.cuda import build as build_cuda
from pagewood.engine.build import build_engine
from pagewood.engine.core.loop import Engine, StepHandle
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.model_folder.load import load_model
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.torch_ops import TorchOps, WholeTexts
from pagewood.engine.models.torch_recurrence import WholeTextStates
from pagewood.engine.runner.cuda import recurrence, state_memory, step_arrays
from pagewood.engine.runner.cuda.drafts.verify import Drafter, DraftRequest
from pagewood.engine.runner.cuda.runner import CUDARunner
from pagewood.engine.runner.cuda.state_memory import CUDAStates
from pagewood.engine.runner.storage import storage_for
from pagewood.kvpool.memory import PageMemory, allocate
from real_configs import REAL
from row_driver import MOST_ROWS, DrivenSequence, RowDriver
from seeded_faults import Edit, assert_found
from stand_ins import flashinfer_torch
from stand_ins.recording_device import RecordingDevice

pytestmark = pytest.mark.usefixtures("small_buffers", "gates_by_element")

KINDS = ("qwen3-next", "granite4-states", "lfm2", "kimi-linear", "falcon-h1", "mamba2")
"""A gated delta rule, Mamba 2, a short convolution, decays of channels, and Mamba 2 beside attention and alone."""
PAGE_SIZE, NUM_PAGES, MAX_DRAFTS, LENGTH = 4, 100, 5, 56
COPIES = MOST_ROWS + 8
"""The first place of copies beside those of prompts."""
PROMPTS = [
    [(7 * place + 11 * number + 1) % 90 for place in range(length)] for number, length in enumerate((22, 1, 9, 30))
]

INTERPRETED = """
import torch
from gpu_checks.recurrence import compare_recurrence

delta, space = {"corrects": True}, {"corrects": False, "values_first": True}
print(compare_recurrence(torch.device("cpu"), *KINDS))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton comes with torch for CUDA only")
@pytest.mark.parametrize(
    "kinds",
    [
        "[(300, 4), (20, 3)], []",
        *(
            pytest.param(f"[], [{heads}]", marks=pytest.mark.slow)
            for heads in (
                "(2, 1, 12, 40, delta)", '(1, 1, 8, 33, {**delta, "most_strength": 2})', "(2, 1, 16, 8, space)",
                '(1, 1, 8, 16, {**delta, "decays_by_channel": True})',
            )
        ),
    ],
)  # fmt: skip
def test_the_kernels_in_their_interpreter(kinds: str) -> None:
    """They compute what torch does, and a token has the same bits in a prompt, in parts of it, and alone."""
    tools = str(Path(__file__).parents[3] / "tools")
    path = os.pathsep.join([tools, *filter(None, [os.environ.get("PYTHONPATH")])])
    # Triton reads this when it is imported, so in a process of its own.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", INTERPRETED.replace("KINDS", f"({kinds})")], env=environment, check=True)


@pytest.fixture(scope="module", params=[KINDS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in KINDS[1:])])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp(request.param)
    case = CASES[request.param]
    if request.param == "kimi-linear":  # without experts, which have other bits with other rows where torch computes
        dense = {**case.extra, "mlp_layer_types": ["dense"] * 3}
        case = replace(case, extra=dense, file={**case.file, "first_k_dense_replace": 3})
    build(case, found)
    return found


class Bench:
    """A batch-invariant runner whose calls are recorded, and what drives it."""

    def __init__(self, folder: Path, *, sizes: tuple[int, ...] = (), drafter: Drafter | None = None) -> None:
        self.device = RecordingDevice()
        model = load_model(folder, build_cuda.cuda_ops(flashinfer_torch, torch.device("cpu"), batch_invariant=True))
        assert model.config.states is not None
        storage = storage_for(model.config.memory_layout(page_size=PAGE_SIZE), NUM_PAGES + 1)
        self.states: PageMemory = allocate(model.config.states, 2 * MOST_ROWS + 1)
        for layer in range(self.states.layout.num_layers):
            for block in self.states.blocks(layer):
                block.view(torch.float32).fill_(1e3)  # a place that nothing was left in must not count
        self.runner = CUDARunner(
            model, storage, flashinfer_torch, self.device, max_rows=16, max_length=64, batch_invariant=True,
            graph_sizes=sizes, states=self.states, drafter=drafter, max_drafts=MAX_DRAFTS if drafter else 0,
        )  # fmt: skip
        self.driver = RowDriver(self.runner, num_pages=NUM_PAGES, page_size=PAGE_SIZE, has_states=True)
        self.device.waits.clear()

    def logits(self, work: list[tuple[DrivenSequence, int]]) -> list[Tensor]:
        """Return the logits of the next positions of some sequences, of each those that a step computes."""
        batch = self.driver.batch(work)
        return list(self.runner.forward(batch).split(batch.counts.tolist()))

    def prompt_logits(self, sequence: DrivenSequence, chunk: int) -> Tensor:
        """Return the logits of a prompt, of as many positions at a time."""
        found: list[Tensor] = []
        while sequence.num_computed < sequence.num_prompt:
            found += self.logits([(sequence, chunk)])
        return torch.cat(found)

    def add(self, index: int, row: int, **share: Any) -> DrivenSequence:
        """Return a sequence with a prompt, in a row that another one may have had."""
        sequence = self.driver.add(PROMPTS[index], sampling=SamplingParams(temperature=0.8), seed=index, **share)
        sequence.row = row
        return sequence

    def launch(self, work: list[tuple[DrivenSequence, int]], known: int) -> StepHandle:
        """Launch a step with numbers of drafts; row 1 gets copies at all borders behind `known` tokens."""
        batch = self.driver.batch([(one, 1) for one, _ in work], drafts=[num for _, num in work])
        copies = [
            (grant, length, COPIES + length // PAGE_SIZE)
            for grant, (one, num) in enumerate(work)
            for length in range(PAGE_SIZE, one.num_computed + num + 1, PAGE_SIZE)
            if one.row == 1 and length > known
        ]
        more = np.array(copies, np.int32).reshape(-1, 3)
        return self.runner.launch(replace(batch, state_copies=np.concatenate([batch.state_copies, more])))

    def kept(self, places: list[int]) -> list[Tensor]:
        """Return what places hold of states, in all layers."""
        layers = range(self.states.layout.num_layers)
        return [block[places].clone() for layer in layers for block in self.states.blocks(layer)]


@torch.inference_mode()
def oracle_logits(folder: Path, tokens: list[int]) -> Tensor:
    """Return the logits of a text, computed position by position in plain torch."""
    model, positions = load_model(folder, TorchOps()), torch.arange(len(tokens))
    attention = WholeTexts([layer.mixer for layer in model.config.layers], len(tokens))
    rotations = [rope(positions) for rope in model.ropes]
    recurrence = WholeTextStates(len(tokens))
    return model(torch.tensor(tokens), rotations, attention, positions, recurrence=recurrence)


def same_bits(folder: Path) -> None:
    """Check that the logits of prompts have the same bits whole, cut, in a crowd, behind a hit and behind a fork."""
    one = Bench(folder)
    whole = [one.prompt_logits(one.driver.add(prompt), 64) for prompt in PROMPTS]
    assert (whole[3] - oracle_logits(folder, PROMPTS[3])).abs().max() < 1e-4
    for chunk in (1, 5):
        cut = Bench(folder)
        for prompt, expected in zip(PROMPTS, whole, strict=True):
            assert torch.equal(cut.prompt_logits(cut.driver.add(prompt), chunk), expected)
    crowd = Bench(folder)
    added = [crowd.driver.add(prompt) for prompt in PROMPTS]
    found: list[list[Tensor]] = [[] for _ in added]
    while live := [i for i, sequence in enumerate(added) if sequence.num_computed < sequence.num_prompt]:
        for i, logits in zip(live, crowd.logits([(added[i], 3 + i) for i in live]), strict=True):
            found[i].append(logits)
    for own, expected in zip(found, whole, strict=True):
        assert torch.equal(torch.cat(own), expected)
    for number in (0, 3):  # two go on behind a hit, in one step, and the snapshot stays as it is
        num_pages, prompt = len(PROMPTS[number]) // PAGE_SIZE, PROMPTS[number]
        prompts = [prompt, [*prompt[: num_pages * PAGE_SIZE], 5, 17, 2]]
        hits = [crowd.driver.add(one, share=added[number], num_shared_pages=num_pages) for one in prompts]
        before = crowd.kept([MOST_ROWS + added[number].row])
        logits = crowd.logits([(hit, 2) for hit in hits])
        again = crowd.driver.add(prompts[1], share=added[number], num_shared_pages=num_pages)
        logits += crowd.logits([(again, 2)])
        assert torch.equal(logits[0], whole[number][num_pages * PAGE_SIZE :][:2])
        assert torch.equal(logits[1], logits[2])
        plain = Bench(folder)
        expected = plain.prompt_logits(plain.driver.add(prompts[1]), 64)[num_pages * PAGE_SIZE :]
        assert torch.equal(torch.cat([logits[1], *crowd.logits([(hits[1], 9)])]), expected)
        for left, right in zip(before, crowd.kept([MOST_ROWS + added[number].row]), strict=True):
            assert torch.equal(left, right)


class KnowingDrafter:
    """Drafts what it knows of texts that begin differently; each token is wrong with some probability."""

    def __init__(self, texts: list[list[int]], seed: int) -> None:
        self._texts = {tuple(text[:2]): text for text in texts}
        self._rng = random.Random(seed)

    def note(self, batch: Batch) -> None:
        """Do nothing."""

    def draft(self, request: DraftRequest) -> tuple[Tensor, Tensor]:
        """Return drafts, and how many there are of each row."""
        drafts = torch.zeros(len(request.rows), request.num_drafts, dtype=torch.int32)
        for own, row, length in zip(drafts, request.rows.tolist(), request.lengths.tolist(), strict=True):
            right = self._texts[tuple(request.tokens[row, :2].tolist())][length : length + request.num_drafts]
            own[: len(right)] = torch.tensor([(one + (self._rng.random() < 0.3)) % 90 for one in right])
        most = [self._rng.randint(max(1, request.num_drafts - 1), request.num_drafts) for _ in drafts]
        return drafts, torch.tensor(most, dtype=torch.int32)


@dataclass(slots=True, kw_only=True)
class Drafted:
    """A sequence that is decoded with drafts."""

    sequence: DrivenSequence
    text: list[int]
    """What plain decoding makes of it."""
    num_known: int
    """Tokens that are known; behind them are those that steps in flight may yield."""  # written by: settle


Pending = tuple[StepHandle, list[tuple[Drafted, int]]]
"""A step in flight, and the most tokens of each."""


@cache
def decoded(folder: Path) -> tuple[list[list[int]], dict[int, list[Tensor]]]:
    """Return the text of each prompt, decoded plainly, and states of the last one, by their number of tokens."""
    bench, texts = Bench(folder), list[list[int]]()
    for index in range(len(PROMPTS)):
        one = bench.add(index, int(index == 3))
        bench.driver.generate([one], num_tokens=1, chunk=64)
        while len(one.tokens) < LENGTH:
            one.tokens += bench.launch([(one, 0)], one.num_computed).wait().tokens.tolist()
        texts.append(one.tokens)
    lengths = range(len(PROMPTS[3]) // PAGE_SIZE * PAGE_SIZE + PAGE_SIZE, LENGTH, PAGE_SIZE)
    return texts, {length: bench.kept([COPIES + length // PAGE_SIZE]) for length in lengths}


def same_bits_with_drafts(folder: Path, seed: int) -> None:
    """Check that drafts change no token, and that copies of states have the bits of those of plain decoding.

    A step is launched before the result of the one before is known, and asks again for copies that this may not have
    made. A row gets another request while drafts of the one before are in flight; the last such request begins behind
    a hit, and with drafts.
    """
    (texts, states), rng, num_tokens = decoded(folder), random.Random(seed), Counter[str]()
    bench = Bench(folder, sizes=((), (2, 4))[seed % 2], drafter=KnowingDrafter(texts, seed))

    def add(index: int, row: int, **share: Any) -> Drafted:
        one = bench.add(index, row, **share)
        if not share:
            bench.driver.generate([one], num_tokens=1, chunk=rng.randint(4, 22))
        return Drafted(sequence=one, text=texts[index], num_known=len(one.tokens))

    def launched(live: list[Drafted]) -> Pending:
        work = [(one.sequence, rng.choice((0, 2, MAX_DRAFTS))) for one in live]
        handle = bench.launch(work, last.num_known - 1)
        for one, num in work:
            one.tokens += [-1] * (1 + num)
            one.num_computed = len(one.tokens) - 1
        return handle, [(one, 1 + num) for one, (_, num) in zip(live, work, strict=True)]

    def settle(handle: StepHandle, entries: list[tuple[Drafted, int]]) -> None:
        result = handle.wait()
        for (one, most), tokens in zip(entries, result.by_grant(), strict=True):
            one.sequence.tokens[one.num_known : one.num_known + most] = tokens
            one.num_known += len(tokens)
            one.sequence.num_computed = len(one.sequence.tokens) - 1
            assert one.sequence.tokens[: one.num_known] == one.text[: one.num_known]
            num_tokens["accepted"] += len(tokens) - 1
        num_tokens["drafted"] += 0 if result.num_drafted is None else int(result.num_drafted.sum())

    last = add(3, 1)
    shared_one = last.sequence
    pending: Pending | None = None
    for index, num_steps, shared in ((0, 4, None), (2, 4, None), (1, 1, None), (2, 4, 2)):
        share = {"share": shared_one, "num_shared_pages": shared} if shared else {}
        one = add(index, 0, **share)
        shared_one = one.sequence if index == 2 else shared_one
        for _ in range(num_steps):
            live = [each for each in (one, last) if len(each.sequence.tokens) + MAX_DRAFTS < LENGTH]
            following = launched(live)
            if pending is not None:
                settle(*pending)
            pending = following
    assert pending is not None
    settle(*pending)
    assert 0 < num_tokens["accepted"] < num_tokens["drafted"]
    for length, state in states.items():
        if len(PROMPTS[3]) < length < last.num_known:
            found = bench.kept([COPIES + length // PAGE_SIZE])
            assert all(map(torch.equal, found, state)), f"the copy behind {length} tokens has other bits"


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))])
def test_drafts_do_not_change_a_bit(folder: Path, seed: int) -> None:
    same_bits_with_drafts(folder, seed)


def test_chunks_crowds_and_hits_do_not_change_a_bit(folder: Path) -> None:
    same_bits(folder)


def test_graphs_leave_the_same_states_and_wait_for_nothing(folder: Path) -> None:
    """Six sequences of two lengths, in graphs with padding and without graphs, greedy and seeded."""
    found: list[tuple[list[list[int]], list[Tensor]]] = []
    for sizes in ((), (2, 8)):
        own = Bench(folder, sizes=sizes)
        prompts = [PROMPTS[i % 4][: 9 + i] for i in range(6)]
        added = [
            own.driver.add(prompt, sampling=SamplingParams(temperature=0.7 * (i % 2)), seed=i)
            for i, prompt in enumerate(prompts)
        ]
        with own.device.watching():
            own.driver.generate(added[:4], num_tokens=9, chunk=6)
        own.runner.drop_graphs()
        own.runner.capture_graphs()  # while there are states
        with own.device.watching():
            own.driver.generate(added, num_tokens=12, chunk=1)  # the last two keep copies in graphs
        assert set(own.device.waits) == {"event.synchronize", "device.finish"}
        assert (own.device.num_replayed > 0) == bool(sizes)
        found.append(([one.output for one in added], own.kept([*range(6), *range(MOST_ROWS, MOST_ROWS + 6)])))
    (plain, before), (in_graphs, behind) = found
    assert in_graphs == plain
    assert all(torch.equal(left, right) for left, right in zip(before, behind, strict=True))


def engine_on(device: RecordingDevice, config: EngineConfig, *, inbox: MemoryInbox, outbox: MemoryOutbox) -> Engine:
    own = replace(config, device="cuda", dtype="float32", num_threads=None)
    return build_cuda.build_on(device, flashinfer_torch, own, inbox=inbox, outbox=outbox)


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let `speculating` build batch-invariant engines on recording devices, also those of which it takes answers."""

    def made(config: EngineConfig, *, inbox: MemoryInbox, outbox: MemoryOutbox) -> Engine:
        config = replace(config, batch_invariant=True, page_size=4)  # which blocks of recurrent layers depend on
        return engine_on(RecordingDevice(), config, inbox=inbox, outbox=outbox)

    monkeypatch.setattr(speculating, "build_engine", made)
    monkeypatch.setattr(build_cuda, "grammar_compiler", speculating.echo_compiler)
    with speculating.plain_engines():
        yield


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(
    ("drafts", "options"),
    [
        (None, {}),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in ((None, {"state_places": 5}), ("ngram", {"overlap": False}), ("draft", {"state_places": 5}))
        ),
        ("eagle", {}),
    ],
)
def test_everything_at_once(folder: Path, tmp_path: Path, drafts: str | None, options: dict[str, Any]) -> None:
    """Prompts that begin alike, in chunks, preempted; grammars, log probabilities, vectors, aborts: to the bit, answers
    are those to one request at a time without a cache and without drafts."""
    drafter = None
    if drafts == "draft":
        build(CASES["llama"], tmp_path)
    if drafts == "eagle":
        if not folder.name.startswith("qwen3-next"):
            pytest.skip("has no layer that predicts")
        folder = with_next_prediction(folder, tmp_path / "predicting")
    if drafts is not None:
        drafter = speculating.Drafter(kind=drafts, folder=tmp_path if drafts == "draft" else None)
    load = speculating.mixed_load(0, overlap=options.pop("overlap", True))
    report = speculating.run(load, model=folder, drafter=drafter, **options)
    assert report.num_cached_tokens > 0
    assert report.num_preempted > 0
    assert report.num_aborted > 0
    assert drafts in (None, "ngram") or report.counts.num_drafted > report.counts.num_accepted
    assert drafts != "eagle" or report.counts.num_accepted > 0


def test_answers_are_those_of_the_cpu_and_hits_follow_a_flush(folder: Path) -> None:
    """Forks of one prompt with seeds of their own, with drafts and without; nothing waits but for steps."""
    options: dict[str, Any] = {
        "model": str(folder), "max_running": 4, "max_length": 64, "max_total_tokens": 256, "page_size": 4,
        "chunked_prefill_size": 9,
    }  # fmt: skip
    found: list[list[list[int]]] = []
    device = RecordingDevice()
    for speculative in (None, "off", "ngram"):  # None: on a CPU
        inbox, outbox = MemoryInbox(), MemoryOutbox()
        config = EngineConfig(**options, speculative=speculative or "off", speculative_control="fixed")
        if speculative is not None:
            engine = engine_on(device, config, inbox=inbox, outbox=outbox)
        else:
            engine = build_engine(replace(config, num_threads=1), inbox=inbox, outbox=outbox)
        device.waits.clear()
        answers: list[list[int]] = []
        for turn in range(2):
            requests = [
                request(f"{turn} {i} {len(prompt)}", prompt, max_tokens=14, temperature=0.9 * (i > 0), seed=i)
                for prompt in PROMPTS[::3]
                for i in range(3)
            ]
            with device.watching():
                ends = answers_to(engine, inbox, outbox, requests)
            answers += map(tokens_of, ends)
            assert sum(end[-1].num_cached_tokens for end in ends) > 20 * turn - 1
        assert set(device.waits) <= {"event.synchronize"}
        engine.close()
        found.append(answers)
    assert found[0] == found[1] == found[2]
    assert found[0][:6] == found[0][6:]
    assert device.num_replayed > 0


_OWN = "[batch.states, padding]"
_FORKED = "np.where(batch.states[:, :1] < 0, batch.states, batch.states[:, :1])"
FAULTS: dict[str, list[Edit]] = {
    "a snapshot of the position behind": [(step_arrays, "state_saves", "length - 1 - starts", "length - starts")],
    "a state that forks share": [(step_arrays, "places_of_states", _OWN, f"[{_FORKED}, padding]")],
    "the convolution's inputs one position early": [
        (recurrence, "convolve", "torch.arange(1 - width, 0", "torch.arange(-width, -1")
    ],
    "an open block that is not cleared at its border": [
        (recurrence, "_token", "index <= places[:, None]", "index < size + 0 * places[:, None]")
    ],
    "decays up to the row before": [
        (recurrence, "_token", "since[every, places]", "since[every, (places - 1).clamp(min=0)]")
    ],
    "blocks that begin with the chunk": [
        (recurrence, "recur", "places = (positions + index) % size", "places = (0 * positions + index) % size")
    ],
    "rings that requests share": [(recurrence, "_begins", "at // step.tokens_per_row", "0 * at")],
    "the state of another row": [(step_arrays, "places_of_states", _OWN, "[batch.states[::-1], padding]")],
}
FAULTS_OF_DRAFTS: dict[str, list[Edit]] = {
    "a rejected draft stays in the state": [(CUDAStates, "of_verify", "certain=step.certain", "certain=None")],
    "a rejected draft of a graph stays in the state": [
        (CUDAStates, "of_graph", "self._certain[:size]", "width * self._certain[:size]")
    ],
    "a copy of the position before": [(state_memory, "exact_saves", "lengths - 1 - where", "lengths - where")],
    "copies where the host expects a row to be": [(state_memory, "exact_saves", "where.starts", "step.starts")],
    "a row goes on with the block of its last request": [
        (CUDAStates, "_begun", "sources == targets", "targets == targets")
    ],
    "blocks that have become certain are left out": [(recurrence, "recur", "range(ring // size - 1)", "range(0)")],
    "drafts replace inputs that are needed": [(state_memory, "_rings", "before + num_drafts", "before")],
    "drafts replace tokens of the open block": [(state_memory, "_rings", "(1 + -(-num_drafts // size))", "1")],
}  # fmt: skip
OF_BLOCKS = (
    "an open block that is not cleared at its border", "decays up to the row before",
    "blocks that begin with the chunk",
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_seeded_faults_are_found(fault: str, folder: Path) -> None:
    if fault in OF_BLOCKS and folder.name.startswith("lfm2"):
        pytest.skip("its layers are convolutions, which have no blocks")
    assert_found(FAULTS[fault], lambda _: same_bits(folder), range(1))


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS_OF_DRAFTS)
def test_seeded_faults_of_drafts_are_found(fault: str, folder: Path) -> None:
    edits = FAULTS_OF_DRAFTS[fault]
    if folder.name.startswith("lfm2") and "_saves" not in edits[0][1] and "inputs" not in fault:
        pytest.skip("its layers are convolutions, which have no blocks")
    decoded(folder)
    assert_found(edits, lambda seed: same_bits_with_drafts(folder, seed), range(6))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size must be at most 1, the number of layers with"),
        ({"state_places": 2}, "state_places must be at least max_running 4, got 2"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    build(CASES["lfm2"], tmp_path)
    config = EngineConfig(model=str(tmp_path), max_running=4, device="cuda", dtype="float32", **options)
    with pytest.raises(ValueError, match=message):
        build_cuda.build_on(RecordingDevice(), flashinfer_torch, config, inbox=MemoryInbox(), outbox=MemoryOutbox())


def test_real_models_have_kernels(tmp_path: Path) -> None:
    """FlashInfer has the sizes of their attention, with `batch_invariant` too."""
    found: list[str] = []
    for real in REAL.values():
        (tmp_path / "config.json").write_text(json.dumps(real.values))
        model = ModelConfig.from_folder(tmp_path)
        if model.states is not None:
            assert build_cuda.kernel_needs(EngineConfig(device="cuda", batch_invariant=True), model)
            found.append(model.architecture)
    assert len(found) >= 7


def test_states_have_a_part_of_the_budget(tmp_path: Path) -> None:
    build(CASES["qwen3-next"], tmp_path)
    config = EngineConfig(model=str(tmp_path), max_running=4, max_length=64, max_total_tokens=256)
    device = RecordingDevice(free_bytes=1 << 20)
    with pytest.raises(ValueError, match=r"max_running must be at most \d+ for states of 0.0 MB in 0.0 GB"):
        engine_on(
            device, replace(config, cuda_graph=False, max_running=400), inbox=MemoryInbox(), outbox=MemoryOutbox()
        )
    device, config = RecordingDevice(free_bytes=8 << 20), replace(config, max_total_tokens=None, cuda_graph=False)
    engine = engine_on(device, replace(config, mem_fraction=0.5), inbox=MemoryInbox(), outbox=MemoryOutbox())
    states = ModelConfig.from_folder(tmp_path).states
    assert states is not None
    assert (engine.info.num_states, engine.info.state_interval) == (20, 256)
    left = (4 << 20) - 21 * states.bytes_per_page  # one place is the runner's own
    assert engine.info.num_pages == left // engine.info.page_bytes - 1
    engine.close()
