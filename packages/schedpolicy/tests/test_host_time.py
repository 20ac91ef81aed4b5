import pytest

from pagewood.schedpolicy.drafting.host_time import HostTime


def test_a_decision_takes_longer_for_more_requests():
    host = HostTime(4)
    assert host.decision_s(0) == pytest.approx(5e-5)
    assert host.decision_s(64) == pytest.approx(5e-5 + 256 * 6e-7)


def test_lengths_are_kept_and_steps_rest_the_longer_the_shorter_they_are():
    host = HostTime(4)
    assert [host.num_kept(5e-5, step_s) for step_s in (0.01, 0.004, 0.0005, 1e-6)] == [0, 1, 10, 63]
    assert [host.num_resting(5e-5, step_s) for step_s in (0.01, 0.002, 0.001, 1e-6)] == [7, 10, 20, 255]


def test_every_long_step_is_learned_from_and_of_short_ones_every_eighth():
    host = HostTime(4)
    assert all(host.may_learn(8, 0.01) for _ in range(100))
    host = HostTime(4)
    learned = [host.may_learn(8, 1e-5) for _ in range(400)]
    assert learned[:4] == [True] * 4
    assert sum(learned) == pytest.approx(50, abs=5)
    assert all(sum(learned[i : i + 8]) >= 1 for i in range(393))


def test_without_measured_durations_every_step_is_learned_from():
    host = HostTime(4)
    assert all(host.may_learn(64, 0.0) for _ in range(100))


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 5.0

    def __call__(self) -> float:
        return self.now_s


def test_a_clock_corrects_what_decisions_and_learning_are_thought_to_take():
    clock = Clock()
    host = HostTime(4, clock)
    for _ in range(200):
        began_s = host.now_s()
        clock.now_s += 3 * (5e-5 + 64 * 6e-7)
        host.note_decision(16, began_s)
        began_s = host.now_s()
        clock.now_s += 5 * (1e-5 + 16 * 1.2e-6)
        host.note_lesson(16, began_s)
    assert host.decision_s(16) == pytest.approx(3 * (5e-5 + 64 * 6e-7), rel=1e-3)
    assert host.decision_s(1) == pytest.approx(3 * (5e-5 + 4 * 6e-7), rel=1e-3)
    step_s = 5 * (1e-5 + 16 * 1.2e-6) / 0.01 / 4  # learning takes 1% of four steps
    assert sum(host.may_learn(16, step_s) for _ in range(400)) == pytest.approx(100, abs=5)


def test_an_interruption_says_little_of_a_price():
    clock = Clock()
    host = HostTime(4, clock)
    usual_s = host.decision_s(16)
    clock.now_s += 10.0
    host.note_decision(16, 5.0)
    assert host.decision_s(16) == pytest.approx(1.15 * usual_s)
    for _ in range(1000):
        clock.now_s += 10.0
        host.note_decision(16, clock.now_s - 10.0)
    assert host.decision_s(16) == pytest.approx(16 * usual_s)


def test_without_a_clock_prices_stay():
    host = HostTime(4)
    assert host.now_s() == 0.0
    host.note_decision(16, -1.0)
    host.note_lesson(16, -1.0)
    assert host.decision_s(16) == HostTime(4).decision_s(16)
