"""Requests with images whose drafts a grammar rules, on both devices, and drafts that rejection sampling verifies."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pagewood.engine.api import Grammar
from pictured import Pictured, pictured
from pictured_engine import Driven, DrivenOnDevice, check_drafts, drafting

pytestmark = pytest.mark.usefixtures("small_buffers")

DEVICES: dict[str, Callable[..., Driven]] = {"cpu": Driven, "cuda": DrivenOnDevice}


def constrained(model: Pictured, folder: Path) -> Pictured:
    """The model with a tokenizer that grammars take: one that says how its tokens become bytes."""
    shutil.copytree(model.folder, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    decoder = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    (folder / "tokenizer.json").write_text(json.dumps({**tokenizer, "decoder": decoder}))
    return replace(model, folder=folder)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["qwen2.5", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_drafts_that_a_grammar_rules_change_no_answer(device: str, kind: str, tmp_path: Path) -> None:
    model = constrained(pictured(kind), tmp_path / "model")
    plain, own = DEVICES[device](model), DEVICES[device](model, **drafting(model, "ngram"))
    grammar = Grammar(kind="regex", text="(w20|w21|w22)*")
    try:
        check_drafts(model, plain, own, is_exact=device == "cpu", least=100, grammar=grammar)
    finally:
        plain.engine.close()
        own.engine.close()


@pytest.mark.parametrize("drafter", ["draft", pytest.param("eagle", marks=pytest.mark.slow)])
def test_rejection_changes_no_greedy_answer(drafter: str) -> None:
    model = pictured("qwen2.5")
    plain, own = Driven(model), Driven(model, **drafting(model, drafter, speculative_verify="rejection"))
    try:
        check_drafts(model, plain, own, is_exact=True, least=0 if drafter == "eagle" else 40, temperature=0.0)
    finally:
        plain.engine.close()
        own.engine.close()
