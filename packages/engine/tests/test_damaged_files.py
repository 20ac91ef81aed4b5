"""Damaged model files and grammars: each is read, or refused with an error that the caller expects; none hangs.

`PAGEWOOD_FUZZ_SEED` moves the seeds. The slow runs draw many more cases.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest

from mutation import damaged_bytes, damaged_json, damaged_text
from pagewood.engine.api import Grammar, Refusal
from pagewood.engine.ebnf import lark_of_ebnf
from pagewood.engine.grammar import GrammarCompiler, open_backend
from pagewood.engine.model_folder.folder import default_sampling, find_drafter, model_folder
from pagewood.engine.model_folder.load import check_weights
from pagewood.engine.model_folder.vector_recipe import read_vector_recipe
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.head_config import HeadConfig
from pagewood.engine.models.stored.checkpoint_files import tensor_names
from pagewood.engine.text import ChatTemplate, ChatTemplateError, Tokenizer
from pagewood.engine.text.panics import TokenizerPanic

DEMO = model_folder(None)
SEED = int(os.environ.get("PAGEWOOD_FUZZ_SEED", "0"))
LONGEST_S = 10.0
"""Of one case, on a busy machine."""
MOST_BYTES = 1 << 30
"""Growth of the process over all cases of a test."""
many = pytest.mark.parametrize("num_cases", [None, pytest.param(40, marks=pytest.mark.slow)], ids=["few", "many"])
"""None: few cases; or that many times as many."""


@contextmanager
def bounded() -> Generator[Callable[[int], random.Random]]:
    """Yield a function that begins a case and returns its random numbers; check time and memory."""
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    case, start_s = -1, time.monotonic()

    def begin(number: int) -> random.Random:
        nonlocal case, start_s
        check()
        case, start_s = number, time.monotonic()
        return random.Random(SEED * 1_000_003 + number)

    def check() -> None:
        assert time.monotonic() - start_s < LONGEST_S, f"case {case} took too long"

    try:
        yield begin
    except Exception as error:
        raise AssertionError(f"case {case} with PAGEWOOD_FUZZ_SEED={SEED}") from error
    check()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb) * 1024
    assert grown < MOST_BYTES


def cases(few: int, num_cases: int | None) -> range:
    return range(few if num_cases is None else few * num_cases)


@many
def test_configurations(tmp_path: Path, num_cases: int | None) -> None:
    values = json.loads((DEMO / "config.json").read_text())
    variants = [
        values | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}},
        values | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                   "high_freq_factor": 4.0, "original_max_position_embeddings": 512}},
        values | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "use_sliding_window": True,
                  "layer_types": ["full_attention", "sliding_attention"] * 2},
        values | {"architectures": ["MistralForCausalLM"], "sliding_window": 64},
        values | {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True}},
    ]  # fmt: skip
    generation = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "eos_token_id": [0, 1]}
    file, target = tmp_path / "config.json", ModelConfig.from_folder(DEMO)
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    with bounded() as begin:
        for number in cases(80, num_cases):
            rng = begin(number)
            config = rng.choice(variants)
            if rng.random() < 0.2:
                file.write_bytes(damaged_bytes(rng, json.dumps(config).encode()))
            else:
                file.write_text(json.dumps(damaged_json(rng, config)))
            (tmp_path / "generation_config.json").write_text(json.dumps(damaged_json(rng, generation)))
            readers: list[Callable[[Path], object]] = [
                ModelConfig.from_folder,
                lambda folder: HeadConfig.from_folder(folder, target),
                default_sampling,
                read_vector_recipe,
            ]
            for read in readers:
                with suppress(ValueError, FileNotFoundError):
                    read(tmp_path)


@many
def test_headers_of_safetensors(tmp_path: Path, num_cases: int | None) -> None:
    source = DEMO / "draft"
    data = (source / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, tensors = data[8 : 8 + length], data[8 + length :]
    for name in ("config.json", "generation_config.json"):
        shutil.copy(source / name, tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(data)
    assert check_weights(tmp_path, config) > 0
    index = {"metadata": {}, "weight_map": {"a": "model.safetensors"}}
    with bounded() as begin:
        for number in cases(50, num_cases):
            rng = begin(number)
            damaged = damaged_bytes(rng, header)
            if rng.random() < 0.5:
                damaged = json.dumps(damaged_json(rng, json.loads(header))).encode()
            size = rng.choice((len(damaged), len(damaged), len(damaged), 0, length, 2**31, 2**63, 2**64 - 1))
            file.write_bytes(size.to_bytes(8, "little") + damaged + tensors[: rng.choice((0, 1000, len(tensors)))])
            (tmp_path / "model.safetensors.index.json").unlink(missing_ok=True)
            if rng.random() < 0.2:
                (tmp_path / "model.safetensors.index.json").write_text(json.dumps(damaged_json(rng, index)))
            readers: list[Callable[[Path], object]] = [
                tensor_names,
                lambda folder: check_weights(folder, config),
                lambda folder: find_drafter(folder, "auto"),
            ]
            for read in readers:
                with suppress(ValueError, FileNotFoundError):
                    read(tmp_path)


@many
def test_tokenizers(tmp_path: Path, num_cases: int | None) -> None:
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    settings = json.loads((DEMO / "tokenizer_config.json").read_text())
    with bounded() as begin:
        for number in cases(40, num_cases):
            rng = begin(number)
            text = json.dumps(damaged_json(rng, tokenizer) if rng.random() < 0.7 else tokenizer)
            (tmp_path / "tokenizer.json").write_bytes(
                damaged_bytes(rng, text.encode()) if rng.random() < 0.3 else text.encode()
            )
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(damaged_json(rng, settings)))
            try:
                read = Tokenizer.from_folder(tmp_path)
            except ValueError:
                continue
            with suppress(ValueError, TokenizerPanic):
                ids = read.encode("Hello, what is 12 + 7? \u00e9")
                read.decode(ids)
                read.fewest_tokens("Hello")
                assert read.vocab_size >= 0


@many
def test_chat_templates(num_cases: int | None) -> None:
    source = (DEMO / "chat_template.jinja").read_text()
    messages: Any = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello", "tool_calls": []}]
    with bounded() as begin:
        for number in cases(30, num_cases):
            rng = begin(number)
            with suppress(ChatTemplateError):
                template = ChatTemplate(damaged_text(rng, source), special_tokens={}, max_seconds=1.0)
                damaged = [damaged_json(rng, one) for one in messages]
                template.render([cast("dict[str, Any]", one) for one in damaged if isinstance(one, dict)])


GRAMMARS: list[tuple[str, str]] = [
    ("json_schema", '{"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}, "b": {"$ref": '
     '"#/$defs/x"}}, "required": ["a"], "$defs": {"x": {"type": "array", "items": {"enum": [1, "y"]}, '
     '"maxItems": 3}}}'),
    ("regex", r"(?:[a-z]{2,5}|\d+\.\d*)(,\s?x)*"),
    ("lark", 'start: "a" b+ | /[0-9]+/\nb: "x" start? | NUM\nNUM: /[1-9]/ "!"{1,3}\n'),
    ("choice", '["yes", "no", "maybe"]'),
    ("structural_tag", '{"type": "structural_tag", "format": {"type": "tag", "begin": "<a>", "content": '
     '{"type": "json_schema", "json_schema": {"type": "integer"}}, "end": "</a>"}}'),
    ("ebnf", 'root ::= "a" item* [^x\\n]\nitem ::= "b" | ("c" root)+ # text\n'),
]  # fmt: skip


@many
def test_grammars(num_cases: int | None) -> None:
    eos = ModelConfig.from_folder(DEMO).eos_token_ids
    num_compiled = 0
    compiler = GrammarCompiler(
        lambda: open_backend("llguidance", DEMO, vocab_size=512, eos_token_ids=eos), deadline_s=5.0
    )
    try:
        with bounded() as begin:
            for number in cases(100, num_cases):
                rng = begin(number)
                kind, text = rng.choice(GRAMMARS)
                is_json = text[0] in "[{" and rng.random() < 0.6
                damaged = json.dumps(damaged_json(rng, json.loads(text))) if is_json else damaged_text(rng, text)
                with suppress(ValueError):
                    if kind == "ebnf":
                        kind, damaged = "lark", lark_of_ebnf(damaged)
                    pending = compiler.compile(Grammar(kind=kind, text=damaged), end_tokens=frozenset(eos))  # pyright: ignore[reportArgumentType]
                    assert pending.wait(LONGEST_S)
                    found = pending.result()
                    num_compiled += not isinstance(found, Refusal)
                    assert not isinstance(found, Refusal) or (found.message and found.code != "grammar_unavailable")
        assert num_compiled > 5
    finally:
        compiler.close()
