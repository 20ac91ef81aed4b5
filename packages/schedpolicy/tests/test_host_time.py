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


def test_every_long_step_is_learned_from_and_of_short_ones_every_fourth():
    host = HostTime(4)
    assert all(host.may_learn(8, 0.01) for _ in range(100))
    host = HostTime(4)
    learned = [host.may_learn(8, 1e-5) for _ in range(400)]
    assert learned[:4] == [True] * 4
    assert sum(learned) == pytest.approx(100, abs=5)
    assert all(sum(learned[i : i + 4]) >= 1 for i in range(397))


def test_without_measured_durations_every_step_is_learned_from():
    host = HostTime(4)
    assert all(host.may_learn(64, 0.0) for _ in range(100))
