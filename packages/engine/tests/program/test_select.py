"""`select` scores choices as `transformers` does, and computes the text before them once."""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import pagewood.engine
from pagewood.engine import AsyncLLM
from pagewood.engine.program import LocalBackend, State, Usage, VariableError, program
from pagewood.engine.program.backend import best_choice, num_shared

FOLDER = Path(pagewood.engine.__file__).parent / "demo"
PAGE = 4


@pytest.fixture(scope="module")
def backend() -> Iterator[LocalBackend]:
    with LocalBackend(AsyncLLM(max_total_tokens=4096, max_running=16, page_size=PAGE)) as found:
        yield found


@cache
def reference() -> tuple[Any, Any]:
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    return model, transformers.AutoTokenizer.from_pretrained(FOLDER)


def mean_logprob(text: str, choice: str, num_before: int) -> float:
    """Return the mean log probability of the tokens of text and choice from `num_before` on."""
    model, tokenizer = reference()
    tokens = tokenizer(text + choice, return_tensors="pt", add_special_tokens=False).input_ids
    with torch.no_grad():
        found = model(tokens).logits[0].log_softmax(-1)
    scored = [float(found[i - 1, tokens[0, i]]) for i in range(num_before, tokens.shape[1])]
    return sum(scored) / len(scored)


@program
def selecting(s: State, text: str, choices: list[str]) -> None:
    s.add(text)
    s.select("best", choices)


@program
def asking(s: State, question: str, choices: list[str]) -> None:
    s.user(question)
    s.select("best", choices)


CASES = [
    ("1, 2, 3,", [" 4", " 5", " 4, 5, 6, 7", " zebra", " 3"]),
    ("Reverse: stone ->", [" enots", " stone", " tree and more", "\n"]),
    ("The capital of France is", [" Paris.", " Berlin.", " Rome", "."]),
]


@pytest.mark.parametrize(("text", "choices"), CASES)
def test_scores_are_those_of_transformers(text: str, choices: list[str], backend: LocalBackend) -> None:
    _, tokenizer = reference()
    num_before = len(tokenizer(text, add_special_tokens=False).input_ids)
    expected = {choice: mean_logprob(text, choice, num_before) for choice in choices}
    answer = selecting.run(text, choices, on=backend).answer("best")
    assert answer.scores == pytest.approx(expected, abs=1e-4)
    assert answer.text == max(expected, key=lambda choice: expected[choice])


def test_scores_of_a_conversation_are_those_of_transformers(backend: LocalBackend) -> None:
    question, choices = "What is 12 + 7?", ["12 + 7 = 20", "12 + 7 = 19", "19", "no"]
    _, tokenizer = reference()
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    num_before = len(tokenizer(text, add_special_tokens=False).input_ids)
    expected = {choice: mean_logprob(text, choice, num_before) for choice in choices}
    answer = asking.run(question, choices, on=backend).answer("best")
    assert answer.scores == pytest.approx(expected, abs=1e-4)
    assert answer.text == "12 + 7 = 19"


def test_a_choice_that_joins_the_token_before_is_scored_with_it(backend: LocalBackend) -> None:
    """All choices are then scored from the same token on, so that their scores can be compared."""
    _, tokenizer = reference()
    text, choices = "I can on", ["ly", " x", "e"]
    tokens = [tokenizer(text + more, add_special_tokens=False).input_ids for more in ("", *choices)]
    num_before = next(i for i in range(len(tokens[0])) if len({one[i] for one in tokens}) > 1)
    assert num_before < len(tokens[0])
    expected = {choice: mean_logprob(text, choice, num_before) for choice in choices}
    assert selecting.run(text, choices, on=backend).answer("best").scores == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("is_cached", [False, True])
def test_the_text_before_the_choices_is_computed_once(is_cached: bool, backend: LocalBackend) -> None:
    text = f"Is it {is_cached}? " + "one two three four five six seven. " * 20
    choices = [" yes", " no", " maybe it is", " I do not know"]

    @program
    def asking_twice(s: State) -> None:
        s.add(text)
        if is_cached:
            s.gen("more", max_tokens=1, regex="a")
        s.select("best", choices)

    usage = asking_twice.run(on=backend).answer("best").usage
    num_prefix = len(backend.tokenizer.encode(text))
    num_each = max(len(backend.tokenizer.encode(choice)) for choice in choices) + PAGE + 2
    computed = usage.num_prompt_tokens - usage.num_cached_tokens
    assert num_prefix > 100
    assert computed <= len(choices) * num_each + (0 if is_cached else num_prefix)
    assert usage.num_output_tokens == 0


def test_there_must_be_a_text_before_the_choices(backend: LocalBackend) -> None:
    with pytest.raises(VariableError, match="'best' failed: select must follow a text"):
        selecting.run("", ["a", "b"], on=backend)


def test_shared_tokens_and_the_best_choice() -> None:
    assert num_shared([[1, 2], [1, 2, 3], [1, 2, 4]]) == 2
    assert num_shared([[1, 2], [1, 3], [1, 2, 4]]) == 1
    with pytest.raises(ValueError, match="must follow a text"):
        num_shared([[1, 2], [3]])
    tie = best_choice(["a", "b", "c"], [[-2.0], [-1.0, -1.0], [-1.0]], Usage())
    assert (tie.text, tie.scores) == ("b", {"a": -2.0, "b": -1.0, "c": -1.0})
    with pytest.raises(ValueError, match="choices must add tokens to the text, got 'b'"):
        best_choice(["a", "b"], [[-2.0], []], Usage())
