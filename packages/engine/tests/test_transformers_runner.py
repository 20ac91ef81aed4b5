"""Models that `transformers` computes over our pages, against the same models with its own cache, in fp32."""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from answered import answers_to, request, tokens_of
from families.case import SMALL, Case, build
from families.ropes import rope
from pagewood.engine import LLM, SamplingParams
from pagewood.engine.api import EngineConfig, FinishReason, Grammar
from pagewood.engine.assembly.available_memory import available_memory_bytes
from pagewood.engine.assembly.transformers.build import build_transformers_engine
from pagewood.engine.build import build_engine
from pagewood.engine.core.loop import Engine
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.models.families.registry import FAMILIES
from pagewood.engine.runner.cuda.runner import CUDARunner
from pagewood.engine.runner.transformers.host_device import HostDevice
from pagewood.engine.runner.transformers.load import FoundModel, load
from pagewood.engine.runner.transformers.model import TransformersModel
from pagewood.engine.runner.transformers.pages import PagedAttention
from pagewood.engine.runner.transformers.shape import FoundShape
from pagewood.kvpool.storage import KVStorage
from row_driver import RowDriver
from stand_ins.recording_device import RecordingDevice

PAGE_SIZE = 4
WITHOUT_TABLE = {
    "stablelm": Case(kind="StableLm"),
    "opt": Case(kind="OPT", extra={"ffn_dim": 80, "word_embed_proj_dim": 64}),
    "phi": Case(kind="Phi"),
}
OVER_CACHES = {
    "falcon-alibi": Case(kind="Falcon", extra={"alibi": True}),
    "falcon-rotary": Case(kind="Falcon", extra={"new_decoder_architecture": True, "num_kv_heads": 2}),
    "bloom": Case(kind="Bloom"),
    "mpt": Case(kind="Mpt"),
    "gpt-j": Case(kind="GPTJ", extra={"rotary_dim": 8, "eos_token_id": 1}),
    "gpt-neo": Case(
        kind="GPTNeo",
        extra={"attention_types": [[["global", "local"], 1], [["local"], 1]], "window_size": 9, "eos_token_id": 1},
    ),
}
"""Classes that attend by themselves."""
CASES = {
    **WITHOUT_TABLE,
    **OVER_CACHES,
    "mistral-window": Case(kind="Mistral", extra={"sliding_window": 9, "head_dim": 8}),
}
_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
_SHARED = {
    "head_dim": 16, "sliding_window": 9, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 97, "laurel_rank": 8, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    "altup_num_inputs": 2, "eos_token_id": 0, "bos_token_id": 0,
}  # fmt: skip
OTHERS = {
    "caps": Case(kind="Gemma2", extra={"head_dim": 16, "sliding_window": 9, "attn_logit_softcapping": 3.0}),
    "sinks": Case(kind="GptOss", extra={"head_dim": 16, "sliding_window": 9, "num_local_experts": 4}),
    "values-of-another-size": Case(kind="DeepseekV3", extra={**_EXPERTS, **_LATENT, "num_key_value_heads": 4}),
    "keys-of-earlier-layers": Case(kind="Gemma3n", config="Gemma3nTextConfig", extra=_SHARED),
    "one-key-head": Case(kind="GPTBigCode", extra={"multi_query": True}),
    "positions-behind-padding": Case(kind="Roberta", extra={"is_decoder": True}),
    "keys-of-an-indexer": Case(
        kind="GlmMoeDsa",
        extra={
            **_EXPERTS,
            **_LATENT,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "n_shared_experts": 1,
            "index_topk": 8,
            "index_head_dim": 16,
            "index_n_heads": 12,
        },
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model, loaded here and there."""

    folder: Path
    reference: Any
    model: TransformersModel
    shape: FoundShape

    @property
    def runner(self) -> CUDARunner:
        """A runner with memory of its own."""
        storage = KVStorage(self.shape.layout(page_size=PAGE_SIZE, dtype="float32"), 401)
        attention = PagedAttention(storage)
        device = HostDevice(free_bytes=available_memory_bytes())
        return CUDARunner(self.model, storage, None, device, max_rows=10, max_length=160, attention=attention)

    def logits(self, tokens: list[int]) -> Tensor:
        """The logits of `transformers` at all positions."""
        with torch.inference_mode():
            return self.reference(torch.tensor([tokens])).logits[0]

    def generated(self, prompt: list[int], num: int) -> list[int]:
        """Its greedy tokens."""
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            tokens = self.reference.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=num, do_sample=False, eos_token_id=None,
                pad_token_id=0,
            )  # fmt: skip
        return tokens[0, len(prompt) :].tolist()


def load_case(case: Case, folder: Path) -> Loaded:
    reference = build(case, folder)
    reference.generation_config.eos_token_id = None
    model, shape = load(FoundModel.of(folder), dtype=torch.float32, device=torch.device("cpu"))
    return Loaded(folder=folder, reference=reference, model=model, shape=shape)


@pytest.fixture(scope="module", params=CASES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load_case(CASES[request.param], tmp_path_factory.mktemp(request.param))


def prompts(num: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, SMALL["vocab_size"], length).tolist() for length in [37, 1, 5, 64, 23, 8, 70, 16, 30][:num]]


def driver_of(runner: CUDARunner) -> RowDriver:
    return RowDriver(runner, num_pages=400, page_size=PAGE_SIZE)


def logits_in_chunks(runner: CUDARunner, tokens: list[int], chunk: int) -> Tensor:
    driver, parts = driver_of(runner), list[Tensor]()
    sequence = driver.add(tokens)
    while sequence.num_computed < len(tokens):
        parts.append(runner.forward(driver.batch([(sequence, chunk)])))
    return torch.cat(parts)


@pytest.mark.parametrize("chunk", [7, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in (1, 64))])
def test_logits_at_every_position(loaded: Loaded, chunk: int) -> None:
    tokens = prompts(7)[6]
    found = logits_in_chunks(loaded.runner, tokens, chunk)
    torch.testing.assert_close(found, loaded.logits(tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", OTHERS)
def test_what_modules_ask_of_attention(name: str, tmp_path: Path) -> None:
    """Caps, sinks, windows, values that are shorter than keys, one head of keys, learned positions; in ragged steps."""
    other, (tokens, long) = load_case(OTHERS[name], tmp_path), (prompts(1)[0], prompts(4)[3])
    runner = other.runner
    driver = driver_of(runner)
    sequences = [driver.add(tokens), driver.add(long)]
    parts: list[list[Tensor]] = [[], []]
    for chunk in (3, 30, 31):
        counts = [min(chunk, len(one.tokens) - one.num_computed) for one in sequences]
        work = [(one, count) for one, count in zip(sequences, counts, strict=True) if count]
        found = runner.forward(driver.batch(work)).split([count for count in counts if count])
        for index, part in zip([i for i, count in enumerate(counts) if count], found, strict=True):
            parts[index].append(part)
    torch.testing.assert_close(torch.cat(parts[0]), other.logits(tokens), atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.cat(parts[1]), other.logits(long), atol=1e-4, rtol=0)


def test_greedy_tokens_alone_after_a_hit_and_among_nine(loaded: Loaded) -> None:
    texts, num_tokens = prompts(9), 32
    expected = loaded.generated(texts[0], num_tokens)
    driver = driver_of(loaded.runner)
    alone = driver.add(texts[0])
    driver.generate([alone], num_tokens=num_tokens, chunk=7)
    assert alone.output == expected
    after_hit = driver.add(texts[0], share=alone, num_shared_pages=len(texts[0]) // PAGE_SIZE)
    driver.generate([after_hit], num_tokens=num_tokens, chunk=7)
    assert after_hit.output == expected
    driver = driver_of(loaded.runner)
    crowd = [driver.add(text) for text in texts]
    driver.generate(crowd, num_tokens=num_tokens, chunk=7)
    assert crowd[0].output == expected
    assert crowd[4].output == loaded.generated(texts[4], num_tokens)


def answers(
    engine: Engine, inbox: MemoryInbox, outbox: MemoryOutbox, texts: list[list[int]], **sampling: Any
) -> list[list[int]]:
    """The tokens that an engine draws after each text, at most 24 and all at once."""
    requests = [request(i, text, max_tokens=24, seed=i, **sampling) for i, text in enumerate(texts)]
    answers = answers_to(engine, inbox, outbox, requests)
    assert all(answer[-1].finish is FinishReason.LENGTH for answer in answers), answers
    return [tokens_of(answer) for answer in answers]


def built(model: Path | None, **options: Any) -> tuple[Engine, MemoryInbox, MemoryOutbox]:
    inbox, outbox = MemoryInbox(), MemoryOutbox()
    config = EngineConfig(
        model=None if model is None else str(model), **{"max_total_tokens": 512, "page_size": PAGE_SIZE, **options}
    )
    return build_engine(config, inbox=inbox, outbox=outbox), inbox, outbox


LITTLE_MEMORY: dict[str, dict[str, Any]] = {
    "plain": {},
    "drafts": {"speculative": "ngram", "speculative_control": "fixed"},
    "int8": {"kv_cache_dtype": "int8"},
}


@pytest.mark.parametrize(
    ("loaded", "options"),
    [
        pytest.param(loaded, options, id=f"{loaded}-{name}", marks=[pytest.mark.slow] * (row != column))
        for row, loaded in enumerate(["phi", "mistral-window", "falcon-alibi"])
        for column, (name, options) in enumerate(LITTLE_MEMORY.items())
    ],
    indirect=["loaded"],
)
def test_an_engine_with_too_little_memory_generates_the_same(
    loaded: Loaded, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Rows are preempted and computed again, in part from the prefix cache."""
    texts = prompts(9)
    texts[5] = texts[0] + [3, 4]
    with caplog.at_level(logging.INFO):
        engine, inbox, outbox = built(
            loaded.folder,
            model_impl="transformers",
            max_total_tokens=160,
            schedule_conservativeness=0.01,
            max_length=120,
            max_running=6,
            **options,
        )
    found = answers(engine, inbox, outbox, texts, temperature=0)
    assert engine.counters().num_preempted > 0
    engine.close()
    expected = [loaded.generated(text, 24) for text in texts]
    if "kv_cache_dtype" in options:  # rounded keys change some of them, late
        assert [one[0] for one in found] == [one[0] for one in expected]
    else:
        assert found == expected
    assert "runs in transformers over our pages, slower" in caplog.text
    assert "model_impl is transformers" in caplog.text


@pytest.mark.parametrize("loaded", ["opt", "mistral-window", "gpt-neo"], indirect=True)
def test_tensors_of_a_device_with_streams(loaded: Loaded) -> None:
    """As on CUDA: results are copied late, and memory is found by computing the largest step."""
    config = EngineConfig(
        model=str(loaded.folder), device="cuda", dtype="float32", max_running=4, max_length=96, max_total_tokens=400,
        speculative="ngram", page_size=PAGE_SIZE,
    )  # fmt: skip
    inbox, outbox, texts = MemoryInbox(), MemoryOutbox(), prompts(5)
    engine = build_transformers_engine(config, "a test", inbox=inbox, outbox=outbox, device=RecordingDevice())
    found = answers(engine, inbox, outbox, texts, temperature=0)
    engine.close()
    assert found == [loaded.generated(text, 24) for text in texts]


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.9}, {"temperature": 1.1, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2}],
    ids=["plain", "filters"],
)
def test_the_tokens_of_a_seed_are_those_of_the_cpu_program(sampling: dict[str, Any]) -> None:
    texts = [[3, 1, 4, 1, 5], [9, 2, 6], [5] * 30]
    found: list[list[list[int]]] = []
    for impl in ("native", "transformers"):
        engine, inbox, outbox = built(None, model_impl=impl)
        found.append(answers(engine, inbox, outbox, texts, **sampling))
        engine.close()
    assert found[0] == found[1]


