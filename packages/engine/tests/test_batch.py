from typing import Any

import numpy as np
import pytest

from pagewood.engine.core.messages.sampling_table import SamplingArrays
from pagewood.engine.core.steps.batch_builder import BatchBuilder
from pagewood.engine.core.steps.grant import Grant
from parts import make_request, make_space


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


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_step_of_decodes_is_built_like_any_other(page_size: int) -> None:
    kv = make_space(num_pages=200, page_size=page_size)
    builder, oracle = (BatchBuilder(num_rows=4, page_size=page_size) for _ in range(2))
    requests = [make_request(list(range(3 + index)), max_new=40, arrival=index) for index in range(4)]
    first: list[Grant] = []
    for request in requests:
        num_tokens = kv.admit(request, max_tokens=9, num_reserved=0)
        first.append(Grant(request, 0, num_tokens, 1, True))
    for each in (builder, oracle):
        each.build(first)
    starts = [request.num_known for request in requests]
    for step in range(9):
        decoding = requests[step // 3 :]  # those of the step before, or fewer
        for request in decoding:
            assert kv.grow(request, starts[request.arrival] + 1)
        grants = [Grant(request, starts[request.arrival], 1, 1) for request in decoding]
        batch, expected = builder.build(grants, is_decode=True), oracle.build(grants)
        for name, array in arrays_of(expected).items():
            assert arrays_of(batch)[name].dtype == array.dtype, name
            assert np.array_equal(arrays_of(batch)[name], array), name
        for request in decoding:
            starts[request.arrival] += 1


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_step_of_decodes_with_drafts_is_built_like_any_other(page_size: int) -> None:
    kv = make_space(num_pages=200, page_size=page_size)
    builder, oracle = (BatchBuilder(num_rows=4, page_size=page_size, is_drafting=True) for _ in range(2))
    requests = [make_request(list(range(3 + index)), max_new=60, arrival=index) for index in range(4)]
    first: list[Grant] = []
    for request in requests:
        first.append(Grant(request, 0, kv.admit(request, max_tokens=9, num_reserved=0), 1, True))
    for each in (builder, oracle):
        each.build(first)
    starts = [request.num_known for request in requests]
    for step in range(9):
        nums = [1 + (step + index) % 6 for index in range(len(requests))]
        grants: list[Grant] = []
        for request, num in zip(requests, nums, strict=True):
            assert kv.grow(request, starts[request.arrival] + num)
            grants.append(Grant(request, starts[request.arrival], num, num))
        batch, expected = builder.build(grants, is_decode=True), oracle.build(grants)
        for name, array in arrays_of(expected).items():
            assert arrays_of(batch)[name].dtype == array.dtype, name
            assert np.array_equal(arrays_of(batch)[name], array), name
        for request, num in zip(requests, nums, strict=True):
            starts[request.arrival] += num  # all drafts were accepted


def test_a_step_of_decodes_knows_that_a_row_has_changed() -> None:
    kv = make_space(page_size=4)
    builder = BatchBuilder(num_rows=4, page_size=4)
    one, other = make_request([1, 2, 3]), make_request([4, 5, 6])
    kv.admit(one, max_tokens=9, num_reserved=0)
    builder.build([Grant(one, 0, 3, 1, True)])
    row = int(builder.build([Grant(one, 3, 1, 1)], is_decode=True).rows[0])
    kv.release(one)
    kv.admit(other, max_tokens=9, num_reserved=0)
    kv.admit(one, max_tokens=9, num_reserved=0)
    builder.build([Grant(one, 0, 3, 1, True)])
    again = int(builder.build([Grant(one, 3, 1, 1)], is_decode=True).rows[0])
    assert (row, again) == (other.row, one.row)
    assert row != again


def arrays_of(owner: Any) -> dict[str, Any]:
    """Return the arrays of an object, and those of its sampling parameters."""
    values: dict[str, Any] = {name: getattr(owner, name) for name in owner.__slots__}
    for value in list(values.values()):
        values |= {"words": value.words} if isinstance(value, SamplingArrays) else {}
    return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}


def test_a_batch_aliases_nothing() -> None:
    kv = make_space()
    builder = BatchBuilder(num_rows=4, page_size=4)
    one = make_request([1, 2, 3])
    kv.admit(one, max_tokens=9, num_reserved=0)
    first = builder.build([Grant(one, 0, 3, 1, True)])
    for batch in (first, *(builder.build([Grant(one, 3, 1, 1)], is_decode=True) for _ in range(2))):
        for name, array in arrays_of(batch).items():
            for field, other in (arrays_of(one) | arrays_of(builder)).items():
                assert not np.shares_memory(array, other), (name, field)
