import pytest

from pagewood.schedpolicy.drafting.kept_lengths import KeptLengths


def test_lengths_that_stay_are_kept_longer_and_longer():
    kept = KeptLengths()
    periods: list[int] = []
    for _ in range(6):
        kept.keep([4, 4], 8, num_plain=9, plain_s=0.3, loss_s=0.1, most=20)
        periods.append(kept.num_left)
    assert periods == [0, 1, 3, 7, 15, 20]
    kept.keep([1, 1], 2, num_plain=9, plain_s=0.3, loss_s=0.1, most=20)
    assert kept.num_left == 5
    kept.keep([1, 1], 2, num_plain=9, plain_s=0.3, loss_s=0.1, most=0)
    assert kept.num_left == 0


def test_they_are_taken_as_often_as_they_are_kept():
    kept = KeptLengths()
    kept.keep([2], 2, num_plain=9, plain_s=0.3, loss_s=0.1, least=1, most=1)
    assert kept.num_left == 1
    kept.take()
    assert kept.num_left == 0
    kept.keep([2], 2, num_plain=9, plain_s=0.3, loss_s=0.1, least=1, most=1)
    kept.drop()
    assert kept.num_left == 0


@pytest.mark.parametrize(
    ("num_requests", "loss_s", "fits"),
    [(6, 0.2, True), (10, 0.1, True), (5, 0.1, False), (11, 0.1, False), (8, 0.21, False)],
)
def test_they_fit_a_similar_load(num_requests: int, loss_s: float, fits: bool):
    kept = KeptLengths()
    kept.keep([3] * 8, 24, num_plain=9, plain_s=0.3, loss_s=0.1, most=9)
    assert kept.fit(num_requests, loss_s) == fits


def test_a_new_request_gets_the_median():
    kept = KeptLengths()
    kept.keep([0, 5, 4, 1, 5], 15, num_plain=9, plain_s=0.3, loss_s=0.1, most=9)
    assert kept.usual == 4


def test_lengths_that_are_held_say_what_they_add_to_another_load():
    kept = KeptLengths()
    assert not kept.is_held
    kept.keep([0, 5, 4, 1, 5], 15, num_plain=9, plain_s=0.3, loss_s=0.1, most=0)
    assert kept.is_held
    assert kept.num_left == 0
    assert (kept.total_of(5), kept.total_of(10), kept.total_of(1)) == (15, 30, 3)
    kept.take()
    assert kept.num_left == 0
    kept.drop()
    assert not kept.is_held


def test_a_step_like_that_of_the_decision_takes_them_without_a_question():
    kept = KeptLengths()
    assert not kept.are_of(2, 9, 1.0)
    for _ in range(3):
        kept.keep([4, 4], 8, num_plain=9, plain_s=0.3, loss_s=0.1, most=20)
    assert kept.num_left == 3
    assert kept.are_of(2, 9, 0.1)
    assert not kept.are_of(2, 9, 0.09)
    assert not kept.are_of(2, 10, 0.1)
    assert not kept.are_of(3, 9, 0.1)
    for _ in range(3):
        kept.take()
    assert not kept.are_of(2, 9, 0.1)
