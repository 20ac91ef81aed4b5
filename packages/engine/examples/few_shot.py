"""Few-shot prompting: the same examples before every question, computed once and read from the cache afterwards.

pip install pagewood-engine
python few_shot.py
"""

from pagewood.engine import AsyncLLM
from pagewood.engine.program import LocalBackend, State, program, run_many

EXAMPLES = [("What is 2 + 3?", "2 + 3 = 5"), ("Reverse: lamp", "pmal"), ("Sort: 3, 1, 2", "1, 2, 3")]
QUESTIONS = ["What is 12 + 7?", "Reverse: stone", "Sort: 5, 2, 9", "What is 5 + 6?"]


@program
def answer(s: State, question: str) -> str:
    """Answer a question as the examples do."""
    s.system("Answer as briefly as in the examples.")
    for asked, answered in EXAMPLES:
        s.user(asked)
        with s.assistant():
            s.add(answered)
    s.user(question)
    s.gen("answer", temperature=0, max_tokens=16)
    return s["answer"]


def main() -> None:
    """Answer all questions, the first one alone."""
    with LocalBackend(AsyncLLM()) as backend:
        first = answer.run(QUESTIONS[0], on=backend)
        others = run_many([answer(question) for question in QUESTIONS[1:]], on=backend)
    for question, result in zip(QUESTIONS, [first, *others], strict=True):
        usage = result.usage
        print(f"{question} -> {result.value} ({usage.num_cached_tokens} of {usage.num_prompt_tokens} tokens cached)")
    total = sum((result.usage for result in others), first.usage)
    print(f"cache hit rate: {total.hit_rate:.0%}")


if __name__ == "__main__":
    main()
