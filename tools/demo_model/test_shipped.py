"""The folder that ships in the engine has these templates, and its model calls tools and uses their results."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parent))

from talk_tasks import UNABLE
from templates import CHAT_TEMPLATE, RESPONSE_TEMPLATE
from tool_format import Message, Tool

SHIPPED = Path(__file__).parents[2] / "packages" / "engine" / "src" / "pagewood" / "engine" / "demo"

WEATHER = Tool(
    name="get_weather", parameters={"city": "string"}, optional={}, description="Get the weather in a city"
)  # fmt: skip
CALCULATOR = Tool(
    name="calculator", parameters={"expression": "string"}, optional={}, description="Evaluate an expression"
)  # fmt: skip
CALENDAR = Tool(
    name="add_event",
    parameters={"title": "string", "day": "string"},
    optional={},
    description="Add an event to the calendar",
)
ALL = (WEATHER, CALCULATOR, CALENDAR)


class Chat:
    """The shipped model, through `transformers`."""

    def __init__(self) -> None:
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(SHIPPED)
        self.model = LlamaForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32).eval()

    def say(self, messages: list[Message], *tools: Tool) -> Message:
        """Return the greedy answer as a message."""
        prompt = self.tokenizer.apply_chat_template(
            messages,
            tools=[tool.declaration() for tool in tools] or None,
            add_generation_prompt=True,
            return_dict=False,
        )
        made = self.model.generate(torch.tensor([prompt]), max_new_tokens=200, do_sample=False)[0, len(prompt) :]
        return self.tokenizer.parse_response(made, prefix=prompt)


@pytest.fixture(scope="module")
def chat() -> Iterator[Chat]:
    # The threads of torch wait for each other by spinning, which is slow on a busy machine.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Chat()
    torch.set_num_threads(num_threads)


def test_the_folder_has_these_templates() -> None:
    assert (SHIPPED / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    assert json.loads((SHIPPED / "tokenizer_config.json").read_text())["response_template"] == RESPONSE_TEMPLATE


@pytest.mark.parametrize(
    ("prompt", "calls", "results", "answer"),
    [
        (
            "What is the weather in Paris?",
            [("get_weather", {"city": "Paris"})],
            ['{"temperature": 21, "conditions": "sunny"}'],
            "It is 21 degrees and sunny in Paris.",
        ),
        (
            "What is the weather in Paris and in Rome?",
            [("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome"})],
            ['{"temperature": 21, "conditions": "sunny"}', '{"temperature": 15, "conditions": "cloudy"}'],
            "It is 21 degrees and sunny in Paris, and 15 degrees and cloudy in Rome.",
        ),
        (
            "What is 123 times 45?",
            [("calculator", {"expression": "123 * 45"})],
            ["5535"],
            "The result of 123 * 45 is 5535.",
        ),
        (
            "Add lunch with Ana on Friday to my calendar.",
            [("add_event", {"title": "lunch with Ana", "day": "Friday"})],
            ['{"status": "ok"}'],
            "I added lunch with Ana on Friday.",
        ),
    ],
)
def test_a_tool_is_called_and_its_result_is_used(
    chat: Chat, prompt: str, calls: list[tuple[str, dict[str, str]]], results: list[str], answer: str
) -> None:
    messages: list[Message] = [{"role": "user", "content": prompt}]
    called = chat.say(messages, *ALL)
    assert called == {
        "role": "assistant",
        "tool_calls": [
            {"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls
        ],
    }
    messages += [called, *({"role": "tool", "content": result} for result in results)]
    assert chat.say(messages, *ALL) == {"role": "assistant", "content": answer}


def test_a_request_that_no_tool_serves_is_answered_as_without_tools(chat: Chat) -> None:
    weather: list[Message] = [{"role": "user", "content": "What is the weather in Paris?"}]
    for tools in ((), (CALENDAR,)):
        assert chat.say(weather, *tools)["content"] == UNABLE
    reverse: list[Message] = [{"role": "user", "content": "Reverse the word: stone"}]
    for tools in ((), ALL):
        assert chat.say(reverse, *tools)["content"] == "enots"
    assert chat.say([{"role": "user", "content": "What is 12 + 7?"}])["content"] == "12 + 7 = 19"