def test_grammars_and_log_probabilities_are_those_of_the_cpu_program() -> None:
    sampling = SamplingParams(
        temperature=0, max_tokens=12, logprobs=2, prompt_logprobs=1, grammar=Grammar.regex("[0-9]{4}-[a-z]+")
    )
    completions: list[Any] = []
    for impl in ("native", "transformers"):
        with LLM(model_impl=impl, max_total_tokens=512) as llm:
            completions += llm.generate(["What is 12 + 7?"], sampling)
            vector = llm.embed(["stone"])[0]
        completions[-1] = completions[-1], vector
    (here, here_vector), (there, there_vector) = completions
    assert here.text == there.text
    np.testing.assert_allclose(here_vector, there_vector, atol=1e-4)
    for ours, theirs in ((here.logprobs, there.logprobs), (here.prompt_logprobs, there.prompt_logprobs)):
        assert [one.token for one in ours] == [one.token for one in theirs]
        np.testing.assert_allclose([one.logprob for one in ours], [one.logprob for one in theirs], atol=1e-4)


@pytest.mark.parametrize("loaded", ["falcon-alibi"], indirect=True)
def test_the_log_says_that_requests_attend_one_after_the_other(
    loaded: Loaded, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        built(loaded.folder)[0].close()
    name = type(loaded.reference).__name__
    assert loaded.model.attends_by_itself
    assert f"{name} attends over a cache in our pages, for one request after the other, because" in caplog.text


@pytest.mark.parametrize("name", WITHOUT_TABLE)
def test_a_model_without_a_table_is_found_by_itself(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build(WITHOUT_TABLE[name], tmp_path)
    kind = f"{WITHOUT_TABLE[name].kind}ForCausalLM"
    assert kind not in FAMILIES
    with caplog.at_level(logging.INFO):
        built(tmp_path)[0].close()
    assert f"there is no table for {kind}" in caplog.text
    with pytest.raises(ValueError, match="architectures must name one of"):
        build_engine(EngineConfig(model=str(tmp_path), model_impl="native"), inbox=MemoryInbox(), outbox=MemoryOutbox())


ONLY_THERE = {"Olmo": {"clip_qkv": 0.5}, "Cohere": {"use_qk_norm": True}}
"""Fields of OLMo 7B and of Command R+."""


@pytest.mark.parametrize("kind", ONLY_THERE)
def test_a_field_that_the_parts_do_not_compute(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    [(field, value)] = ONLY_THERE[kind].items()
    other = load_case(Case(kind=kind, extra={**ONLY_THERE[kind], "eos_token_id": 0}), tmp_path)
    with caplog.at_level(logging.INFO):
        engine, inbox, outbox = built(tmp_path)
    found = answers(engine, inbox, outbox, prompts(3), temperature=0)
    engine.close()
    assert found == [other.generated(text, 24) for text in prompts(3)]
    assert f"{kind}ForCausalLM with {field} {value} is computed there only" in caplog.text
    with pytest.raises(ValueError, match=f"{field} must be absent"):
        built(tmp_path, model_impl="native")


REFUSED = {
    "Mamba": ({}, "MambaForCausalLM must have keys and values of all positions as its only cache"),
    "Jamba": ({}, "JambaForCausalLM must have keys and values of all positions as its only cache"),
    "CpmAnt": ({}, "CpmAntForCausalLM must keep nothing of a text but keys and values, .* got \\[1, 4, 34, 128\\]"),
    "BertLMHead": ({}, "a token must see no later one"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_cache_of_another_kind_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    extra, message = REFUSED[kind]
    if kind == "BertLMHead":
        config: Any = transformers.BertConfig(**SMALL)
        transformers.BertLMHeadModel(config).save_pretrained(tmp_path)
    else:
        build(Case(kind=kind, extra=extra), tmp_path)
    with pytest.raises(ValueError, match=message):
        built(tmp_path, model_impl="transformers")


def test_a_state_beside_keys_and_values_is_found_by_computing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if nothing in a class or its configuration says that there is any: here each layer adds the token before."""
    build(WITHOUT_TABLE["phi"], tmp_path)
    plain = transformers.models.phi.modeling_phi.PhiDecoderLayer.forward

    def shifted(self: Any, hidden_states: Tensor, *args: Any, **others: Any) -> Any:
        return plain(self, hidden_states + 0.3 * hidden_states.roll(1, 1), *args, **others)

    monkeypatch.setattr(transformers.models.phi.modeling_phi.PhiDecoderLayer, "forward", shifted)
    with pytest.raises(
        ValueError,
        match=r"PhiForCausalLM must keep nothing of a text but .* in parts differ from those of the class by",
    ):
        built(tmp_path)


def test_ropes_that_grow_with_the_longest_text_of_a_step_end_where_they_begin_to(tmp_path: Path) -> None:
    fields = {**rope("dynamic", factor=2.0), "max_position_embeddings": 40}
    build(Case(kind="StableLm", extra=fields), tmp_path)
    engine, _, _ = built(tmp_path, max_total_tokens=400)
    assert engine.info.max_length == 40
    engine.close()


@pytest.mark.parametrize("loaded", ["phi"], indirect=True)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"weights": "int8"},
            "weights must be auto or float32 or bfloat16 for a model that transformers computes, got int8",
        ),
        ({"speculative": "suffix"}, "speculative must be off or ngram or auto for a model that transformers computes"),
        ({"max_length": 999}, r"max_length must be at most 256 \(\d+ pages of 4 tokens"),
    ],
)
def test_what_a_model_of_transformers_cannot_do_is_refused(
    loaded: Loaded, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        built(loaded.folder, model_impl="transformers", **{"max_total_tokens": 4096, **options})


def test_a_folder_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    """`transformers` would make them up."""
    build(WITHOUT_TABLE["phi"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.fc1.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"must hold all weights of PhiForCausalLM, and lacks model\.layers\.1\.mlp\.fc1"
    ):
        built(tmp_path)
