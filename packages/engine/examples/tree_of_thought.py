"""A tree of thought: which of some numbers add up to a target? The model adds; the program searches.

Each thought is a turn of a conversation, so a branch of the tree is a branch of the text: its beginning is in the
cache, and the thoughts of a level are computed together.

    pip install pagewood-engine
    python tree_of_thought.py

Source: Yao et al., Tree of Thoughts, 2023.
"""

from dataclasses import dataclass

from pagewood.engine import AsyncLLM
from pagewood.engine.program import LocalBackend, State, program


@dataclass(frozen=True, slots=True)
class Thought:
    """A conversation in which some of the numbers were added."""

    state: State
    used: tuple[int, ...]
    sum: int


def thoughts(parent: Thought, numbers: list[int]) -> list[Thought]:
    """Return one thought for each number that is left; the model adds all of them at the same time."""
    left = [number for number in numbers if number not in parent.used]
    name = f"sum {len(parent.used)}"
    branches = parent.state.fork(len(left)) if left else []
    for branch, number in zip(branches, left, strict=True):
        branch.user(f"What is {parent.sum} + {number}?")
        with branch.assistant():
            branch.add(f"{parent.sum} + {number} =")
            branch.gen(name, temperature=0, max_tokens=8, regex=" [0-9]{1,3}")
    return [
        Thought(branch, (*parent.used, number), int(branch[name]))
        for branch, number in zip(branches, left, strict=True)
    ]


@program
def search(s: State, numbers: list[int], target: int, *, width: int) -> tuple[int, ...]:
    """Return numbers whose sum is the target, or (); follow the `width` best thoughts of each level."""
    s.system("You add numbers.")
    best = [Thought(s, (), 0)]
    while best:
        level = [thought for parent in best for thought in thoughts(parent, numbers)]
        for thought in level:
            if thought.sum == target:
                return thought.used
        ahead = {frozenset(one.used): one for one in level if one.sum < target}
        best = sorted(ahead.values(), key=lambda one: target - one.sum)[:width]
    return ()


def main() -> None:
    """Search, and show how much of the prompts came from the cache."""
    with LocalBackend(AsyncLLM(page_size=1)) as backend:
        result = search.run([2, 5, 9, 12], 23, width=3, on=backend)
    print(" + ".join(map(str, result.value)), "= 23" if result.value else "no solution")
    usage = result.usage
    print(f"cache hit rate: {usage.hit_rate:.0%} of {usage.num_prompt_tokens} prompt tokens")


if __name__ == "__main__":
    main()
