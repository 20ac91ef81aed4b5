import pytest

from pagewood.schedpolicy.drafting.decode_pace import DecodePace


def test_a_pace_is_known_after_some_steps():
    pace = DecodePace()
    pace.observe(4, 32, 128, 0.0128)
    assert pace.token_s(4) is None
    pace.observe(4, 32, 128, 0.0256)
    assert pace.token_s(4) == pytest.approx(0.0384 / 256, rel=0.02)


def test_similar_loads_share_a_pace():
    pace = DecodePace()
    pace.observe(18, 64, 1000, 0.1)
    assert pace.token_s(19) == pace.token_s(16) == pytest.approx(1e-4)
    assert pace.token_s(20) is None
    assert pace.token_s(15) is None
    pace.observe(3, 64, 190, 0.1)
    assert pace.token_s(2) is None
    assert pace.token_s(4) is None


def test_old_steps_are_forgotten_and_interruptions_are_limited():
    pace = DecodePace()
    pace.observe(1, 64, 64, 0.0064)
    pace.observe(1, 1, 1, 1.0)
    assert pace.token_s(1) == pytest.approx(1e-4, rel=0.02)
    for _ in range(100):
        pace.observe(1, 64, 64, 0.0032)
    assert pace.token_s(1) == pytest.approx(5e-5, rel=0.02)
