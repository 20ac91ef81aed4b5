"""The chat template writes what the model is trained on, and the response template reads what the model writes."""

import json
import random
import sys
from itertools import islice
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_parsing import ResponseParser

sys.path.insert(0, str(Path(__file__).parent))

from batches import Encoder
from dialog import system_message, turns
from templates import CHAT_TEMPLATE, RESPONSE_TEMPLATE
from tokenizer import ASSISTANT, END, PAD, save_tokenizer, train_tokenizer
from tool_dialog import exchange, offer
from tool_format import Message, Tool
from tool_tasks import TOOLS, Exchange

WITHOUT_TOOLS = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""The template of conversations without tools, which must not change: it names the ids of all stored prompts."""

WEATHER = Tool(name="get_weather", parameters={"city": "string"}, optional={}, description="Get the weather")
CALLED: Message = {
    "role": "assistant",
    "tool_calls": [{"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Brasília"}}}],
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Brasília"}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    trained = train_tokenizer(["What is the weather in Paris?", "Tools: get_weather(city: string)"] * 3, 290)
    return PreTrainedTokenizerFast(
        tokenizer_object=trained,
        chat_template=CHAT_TEMPLATE,
        response_template=RESPONSE_TEMPLATE,
        eos_token=END,
        pad_token=PAD,
    )


def render(tokenizer: PreTrainedTokenizerFast, messages: list[Message], **variables: object) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **variables))  # pyright: ignore[reportArgumentType]


def conversation(rng: random.Random) -> list[Message]:
    system = system_message(rng)
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    for turn in islice(turns(rng), 4):
        messages += [{"role": "user", "content": turn.prompt}, {"role": "assistant", "content": turn.answer}]
    return messages


@pytest.mark.parametrize("prompted", [False, True])
def test_a_conversation_without_tools_is_rendered_as_before(tokenizer: PreTrainedTokenizerFast, prompted: bool) -> None:
    rng = random.Random(0)
    for _ in range(50):
        messages = conversation(rng)
        before = render(tokenizer, messages, chat_template=WITHOUT_TOOLS, add_generation_prompt=prompted)
        for tools in (None, []):
            assert render(tokenizer, messages, tools=tools, add_generation_prompt=prompted) == before
    assert render(tokenizer, [{"role": "user", "content": " a \n"}], documents=[{"text": "b"}]) == "<|user|>a<|end|>"


def test_the_template_renders_the_rows_that_the_model_is_trained_on(tokenizer: PreTrainedTokenizerFast) -> None:
    encoder, rng = Encoder(tokenizer._tokenizer), random.Random(1)
    for kinds in [[kind] for kind in TOOLS] * 20 + [[*TOOLS]] * 20:
        offered = offer(rng, kinds)
        messages: list[Message] = [] if offered.system is None else [{"role": "system", "content": offered.system}]
        text = offered.text()
        trained = [] if text is None else encoder.system_part(text)
        for _ in range(2):
            served: Exchange = exchange(rng, offered)
            messages += [*served.messages(), {"role": "assistant", "content": served.answer}]
            trained += [
                id for turn in served.turns() for part in encoder.turn_parts(turn.prompt, turn.answer) for id in part
            ]
        tools = [tool.declaration() for tool in offered.tools]
        assert tokenizer.apply_chat_template(messages, tools=tools, return_dict=False) == trained


@pytest.mark.parametrize(
    ("function", "line"),
    [
        ({"name": "now"}, "now()"),
        ({"name": "now", "parameters": None, "description": None}, "now()"),
        ({"name": "f", "description": " A\ntool.\n", "parameters": {"properties": {}}}, "A tool: f()"),
        ({"name": "f", "parameters": {"properties": {"a": {"type": "integer"}, "b": {}}}}, "f(a: integer, b: any)"),
        (
            {"name": "f", "parameters": {"properties": {"a": {"enum": ["x", "y"]}, "b": {"type": ["string", "null"]}},
                                         "required": ["b"]}},
            "f(a?: x|y, b: string|null)",
        ),
        ({"name": "f", "parameters": {"properties": {"a": {"type": "array"}}, "required": []}}, "f(a?: array)"),
    ],
)  # fmt: skip
def test_a_tool_is_one_line(tokenizer: PreTrainedTokenizerFast, function: Message, line: str) -> None:
    asked: list[Message] = [{"role": "user", "content": "Hi"}]
    for tool in ({"type": "function", "function": function}, function):
        shown = render(tokenizer, asked, tools=[tool], add_generation_prompt=True)
        assert shown == f"<|system|>Tools:\n{line}<|end|><|user|>Hi<|end|><|assistant|>"
    both = render(
        tokenizer, [{"role": "system", "content": "Be brief."}, *asked], tools=[function, WEATHER.declaration()]
    )
    assert both == (
        f"<|system|>Be brief.\n\nTools:\n{line}\nGet the weather: get_weather(city: string)<|end|><|user|>Hi<|end|>"
    )


def test_calls_stand_below_the_text_and_results_of_one_answer_share_a_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    twice = {**CALLED, "content": "I look.", "tool_calls": CALLED["tool_calls"] * 2}  # pyright: ignore[reportOperatorIssue]
    results: list[Message] = [{"role": "tool", "content": " 21\n"}, {"role": "tool", "content": "ok"}]
    again: list[Message] = [CALLED, {"role": "tool", "content": "1"}, {"role": "user", "content": "Hi"}]
    shown = render(tokenizer, [twice, *results, *again])
    assert shown == (
        f"<|assistant|>I look.\n{CALL}\n{CALL}<|end|>"
        "<|user|><tool_response>\n21\n</tool_response>\n<tool_response>\nok\n</tool_response><|end|>"
        f"<|assistant|>{CALL}<|end|><|user|><tool_response>\n1\n</tool_response><|end|><|user|>Hi<|end|>"
    )


def test_arguments_may_be_text(tokenizer: PreTrainedTokenizerFast) -> None:
    call = {"function": {"name": "get_weather", "arguments": '{"city": "Brasília"}'}}
    assert render(tokenizer, [{"role": "assistant", "content": None, "tool_calls": [call]}]) == (
        f"<|assistant|>{CALL}<|end|>"
    )


def test_the_response_template_reads_every_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    rng = random.Random(2)
    for _ in range(100):
        offered = offer(rng, [*TOOLS])
        served = exchange(rng, offered)
        called, answered = served.turns()
        prefix = render(tokenizer, [{"role": "user", "content": served.prompt}], add_generation_prompt=True)
        for turn in (called, answered):
            message, parser = {}, ResponseParser(RESPONSE_TEMPLATE, prefix=prefix)
            text = turn.answer + END
            for at in range(0, len(text), 7):
                parser.feed(text[at : at + 7])
            message, _ = parser.finalize()
            assert message == tokenizer.parse_response(text, prefix=prefix)
            if turn is answered:
                assert message == {"role": "assistant", "content": served.answer}
            else:
                calls = served.messages()[1]["tool_calls"]
                assert isinstance(calls, list)
                assert message == {
                    "role": "assistant",
                    "tool_calls": [{key: call[key] for key in ("type", "function")} for call in calls],
                }


def test_text_before_calls_is_the_content(tokenizer: PreTrainedTokenizerFast) -> None:
    message = tokenizer.parse_response(f"I look.\n{CALL}\n{CALL}{END}", prefix=ASSISTANT)
    assert message["content"] == "I look."
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == [{"city": "Brasília"}] * 2


def test_the_folder_holds_both_templates(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    save_tokenizer(tokenizer._tokenizer, tmp_path)
    loaded = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    asked: list[Message] = [{"role": "user", "content": "Hi"}]
    tools = [WEATHER.declaration()]
    assert render(loaded, asked, tools=tools) == render(tokenizer, asked, tools=tools)
    assert loaded.parse_response(CALL, prefix=ASSISTANT)["tool_calls"][0]["function"]["name"] == "get_weather"
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["response_template"] == RESPONSE_TEMPLATE
