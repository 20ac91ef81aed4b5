"""Verification of drafts on the CUDA runner, with a real model and FlashInfer's stand-in: the text does not change."""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewood.engine.api import Delta, EngineConfig, Grammar, SamplingParams, Submit, TokenLogprob
from pagewood.engine.assemble import assemble
from pagewood.engine.assembly.cuda.build import cuda_ops
from pagewood.engine.core.loop import EngineInfo
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.sampling_table import SamplingArrays
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.model_folder.load import load_model
from pagewood.engine.runner.cuda.drafts.drafting_model import DraftModel
from pagewood.engine.runner.cuda.drafts.lookup import NgramDrafter
from pagewood.engine.runner.cuda.drafts.masks import MaskShape, packed_masks
from pagewood.engine.runner.cuda.drafts.verify import (
    Drafter,
    DraftRequest,
    InexactRows,
    Yielded,
    count_accepted,
)
from pagewood.engine.runner.cuda.ops import CUDAOps
from pagewood.engine.runner.cuda.runner import CUDARunner
from pagewood.engine.runner.cuda.staging import StagingSlot
from pagewood.engine.runner.cuda.step_arrays import TableShape
from pagewood.engine.runner.storage import storage_for
from pagewood.engine.testing.echo_grammar import EchoCompiler, allowed_tokens
from pagewood.engine.testing.random_drafting import RandomDrafting
from pagewood.kvpool import MultiHeadLayout
from pagewood.kvpool.storage import KVStorage
from row_driver import RowDriver
from stand_ins import flashinfer_torch
from stand_ins.recording_device import RecordingDevice

pytestmark = [pytest.mark.usefixtures("small_buffers"), pytest.mark.slow]

DIM, MAX_LENGTH, NUM_PAGES_OF_4 = 8, 64, 120
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3-windows": (
        "Qwen3",
        {
            "head_dim": DIM,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "latents": (
        "DeepseekV2",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": 12,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            "first_k_dense_replace": 2,
        },
    ),
}
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.3, top_p=0.8, min_p=0.02),
    SamplingParams(temperature=1.3, typical_p=0.6),
    SamplingParams(temperature=1.3, top_n_sigma=1.2),
]


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("only-llama"))


def make_model(name: str, folder: Path) -> Path:
    torch.manual_seed(1)
    kind, extra = MODELS[name]
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "initializer_range": 0.2}
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **heads, **extra})
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)
    return folder


class OracleDrafter:
    """Drafts what plain decoding yields, with some wrong tokens; knows the texts of the requests."""

    def __init__(self, texts: list[list[int]], *, wrong_every: int) -> None:
        self._texts = torch.zeros(len(texts), 2 * MAX_LENGTH, dtype=torch.int32)
        for row, text in enumerate(texts):
            self._texts[row, : len(text)] = torch.tensor(text, dtype=torch.int32)
        self._wrong_every = wrong_every

    def note(self, batch: Batch) -> None:
        """Do nothing."""

    def draft(self, request: DraftRequest) -> tuple[torch.Tensor, torch.Tensor]:
        firsts = request.tokens.index_select(0, request.rows)[:, :3]  # all texts begin differently
        texts = (self._texts[None, :, :3] == firsts[:, None]).all(2).int().argmax(1)
        places = request.lengths[:, None] + torch.arange(request.num_drafts)
        drafts = self._texts.index_select(0, texts).gather(1, places.long())
        wrong = places % self._wrong_every == 0
        return torch.where(wrong, (drafts + 1) % 49, drafts), torch.full_like(request.rows, request.num_drafts)


