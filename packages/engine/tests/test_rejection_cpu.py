"""Rejection sampling in the CPU's runner: a draft model or a head changes the text, and not its distribution."""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import save_file

from answered import answers_to, tokens_of
from chi_square import assert_fits, chi_square, probabilities
from group_in_threads import ranks_are_threads
from pagewood.engine import LLM
from pagewood.engine.api import EngineConfig, SamplingParams, Submit
from pagewood.engine.build import build_engine
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.model_folder.folder import FoundDrafter
from pagewood.engine.model_folder.load import load_model
from pagewood.engine.runner.cpu.drafts.eagle import EagleDrafter
from pagewood.engine.runner.cpu.drafts.loaded_drafter import LoadedDrafter, load_drafter
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.cpu.program.ops import CPUOps
from pagewood.engine.runner.cpu.program.passes import Pass
from pagewood.engine.runner.cpu.runner import CPURunner
from pagewood.kvpool import MultiHeadLayout
from row_driver import DrivenSequence, RowDriver
from scratch import scratch_folder
from seeded_faults import Edit, seed_fault

DIM, SIZE, VOCAB, DRAFT_VOCAB, NAN_TOKEN = 16, 32, 40, 30, 39
NUM_PAGES, MAX_LENGTH, MAX_TOKENS, MAX_ROWS = 3000, 60, 4, 250
KINDS = ["draft", "eagle"]
PROMPT = [3, 11, 7]


def saved_model(seed: int, *, has_nan: bool = False) -> Path:
    folder = scratch_folder()
    torch.manual_seed(seed)
    config: Any = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=SIZE, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=DIM, initializer_range=0.3, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    if has_nan:
        with torch.no_grad():
            model.model.embed_tokens.weight[NAN_TOKEN] = torch.nan
    model.save_pretrained(folder)
    return folder


@cache
def folder_of(name: str) -> Path:
    """Return the folder of a target, a draft model that knows nothing of it, or a head of random weights."""
    if name != "eagle":
        return saved_model({"target": 3, "draft": 4, "broken": 3, "broken draft": 4}[name], has_nan="broken" in name)
    folder = scratch_folder()
    torch.manual_seed(5)
    shapes = {
        "self_attn.q_proj": (64, 2 * SIZE), "self_attn.k_proj": (32, 2 * SIZE), "self_attn.v_proj": (32, 2 * SIZE),
        "self_attn.o_proj": (SIZE, 64), "mlp.gate_proj": (48, SIZE), "mlp.up_proj": (48, SIZE),
        "mlp.down_proj": (SIZE, 48),
    }  # fmt: skip
    tensors = {f"midlayer.{name}.weight": torch.randn(shape) * 0.2 for name, shape in shapes.items()}
    for norm in ("midlayer.input_layernorm", "midlayer.post_attention_layernorm", "midlayer.hidden_norm", "norm"):
        tensors[f"{norm}.weight"] = 1 + torch.randn(SIZE) * 0.2
    tensors["fc.weight"] = torch.randn(SIZE, 3 * SIZE) * 0.2
    tensors["lm_head.weight"] = torch.randn(DRAFT_VOCAB, SIZE) * 0.3
    tensors["d2t"] = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values - torch.arange(DRAFT_VOCAB)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder_of("target") / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "draft_vocab_size": DRAFT_VOCAB, "eagle_aux_hidden_state_layer_ids": [0, 2, 3]}
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLMEagle3"]}))
    return folder


@cache
def loaded(drafter: str, target: str = "target") -> LoadedDrafter:
    folder = folder_of(target)
    found = FoundDrafter(kind="eagle" if drafter == "eagle" else "draft", folder=folder_of(drafter))
    return load_drafter(found, load_model(folder, CPUOps()), folder)


