"""Building an engine for a CUDA device, on a recording device: memory, graphs, errors, and a conversation."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

import gguf_files
import quantised_folders
from answered import answers_to, request, tokens_of
from pagewood.engine import LLM, SamplingParams
from pagewood.engine.api import EngineConfig, Submit
from pagewood.engine.assembly.cuda.build import build_cuda_engine, build_on, kernel_needs
from pagewood.engine.assembly.tiers import lower_caches
from pagewood.engine.assembly.tiers.lower_caches import TieredCaches
from pagewood.engine.build import build_engine
from pagewood.engine.core.loop import Engine
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.model_folder.folder import model_folder
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.text import Tokenizer
from pagewood.engine.weights.gguf import folder as gguf_folders
from pagewood.kvpool import MultiHeadLayout
from pagewood.kvpool.storage import KVStorage
from stand_ins import flashinfer_torch, tiny_heads
from stand_ins.recording_device import RecordingDevice

pytestmark = pytest.mark.usefixtures("small_buffers")

PAGE_BYTES = 4 * 2 * 16 * 2 * 64 * 4  # layers, K and V, positions, KV heads, head_dim, bytes
MIB = 1 << 20


def build(device: RecordingDevice, **options: Any) -> tuple[Engine, MemoryInbox, MemoryOutbox]:
    config = EngineConfig(**{"device": "cuda", "dtype": "float32", "max_running": 4, "max_length": 96, **options})
    inbox, outbox = MemoryInbox(), MemoryOutbox()
    return build_on(device, flashinfer_torch, config, inbox=inbox, outbox=outbox), inbox, outbox


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_conversation_equals_that_on_the_cpu(batch_invariant: bool) -> None:
    questions = ["What is 12 + 7?", "Reverse: stone", "Sort: pear, apple, fig"]
    with LLM(max_running=4, max_total_tokens=1024) as llm:
        prompts = [llm.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in questions]
        completions = llm.generate([p.tolist() for p in prompts], SamplingParams(temperature=0, max_tokens=12), stop=())
        expected = [completion.tokens for completion in completions]
    device = RecordingDevice()
    engine, inbox, outbox = build(device, max_total_tokens=1024, batch_invariant=batch_invariant)
    device.waits.clear()
    requests = [request(i, prompt, max_tokens=12, ignore_eos=False) for i, prompt in enumerate(prompts)]
    with device.watching():
        answers = answers_to(engine, inbox, outbox, requests)
    engine.close()
    assert [tuple(tokens_of(answer)) for answer in answers] == expected
    assert set(device.waits) == {"event.synchronize", "device.finish"}
    assert device.waits.count("device.finish") == 1  # by close
    assert device.num_replayed > 0


@pytest.mark.parametrize(
    "speculative", ["eagle", *(pytest.param(one, marks=pytest.mark.slow) for one in ("off", "draft"))]
)
def test_a_closed_engine_gives_its_memory_back_at_once(speculative: str) -> None:
    """Without the garbage collector: another engine may be built right after it, and takes most of the free memory."""
    more = {"speculative_model": str(model_folder(None))} if speculative == "draft" else {}
    gc.collect()
    before = _storages()
    engine, _, _ = build(RecordingDevice(), max_total_tokens=1024, speculative=speculative, **more)
    assert _storages() > before
    engine.close()
    gc.disable()
    try:
        del engine
        assert _storages() == before
    finally:
        gc.enable()


def _storages() -> int:
    """Return how many KV memories there are."""
    return sum(type(one) is KVStorage for one in gc.get_objects())


@pytest.mark.parametrize("kind", ["gptq", "gguf", "experts in fp8"])
def test_quantised_weights_answer_as_transformers_do(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are widened to the dtype of activations, except for experts in FP8."""
    monkeypatch.setattr(gguf_folders, "cache_root", lambda: tmp_path / "cache")
    has_experts = kind == "experts in fp8"
    more: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    more = {"architecture": "Qwen3Moe", **more} if has_experts else {}
    quantised_folders.write_model(tmp_path, head_dim=64, **more)
    plain: Any = transformers.AutoConfig.from_pretrained(tmp_path)
    model = tmp_path
    if kind == "gptq":
        config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
        weights = quantised_folders.quantise(tmp_path, quantised_folders.gptq(num_bits=4, group=32), config)
    elif has_experts:
        make = quantised_folders.float8_blocks(high=48, wide=32, scale=".weight_scale_inv")
        weights = quantised_folders.quantise(tmp_path, make, {"quant_method": "fp8", "weight_block_size": [48, 32]})
    else:
        model = tmp_path / "m.gguf"
        weights = gguf_files.write_gguf(tmp_path, model, architecture="llama", kinds=["Q8_0", "Q5_1"])
    prompt = [3, 17, 9, 41, 5, 28]
    plain.save_pretrained(tmp_path / "read")
    save_file(weights, tmp_path / "read" / "model.safetensors")
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "read", dtype=torch.float32)
    expected = reference.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    with caplog.at_level(logging.INFO):
        engine, inbox, outbox = build(RecordingDevice(), model=str(model), max_total_tokens=256)
    assert ("24 matrices of fp8 as float8 in groups of 32" in caplog.messages) == has_experts
    [answer] = answers_to(engine, inbox, outbox, [request("x", prompt, max_tokens=12)])
    engine.close()
    assert tokens_of(answer) == expected[0, len(prompt) :].tolist()