def answers(
    folder: Path,
    prompts: list[list[int]],
    samplings: list[SamplingParams],
    *,
    page_size: int,
    drafter: Drafter | Callable[[RecordingDevice, int], Drafter] | None = None,
    max_drafts: int = 0,
    overlap: bool = True,
    with_graphs: bool = False,
    batch_invariant: bool = False,
    chunk: int = 64,
    logits: list[torch.Tensor] | None = None,
    counts: list[tuple[int, int]] | None = None,
    bad_token: int | None = None,
    num_pages: int | None = None,
    deltas: list[Delta] | None = None,
) -> tuple[list[list[int]], RecordingDevice, int]:
    """Generate an answer to each prompt with a whole engine; return them, its device, and the accepted drafts.

    Args:
        folder: of the model, as the other arguments.
        prompts: token ids.
        samplings: of each prompt.
        page_size: of the pool.
        drafter: or a function of the device and the number of pages that makes it.
        max_drafts: of a grant.
        overlap: see `EngineConfig`.
        with_graphs: whether steps are captured.
        batch_invariant: see `EngineConfig`.
        chunk: prompt tokens of a step.
        logits: gets all logits.
        counts: gets the drafted and the accepted tokens of each request.
        bad_token: its embedding is not a number.
        num_pages: of the pool; None: enough for all.
        deltas: gets all that is answered.
    """
    device = RecordingDevice()
    num_pages = NUM_PAGES_OF_4 * 4 // page_size
    model = load_model(folder, cuda_ops(flashinfer_torch, torch.device("cpu"), batch_invariant=batch_invariant))
    storage = storage_for(model.config.memory_layout(page_size=page_size), num_pages + 1)
    for layer in range(2):
        storage.layer(layer).fill_(1e3)  # unwritten positions must not count
    if callable(drafter):
        drafter = drafter(device, num_pages)
    runner = CUDARunner(
        model, storage, flashinfer_torch, device, max_rows=4, max_length=MAX_LENGTH, batch_invariant=batch_invariant,
        graph_sizes=[1, 2, 4] if with_graphs else (), drafter=drafter, max_drafts=max_drafts,
    )  # fmt: skip
    if logits is not None:
        head = model.head

        def watched(x: torch.Tensor) -> torch.Tensor:
            rows = head(x)
            logits.append(rows.clone())
            return rows

        model.head = watched
    if bad_token is not None:
        embedding = model.embedding
        model.embedding = lambda tokens: embedding(tokens).masked_fill((tokens == bad_token)[:, None], torch.nan)
    device.waits.clear()
    inbox, outbox = MemoryInbox(), MemoryOutbox()
    engine = assemble(
        EngineConfig(page_size=page_size, max_running=4, chunked_prefill_size=chunk, overlap=overlap),
        info=EngineInfo(
            model_name="x", max_length=MAX_LENGTH, vocab_size=50, eos_token_ids=(), num_pages=num_pages,
            page_size=page_size,
        ),
        make_runner=lambda _: runner,
        drafting=RandomDrafting(max_tokens=max_drafts, seed=3) if drafter else None,
        compiler=EchoCompiler(random.Random(0), 50),
        inbox=inbox,
        outbox=outbox,
    )  # fmt: skip
    for i, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        inbox.put(Submit(request_id=str(i), tokens=np.array(prompt, "<i4").tobytes(), sampling=sampling))
    tokens: list[list[int]] = [[] for _ in prompts]
    num_open, num_accepted, pending = len(prompts), 0, None
    with device.watching():
        while num_open or pending is not None:
            pending = engine.advance(pending)
            for delta in outbox.take():
                if deltas is not None:
                    deltas.append(delta)
                tokens[int(delta.request_id)] += delta.tokens
                num_open -= delta.finish is not None
                num_accepted += delta.num_accepted_tokens if delta.finish else 0
                if delta.finish and counts is not None:
                    counts.append((delta.num_drafted_tokens, delta.num_accepted_tokens))
    assert engine.violation() is None
    engine.close()
    assert set(device.waits) <= {"event.synchronize", "device.finish"}
    assert device.waits.count("device.finish") == 1  # by close
    return tokens, device, num_accepted


def prompts_of(num: int) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [[i, *rng.integers(0, 50, 2 + 3 * i % 17).tolist()] for i in range(num)]


def samplings_of(num: int) -> list[SamplingParams]:
    return [
        replace(one, seed=i, max_tokens=24 + i) for i, one in ((i, SAMPLINGS[i % len(SAMPLINGS)]) for i in range(num))
    ]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(
    ("overlap", "with_graphs", "batch_invariant", "chunk"),
    [(True, True, False, 64), (True, False, False, 5), (True, True, True, 7), (False, True, False, 64)],
)
def test_drafts_do_not_change_the_text(
    folder: Path, page_size: int, overlap: bool, with_graphs: bool, batch_invariant: bool, chunk: int
) -> None:
    prompts, samplings = prompts_of(9), samplings_of(9)
    plain, _, _ = answers(folder, prompts, samplings, page_size=page_size, batch_invariant=batch_invariant)
    texts = [prompt + answer for prompt, answer in zip(prompts, plain, strict=True)]
    drafted, device, num_accepted = answers(
        folder, prompts, samplings, page_size=page_size, drafter=OracleDrafter(texts, wrong_every=5), max_drafts=4,
        overlap=overlap, with_graphs=with_graphs, batch_invariant=batch_invariant, chunk=chunk,
    )  # fmt: skip
    assert drafted == plain
    assert num_accepted > 40
    assert (device.num_replayed > 0) == with_graphs


