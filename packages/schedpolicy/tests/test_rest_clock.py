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
    clock.postpone(10**6)
    assert not clock.is_probe_due


def test_a_probe_is_priced_once_after_each_change():
    clock = RestClock()
    for change in (clock.draft, clock.probe, clock.hasten, clock.end_period):
        clock.postpone(40)
        assert clock.is_priced
        change()
        assert not clock.is_priced
    clock.draft()
    clock.postpone(5)  # a probe that is paid for early waits for its time nevertheless
    clock.decline("load")
    for _ in range(15):
        assert not clock.is_probe_due
        clock.decline("load")
    assert clock.is_probe_due


def test_drafters_follow_from_24_steps_before_a_probe():
    clock = declined(4)
    clock.postpone(40)
    assert not clock.is_far
    clock.rest(0)  # a decision after which no step rests counts too
    assert clock.is_far
    clock.rest(30)
    assert clock.is_far
    assert [clock.rests(8) and clock.is_far for _ in range(14)] == [True] * 11 + [False] * 3


def test_it_says_how_much_lower_a_load_is():
    clock = RestClock()
    assert clock.note_load(8) == 1
    assert clock.note_load(6) == 1
    assert clock.note_load(3) == 0.5
    assert clock.note_load(30) == 1


def test_a_period_without_drafts_rests_as_a_whole_and_its_steps_pay_for_probes():
    clock = declined(1)
    clock.withdraw()
    assert clock.reason == "trial"
    for step in range(1000):
        assert clock.rests(8)
        assert clock.is_far
        if step == 2:
            clock.hasten()  # the last results of drafts come back
    assert not clock.is_probe_due
    clock.end_period()
    assert not clock.rests(8)
    assert clock.num_withdrawn == clock.num_idle == 1002
    for _ in range(16):
        assert not clock.is_probe_due
        clock.decline("load")
    assert clock.is_probe_due
    clock.probe()
    assert clock.num_idle == clock.num_withdrawn == 0
