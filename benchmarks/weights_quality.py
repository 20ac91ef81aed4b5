# pyright: basic, reportMissingImports=false
# (torch is untyped; the modules of tools/demo_model lie in no package)
"""Measures what forms of weights change: perplexity, greedy tokens, and exact answers of the embedded model.

python benchmarks/weights_quality.py                    # the embedded model: a quarter of an hour on two cores
python benchmarks/weights_quality.py --count 5          # fewer prompts
python benchmarks/weights_quality.py --defaults         # what is chosen without a word for a checkpoint in bfloat16
python benchmarks/weights_quality.py --defaults --size 110M --size 500M     # the same, with random weights
python benchmarks/weights_quality.py FOLDER...          # perplexity and greedy tokens of other models

The numbers do not depend on the load of the machine. Texts: licences of numpy and torch as their wheels bring them, and
the documentation that ships with Python (every second chapter; GPTQ is calibrated with the others). For the embedded
model also right answers of `tools/demo_model`, and GPTQ with conversations of its training.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import files
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

import end_to_end  # noqa: F401 - makes the support of the engine's tests importable
from pagewood.engine import LLM, SamplingParams
from pagewood.engine.api import ActivationFormat, WeightFormat
from pagewood.engine.model_folder.folder import model_folder
from pagewood.engine.model_folder.model_digest import ModelDigest
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.quantise import Scheme, quantise_model, read_calibration
from pagewood.engine.quantise.calibration import documentation
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.cpu.runner import CPURunner
from pagewood.engine.runner.cpu.weights.loaded_model import load_cpu_model
from pagewood.engine.runner.storage import storage_for
from pagewood.engine.text import Tokenizer
from row_driver import RowDriver
from weight_forms.folders import SHAPES, write_folder

sys.path.insert(0, str(Path(__file__).parent.parent / "tools" / "demo_model"))

PAGE_SIZE, LENGTH = 16, 512
FORMS: Mapping[WeightFormat, Sequence[ActivationFormat]] = {
    "float32": ("float32",),
    "bfloat16": ("float32", "bfloat16"),
    "int8": ("auto", "float32"),
    "int4": ("auto", "float32"),
}
"""With the activations that are measured."""
CALIBRATION_TOKENS = 32768
KVType: TypeAlias = Literal["float32", "int8"]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A model in a form."""

    name: str
    folder: Path
    form: WeightFormat
    activations: ActivationFormat = "auto"
    kv: KVType = "float32"


