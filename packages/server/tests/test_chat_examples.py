"""The example questions of the chat page are ones that the embedded model answers."""

from __future__ import annotations

import json
import re
from pathlib import Path

from pagewood.engine import LLM, SamplingParams
from pagewood.server import pages

ANSWERS = {
    "What is 12 + 7?": "19",
    "Reverse the word: stone": "enots",
    "Sort these numbers: 42, 7, 19, 3": "3, 7, 19, 42",
    "What is the capital of France?": "Paris",
    "How many letters are in banana?": "6 letters",
}


def test_the_embedded_model_answers_the_examples() -> None:
    page = (Path(pages.__file__).parent / "chat.html").read_text()
    found = re.search(r"const EXAMPLES = (\[[^\]]*\]);", page)
    assert found is not None
    questions: list[str] = json.loads(found[1])
    assert questions == [*ANSWERS]
    with LLM(max_total_tokens=4096, num_threads=1) as llm:
        asked = [[{"role": "user", "content": question}] for question in questions]
        answers = llm.chat(asked, SamplingParams(temperature=0, max_tokens=48))
    assert all(right in answer.text for right, answer in zip(ANSWERS.values(), answers, strict=True))
