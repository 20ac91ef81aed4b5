"""The generated answers are right, and held-out prompts are never trained on."""

import ast
import json
import random
import re
import sys
from itertools import islice, pairwise
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from batches import Encoder, row
from dialog import memory_dialog, turns
from memory_tasks import Memory
from talk_tasks import UNABLE
from tasks import GENERATORS, Turn, draw, held_out
from tokenizer import train_tokenizer
from tool_dialog import exchange, offer, tool_dialog, tool_turns, unserved
from tool_tasks import OTHER_TOOLS, TOOLS, Exchange


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


def some_exchanges(kind: str, count: int = 300) -> list[Exchange]:
    rng = random.Random(f"test {kind}")
    return [exchange(rng, offer(rng, [kind])) for _ in range(count)]


@pytest.mark.parametrize("kind", TOOLS)
def test_calls_name_the_offered_tool_with_its_parameters_and_words_of_the_prompt(kind: str) -> None:
    rng = random.Random(5)
    for _ in range(300):
        offered = offer(rng, [kind])
        served = exchange(rng, offered)
        tool = offered.kinds[kind]
        assert tool in offered.tools
        assert len(served.calls) == len(served.results) == (2 if served.task == "two calls" else 1)
        for call in served.calls:
            assert call.name == tool.name
            assert [*call.arguments] == [*tool.parameters]
            if kind != "calculator":
                assert all(value in served.prompt for value in call.arguments.values())
        written = served.turns()[0].answer
        read = [json.loads(part.strip()) for part in re.findall(r"<tool_call>\n(.*?)\n</tool_call>", written)]
        assert read == [{"name": call.name, "arguments": call.arguments} for call in served.calls]


def test_the_answer_uses_each_result() -> None:
    for served in some_exchanges("weather"):
        words = served.answer.removeprefix("It is ").removesuffix(".")
        if served.answer.startswith("The tool reported an error: "):
            assert served.answer.partition(": ")[2].removesuffix(".") in served.results[0]
            continue
        shown = words.split(", and ")
        assert len(shown) == len(served.calls)
        for part, result, call in zip(shown, served.results, served.calls, strict=True):
            degrees, sky = re.fullmatch(r"(\S+) degrees and (.*) in .*", part).groups()  # pyright: ignore[reportOptionalMemberAccess]
            assert degrees in result
            assert sky in result
            assert part.endswith(f" in {next(iter(call.arguments.values()))}")
    for served in some_exchanges("calendar"):
        title, day = served.calls[0].arguments.values()
        assert (title in served.answer and day in served.answer) or "error" in served.answer


def test_expressions_have_the_value_of_the_result() -> None:
    for served in some_exchanges("calculator"):
        (written,) = served.calls[0].arguments.values()
        assert set(written) <= set("0123456789.+-*/() ")
        if "error" not in served.answer:
            assert served.answer.startswith(f"The result of {written} is ")
            shown = served.answer.split()[-1].removesuffix(".")
            assert shown in served.results[0]
            assert float(shown) == pytest.approx(eval(written), abs=1e-4)


@pytest.mark.parametrize("kind", TOOLS)
def test_both_sides_of_the_split_of_tools_are_disjoint(kind: str) -> None:
    rng = random.Random(6)
    trained = {exchange(rng, offer(rng, [kind])).content for _ in range(400)}
    held = [tool_dialog(rng, kind)[1] for _ in range(40)]
    assert not trained & {served.content for served in held}
    for served in held:
        assert served.task == "calculator" or all(held_out(content) for content in contents(served))


def contents(served: Exchange) -> list[str]:
    if served.task == "calendar":
        return [served.content]
    return [f"weather {city.lower()}" for call in served.calls for city in call.arguments.values()]


def test_a_conversation_with_tools_never_shows_held_out_content() -> None:
    rng = random.Random(7)
    for _ in range(150):
        for group in islice(tool_turns(rng, offer(rng)), 8):
            for turn in group:
                if turn.task != "memory" or "not told" not in turn.answer:
                    assert not held_out(turn.content), turn


def test_a_request_without_its_tool_is_refused_and_a_tool_without_a_request_is_not_called() -> None:
    rng, seen = random.Random(8), set[str]()
    for _ in range(200):
        offered = offer(rng)
        asked = unserved(rng, offered)
        assert (asked is None) == ({"weather", "calendar"} <= {*offered.kinds})
        assert asked is None or asked.answer == UNABLE
        names = {tool.name for tool in offered.kinds.values()}
        for group in islice(tool_turns(rng, offered), 6):
            called = re.findall(r'<tool_call>\n{"name": "(.*?)"', group[0].answer)
            assert {*called} <= names
            assert called or not offered.serves(group[0])
            seen |= {group[0].task}
    assert {"no tool", "weather, call", "two calls, call", "calculator, call", "calendar, call", "reverse"} <= seen


def test_some_conversations_offer_a_tool_that_is_never_called() -> None:
    rng = random.Random(9)
    assert any(tool in OTHER_TOOLS for _ in range(50) for tool in offer(rng).tools)


def test_rows_hold_an_exchange_as_a_whole() -> None:
    rng = random.Random(10)
    encoder = Encoder(train_tokenizer(["What is the weather in Paris?", '{"name": "get_weather"}'] * 3, 280))
    num_calls = 0
    for _ in range(40):
        tokens, marks = row(encoder, rng, 1024, tools=True)
        assert len(tokens) == len(marks) == 1024
        text = encoder.tokenizer.decode(tokens, skip_special_tokens=False)
        calls = text.count("</tool_call>")
        assert calls == text.count("<tool_response>") == text.count("</tool_response>")
        assert text.count("</tool_response><|end|><|assistant|>") == text.count("<|assistant|><tool_call>")
        marked = encoder.tokenizer.decode([token for token, mark in zip(tokens, marks, strict=True) if mark])
        assert "tool_response" not in marked
        assert marked.count("</tool_call>") == calls
        num_calls += calls
    assert num_calls > 20
