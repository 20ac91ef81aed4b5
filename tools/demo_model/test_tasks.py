"""The generated answers are right, and held-out prompts are never trained on."""

import ast
import json
import random
import sys
from itertools import islice, pairwise
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from batches import Encoder, row
from dialog import memory_dialog, turns
from memory_tasks import Memory
from tasks import GENERATORS, Turn, draw, held_out
from tokenizer import train_tokenizer


def some(name: str, count: int = 300) -> list[Turn]:
    rng = random.Random(f"test {name}")
    return [GENERATORS[name][1](rng) for _ in range(count)]


@pytest.mark.parametrize("name", GENERATORS)
def test_one_seed_gives_one_turn(name: str) -> None:
    assert some(name, 20) == some(name, 20)


@pytest.mark.parametrize("name", GENERATORS)
def test_prompts_and_answers_are_stripped_text(name: str) -> None:
    for turn in some(name):
        assert turn.prompt.strip()
        assert turn.answer == turn.answer.strip() != ""


@pytest.mark.parametrize("name", GENERATORS)
def test_both_sides_of_the_split_are_disjoint(name: str) -> None:
    rng = random.Random(0)
    trained = {draw(rng, name, held=False).content for _ in range(400)}
    held = {draw(rng, name, held=True).content for _ in range(20)}
    assert not trained & held


def test_a_conversation_never_shows_held_out_content() -> None:
    rng = random.Random(1)
    for _ in range(100):
        for turn in islice(turns(rng), 12):
            if turn.task != "memory" or "not told" not in turn.answer:
                assert not held_out(turn.content), turn


@pytest.mark.parametrize("name", ["add", "subtract", "multiply", "divide"])
def test_sums_are_right(name: str) -> None:
    for turn in some(name):
        shown, result = turn.answer.replace(" x ", " * ").split(" = ")
        left, sign, right = shown.split()
        a, b = int(left), int(right)
        assert {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else None}[sign] == int(result)


def test_reversed_twice_is_in_the_prompt() -> None:
    for turn in some("reverse"):
        assert turn.answer[::-1] in turn.prompt


@pytest.mark.parametrize("name", ["sort numbers", "sort words"])
def test_sorted_answers_are_in_order_and_complete(name: str) -> None:
    for turn in some(name):
        parts = turn.answer.split(", ")
        values = [int(part) for part in parts] if name == "sort numbers" else parts
        assert values in (sorted(values), sorted(values, reverse=True))
        assert all(part in turn.prompt for part in parts)


def test_json_answers_parse() -> None:
    for turn in some("json"):
        assert all(str(value) in turn.prompt for value in json.loads(turn.answer).values())


def test_counting_aloud_has_no_gap() -> None:
    for turn in some("count aloud"):
        numbers = ast.literal_eval(f"[{turn.answer}]")
        assert {abs(b - a) for a, b in pairwise(numbers)} <= {1}


def test_letters_are_counted() -> None:
    for turn in some("count letters"):
        counted, _, result = turn.answer.rpartition(": ")
        word = "".join(entry.split()[1] for entry in counted.split(", "))
        assert word in turn.prompt
        assert len(word) == int(result.split()[0])
    for turn in some("count one letter"):
        spelled, _, result = turn.answer.rpartition(": ")
        word = "".join(entry[0] for entry in spelled.split())
        assert word in turn.prompt
        _, letter, _ = turn.content.split()
        assert word.count(letter) == int(result.split()[0]) == spelled.count("(")


def test_words_are_counted() -> None:
    for turn in some("count words"):
        listed, _, result = turn.answer.rpartition(": ")
        words = [entry.split()[1] for entry in listed.split(", ")]
        assert " ".join(words) in turn.prompt
        assert len(words) == int(result.split()[0])


@pytest.mark.parametrize("name", ["repeat", "upper-case", "lower-case"])
def test_the_text_is_in_the_prompt(name: str) -> None:
    for turn in some(name):
        assert turn.answer.lower() in turn.prompt.lower()


def test_the_last_stated_name_is_remembered() -> None:
    memory, rng = Memory(), random.Random(2)
    for _ in range(200):
        stated, asked = memory.tell(rng), memory.ask(rng)
        assert stated.task == asked.task == "memory"
        assert "not told" in asked.answer or any(value in asked.answer for value in memory.known.values())


def test_a_memory_dialog_asks_for_what_it_stated_first() -> None:
    dialog = memory_dialog(random.Random(3), distance=4)
    assert len(dialog) == 6
    assert dialog[0].content == dialog[-1].content


def test_rows_mark_exactly_the_answers() -> None:
    rng = random.Random(4)
    drawn = [turn for _ in range(50) for turn in islice(turns(rng), 10)]
    encoder = Encoder(train_tokenizer((text for turn in drawn for text in (turn.prompt, turn.answer)), 320))
    tokens, marks = row(encoder, rng, 192)
    assert len(tokens) == len(marks) == 192
    ends = [at for at in range(192) if marks[at] and not [*marks, False][at + 1]]
    assert ends
    assert all(tokens[at] == encoder.end for at in ends)
    starts = [at for at in range(1, 192) if marks[at] and not marks[at - 1]]
    assert all(tokens[at - 1] == encoder.assistant for at in starts)


@pytest.mark.parametrize(
    "text", ["Reverse the word: stone", "café 日本 🙂", "  two  spaces", '{"a": 1}', "12+7=", "a\nb\t"]
)
def test_the_tokenizer_gives_back_what_it_reads(text: str) -> None:
    tokenizer = train_tokenizer(["Reverse the word stone", "What is the capital?", "What is 12 + 7?"] * 3, 280)
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