class Bench:
    """A runner with a drafter. All steps of a sequence but the first, which computes its prompt, have drafts."""

    def __init__(
        self,
        drafter: str,
        *,
        target: str = "target",
        uses_rejection: bool = True,
        page_size: int = 4,
        num_threads: int = 2,
    ) -> None:
        own = loaded(drafter, target)
        layout = MultiHeadLayout(num_layers=4, num_kv_heads=2, head_dim=DIM, page_size=page_size, order="HND")
        memory = own.memory.allocate(layout, NUM_PAGES)
        self.num_drafted = 0
        self.num_accepted = 0
        self.runner = CPURunner(
            own.target, memory.target, warm_up(DIM, drafter=DIM), max_rows=MAX_ROWS,
            max_length=MAX_LENGTH, num_threads=num_threads,
            make_drafter=own.maker(memory, max_tokens=MAX_TOKENS, uses_rejection=uses_rejection),
        )  # fmt: skip
        self.driver = RowDriver(self.runner, num_pages=NUM_PAGES, page_size=page_size)

    def add(self, prompt: list[int], sampling: SamplingParams, seed: int = 0) -> DrivenSequence:
        sequence = self.driver.add(prompt, sampling=sampling, seed=seed)
        sequence.num_sent_tokens = 0  # a drafter needs all tokens of a row
        return sequence

    def admit(self, sequences: list[DrivenSequence]) -> None:
        """Compute the prompts in the first step."""
        batch = self.driver.batch([(one, MAX_LENGTH) for one in sequences])
        self.take(sequences, replace(batch, admitted=np.arange(len(sequences), dtype=np.int32)))

    def step(self, sequences: list[DrivenSequence], drafts: list[int]) -> None:
        self.take(
            sequences, self.driver.batch([(one, 1) for one in sequences], drafts=drafts)
        )  # fmt: skip

    def take(self, sequences: list[DrivenSequence], batch: Any) -> None:
        result = self.runner.launch(batch).wait()
        for sequence, tokens in zip(sequences, result.by_grant(), strict=True):
            sequence.tokens.extend(tokens)
            sequence.num_computed = len(sequence.tokens) - 1
        if result.num_drafted is not None:
            self.num_drafted += int(result.num_drafted.sum())
            self.num_accepted += int((result.counts - 1).sum())

    def generate(self, sequences: list[DrivenSequence], *, num_tokens: int, num_drafts: list[int]) -> None:
        """Generate at least `num_tokens` tokens of each sequence, whose seed chooses its number of drafts."""
        self.admit(sequences)
        while live := [one for one in sequences if len(one.output) < num_tokens]:
            self.step(live, [num_drafts[one.seed % len(num_drafts)] for one in live])

    def distributions(self, prompts: list[list[int]], params: SamplingParams) -> NDArray[np.float64]:
        """Return the distribution `[V]` of the token after each prompt, all of one length."""
        rows: list[NDArray[np.float64]] = []
        while len(rows) < len(prompts):
            self.driver._num_rows = 0
            part = [self.add(prompt, params) for prompt in prompts[len(rows) : len(rows) + MAX_ROWS]]
            logits = self.runner.forward(self.driver.batch([(one, MAX_LENGTH) for one in part]))
            rows += [probabilities(row, params) for row in logits[len(prompts[0]) - 1 :: len(prompts[0])]]
            for one in part:
                self.driver._free.extend(one.pages)
        return np.stack(rows)


def prompts_of(num: int) -> list[list[int]]:
    return [np.random.default_rng(i).integers(0, NAN_TOKEN, 3 + 5 * i).tolist() for i in range(num)]


