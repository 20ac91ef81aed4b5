"""The weights of an engine: from the checkpoint, quantised, from the cache folder; and what becomes of the answers."""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from threading import Event
from typing import Any, Literal

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

import small_disk
from pagewood.engine import LLM, SamplingParams
from pagewood.engine.api import ActivationFormat, EngineConfig, WeightFormat
from pagewood.engine.model_folder import model_digest
from pagewood.engine.model_folder.folder import model_folder
from pagewood.engine.model_folder.inspection import inspect_model
from pagewood.engine.model_folder.model_digest import ModelDigest
from pagewood.engine.quantise import Scheme, quantise_model
from pagewood.engine.runner.cpu.compiled.products.packed_weights import WideLevel
from pagewood.engine.runner.cpu.compiled.products.pair_dot import PairLevel, pair_levels
from pagewood.engine.runner.cpu.compiled.products.weight_kind import WeightKind
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.cpu.runner import CPURunner
from pagewood.engine.runner.cpu.weights.loaded_model import LoadedModel, load_cpu_model
from pagewood.engine.runner.storage import storage_for
from pagewood.engine.text import Tokenizer
from pagewood.engine.weights.matrix_forms import quantise_int4, quantise_int8, to_bfloat16
from row_driver import RowDriver

FORMS: list[WeightFormat] = ["bfloat16", "int8", "int4"]
ROUNDED: list[WeightFormat] = ["int8", "int4"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test."""
    monkeypatch.setenv("PAGEWOOD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "weights"


def save(folder: Path, dtype: torch.dtype = torch.float32, *, tied: bool = False) -> Any:
    """Save a tiny model with sizes that fill no whole panels, and return it in float32."""
    torch.manual_seed(3)
    config: Any = transformers.Qwen2Config(
        vocab_size=75, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, tie_word_embeddings=tied,
    )  # fmt: skip
    model: Any = transformers.Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms of ones would put int4's few numbers exactly between two codes of int8
                parameter.uniform_(0.5, 1.5)
    model.to(dtype)
    model.save_pretrained(folder)
    return transformers.Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def load(folder: Path, form: WeightFormat, **options: Any) -> LoadedModel:
    return load_cpu_model(folder, form, digest=ModelDigest(folder), **options)


def logits(loaded: LoadedModel, tokens: list[int]) -> NDArray[np.float32]:
    """Return the logits `[T, V]` at all positions."""
    config = loaded.model.config
    layout = config.memory_layout(page_size=16, dtype="float32", order="HND")
    kernel = warm_up(layout, packed=loaded.variants)
    runner = CPURunner(loaded.model, storage_for(layout, 16), kernel, max_rows=1, max_length=256, num_threads=2)
    driver = RowDriver(runner, num_pages=16, page_size=16)
    found = runner.forward(driver.batch([(driver.add(tokens), len(tokens))])).copy()
    runner.close()
    return found


def random_tokens(length: int = 60) -> list[int]:
    return np.random.default_rng(4).integers(0, 75, length).tolist()


def distance(found: NDArray[np.floating[Any]], exact: NDArray[np.floating[Any]]) -> float:
    """Return the error relative to the Euclidean norm."""
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_transformers_with_the_widened_weights(
    form: WeightFormat, tied: bool, tmp_path: Path
) -> None:
    """And with activations that are rounded to eight bits, without which logits differ by up to 4%."""
    reference = save(tmp_path, tied=tied)
    tokens, make = random_tokens(), {"bfloat16": to_bfloat16, "int8": quantise_int8, "int4": quantise_int4}[form]
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.from_numpy(make(parameter.numpy()).dequantised()))
        if tied:
            reference.tie_weights()
        exact = reference(torch.tensor([tokens])).logits[0].numpy()
        if form != "bfloat16":
            for module in reference.modules():
                if isinstance(module, torch.nn.Linear):
                    module.register_forward_pre_hook(lambda module, inputs: rounded(inputs[0]))
        expected = reference(torch.tensor([tokens])).logits[0].numpy()
    activations: ActivationFormat = "float32" if form == "bfloat16" else "auto"
    found = logits(load(tmp_path, form, activations=activations), tokens)
    assert distance(found, expected) < (1e-5 if form == "bfloat16" else 5e-3)  # some codes are rounded the other way
    assert distance(found, exact) < (1e-5 if form == "bfloat16" else 0.04)
    assert np.array_equal(found, logits(load(tmp_path, form, activations=activations), tokens))


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Return activations with eight bits and a scale for each token."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


@pytest.mark.parametrize("tied", [False, True])
def test_with_float32_activations_logits_have_the_bits_of_the_dequantised_weights(tied: bool, tmp_path: Path) -> None:
    """Also when the weights come from the cache folder, which they share with products of eight bits."""
    save(tmp_path / "model", tied=tied)
    tokens = random_tokens()
    dequantised: Any = transformers.Qwen2ForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    with torch.no_grad():
        for parameter in dequantised.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.from_numpy(quantise_int8(parameter.numpy()).dequantised()))
    dequantised.save_pretrained(tmp_path / "dequantised")
    expected = logits(load(tmp_path / "dequantised", "float32"), tokens)
    in_bytes = logits(load(tmp_path / "model", "int8"), tokens)
    assert distance(in_bytes, expected) > 1e-3
    loaded = load(tmp_path / "model", "int8", activations="float32")
    assert loaded.variants == {(WeightKind.INT8, WideLevel.FLOAT32)}
    assert np.array_equal(logits(loaded, tokens), expected)


@pytest.mark.parametrize("form", ROUNDED)
def test_so_have_those_of_a_folder_that_is_quantised(form: Literal["int8", "int4"], tmp_path: Path) -> None:
    save(tmp_path / "model", torch.bfloat16)
    quantise_model(tmp_path / "model", tmp_path / "made", Scheme(format=form))
    tokens = random_tokens()
    expected = logits(load(tmp_path / "made", "float32"), tokens)
    assert distance(logits(load(tmp_path / "made", "auto"), tokens), expected) > 1e-3
    loaded = load(tmp_path / "made", "auto", activations="float32")
    assert WeightKind[form.upper()] in {kind for kind, _ in loaded.variants}
    assert np.array_equal(logits(loaded, tokens), expected)


@pytest.mark.parametrize("tied", [False, True])
def test_with_bfloat16_activations_the_inputs_of_every_product_are_rounded(tied: bool, tmp_path: Path) -> None:
    """And nothing else is: a third of the positions agree as with float32; in the others a number close to the middle
    between two of bfloat16 is rounded the other way."""
    reference = save(tmp_path, torch.bfloat16, tied=tied)
    tokens = random_tokens()
    with torch.no_grad():
        exact = reference(torch.tensor([tokens])).logits[0].numpy()
        for module in reference.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(lambda module, inputs: inputs[0].bfloat16().float())
        expected = reference(torch.tensor([tokens])).logits[0].numpy()
    loaded = load(tmp_path, "auto", activations="bfloat16")
    assert {kind for kind, _ in loaded.variants} == {WeightKind.BFLOAT16_PAIRS}
    found = logits(loaded, tokens)
    assert sum(distance(*rows) < 1e-5 for rows in zip(found, expected, strict=True)) >= 15
    assert min(distance(*rows) for rows in zip(found, exact, strict=True)) > 1e-3
    assert distance(found, expected) < 3e-3 < distance(found, exact) < 0.02
    assert np.array_equal(found, logits(load(tmp_path, "bfloat16", activations="bfloat16"), tokens))


@pytest.mark.parametrize(
    ("dtype", "kinds"),
    [
        (torch.float32, set()),
        (torch.bfloat16, {WeightKind.BFLOAT16}),
        (torch.float16, {WeightKind.FLOAT16}),
    ],
    ids=str,
)
def test_auto_keeps_the_form_of_the_checkpoint_and_with_float32_activations_its_bits(
    dtype: torch.dtype, kinds: set[WeightKind], tmp_path: Path
) -> None:
    save(tmp_path, dtype)
    auto, tokens = load(tmp_path, "auto", activations="float32"), random_tokens()
    assert {kind for kind, _ in auto.variants} == kinds
    assert np.array_equal(logits(auto, tokens), logits(load(tmp_path, "float32"), tokens))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_auto_rounds_activations_where_the_processor_multiplies_bfloat16(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only those of bfloat16 weights; without the instruction, products have the bits of float32."""
    save(tmp_path, dtype)
    tokens = random_tokens()
    wide = logits(load(tmp_path, "float32"), tokens)
    if dtype == torch.bfloat16 and PairLevel.AVX512_BF16 in pair_levels():
        loaded = load(tmp_path, "auto")
        assert loaded.variants == {(WeightKind.BFLOAT16_PAIRS, PairLevel.AVX512_BF16)}
        assert loaded.mark == " by bfloat16"
        found = logits(loaded, tokens)
        assert np.array_equal(found, logits(load(tmp_path, "auto", activations="bfloat16"), tokens))
        assert 0 < distance(found, wide) < 0.02
    monkeypatch.setenv("PAGEWOOD_BFLOAT16_DOT", "widened")
    loaded = load(tmp_path, "auto")
    assert loaded.mark == ""
    assert np.array_equal(logits(loaded, tokens), wide)


@pytest.mark.parametrize("form", ROUNDED)
def test_quantised_weights_are_kept_and_mapped(
    form: WeightFormat, tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path / "model", torch.bfloat16)
    tokens = random_tokens()
    first = logits(load(tmp_path / "model", form, num_threads=2), tokens)
    [path] = cache.iterdir()
    content = path.read_bytes()
    steps: list[tuple[str, int, int]] = []
    assert np.array_equal(
        logits(load(tmp_path / "model", form, progress=lambda *step: steps.append(step)), tokens), first
    )
    assert len(steps) == 5 + 6  # norms and biases alone are read
    flipped = bytearray(content)
    flipped[5000] ^= 1  # in the embeddings
    for damaged in (bytes(flipped), content[:-7]):
        path.write_bytes(damaged)
        assert np.array_equal(logits(load(tmp_path / "model", form), tokens), first)
        assert path.read_bytes() == content
        assert "weights are quantised again" in caplog.text
        caplog.clear()
    assert [file.name for file in cache.iterdir()] == [path.name]


def test_weights_of_a_large_model_get_their_name_when_its_digest_is_known(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are quantised meanwhile. If there are some already, the digest is waited for."""
    monkeypatch.setattr(model_digest, "_AT_ONCE_BYTES", 0)
    save(tmp_path / "model")
    may_read, read = Event(), model_digest._read

    def waiting(*args: Any) -> bytes:
        assert may_read.wait(60)
        return read(*args)

    def go_on(text: str, done: int, total: int) -> None:
        if done == total:
            may_read.set()

    monkeypatch.setattr(model_digest, "_read", waiting)
    first = logits(load(tmp_path / "model", "int8", progress=go_on), random_tokens())
    [path] = cache.iterdir()
    steps: list[tuple[str, int, int]] = []
    loaded = load(tmp_path / "model", "int8", progress=lambda *step: steps.append(step))
    assert len(steps) == 5 + 6
    assert np.array_equal(logits(loaded, random_tokens()), first)
    monkeypatch.undo()
    monkeypatch.setenv("PAGEWOOD_CACHE", str(tmp_path / "cache"))
    load(tmp_path / "model", "int8")
    assert list(cache.iterdir()) == [path]


def test_other_weights_get_another_file(tmp_path: Path, cache: Path) -> None:
    reference = save(tmp_path)
    load(tmp_path, "int8")
    load(tmp_path, "int4")
    with torch.no_grad():
        reference.lm_head.weight[0, 0] += 1
    reference.save_pretrained(tmp_path)
    load(tmp_path, "int8")
    assert len(list(cache.iterdir())) == 3


def test_a_folder_that_cannot_be_written_costs_the_cache_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path)
    (tmp_path / "file").write_text("")
    expected = logits(load(tmp_path, "int4"), random_tokens())
    monkeypatch.setenv("PAGEWOOD_CACHE", str(tmp_path / "file"))
    found = logits(load(tmp_path, "int4"), random_tokens())
    assert np.array_equal(found, expected)
    assert "quantised weights cannot be kept in" in caplog.text


@pytest.mark.parametrize("num_bytes", [8192, 1 << 16, 90_000])
def test_a_full_disk_costs_the_cache_only(
    num_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In whichever matrix, or in the index, the room ends."""
    save(tmp_path / "model")
    expected = logits(load(tmp_path / "model", "int8"), random_tokens())
    with small_disk.mounted(tmp_path / "disk", num_bytes=num_bytes) as disk:
        monkeypatch.setenv("PAGEWOOD_CACHE", str(disk / "cache"))
        found = logits(load(tmp_path / "model", "int8"), random_tokens())
        assert np.array_equal(found, expected)
        assert list((disk / "cache" / "weights").iterdir()) == []
    assert f"cannot be kept in {disk / 'cache' / 'weights'}" in caplog.text
    assert "No space left on device; make room there, or set PAGEWOOD_CACHE to" in caplog.text


def test_a_folder_that_is_read_only_costs_the_cache_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """But what it holds is used."""
    save(tmp_path / "model")
    with small_disk.mounted(tmp_path / "disk", num_bytes=1 << 22) as disk:
        monkeypatch.setenv("PAGEWOOD_CACHE", str(disk))
        expected = logits(load(tmp_path / "model", "int8"), random_tokens())
        gc.collect()  # the weights of the first start are mapped for writing
        small_disk.forbid_writing(disk)
        steps: list[tuple[str, int, int]] = []
        loaded = load(tmp_path / "model", "int8", progress=lambda *step: steps.append(step))
        assert np.array_equal(logits(loaded, random_tokens()), expected)
        assert len(steps) == 5 + 6
        load(tmp_path / "model", "int4")
        assert f"cannot be kept in {disk / 'weights'}" in caplog.text
        assert "Read-only file system" in caplog.text
        assert "make room there, or set PAGEWOOD_CACHE to a folder that can be written" in caplog.text
        del loaded


def test_an_edit_while_a_model_is_loaded_keeps_its_weights_out_of_the_cache(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"

    def edit(text: str, done: int, total: int) -> None:
        if done == total:
            with file.open("r+b") as opened:
                opened.seek(-1, os.SEEK_END)
                opened.write(b"?")

    load(tmp_path / "model", "int8", progress=edit)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("form", "activations"),
    [
        *((form, "auto") for form in ("auto", *FORMS)),
        ("bfloat16", "bfloat16"),
        ("bfloat16", "float32"),
        ("int8", "float32"),
        ("int4", "float32"),
    ],
)
def test_an_engine_generates_the_same_alone_together_and_with_drafts(
    form: WeightFormat, activations: ActivationFormat
) -> None:
    """With the embedded model, whose draft model gets the same form, and whose head stays float32."""
    questions = ["What is 12 + 7?", "Spell the word 'banana' backwards.", "Sort these words: stone river cloud apple."]
    chats = [[{"role": "user", "content": question}] for question in questions]
    sampling = SamplingParams(max_tokens=40, temperature=0.0)
    answers: dict[str, list[str]] = {}
    for speculative in ("off", "draft", "eagle"):
        with LLM(
            weights=form, activations=activations, speculative=speculative, num_threads=2, max_total_tokens=2048
        ) as llm:
            answers[speculative] = [answer.text for answer in llm.chat(chats, sampling)]
            if speculative == "off":
                assert answers["off"] == [llm.chat([chat], sampling)[0].text for chat in chats]
    assert answers["off"][0] == "12 + 7 = 19"
    assert answers["draft"] == answers["eagle"] == answers["off"]


def test_files_of_kv_belong_to_a_form_of_weights(tmp_path: Path) -> None:
    """Keys and values of one form are not taken for those of another."""
    chat: Any = [{"role": "user", "content": "Sort these words: " + "stone river cloud apple " * 8}]

    def cached(form: WeightFormat, activations: ActivationFormat = "auto") -> int:
        with LLM(
            weights=form, activations=activations, host_cache_gb=0.01, disk_cache_path=str(tmp_path / "kv"),
            disk_cache_gb=0.05, max_total_tokens=1024,
        ) as llm:  # fmt: skip
            return llm.chat([chat], SamplingParams(max_tokens=2, temperature=0.0))[0].num_cached_tokens

    assert cached("float32") == 0
    assert cached("auto") > 0  # the same bits
    assert cached("float32", "float32") > 0
    with pytest.raises(ValueError, match="must hold pages of the same model and layout"):
        cached("int8")
    (tmp_path / "kv").rename(tmp_path / "others")
    assert cached("bfloat16", "float32") == 0
    assert cached("bfloat16", "float32") > 0
    with pytest.raises(ValueError, match="must hold pages of the same model and layout"):
        cached("bfloat16", "bfloat16")
    (tmp_path / "kv").rename(tmp_path / "of bfloat16")
    assert cached("int8") == 0
    with pytest.raises(ValueError, match="must hold pages of the same model and layout"):
        cached("int8", "float32")


def test_the_configuration_names_forms() -> None:
    with pytest.raises(ValueError, match="weights must be one of auto, float32, bfloat16, int8, int4, got 'int3'"):
        EngineConfig(weights="int3")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="weights must be auto on CUDA, which keeps them in dtype, got 'int8'"):
        EngineConfig(device="cuda", weights="int8")


def test_the_configuration_names_activations() -> None:
    with pytest.raises(ValueError, match="activations must be one of auto, float32, bfloat16, got 'int8'"):
        EngineConfig(activations="int8")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="activations must be auto or float32 with weights 'int8', got 'bfloat16'"):
        EngineConfig(weights="int8", activations="bfloat16")
    for activations in ("float32", "bfloat16"):
        rule = f"activations must be auto on CUDA, which computes in dtype, got '{activations}'"
        with pytest.raises(ValueError, match=rule):
            EngineConfig(device="cuda", activations=activations)


