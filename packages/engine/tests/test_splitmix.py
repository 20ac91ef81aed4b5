import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewood.engine.runner.cpu.compiled import sampling
from pagewood.engine.runner.splitmix import uniform


@settings(deadline=None)  # the first call compiles
@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31 - 1)), max_size=20))
def test_numbers_equal_those_of_the_compiled_sampler(rows: list[tuple[int, int]]) -> None:
    seeds, positions = np.array([s for s, _ in rows], np.int64), np.array([p for _, p in rows], np.int32)
    numbers = uniform(seeds, positions)
    assert numbers.dtype == np.float64
    assert numbers.tolist() == [sampling.uniform(*row) for row in zip(seeds, positions, strict=True)]
    assert ((numbers >= 0) & (numbers < 1)).all()