def texts(
    drafter: str, sampling: SamplingParams, *, num_drafts: list[int], which: list[int] | None = None, **options: Any
) -> list[list[int]]:
    """Return 24 tokens for each of six prompts, or for some of them, computed together."""
    bench = Bench(drafter, **options)
    prompts = prompts_of(6)
    sequences = [bench.add(prompts[i], sampling, seed=i) for i in which or range(6)]
    bench.generate(sequences, num_tokens=24, num_drafts=num_drafts)
    bench.runner.close()
    return [one.output[:24] for one in sequences]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.5, top_k=12, top_p=0.9),
        SamplingParams(),
    ],
    ids=["filtered", "plain"],
)
def test_tokens_follow_the_distribution_of_the_model(kind: str, params: SamplingParams) -> None:
    """20,000 texts of three tokens. The second and the third come with one draft, with two or with none."""
    bench = Bench(kind)
    first = bench.distributions([PROMPT], params)[0]
    second = bench.distributions([[*PROMPT, a] for a in range(VOCAB)], params)
    third = bench.distributions([[*PROMPT, a, b] for a in range(VOCAB) for b in range(VOCAB)], params)
    pairs = first[:, None] * second
    of_third = (pairs.reshape(-1, 1) * third).sum(0)
    bench.driver._num_rows = 0
    sequences = [bench.add(PROMPT, params) for _ in range(MAX_ROWS)]
    found: list[list[int]] = []
    while len(found) < 20_000:
        for one in sequences:
            one.tokens, one.num_computed, one.num_sent_tokens, one.seed = list(PROMPT), 0, 0, len(found)
            found.append(one.tokens)
        bench.generate(sequences, num_tokens=3, num_drafts=[1, 2, 0, 2])
    bench.runner.close()
    tokens = np.array([text[len(PROMPT) : len(PROMPT) + 3] for text in found])
    assert_fits([chi_square(tokens[:, 0], first)])
    assert_fits([chi_square(tokens[:, 1], pairs.sum(0))])
    assert_fits([chi_square(tokens[:, 2], of_third)])
    after = [tokens[tokens[:, 0] == a, 1] for a in range(VOCAB)]
    assert_fits([chi_square(drawn, second[a]) for a, drawn in enumerate(after) if len(drawn) >= 200])
    assert 0.1 < bench.num_accepted / bench.num_drafted < 0.9


@pytest.mark.parametrize("kind", KINDS)
def test_more_drafts_are_accepted_than_by_comparison(kind: str) -> None:
    sampling = SamplingParams(temperature=1.5)
    shares = []
    for uses_rejection in (False, True):
        bench = Bench(kind, uses_rejection=uses_rejection)
        sequences = [bench.add(PROMPT, sampling, seed=seed) for seed in range(MAX_ROWS)]
        bench.generate(sequences, num_tokens=30, num_drafts=[1])
        bench.runner.close()
        shares.append(bench.num_accepted / bench.num_drafted)
    assert shares[1] > 1.1 * shares[0]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_is_that_of_plain_decoding(kind: str) -> None:
    greedy = SamplingParams(temperature=0.0)
    assert texts(kind, greedy, num_drafts=[4]) == texts(kind, greedy, num_drafts=[0], uses_rejection=False)


@pytest.mark.parametrize("kind", KINDS)
def test_text_without_drafts_is_that_of_plain_decoding(kind: str) -> None:
    sampling = SamplingParams(top_p=0.95)
    plain = texts(kind, sampling, num_drafts=[0], uses_rejection=False)
    assert texts(kind, sampling, num_drafts=[0]) == plain
    assert texts(kind, sampling, num_drafts=[3]) != plain