def test_bfloat16_activations_need_weights_that_are_bfloat16() -> None:
    """With weights auto the checkpoint decides; the embedded model's is in float16."""
    rule = "activations must be auto or float32 unless weights are bfloat16, and with weights 'auto' those of this "
    with pytest.raises(ValueError, match=f"{rule}model are float.*, got 'bfloat16'"):
        LLM(activations="bfloat16")


@pytest.mark.parametrize("level", pair_levels(), ids=lambda level: level.name)
def test_the_log_says_which_instruction_multiplies(
    level: PairLevel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PAGEWOOD_BFLOAT16_DOT", level.name.lower())
    with caplog.at_level("INFO"), LLM(weights="bfloat16", activations="bfloat16", max_total_tokens=64):
        pass
    wanted = f"weights: bfloat16; products with bfloat16 activations by {level.name.replace('_', '-')}"
    assert wanted in [record.message for record in caplog.records]


@pytest.mark.parametrize(
    ("form", "activations", "most"),
    [
        ("bfloat16", "bfloat16", 0.02),
        ("int8", "auto", 0.04),
        ("int8", "float32", 0.02),
        ("int4", "auto", 0.2),
        ("int4", "float32", 0.2),
    ],
)
def test_logits_of_the_embedded_model_move_by_little(
    form: WeightFormat, activations: ActivationFormat, most: float
) -> None:
    """Relative to the norm, over some of its questions."""
    folder = model_folder(None)
    tokenizer = Tokenizer.from_folder(folder)
    questions = ("What can you do?", "What is 12 + 7?", "Sort these words: stone river cloud apple.")
    prompts = [list(tokenizer.encode_chat([{"role": "user", "content": question}])) for question in questions]
    exact, found = (
        np.concatenate([logits(loaded, prompt) for prompt in prompts])
        for loaded in (load(folder, "float32"), load(folder, form, activations=activations))
    )
    assert 1e-3 < distance(found, exact) < most


def test_most_greedy_answers_stay_with_bfloat16_activations() -> None:
    questions = [f"What is {a} + {b}?" for a, b in ((12, 7), (3, 4), (25, 31), (40, 9), (66, 5))]
    questions += [f"Spell the word '{word}' backwards." for word in ("banana", "stone", "window", "paper")]
    questions += [f"Sort these words: {words}." for words in ("stone river cloud", "tree apple moon", "sea bird")]
    chats = [[{"role": "user", "content": question}] for question in questions]
    answers: list[list[str]] = []
    for activations in ("float32", "bfloat16"):
        with LLM(weights="bfloat16", activations=activations, num_threads=2, max_total_tokens=4096) as llm:
            made = llm.chat(chats, SamplingParams(max_tokens=40, temperature=0.0))
            answers.append([answer.text for answer in made])
    assert sum(one == other for one, other in zip(*answers, strict=True)) >= len(questions) - 2


_MEASURE = """
import json, sys
from pathlib import Path
from pagewood.engine.runner.cpu.weights.loaded_model import load_cpu_model
from pagewood.engine.model_folder.model_digest import ModelDigest
def resident_bytes(name):
    [line] = [line for line in open("/proc/self/status") if line.startswith(name + ":")]
    return 1024 * int(line.split()[1])
large, small, form = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
loaded = [load_cpu_model(small, form, digest=ModelDigest(small), num_threads=2)]
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
before = resident_bytes("VmRSS")
loaded.append(load_cpu_model(large, form, digest=ModelDigest(large), num_threads=2))
print(json.dumps([resident_bytes("VmHWM") - before, resident_bytes("VmRSS") - before]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="only Linux measures a peak again")
@pytest.mark.parametrize("form", ["float32", "bfloat16", *ROUNDED])
def test_loading_takes_little_more_memory_than_stays(form: WeightFormat, tmp_path: Path) -> None:
    """Resident memory at its peak is at most 1.15 times that of the weights, mapped files included.

    Python, its imports and the kernels do not count: a smaller model is loaded first.
    """
    torch.manual_seed(0)
    config: Any = transformers.Qwen2Config(
        vocab_size=32_000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=4, tie_word_embeddings=False, max_position_embeddings=128,
    )  # fmt: skip
    large = tmp_path / "large"
    transformers.Qwen2ForCausalLM(config).bfloat16().save_pretrained(large)
    save(tmp_path / "small")
    weights_bytes = inspect_model(large).weights_bytes[form]
    arguments = [sys.executable, "-c", _MEASURE, str(large), str(tmp_path / "small"), form]
    for start in ("first", "second"):
        made = subprocess.run(arguments, capture_output=True, text=True, check=True, env=dict(os.environ))
        peak, after = json.loads(made.stdout)
        assert peak < 1.15 * weights_bytes, start
        if start == "second" and form in ROUNDED:
            assert after < 0.15 * weights_bytes  # the file is mapped, and its pages are read when they are used
        else:
            assert after > 0.9 * weights_bytes  # so that the peak is that of a model that was loaded
