"""The examples run and print what they should."""

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, capsys: pytest.CaptureFixture[str]) -> tuple[list[str], int]:
    """Return the lines that an example prints before its cache hit rate, and that rate in percent."""
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    *lines, last = capsys.readouterr().out.splitlines()
    found = re.match(r"cache hit rate: (\d+)%", last)
    assert found is not None, last
    return lines, int(found[1])


def test_few_shot_examples_are_computed_once(capsys: pytest.CaptureFixture[str]) -> None:
    lines, hit_rate = run("few_shot", capsys)
    assert [line.split(" (")[0] for line in lines] == [
        "What is 12 + 7? -> 12 + 7 = 19",
        "Reverse: stone -> enots",
        "Sort: 5, 2, 9 -> 2, 5, 9",
        "What is 5 + 6? -> 5 + 6 = 11",
    ]
    assert hit_rate > 60


def test_the_tree_of_thought_finds_the_sum(capsys: pytest.CaptureFixture[str]) -> None:
    lines, hit_rate = run("tree_of_thought", capsys)
    numbers, total = lines[0].split(" = ")
    assert sorted(int(number) for number in numbers.split(" + ")) == [2, 9, 12]
    assert total == "23"
    assert hit_rate > 40


def test_the_judges_choose_the_right_answer(capsys: pytest.CaptureFixture[str]) -> None:
    lines, hit_rate = run("judges", capsys)
    assert lines[-1] == "the judges chose: 7 + 5 = 12"
    assert len(lines) > 2
    assert hit_rate > 30


def trained(num_steps: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what the example with a trainer prints; in each step both must have the same log probabilities."""
    monkeypatch.setattr(sys, "argv", ["grpo.py", str(num_steps)])
    runpy.run_path(str(EXAMPLES / "grpo.py"), run_name="__main__")
    *steps, last = capsys.readouterr().out.splitlines()
    for number, line in enumerate(steps, start=1):
        found = re.fullmatch(
            r"step (\d+): \d+% right; log probabilities of trainer and engine differ by at most (.+); weights (\d+)",
            line,
        )
        assert found is not None, line
        assert (int(found[1]), int(found[3])) == (number, number)
        assert 0 < float(found[2]) < 1e-4
    assert len(steps) == num_steps
    return re.findall(r"(\d+)%", last)


def test_a_trainer_and_the_engine_have_the_same_log_probabilities(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(3, capsys, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_reward_rises(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    first, last = map(int, trained(40, capsys, monkeypatch))
    assert last > first + 10