@pytest.mark.parametrize("kind", KINDS)
def test_equal_seeds_and_numbers_of_drafts_give_equal_texts(kind: str) -> None:
    """Whatever the batch, the page size and the number of threads."""
    sampling = SamplingParams(temperature=1.2, top_p=0.95)
    expected = texts(kind, sampling, num_drafts=[3, 0, 4, 2])
    assert texts(kind, sampling, num_drafts=[3, 0, 4, 2], page_size=16, num_threads=1) == expected
    for i in range(6):
        assert texts(kind, sampling, num_drafts=[3, 0, 4, 2], which=[i], page_size=1) == [expected[i]]


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_launched_before_accepted_counts_are_known(kind: str) -> None:
    """Beside rows with fewer drafts, and without drafts; `starts` are then upper bounds."""
    sampling = SamplingParams(temperature=1.2)
    outputs: list[list[list[int]]] = []
    for overlaps in (False, True):
        bench = Bench(kind)
        sequences = [bench.add(prompt, sampling, seed=9) for prompt in prompts_of(3)]
        bench.admit(sequences)
        drafts, results = [2, 0, 4], []
        for _ in range(6):
            batch = bench.driver.batch([(one, 1) for one in sequences], drafts=drafts)
            if not overlaps:
                bench.take(sequences, batch)
                continue
            results.append(bench.runner.launch(batch))
            for one, n in zip(sequences, drafts, strict=True):
                one.tokens.extend([-1] * (n + 1))
                one.num_computed = len(one.tokens) - 1
        for result in results:
            for one, tokens in zip(sequences, result.wait().by_grant(), strict=True):
                one.tokens.extend(tokens)
        bench.runner.close()
        outputs.append([[token for token in one.output if token >= 0] for one in sequences])
    assert outputs[0] == outputs[1]
    assert len(outputs[0][2]) > 7


def test_logits_that_are_not_numbers_end_the_tokens() -> None:
    """A text ends before the token whose logits the target could not compute, and other rows go on."""
    bench = Bench("draft", target="broken")
    sampling = SamplingParams(temperature=1.5)
    sequences = [bench.add([1, 2, seed % NAN_TOKEN], sampling, seed=seed) for seed in range(MAX_ROWS)]
    bench.admit(sequences)
    for _ in range(3):
        before = [list(one.tokens) for one in sequences]
        bench.step(sequences, [3] * MAX_ROWS)
        for tokens, one in zip(before, sequences, strict=True):
            assert NAN_TOKEN not in one.tokens[:-1]
            assert (one.tokens == tokens) == (tokens[-1] == NAN_TOKEN)
    bench.runner.close()
    assert any(one.tokens[-1] == NAN_TOKEN for one in sequences)


def test_drafts_from_logits_that_are_not_numbers_are_replaced() -> None:
    """The draft model computes NaN after one token of the prompt: every step yields the token of plain decoding."""
    sampling = SamplingParams(temperature=1.2)
    outputs = []
    for drafter, num_drafts in (("draft", [0]), ("broken draft", [3])):
        bench = Bench(drafter)
        sequence = bench.add([1, NAN_TOKEN, 2], sampling, seed=1)
        bench.generate([sequence], num_tokens=12, num_drafts=num_drafts)
        bench.runner.close()
        outputs.append(sequence.output)
    assert bench.num_accepted == 0
    assert outputs[0] == outputs[1]


def texts_in_stages(
    kind: Any, num_stages: int, prompts: list[list[int]], sampling: list[SamplingParams], *, num_rows: int = 8
) -> list[list[int]]:
    """Return what the tiny target in stages answers, with a fixed number of drafts; a request fits one page.

    Where fewer drafts may be made at the end of a text depends on what the host knows, so it is cut before that.
    """
    config = EngineConfig(
        model=str(folder_of("target")), speculative=kind, speculative_model=str(folder_of(kind)),
        speculative_verify="rejection", speculative_num_tokens=3, speculative_control="fixed",
        pipeline_parallel_size=num_stages, num_threads=num_stages, page_size=64, max_length=64,
        max_running=num_rows, max_total_tokens=num_rows * 64, prefix_cache=False,
    )  # fmt: skip
    inbox, outbox = MemoryInbox(), MemoryOutbox()
    engine = build_engine(config, inbox=inbox, outbox=outbox)
    requests = [
        Submit(request_id=str(i), tokens=np.array(prompt, "<i4").tobytes(), sampling=params)
        for i, (prompt, params) in enumerate(zip(prompts, sampling, strict=True))
    ]
    try:
        found = [tokens_of(answer) for answer in answers_to(engine, inbox, outbox, requests)]
        counts = engine.counters().speculation
    finally:
        engine.close()
    assert counts is not None
    assert counts.num_accepted > len(prompts) / 6
    return [text[:20] for text in found]


