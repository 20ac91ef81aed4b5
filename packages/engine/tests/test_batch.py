from typing import Any

import numpy as np

from pagewood.engine.core.batch import BatchBuilder
from pagewood.engine.core.plan import Grant
from pagewood.engine.core.sampling import SamplingArrays
from pagewood.engine.testing import make_request, make_space


def test_an_admission_carries_pages_tokens_and_sampling() -> None:
    kv = make_space()
    one = make_request([5, 6, 7, 8, 9, 10])
    kv.admit(one, max_tokens=5, num_reserved=0)
    batch = BatchBuilder(num_rows=4, page_size=4).build([Grant(one, 0, 5, 0, True)])
    assert batch.num_tokens == 5
    assert batch.page_rows.tolist() == [one.row] * 2
    assert batch.page_columns.tolist() == [0, 1]
    assert batch.page_ids.tolist() == one.pages[:2].tolist()
    assert batch.token_positions.tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 9, 10]
    assert batch.sampled.tolist() == []


def test_a_decode_carries_only_its_position_and_sampling() -> None:
    kv = make_space()
    builder = BatchBuilder(num_rows=4, page_size=4)
    one, two = make_request([1, 2, 3]), make_request([4, 5, 6, 7])
    for each in (one, two):
        kv.admit(each, max_tokens=9, num_reserved=0)
    builder.build([Grant(one, 0, 3, 1, True), Grant(two, 0, 4, 1, True)])
    kv.grow(two, 5)
    batch = builder.build([Grant(one, 3, 1, 1), Grant(two, 4, 1, 1)])
    assert len(batch.token_ids) == 0
    assert (batch.page_rows.tolist(), batch.page_columns.tolist()) == ([two.row], [1])
    assert batch.rows.tolist() == [one.row, two.row]
    assert batch.starts.tolist() == [3, 4]
    assert batch.sampled.tolist() == [0, 1]
    assert batch.sampling.temperatures.tolist() == [1.0, 1.0]


def arrays_of(owner: Any) -> dict[str, Any]:
    """Return the arrays of an object, and those of its sampling parameters."""
    values: dict[str, Any] = {name: getattr(owner, name) for name in owner.__slots__}
    for value in list(values.values()):
        values |= value.fields() if isinstance(value, SamplingArrays) else {}
    return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}


def test_a_batch_aliases_nothing() -> None:
    kv = make_space()
    builder = BatchBuilder(num_rows=4, page_size=4)
    one = make_request([1, 2, 3])
    kv.admit(one, max_tokens=9, num_reserved=0)
    batch = builder.build([Grant(one, 0, 3, 1, True)])
    for name, array in arrays_of(batch).items():
        for field, other in (arrays_of(one) | arrays_of(builder)).items():
            assert not np.shares_memory(array, other), (name, field)
