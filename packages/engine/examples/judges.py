"""Several judges: the model answers a question several times, and judges who see it differently score the answers.

pip install pagewood-engine
python judges.py
"""

from pagewood.engine import AsyncLLM
from pagewood.engine.program import LocalBackend, State, program

JUDGES = ["What is {a} + {b}?", "What is {b} + {a}?", "Add {a} and {b}."]


@program
def judged(s: State, a: int, b: int, *, num_answers: int) -> tuple[str, dict[str, float]]:
    """Return the answer that the judges like best, and the score of each answer."""
    s.system("You are careful.")
    drafts = s.fork(num_answers)
    for seed, draft in enumerate(drafts):
        draft.user(JUDGES[0].format(a=a, b=b))
        draft.gen("answer", temperature=4.0, seed=seed, max_tokens=16, regex=f"{a} \\+ {b} = [0-9]{{1,2}}")
    s.join(drafts)
    answers = sorted({draft["answer"] for draft in drafts})
    judges = s.fork(len(JUDGES))
    for judge, question in zip(judges, JUDGES, strict=True):
        judge.user(question.format(a=a, b=b))
        judge.select("verdict", answers)
    scores = {
        answer: sum(judge.answer("verdict").scores[answer] for judge in judges) / len(judges) for answer in answers
    }
    return max(answers, key=lambda answer: scores[answer]), scores


def main() -> None:
    """Judge, and show how much of the prompts came from the cache."""
    with LocalBackend(AsyncLLM(page_size=1)) as backend:
        result = judged.run(7, 5, num_answers=6, on=backend)
    best, scores = result.value
    for answer, score in sorted(scores.items(), key=lambda item: -item[1]):
        print(f"{score:6.2f}  {answer}")
    print(f"the judges chose: {best}")
    print(f"cache hit rate: {result.usage.hit_rate:.0%} of {result.usage.num_prompt_tokens} prompt tokens")


if __name__ == "__main__":
    main()