_MIXED = (
    prompts_of(4) * 2,
    [SamplingParams(temperature=1.2, top_p=0.95, seed=seed, max_tokens=24, ignore_eos=True) for seed in range(8)],
)


def check_stages(kind: str, num_stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with one process, which makes as many drafts, because all tokens of a request fit its page."""
    ranks_are_threads(monkeypatch)
    assert texts_in_stages(kind, num_stages, *_MIXED) == texts_in_stages(kind, 1, *_MIXED)


@pytest.mark.parametrize(
    ("kind", "num_stages"),
    [("eagle", 2), pytest.param("eagle", 4, marks=pytest.mark.slow), pytest.param("draft", 2, marks=pytest.mark.slow)],
)
def test_texts_of_stages_are_those_of_one_process(kind: str, num_stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_stages(kind, num_stages, monkeypatch)


FAULTS: dict[str, Edit] = {
    "logits are held elsewhere": (Pass, "hold_logits", "held=held.logits", "held=np.roll(held.logits, 1, 0)"),
    "logits of the next draft": (Pass, "hold_logits", "index=index", "index=(index + 1) % held.logits.shape[1]"),
    "drafts with the noise of the target": (EagleDrafter, "lay_out", "independent(grants.sampling)", "grants.sampling"),
}


@pytest.mark.parametrize("name", [*FAULTS])
def test_seeded_faults_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = texts_in_stages("eagle", 1, *_MIXED)
    ranks_are_threads(monkeypatch)
    seed_fault([FAULTS[name]], monkeypatch)
    assert texts_in_stages("eagle", 2, *_MIXED) != expected


@pytest.mark.slow
def test_tokens_of_stages_follow_the_distribution_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """6,000 texts, whose second and third tokens were drafted in the step before."""
    ranks_are_threads(monkeypatch)
    params, bench = SamplingParams(), Bench("eagle")
    first = bench.distributions([PROMPT], params)[0]
    second = bench.distributions([[*PROMPT, a] for a in range(VOCAB)], params)
    third = bench.distributions([[*PROMPT, a, b] for a in range(VOCAB) for b in range(VOCAB)], params)
    bench.runner.close()
    pairs = first[:, None] * second
    sampling = [SamplingParams(seed=seed, max_tokens=6, ignore_eos=True) for seed in range(6000)]
    tokens = np.array(texts_in_stages("eagle", 2, [PROMPT] * len(sampling), sampling, num_rows=60))
    assert_fits([chi_square(tokens[:, 0], first)])
    assert_fits([chi_square(tokens[:, 1], pairs.sum(0))])
    assert_fits([chi_square(tokens[:, 2], (pairs.reshape(-1, 1) * third).sum(0))])


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_with_rejection_sampling(kind: str) -> None:
    """It gives other text than plain decoding unless that is greedy, and the same text in another batch."""
    prompts = ["Count from 1 to 9.", "Name three colours.", "What is the capital of France?"]
    greedy, sampled = (SamplingParams(temperature=t, seed=5, max_tokens=32, ignore_eos=True) for t in (0.0, 1.5))
    with LLM(max_total_tokens=2048) as plain:
        expected = [[one.tokens for one in plain.generate(prompts, params)] for params in (greedy, sampled)]
    with LLM(
        max_total_tokens=2048, speculative=kind, speculative_verify="rejection", speculative_num_tokens=3,
        speculative_control="fixed", prefix_cache=False,
    ) as llm:  # fmt: skip
        assert [one.tokens for one in llm.generate(prompts, greedy)] == expected[0]
        together = llm.generate(prompts, sampled)
        alone = [llm.generate([prompt], sampled)[0].tokens for prompt in prompts]
        counts = llm.counters().speculation
        assert alone == [one.tokens for one in together]
    assert [one.tokens for one in together] != expected[1]
    assert sum(one.num_accepted_tokens for one in together) > 0
    assert counts is not None
    assert (counts.num_rebuilt > 0) == (kind == "draft")  # a head computes prompts with the target