def reports_of(deltas: list[Delta], name: str) -> tuple[list[TokenLogprob], list[TokenLogprob]]:
    """Return what was reported of the prompt and of the output of a request."""
    own = [delta for delta in deltas if delta.request_id == name]
    return [one for delta in own for one in delta.prompt_logprobs], [one for delta in own for one in delta.logprobs]


def distribution(sampling: SamplingParams, tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Return log probabilities of the next token by the processors of `transformers`."""
    logits = logits[None].clone()
    if sampling.repetition_penalty != 1.0:
        penalise: Any = transformers.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
        logits = penalise(torch.tensor([tokens]), logits)
    if sampling.temperature == 0.0:
        best = torch.full_like(logits, -torch.inf)
        return best.scatter(1, logits.argmax(-1, keepdim=True), 0.0)[0]
    warpers: list[Any] = [transformers.TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k:
        warpers.append(transformers.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        warpers.append(transformers.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0.0:
        warpers.append(transformers.MinPLogitsWarper(sampling.min_p))
    for warper in warpers:
        logits = warper(torch.tensor([tokens]), logits)
    return logits.log_softmax(-1)[0]


@pytest.mark.parametrize(
    ("is_drafting", "with_graphs", "chunk"), [(False, False, 64), (False, True, 1), (True, True, 64), (True, False, 5)]
)
@pytest.mark.parametrize("kind", ["raw", "processed"])
def test_log_probabilities_are_those_of_transformers(
    llama: Path, kind: Literal["raw", "processed"], is_drafting: bool, with_graphs: bool, chunk: int
) -> None:
    prompts = prompts_of(5)
    samplings = [
        replace(one, logprobs=i, logprobs_kind=kind, prompt_logprobs=2 * i, repetition_penalty=1.4)
        for i, one in enumerate(samplings_of(4))
    ]
    samplings.append(samplings[0])
    samplings[3] = replace(samplings[3], logprobs=None, prompt_logprobs=None)
    plain, _, _ = answers(llama, prompts, samplings, page_size=4)
    texts = [prompt + answer for prompt, answer in zip(prompts, plain, strict=True)]
    deltas: list[Delta] = []
    options: dict[str, Any] = {"drafter": OracleDrafter(texts, wrong_every=5), "max_drafts": 4} if is_drafting else {}
    answers(llama, prompts, samplings, page_size=4, chunk=chunk, with_graphs=with_graphs, deltas=deltas, **options)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(llama)
    for i, (prompt, text, sampling) in enumerate(zip(prompts, texts, samplings, strict=True)):
        of_prompt, of_output = reports_of(deltas, str(i))
        if sampling.logprobs is None:
            assert not of_prompt
            assert not of_output
            continue
        with torch.no_grad():
            logits = model(torch.tensor([text])).logits[0].float()
        assert [entry.token for entry in (*of_prompt, *of_output)] == text[1:]
        for position, entry in enumerate((*of_prompt, *of_output), 1):
            row = logits[position - 1].log_softmax(-1)
            num_top = sampling.prompt_logprobs if position < len(prompt) else sampling.logprobs
            if position >= len(prompt) and kind == "processed":
                row = distribution(sampling, text[:position], logits[position - 1])
            assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-4)
            assert [value for _, value in entry.top] == pytest.approx(row.topk(num_top or 0).values.tolist(), abs=1e-4)
            if num_top and entry.rank <= num_top:
                assert entry.top[entry.rank - 1][1] == pytest.approx(entry.logprob, abs=1e-4)


@pytest.mark.parametrize(
    ("is_drafting", "with_graphs", "overlap"),
    [(False, False, True), (False, True, True), (False, True, False), (True, True, True), (True, False, True)],
)
def test_tokens_are_the_best_that_a_grammar_allows(
    llama: Path, is_drafting: bool, with_graphs: bool, overlap: bool
) -> None:
    prompts = prompts_of(5)
    grammars = [None if i == 2 else Grammar(kind="regex", text=f"{i} 20 999 0") for i in range(5)]
    samplings = [
        SamplingParams(temperature=0.0, max_tokens=15 + 3 * i, ignore_eos=True, grammar=grammar)
        for i, grammar in enumerate(grammars)
    ]
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(llama)
    expected: list[list[int]] = []
    for prompt, sampling in zip(prompts, samplings, strict=True):
        output: list[int] = []
        while len(output) < (sampling.max_tokens or 0):
            allowed = list(range(50))
            if sampling.grammar is not None:
                allowed = allowed_tokens(sampling.grammar, output, frozenset(), 50)
            if not allowed:
                break
            with torch.no_grad():
                logits = model(torch.tensor([prompt + output])).logits[0, -1]
            output.append(allowed[int(logits[allowed].argmax())])
        expected.append(output)
    texts = [prompt + answer for prompt, answer in zip(prompts, expected, strict=True)]
    options: dict[str, Any] = {"drafter": OracleDrafter(texts, wrong_every=5), "max_drafts": 4} if is_drafting else {}
    found, _, _ = answers(llama, prompts, samplings, page_size=4, with_graphs=with_graphs, overlap=overlap, **options)
    assert found == expected
    assert len({len(one) for one in expected}) > 1


@pytest.mark.parametrize("with_graphs", [False, True])
def test_looked_up_drafts_do_not_change_the_text(llama: Path, with_graphs: bool) -> None:
    rng = np.random.default_rng(1)
    prompts = [[i, *rng.integers(0, 4, 20).tolist()] for i in range(5)]  # four tokens, so that n-grams repeat
    plain, _, _ = answers(llama, prompts, samplings_of(5), page_size=4)
    drafted, _, num_accepted = answers(
        llama, prompts, samplings_of(5), page_size=4, drafter=NgramDrafter(), max_drafts=3, with_graphs=with_graphs
    )
    assert drafted == plain
    assert num_accepted > 0


@pytest.mark.parametrize("with_graphs", [False, True])
def test_a_verified_position_has_the_bits_of_a_decoded_one(llama: Path, with_graphs: bool) -> None:
    """In batch-invariant mode: one kernel, one tile, and masked positions add zeros."""
    prompts, samplings = prompts_of(1), samplings_of(1)
    rows: list[torch.Tensor] = []
    plain, _, _ = answers(llama, prompts, samplings, page_size=4, batch_invariant=True, logits=rows)
    expected = {tuple(row.tolist()) for row in torch.cat(rows)}
    rows = []
    answers(
        llama, prompts, samplings, page_size=4, batch_invariant=True, max_drafts=4, with_graphs=with_graphs,
        drafter=OracleDrafter([prompts[0] + plain[0]], wrong_every=100), logits=rows,
    )  # fmt: skip
    got = {tuple(row.tolist()) for row in torch.cat(rows)}
    assert expected <= got  # the padding of graphs has other logits


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9), st.integers(0, 5)), min_size=1, max_size=5),
    st.lists(st.integers(-1, 12), min_size=1, max_size=2, unique=True),
)
def test_packed_masks_show_what_a_token_may_see(grants: list[tuple[int, int, int]], windows: list[int]) -> None:
    """Grants of (start, tokens, positions by which the plan is too long)."""
    starts, counts, slack = (np.array(column, np.int32) for column in zip(*grants, strict=True))
    kv_lens = (starts + counts + slack).astype(np.int32)
    shape = MaskShape.of(counts, kv_lens)
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
    positions = np.concatenate([np.arange(s, s + c) for s, c in zip(starts, counts, strict=True)]).astype(np.int32)
    masks = packed_masks(
        torch.from_numpy(positions), offsets, torch.from_numpy(kv_lens), torch.from_numpy(shape.offsets), windows,
        num_bytes=int(shape.offsets[-1]), rows_per_byte=shape.rows_per_byte,
    )  # fmt: skip
    for window in windows:
        mask = masks.by_window[window].numpy()
        for grant, (start, count) in enumerate(zip(starts, counts, strict=True)):
            own = np.unpackbits(mask[shape.offsets[grant] : shape.offsets[grant + 1]], bitorder="little")
            bits = own[: count * kv_lens[grant]].reshape(count, -1)
            distance = np.arange(start, start + count)[:, None] - np.arange(kv_lens[grant])
            assert (bits == ((distance >= 0) & ((window < 0) | (distance <= window)))).all()


def draft_model(folder: Path, *, page_size: int, **options: Any) -> Callable[[RecordingDevice, int], Drafter]:
    def make(device: RecordingDevice, num_pages: int) -> Drafter:
        model = load_model(folder, CUDAOps(flashinfer_torch))
        storage = storage_for(model.config.memory_layout(page_size=page_size), num_pages + 1)
        for layer in range(2):
            storage.layer(layer).fill_(1e3)
        return DraftModel(
            model, storage, flashinfer_torch, device, max_rows=4,
            max_length=MAX_LENGTH, **options,
        )  # fmt: skip

    return make


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(("overlap", "with_graphs", "chunk"), [(True, True, 64), (True, False, 5), (False, False, 7)])
def test_a_draft_model_does_not_change_the_text_and_the_model_itself_drafts_what_it_yields(
    folder: Path, page_size: int, overlap: bool, with_graphs: bool, chunk: int
) -> None:
    prompts, samplings = prompts_of(6), samplings_of(6)
    plain, _, _ = answers(folder, prompts, samplings, page_size=page_size)
    counts: list[tuple[int, int]] = []
    drafted, _, _ = answers(
        folder, prompts, samplings, page_size=page_size, drafter=draft_model(folder, page_size=page_size),
        max_drafts=4, overlap=overlap, with_graphs=with_graphs, chunk=chunk, counts=counts,
    )  # fmt: skip
    assert drafted == plain
    drafted_tokens, accepted = (sum(column) for column in zip(*counts, strict=True))
    assert accepted > 40
    assert accepted == drafted_tokens  # also of drafts that end after a request


def test_a_row_that_lacks_much_gets_drafts_when_it_is_computed(llama: Path) -> None:
    prompts, samplings = [[i, *range(20 + i)] for i in range(4)], samplings_of(4)
    plain, _, _ = answers(llama, prompts, samplings, page_size=4)
    counts: list[tuple[int, int]] = []
    drafted, _, _ = answers(
        llama, prompts, samplings, page_size=4, drafter=draft_model(llama, page_size=4, max_rebuilt=6), max_drafts=3,
        counts=counts,
    )  # fmt: skip
    assert drafted == plain
    drafted_tokens, accepted = (sum(column) for column in zip(*counts, strict=True))
    assert 20 < accepted == drafted_tokens


def test_pages_that_held_what_is_not_a_number_can_be_used_again(llama: Path) -> None:
    """A mask hides positions by a weight of zero, and zero times NaN is NaN."""
    prompts = [[*range(i, i + 20), 49, *range(i, 30)] for i in range(4)] + prompts_of(16)[4:]
    prompts = [prompt if i < 4 else [token % 49 for token in prompt] for i, prompt in enumerate(prompts)]
    samplings = [SamplingParams(temperature=0.0, max_tokens=24)] * len(prompts)
    plain, _, _ = answers(llama, prompts, samplings, page_size=16, bad_token=49, num_pages=9)
    assert plain[:4] == [[]] * 4
    assert sum(len(answer) for answer in plain) > 100
    texts = [prompt + answer for prompt, answer in zip(prompts, plain, strict=True)][4:]
    drafted, _, num_accepted = answers(
        llama, prompts, samplings, page_size=16, bad_token=49, num_pages=9, max_drafts=4,
        drafter=OracleDrafter(texts, wrong_every=3),
    )  # fmt: skip
    assert num_accepted > 40
    assert drafted == plain


def test_pages_of_a_row_without_a_token_are_cleared_before_another_row_gets_them(llama: Path) -> None:
    model = load_model(llama, CUDAOps(flashinfer_torch))
    storage = KVStorage(MultiHeadLayout(num_layers=2, num_kv_heads=1, head_dim=DIM, page_size=4), 21)
    runner = CUDARunner(
        model, storage, flashinfer_torch, RecordingDevice(), max_rows=4, max_length=MAX_LENGTH,
        drafter=NgramDrafter(), max_drafts=2,
    )  # fmt: skip
    embedding = model.embedding
    model.embedding = lambda tokens: embedding(tokens).masked_fill((tokens == 49)[:, None], torch.nan)
    driver = RowDriver(runner, num_pages=20, page_size=4)
    sound, broken = driver.add([1, 2, 3, 4, 5]), driver.add([1, 2, 3, 49, 5, 6])
    runner.launch(driver.batch([(sound, 9), (broken, 5)])).wait()
    before = storage.layer(1).clone()
    assert before.isnan().any()
    sound.tokens.append(7)
    assert runner.launch(driver.batch([(sound, 9), (broken, 5)])).wait().counts.tolist() == [1, 0]
    for layer in range(2):
        assert storage.layer(layer).isfinite().all()
    kept = torch.tensor(sound.pages[:1])
    assert torch.equal(storage.layer(1)[kept], before[kept])


def drafts_of(text: list[int], num_drafts: int, **options: int) -> list[int]:
    tokens = torch.full((3, 40), 9, dtype=torch.int32)
    tokens[1, : len(text)] = torch.tensor(text)
    none = np.zeros(0, np.int32)
    slot = StagingSlot(RecordingDevice(), windows=(), result_size=0)
    drafts, counts = NgramDrafter(**options).draft(
        DraftRequest(
            tokens=tokens, page_table=tokens, rows=torch.tensor([1], dtype=torch.int32),
            lengths=torch.tensor([len(text)], dtype=torch.int32), num_drafts=num_drafts,
            longest=len(text) + num_drafts, host_rows=none, host_starts=none, kv_lens=none,
            sampling=SamplingArrays.of([], []), slot=slot,
            tables=TableShape(max_rows=2, tokens_per_row=40, pages_per_row=1, page_size=64),
        )
    )  # fmt: skip
    assert ((drafts >= 0) & (drafts < 10)).all()
    return drafts[0, : int(counts[0])].tolist()


def naive_drafts(text: list[int], num_drafts: int, *, min_n: int, max_n: int) -> list[int]:
    for n in range(min(max_n, len(text) - 1), min_n - 1, -1):
        for place in range(len(text) - 1, n - 1, -1):
            if text[place - n : place] == text[len(text) - n :]:
                copied = list(text)
                for i in range(num_drafts):
                    copied.append(copied[place + i])
                return copied[len(text) :]
    return []


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(1, 8), st.integers(1, 3), st.integers(0, 5))
def test_lookup_equals_a_search(text: list[int], num_drafts: int, min_n: int, more: int) -> None:
    options = {"min_n": min_n, "max_n": min_n + more}
    assert drafts_of(text, num_drafts, **options) == naive_drafts(text, num_drafts, **options)


def test_a_run_ends_before_logits_that_are_not_numbers() -> None:
    cells = torch.arange(12, dtype=torch.int32)
    equal = torch.tensor([1, 1, 1, 0, 1, 0, 1, 0, 1, 1, 1, 0]).bool()
    broken = torch.tensor([0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0]).bool()
    drafted = torch.tensor([3, 3, 3], dtype=torch.int32)
    assert count_accepted(equal, broken, cells, drafted, 4).tolist() == [4, 2, 0]
    broken[2] = True
    assert count_accepted(equal, broken, cells, drafted, 4).tolist() == [2, 2, 0]
    assert count_accepted(equal, broken & False, cells, drafted - 2, 4).tolist() == [2, 2, 2]


def test_results_are_cut_to_the_counts() -> None:
    promised = np.array([3, 1, 2], np.int32)
    words = np.array([10, 11, 12, 20, 30, 31, 2, 1, 0, 2, 0, 1], np.int32)
    yielded = Yielded(promised=promised, stamps=[RecordingDevice().stamp() for _ in range(4)])
    assert yielded.size == len(words)
    result = yielded.result(words)
    assert result.draft_s > 0
    assert result.verify_s > 0
    assert result.by_grant() == [(10, 11), (20,), ()]
    assert result.num_drafted is not None
    assert result.num_drafted.tolist() == [2, 0, 1]


def batch_of(rows: list[int], promised: list[int], admitted: list[int]) -> Batch:
    empty = np.empty(0, np.int32)
    return Batch(
        page_rows=empty, page_columns=empty, page_ids=empty, token_rows=empty, token_positions=empty, token_ids=empty,
        admitted=np.array(admitted, np.int32), rows=np.array(rows, np.int32),
        starts=np.zeros(len(rows), np.int32), counts=np.array(promised, np.int32),
        sampled=np.arange(len(rows), dtype=np.int32), num_promised=np.array(promised, np.int32),
        sampling=SamplingArrays.of([SAMPLINGS[0]] * len(rows), [0] * len(rows)),
    )  # fmt: skip


def test_rows_are_inexact_until_their_last_drafts_are_known_or_a_request_is_admitted() -> None:
    rows = InexactRows(3)
    first = rows.mark(batch_of([0, 1], [3, 1], []))
    second = rows.mark(batch_of([0, 2], [2, 2], []))
    third = rows.mark(batch_of([0], [1], []))
    every = batch_of([0, 1, 2], [1, 1, 1], [])
    assert rows.of(every).tolist() == [True, False, True]
    rows.settle(first)
    assert rows.of(every).tolist() == [True, False, True]
    rows.admit(batch_of([2], [1], [0]))
    assert rows.of(every).tolist() == [True, False, False]
    rows.settle(second)
    rows.settle(third)
    assert not rows.of(every).any()