def talk(prompts: Sequence[np.ndarray], **options: Any) -> tuple[list[list[int]], int]:
    """Return the answers of an engine, which waits for nothing but its steps, and how many of its drafts were right."""
    device = RecordingDevice()
    engine, inbox, outbox = build(device, max_total_tokens=1024, **options)
    device.waits.clear()
    with device.watching():
        answers = answers_to(
            engine, inbox, outbox, [request(i, prompt, max_tokens=20) for i, prompt in enumerate(prompts)]
        )
    engine.close()
    assert set(device.waits) == {"event.synchronize", "device.finish"}
    assert device.waits.count("device.finish") == 1  # by close
    return [tokens_of(answer) for answer in answers], sum(answer[-1].num_accepted_tokens for answer in answers)


@pytest.mark.parametrize(
    "speculative",
    ["ngram", "draft", "mtp", *(pytest.param(one, marks=pytest.mark.slow) for one in ("auto", "eagle", "experts"))],
)
@pytest.mark.parametrize("control", ["adaptive", "fixed"])
def test_drafts_do_not_change_a_conversation(speculative: str, control: str) -> None:
    model: dict[str, Any] = {}
    drafting: dict[str, Any] = {"speculative": speculative, "speculative_control": control}
    if speculative in ("eagle", "mtp", "experts"):
        target, head = tiny_heads.folders_of(speculative)
        model, drafting["speculative"] = {"model": str(target)}, "eagle"
        drafting |= {"speculative_model": str(head)} if speculative == "eagle" else {}
    prompts = [np.array([5 + (seed * 7919 + i * i * 31 + i) % 40 for i in range(30)] * 2, "<i4") for seed in range(3)]
    if not model:
        tokenizer = Tokenizer.from_folder(model_folder(None))
        asked = [f"Repeat the word {word} 9 times." for word in ("tree", "house", "river")]
        prompts = [tokenizer.encode_chat([{"role": "user", "content": one}]) for one in asked]

    plain, _ = talk(prompts, **model)
    drafted, num_accepted = talk(prompts, **model, **drafting)
    assert drafted == plain
    if control == "fixed" and not model:  # the random heads draft nothing of use
        assert num_accepted > 0


