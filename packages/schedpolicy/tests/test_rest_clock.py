from pagewood.schedpolicy.drafting.rest_clock import RestClock


def declined(num: int, num_requests: int = 8) -> RestClock:
    """Return a clock after decisions for no drafts."""
    clock = RestClock()
    clock.note_load(num_requests)
    for _ in range(num):
        clock.decline("load")
    return clock


def test_most_steps_rest_after_four_decisions_for_no_drafts():
    assert not declined(3).is_settled
    clock = declined(4)
    assert clock.is_settled
    assert not clock.rests(8)
    clock.rest(7)
    assert [clock.rests(8) for _ in range(8)] == [True] * 7 + [False]
    assert clock.reason == "load"
    assert clock.num_idle == 11
    clock.draft()
    assert not clock.is_settled


def test_a_rest_ends_early_at_a_much_lower_load():
    clock = declined(4)
    clock.rest(7)
    assert clock.rests(6)
    assert not clock.rests(5)
    assert clock.rests(6)


def test_probes_become_rarer_until_drafts_gain_or_something_changes():
    clock = RestClock()
    waits: list[int] = []
    for _ in range(7):
        while not clock.is_probe_due:
            clock.decline("acceptance")
        waits.append(clock.num_idle)
        clock.probe()
    assert waits == [16, 32, 64, 128, 256, 512, 512]
    for change in (clock.hasten, clock.draft, lambda: clock.note_load(1)):
        clock.note_load(100)
        clock.postpone(200)
        change()
        for _ in range(16 - clock.num_idle):
            assert not clock.is_probe_due
            clock.decline("acceptance")
        assert clock.is_probe_due


def test_a_probe_that_is_too_dear_is_put_off_but_not_for_ever():
    clock = RestClock()
    clock.postpone(10**6)
    while not clock.is_probe_due:
        clock.decline("acceptance")
    assert clock.num_idle == 8192


def test_drafters_follow_from_24_steps_before_a_probe():
    clock = declined(4)
    clock.postpone(40)
    clock.pause(1)
    assert not clock.is_far
    clock.rest(30)
    assert clock.is_far
    assert [clock.rests(8) and clock.is_far for _ in range(14)] == [True] * 11 + [False] * 3


def test_it_says_how_much_lower_a_load_is():
    clock = RestClock()
    assert clock.note_load(8) == 1
    assert clock.note_load(6) == 1
    assert clock.note_load(3) == 0.5
    assert clock.note_load(30) == 1