def defaults(folder: Path) -> list[Candidate]:
    """Return the ways to compute with weights in bfloat16, the exact one first."""
    return [
        Candidate(name="bfloat16, float32 activations", folder=folder, form="bfloat16", activations="float32"),
        Candidate(name="bfloat16, bfloat16 activations", folder=folder, form="bfloat16", activations="bfloat16"),
        Candidate(
            name="bfloat16, float32 activations, int8 KV",
            folder=folder,
            form="bfloat16",
            activations="float32",
            kv="int8",
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class Window:
    """A text that a model computes from its beginning."""

    tokens: list[int]
    first: int = 1
    """The first token whose probability counts."""


@dataclass(frozen=True, kw_only=True)
class OnText:
    """What a model says about the tokens of texts."""

    loss: float
    """Mean negative logarithm of the probability of the token that follows."""
    greedy: NDArray[np.int64]
    """The most likely token at each position."""


def main() -> None:
    """Measure and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="of models (default: the embedded one)")
    parser.add_argument("--defaults", action="store_true", help="only ways to compute with weights in bfloat16")
    parser.add_argument(
        "--size", action="append", choices=SHAPES, help="of a model with random weights instead of a folder"
    )
    parser.add_argument("--count", type=int, default=100, help="prompts for each task (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=16384, help="of each text, at most (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads (default: all cores)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["PAGEWOOD_CACHE"] = str(Path(scratch) / "cache")
        made = [Path(scratch) / size for size in arguments.size or ()]
        for folder in made:
            write_folder(SHAPES[folder.name], folder)
            copy_tokenizer(folder)
        for folder in [*made, *arguments.folders] or [None]:
            measure(folder, Path(scratch), arguments)


def copy_tokenizer(folder: Path) -> None:
    """Give a model with random weights the tokenizer of the embedded one."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_folder(None) / name, folder)


def measure(given: Path | None, scratch: Path, arguments: argparse.Namespace) -> None:
    """Print the tables of one model."""
    folder, is_embedded = model_folder(given), given is None
    texts = texts_for(Tokenizer.from_folder(folder), arguments, is_embedded=is_embedded)
    candidates = defaults(folder) if arguments.defaults else forms(folder, scratch, is_embedded=is_embedded)
    print(f"\n{'The embedded model' if is_embedded else folder.name}: perplexity, and tokens of 100 that greedy "
          f"decoding chooses as with {candidates[0].name} (for each text: "
          f"{', '.join(f'{name} {num_scored(windows):,} tokens' for name, windows in texts.items())}).\n")  # fmt: skip
    print("| weights | " + " | ".join(f"{name}, perplexity | same tokens" for name in texts) + " |")
    print("|---|" + "--:|--:|" * len(texts))
    exact: dict[str, OnText] = {}
    for candidate in candidates:
        cells: list[str] = []
        for name, found in on_texts(candidate, texts, arguments.threads).items():
            same = (found.greedy == exact.setdefault(name, found).greedy).mean()
            cells += [f"{np.exp(found.loss):.4f}", f"{100 * same:.2f}"]
        print(f"| {candidate.name} | " + " | ".join(cells) + " |", flush=True)
    if is_embedded:
        answers(candidates, arguments.count, arguments.threads)


def forms(folder: Path, scratch: Path, *, is_embedded: bool) -> list[Candidate]:
    """Return all forms of weights, float32 first."""
    candidates: list[Candidate] = []
    for form, others in FORMS.items():
        for other in others:
            name = f"{form}, {other} activations" if len(others) > 1 else form
            candidates.append(Candidate(name=name, folder=folder, form=form, activations=other))
    return candidates + gptq(folder, scratch, is_embedded=is_embedded)


def gptq(folder: Path, scratch: Path, *, is_embedded: bool) -> list[Candidate]:
    """Quantise a model with each calibration; embeddings and head keep their numbers, or are int4 as elsewhere."""
    halves = documentation()
    calibrations = {"documentation": "\n\n".join(halves[1::2])}
    found: list[Candidate] = []
    config = ModelConfig.from_folder(folder)
    for name, text in calibrations.items():
        (scratch / f"{name}.txt").write_text(text, encoding="utf-8")
    files_by_name = {name: scratch / f"{name}.txt" for name in calibrations}
    if is_embedded:
        files_by_name["training"] = scratch / "training.jsonl"
        files_by_name["training"].write_text(training_conversations(), encoding="utf-8")
    for name, file in files_by_name.items():
        calibration = read_calibration(
            folder, file, num_tokens=CALIBRATION_TOKENS, vocab_size=config.vocab_size, max_position=config.max_position
        )
        out = scratch / f"{folder.name}-{name}"
        quantise_model(folder, out, Scheme(format="int4", method="gptq"), calibration=calibration)
        found += [
            Candidate(name=f"int4 by GPTQ ({name})", folder=out, form="int4"),
            Candidate(name=f"int4 by GPTQ ({name}), embeddings and head as they are", folder=out, form="auto"),
        ]
    return found


def training_conversations() -> str:
    """Return conversations of the embedded model's training, with tools, as lines of JSON."""
    from tool_dialog import exchange, offer

    rng, lines = random.Random("calibrate"), list[str]()
    from dialog import turns

    for at in range(300):
        offered = offer(rng)
        messages: list[Any] = [] if offered.system is None else [{"role": "system", "content": offered.system}]
        source = turns(rng, later=True)
        for _ in range(3):
            if at % 2 and offered.kinds:
                made = exchange(rng, offered)
                messages += [*made.messages(), {"role": "assistant", "content": made.answer}]
            else:
                turn = next(turn for turn in source if not offered.serves(turn))
                messages += [{"role": "user", "content": turn.prompt}, {"role": "assistant", "content": turn.answer}]
        tools = [tool.declaration() for tool in offered.tools]
        lines.append(json.dumps({"messages": messages, **({"tools": tools} if tools else {})}))
    return "\n".join(lines)


def texts_for(tokenizer: Tokenizer, arguments: argparse.Namespace, *, is_embedded: bool) -> dict[str, list[Window]]:
    """Return texts by name; of conversations only the last answers count, because their prompts are drawn by chance."""

    def windows(text: str) -> list[Window]:
        tokens = tokenizer.encode(text)[: arguments.tokens].tolist()
        return [Window(tokens=tokens[start : start + LENGTH]) for start in range(0, len(tokens) - 1, LENGTH - 1)]

    texts = {"licences": windows(licences()), "documentation": windows("\n\n".join(documentation()[::2]))}
    if is_embedded:
        from evaluate import cases, tool_cases

        answered: list[Window] = []
        for case in (*cases(arguments.count), *tool_cases(arguments.count)):
            tools = [tool.declaration() for tool in case.tools] or None
            prompt = tokenizer.encode_chat(case.messages, tools=tools).tolist()
            answer = tokenizer.encode(case.answer, add_special_tokens=False).tolist()
            answered.append(Window(tokens=[*prompt, *answer], first=len(prompt)))
        texts = {"answers": random.Random(0).sample(answered, min(len(answered), arguments.tokens // 32)), **texts}
    return texts


def num_scored(windows: Sequence[Window]) -> int:
    """Return how many tokens count."""
    return sum(len(window.tokens) - window.first for window in windows)


def licences() -> str:
    """Return the licences that two wheels bring."""
    found: list[str] = []
    for package in ("numpy", "torch"):
        for path in sorted(files(package) or [], key=str):
            if "dist-info" in str(path) and path.name.upper().startswith("LICENSE"):
                found.append(Path(str(path.locate())).read_text(encoding="utf-8", errors="ignore"))
    return "\n\n".join(found)


def on_texts(candidate: Candidate, texts: Mapping[str, Sequence[Window]], num_threads: int) -> dict[str, OnText]:
    """Compute the logits at all positions of texts, each window by itself."""
    loaded = load_cpu_model(
        candidate.folder,
        candidate.form,
        activations=candidate.activations,
        digest=ModelDigest(candidate.folder),
        num_threads=num_threads,
    )
    config = loaded.model.config
    length = longest(texts)
    num_pages = -(-length // PAGE_SIZE)
    layout = config.memory_layout(page_size=PAGE_SIZE, dtype=candidate.kv, order="HND")
    kernel = warm_up(layout, packed=loaded.variants)
    runner = CPURunner(
        loaded.model, storage_for(layout, num_pages), kernel, max_rows=1, max_length=length, num_threads=num_threads
    )
    found: dict[str, OnText] = {}
    for name, windows in texts.items():
        losses: list[NDArray[np.float64]] = []
        greedy: list[NDArray[np.int64]] = []
        for window in windows:
            driver = RowDriver(runner, num_pages=num_pages, page_size=PAGE_SIZE)
            sequence = driver.add(window.tokens)
            whole = runner.forward(driver.batch([(sequence, len(window.tokens))]))
            logits, wanted = whole[window.first - 1 : -1].astype(np.float64), window.tokens[window.first :]
            largest = logits.max(axis=1)
            sums = np.log(np.exp(logits - largest[:, None]).sum(axis=1)) + largest
            losses.append(sums - logits[np.arange(len(logits)), wanted])
            greedy.append(logits.argmax(axis=1))
        found[name] = OnText(loss=float(np.concatenate(losses).mean()), greedy=np.concatenate(greedy))
    runner.close()
    return found


def longest(texts: Mapping[str, Sequence[Window]]) -> int:
    """Return the tokens of the longest window."""
    return max(len(window.tokens) for windows in texts.values() for window in windows)


def answers(candidates: Sequence[Candidate], count: int, num_threads: int) -> None:
    """Print the exact answers to held-out prompts, and in conversations with tools."""
    from evaluate import cases, tool_cases

    kinds = {"tasks": list(cases(count)), "tool conversations": list(tool_cases(count))}
    print("\nExact answers of the embedded model, greedy.\n")
    print("| weights | " + " | ".join(f"{name} ({len(asked):,} prompts)" for name, asked in kinds.items()) + " |")
    print("|---|" + "--:|" * len(kinds))
    sampling = SamplingParams(max_tokens=250, temperature=0.0)
    for candidate in candidates:
        cells: list[str] = []
        with LLM(
            candidate.folder,
            weights=candidate.form,
            activations=candidate.activations,
            kv_cache_dtype=candidate.kv,
            num_threads=num_threads,
        ) as llm:
            for asked in kinds.values():
                prompts = [
                    llm.tokenizer.encode_chat(
                        case.messages, tools=[tool.declaration() for tool in case.tools] or None
                    ).tolist()
                    for case in asked
                ]
                made = llm.generate(prompts, sampling)
                right = sum(one.text == case.answer for one, case in zip(made, asked, strict=True))
                cells.append(f"{right:,} ({right / len(asked):.1%})")
        print(f"| {candidate.name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