@pytest.mark.parametrize(
    "options", [{}, {"cuda_graph": False}, {"speculative": "eagle", "speculative_control": "fixed"}]
)
def test_flashinfers_experts_answer_alike(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [np.array([5 + (seed * 7919 + i * 31 + i * i) % 40 for i in range(30)], "<i4") for seed in range(3)]
    model = str(tiny_heads.folders_of("experts")[0])
    fused, calls = flashinfer_torch.cutlass_fused_moe, 0

    @functools.wraps(fused)
    def counted(*args: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        return fused(*args, **keywords)

    monkeypatch.setattr(flashinfer_torch, "cutlass_fused_moe", counted)
    plain, _ = talk(prompts, model=model)
    assert not calls
    assert talk(prompts, model=model, expert_kernels="flashinfer", **options)[0] == plain
    assert calls


def test_what_cuda_does_not_draft_is_refused() -> None:
    with pytest.raises(ValueError, match=r"head_dim of the draft model must be one of .* got 32"):
        build_cuda_engine(EngineConfig(device="cuda", speculative="draft"), inbox=MemoryInbox(), outbox=MemoryOutbox())
    for options, message in (
        ({"speculative": "suffix"}, "speculative must be off, ngram, draft, eagle or auto on CUDA, got suffix"),
        ({"speculative": "draft", "speculative_verify": "rejection"}, "speculative_verify must be exact on CUDA"),
    ):
        with pytest.raises(ValueError, match=message):
            build(RecordingDevice(), **options)


def test_a_conversation_that_was_evicted_is_loaded_and_not_computed_again() -> None:
    engine, inbox, outbox = build(RecordingDevice(), max_length=240, max_total_tokens=256, host_cache_gb=0.1)

    def cached(seed: int) -> tuple[tuple[int, ...], int]:
        """Answer a prompt; return the tokens, and the number of its positions that were loaded."""
        prompt = np.array([5 + (seed * 7919 + i * i * 31 + i) % 200 for i in range(200)], "<i4")
        [answer] = answers_to(engine, inbox, outbox, [request("x", prompt, max_tokens=8)])
        return tuple(tokens_of(answer)), answer[-1].num_cached_tokens

    first = [cached(seed) for seed in range(3)]  # each evicts the one before
    assert [num_cached for _, num_cached in first] == [0, 0, 0]
    assert [cached(seed) for seed in range(3)] == [(tokens, 192) for tokens, _ in first]
    engine.close()


def test_memory_that_cannot_be_pinned_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = MultiHeadLayout(num_layers=1, num_kv_heads=1, head_dim=64, page_size=16)
    memory = KVStorage(layout, 2, device="meta").memory  # not a CPU's memory, like a GPU's
    pages = SimpleNamespace(page_bytes=layout.bytes_per_page)  # those of a GPU have streams
    monkeypatch.setattr(lower_caches, "device_pages", lambda _: pages)
    with pytest.raises(ValueError, match=r"host_cache_gb must fit into the .* GB of memory .* got 1000000\.0"):
        TieredCaches(EngineConfig(host_cache_gb=1e6), memory=memory, page_size=16, fingerprint=b"")


def test_graphs_can_be_limited_and_disabled() -> None:
    for options, sizes in (
        ({}, [1, 2, 4]),
        ({"cuda_graph_max_batch": 2}, [1, 2]),
        ({"cuda_graph_max_batch": 100}, [1, 2, 4]),
        ({"cuda_graph": False}, []),
    ):
        engine, _, _ = build(RecordingDevice(), **options)
        assert engine._runner._graphs.sizes == sizes  # pyright: ignore[reportAttributeAccessIssue]


def test_kv_memory_takes_what_is_left_of_the_fraction() -> None:
    device = RecordingDevice(free_bytes=100 * MIB, peak_bytes=30 * MIB)
    engine, _, _ = build(device, mem_fraction=0.5, cuda_graph=False)
    probe_bytes = (4 * 6 + 1) * PAGE_BYTES  # KV memory of the probe: 4 rows of 95 tokens, and the runner's page
    left = 50 * MIB - (30 * MIB - probe_bytes)
    assert engine.info.num_pages == left // PAGE_BYTES - 1
    engine, _, _ = build(device, max_total_tokens=160)
    assert engine.info.num_pages == 10


def test_the_error_for_too_little_memory_says_what_to_change_and_by_how_much() -> None:
    device = RecordingDevice(free_bytes=4 * MIB)
    with pytest.raises(
        ValueError, match=r"64 pages lacks \d+ MiB.* raise mem_fraction to 0\.\d+ or lower max_total"
    ) as e:
        build(device, max_total_tokens=256, mem_fraction=0.1, cuda_graph=False, page_size=4)
    assert "weights 0, activations 0, graphs 0" in str(e.value)
    with pytest.raises(ValueError, match=r"max_length must be at most 80, .* got 96"):
        build(RecordingDevice(), max_total_tokens=80)
    with pytest.raises(ValueError, match=r"lacks \d+ MiB.*: lower max_total_tokens"):
        build(device, max_total_tokens=100_000)


def test_fields_are_checked() -> None:
    with pytest.raises(ValueError, match="mem_fraction must be in"):
        EngineConfig(mem_fraction=0.0)
    with pytest.raises(ValueError, match="dtype must be float32 on a CPU, got bfloat16"):
        EngineConfig(dtype="bfloat16")
    with pytest.raises(ValueError, match="cuda_graph_max_batch must be >= 1, got 0"):
        EngineConfig(cuda_graph_max_batch=0)


def with_attention(model: ModelConfig, changes: list[dict[str, Any]]) -> ModelConfig:
    """Return the model with one layer for each of `changes` of its attention."""
    layer = model.layers[0]
    return replace(model, layers=tuple(replace(layer, mixer=replace(layer.mixer, **change)) for change in changes))


def test_models_without_kernels_are_refused() -> None:
    model = ModelConfig.from_folder(model_folder(None))
    (needs,) = kernel_needs(EngineConfig(device="cuda", batch_invariant=True), model)
    assert (needs.dtype, needs.head_dim, needs.has_windows) == ("bfloat16", 64, (False,))
    with pytest.raises(ValueError, match=r"head_dim must be one of \(64, 128, 256, 512\) on CUDA.* got 80"):
        kernel_needs(EngineConfig(device="cuda"), with_attention(model, [{"head_dim": 80}]))
    model = with_attention(model, [{"window": window} for window in (None, 32, 64, None)])
    assert kernel_needs(EngineConfig(device="cuda"), model)[0].has_windows == (False, True)
    kernel_needs(EngineConfig(device="cuda", batch_invariant=True, max_length=32), model)
    with pytest.raises(ValueError, match=r"max_length must be at most 32 for batch_invariant, .* got 33"):
        kernel_needs(EngineConfig(device="cuda", batch_invariant=True, max_length=33), model)
    model = with_attention(model, [{"window": 48, "is_chunked": True, "soft_cap": 9.0}, {"soft_cap": 9.0}])
    (needs,) = kernel_needs(EngineConfig(device="cuda", max_length=48), model)
    assert (needs.has_windows, needs.has_soft_cap) == ((False,), True)
    with pytest.raises(ValueError, match=r"max_length must be at most 48 on CUDA, .* chunks of 48, .* got 49"):
        kernel_needs(EngineConfig(device="cuda", max_length=49), model)


def test_each_size_of_heads_has_kernels() -> None:
    model = ModelConfig.from_folder(model_folder(None))
    sizes: list[dict[str, Any]] = [{"head_dim": 256, "window": 512}, {"head_dim": 512}]
    model = with_attention(model, sizes)
    found = kernel_needs(EngineConfig(device="cuda"), model)
    assert [(one.head_dim, one.has_windows) for one in found] == [(256, (True,)), (512, (False,))]
    with pytest.raises(ValueError, match="batch_invariant must be False for heads of 512 elements on CUDA"):
        kernel_needs(EngineConfig(device="cuda", batch_invariant=True), model)
    with pytest.raises(ValueError, match="kv_cache_dtype must be auto or bfloat16 for heads of 512 elements on CUDA"):
        kernel_needs(EngineConfig(device="cuda", kv_cache_dtype="fp8_e4m3"), model)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_host_without_a_gpu_is_an_error() -> None:
    with pytest.raises(ValueError, match="device must be cpu where torch finds no CUDA device"):
        build_engine(EngineConfig(device="cuda"), inbox=MemoryInbox(), outbox=MemoryOutbox())
    with pytest.raises(ValueError, match="dtype must be float16 or bfloat16 on CUDA"):
        build_engine(EngineConfig(device="cuda", dtype="float32"), inbox=MemoryInbox(), outbox=MemoryOutbox())
    rejecting = EngineConfig(device="cuda", speculative="draft", speculative_verify="rejection")
    with pytest.raises(ValueError, match="speculative_verify must be exact on CUDA, got rejection"):
        build_engine(rejecting, inbox=MemoryInbox(), outbox=MemoryOutbox())


def test_missing_parts_are_refused() -> None:
    with pytest.raises(
        ValueError,
        match="kv_cache_dtype must be one of auto, bfloat16, fp8_e4m3 on CUDA with dtype bfloat16, got 'int8'",
    ):
        EngineConfig(device="cuda", kv_cache_dtype="int8")
    with pytest.raises(ValueError, match="kv_cache_dtype must be one of auto, float32, int8 on a CPU, got 'fp8_e4m3'"):
        EngineConfig(kv_cache_dtype="fp8_e4m3")


def test_fp8_keys_and_values_take_half_of_float16_and_give_nearly_the_same_answers() -> None:
    pages = {}
    for kv_cache_dtype in ("auto", "fp8_e4m3"):
        device = RecordingDevice(free_bytes=100 * MIB)
        engine, _, _ = build(device, dtype="float16", kv_cache_dtype=kv_cache_dtype, cuda_graph=False)
        pages[kv_cache_dtype] = engine.info.num_pages
    assert 1.9 < pages["fp8_e4m3"] / pages["auto"] < 2.1
    engine, inbox, outbox = build(RecordingDevice(), dtype="float16", kv_cache_dtype="fp8_e4m3", max_total_tokens=1024)
    with LLM(max_running=1, max_total_tokens=1024) as llm:
        prompt = llm.tokenizer.encode_chat([{"role": "user", "content": "What is 12 + 7?"}])
        inbox.put(
            Submit(
                request_id="a",
                tokens=prompt.astype("<i4").tobytes(),
                sampling=SamplingParams(temperature=0, max_tokens=12),
            )
        )
        tokens: list[int] = []
        while not (deltas := outbox.take()) or deltas[-1].finish is None:
            tokens += [token for delta in deltas for token in delta.tokens]
            engine.step()
        tokens += [token for delta in deltas for token in delta.tokens]
        assert "19" in llm.tokenizer.decode(tokens)
    engine.close()
