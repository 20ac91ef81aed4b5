"""Tasks on numbers: arithmetic, sorting and counting aloud."""

# ruff: noqa: RUF001

import random

from tasks import Turn, phrase, task

from vocabulary import NUMBER_WORDS

ADD = (
    "What is {a} + {b}?", "What is {a}+{b}?", "{a}+{b}=", "{a} + {b} =", "{a}+{b}", "{a} + {b}", "{a} + {b} = ?",
    "Add {a} and {b}.", "Add {b} to {a}.", "How much is {a} + {b}?", "What is {a} plus {b}?", "What's {a} + {b}?",
    "{a} plus {b}", "What is the sum of {a} and {b}?", "Calculate {a} + {b}.", "Compute {a}+{b}.", "{a} + {b}?",
    "How much is {a} plus {b}?", "Calculate {a} plus {b}.", "Sum of {a} and {b}",
    "What do you get if you add {a} and {b}?",
)  # fmt: skip
SUBTRACT = (
    "What is {a} - {b}?", "What is {a}-{b}?", "{a}-{b}=", "{a} - {b} =", "{a}-{b}", "{a} - {b}", "{a} - {b} = ?",
    "Subtract {b} from {a}.", "Take {b} from {a}.", "How much is {a} - {b}?", "What is {a} minus {b}?",
    "{a} minus {b}", "What's {a} - {b}?", "Calculate {a} - {b}.", "Compute {a}-{b}.", "{a} - {b}?",
    "How much is {a} minus {b}?", "Take away {b} from {a}.", "What do you get if you subtract {b} from {a}?",
)  # fmt: skip
MULTIPLY = (
    "What is {a} x {b}?", "What is {a} * {b}?", "What is {a}*{b}?", "{a}*{b}=", "{a} * {b} =", "{a}x{b}", "{a} * {b}",
    "{a} x {b} = ?", "Multiply {a} by {b}.", "Multiply {a} and {b}.", "How much is {a} x {b}?",
    "What is {a} times {b}?", "{a} times {b}", "What's {a} * {b}?", "Calculate {a} * {b}.", "Compute {a}*{b}.",
    "What is {a} × {b}?", "{a} × {b}", "How much is {a} * {b}?", "What is the product of {a} and {b}?",
    "How much is {a} times {b}?", "What is {a} multiplied by {b}?",
)  # fmt: skip
DIVIDE = (
    "What is {a} / {b}?", "What is {a}/{b}?", "{a}/{b}=", "{a} / {b} =", "{a}/{b}", "{a} / {b}", "{a} / {b} = ?",
    "Divide {a} by {b}.", "How much is {a} / {b}?", "What is {a} divided by {b}?", "{a} divided by {b}",
    "What's {a} / {b}?", "Calculate {a} / {b}.", "Compute {a}/{b}.", "What is {a} ÷ {b}?", "{a} ÷ {b}",
    "How much is {a} divided by {b}?",
)  # fmt: skip


def arithmetic(
    rng: random.Random, name: str, templates: tuple[str, ...], a: int, b: int, sign: str, result: int
) -> Turn:
    """Return the sum in one notation for the answer, so that the result can attend to it."""
    shown = [str(a), str(b)]
    if max(a, b) < len(NUMBER_WORDS) and rng.random() < 0.1:
        shown = [NUMBER_WORDS[a], NUMBER_WORDS[b]]
        templates = tuple(
            t for t in templates if any(w in t for w in ("plus", "minus", "times", "divide", "sum", "prod"))
        )
    prompt = phrase(rng, templates, a=shown[0], b=shown[1])
    return Turn(task=name, content=f"{a}{sign}{b}", prompt=prompt, answer=f"{a} {sign} {b} = {result}")


def operand(rng: random.Random) -> int:
    return rng.randint(0, 20) if rng.random() < 0.3 else rng.randint(0, 100)


@task("add", share=6)
def add(rng: random.Random) -> Turn:
    a, b = operand(rng), operand(rng)
    return arithmetic(rng, "add", ADD, a, b, "+", a + b)


@task("subtract", share=7)
def subtract(rng: random.Random) -> Turn:
    a, b = operand(rng), operand(rng)
    if a < b and rng.random() < 0.6:
        a, b = b, a
    return arithmetic(rng, "subtract", SUBTRACT, a, b, "-", a - b)


@task("multiply", share=4)
def multiply(rng: random.Random) -> Turn:
    """Hold out prompts, because the times tables are 169 facts that cannot be inferred."""
    a, b = rng.randint(0, 12), rng.randint(0, 12)
    turn = arithmetic(rng, "multiply", MULTIPLY, a, b, "x", a * b)
    return by_prompt(turn)


@task("divide", share=3.5)
def divide(rng: random.Random) -> Turn:
    b, result = rng.randint(1, 12), rng.randint(0, 12)
    return by_prompt(arithmetic(rng, "divide", DIVIDE, b * result, b, "/", result))


def by_prompt(turn: Turn) -> Turn:
    """Hold out by the words of the prompt, for tasks on memorized facts."""
    return Turn(task=turn.task, content=turn.prompt.lower(), prompt=turn.prompt, answer=turn.answer)


SORT_UP = (
    "Sort these numbers: {w}", "Sort {w}", "Sort the numbers {w}", "Sort: {w}", "Sort the list {w}",
    "Sort this list: {w}",
    "Put these numbers in order: {w}", "Order these numbers: {w}", "Sort {w} in ascending order.", "Order {w}",
    "Sort from smallest to largest: {w}", "Arrange {w} from smallest to largest.", "Put {w} in order.",
)  # fmt: skip
SORT_DOWN = (
    "Sort {w} in descending order.", "Sort in descending order: {w}", "Sort from largest to smallest: {w}",
    "Arrange {w} from largest to smallest.", "Sort these numbers in descending order: {w}",
    "Sort {w} from high to low.",
)  # fmt: skip


@task("sort numbers", share=9)
def sort_numbers(rng: random.Random) -> Turn:
    top = rng.choice((9, 20, 50, 99, 99))
    numbers = [rng.randint(0, top) for _ in range(rng.randint(3, 5))]
    down = rng.random() < 0.2
    listed = rng.choice((", ", ", ", ", ", " ")).join(map(str, numbers))
    if rng.random() < 0.1:
        listed = f"[{listed}]"
    prompt = phrase(rng, SORT_DOWN if down else SORT_UP, w=listed)
    ordered = sorted(numbers, reverse=down)
    content = "sort " + " ".join(map(str, sorted(numbers)))
    return Turn(task="sort numbers", content=content, prompt=prompt, answer=", ".join(map(str, ordered)))


COUNT_TO = (
    "Count to {b}.", "Count up to {b}.", "Count from 1 to {b}.", "Count from one to {b}.", "Count until {b}.",
    "Count out loud to {b}.", "List the numbers from 1 to {b}.", "Say the numbers from 1 to {b}.",
)  # fmt: skip
COUNT_BETWEEN = ("Count from {a} to {b}.", "Count up from {a} to {b}.", "List the numbers from {a} to {b}.")
COUNT_DOWN = (
    "Count down from {a}.",
    "Count backwards from {a}.",
    "Count down from {a} to 1.",
    "Count from {a} down to 1.",
)


@task("count aloud", share=3.5)
def count_aloud(rng: random.Random) -> Turn:
    """Hold out prompts, because there are few ends of ranges."""
    kind = rng.random()
    low, high = sorted((rng.randint(1, 50), rng.randint(2, 50)))
    if kind < 0.45:
        low, high = 1, rng.choice((rng.randint(2, 20), rng.randint(2, 50)))
        prompt, numbers = phrase(rng, COUNT_TO, b=high), range(1, high + 1)
    elif kind < 0.75:
        low = max(low, high - rng.choice((5, 10, 20, 50)))
        high += low == high
        prompt, numbers = phrase(rng, COUNT_BETWEEN, a=low, b=high), range(low, high + 1)
    else:
        high = rng.choice((5, 10, rng.randint(2, 20)))
        prompt, numbers = phrase(rng, COUNT_DOWN, a=high), range(high, 0, -1)
    answer = ", ".join(map(str, numbers))
    return Turn(task="count aloud", content=prompt.lower(), prompt=prompt, answer=answer)
