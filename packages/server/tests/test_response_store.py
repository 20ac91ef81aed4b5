"""The bounds of the store of responses, against a model with a plain list."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewood.server.protocols.responses.store import ResponseStore, StoredResponse

MAX_RESPONSES = 4
MAX_BYTES = 100


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from(["put", "get", "delete"]), st.integers(0, 9), st.integers(2, 60))))
def test_the_least_recently_used_go_first(operations: list[tuple[str, int, int]]) -> None:
    store = ResponseStore(max_responses=MAX_RESPONSES, max_bytes=MAX_BYTES)
    kept: list[tuple[str, StoredResponse]] = []  # the oldest first
    for number, (operation, index, size) in enumerate(operations):
        if operation == "put":
            response = StoredResponse(body=b"x" * (size // 2), input=b"x" * (size - size // 2))
            store.put(str(number), response)
            kept.append((str(number), response))
            while len(kept) > MAX_RESPONSES or sum(one.num_bytes for _, one in kept) > MAX_BYTES:
                kept.pop(0)
            continue
        id = kept[index][0] if index < len(kept) else "none"
        expected = dict(kept).get(id)
        if operation == "get":
            assert store.get(id) is expected
            kept.sort(key=lambda one: one[0] == id)  # stable
        else:
            assert store.delete(id) == (expected is not None)
            kept = [one for one in kept if one[0] != id]
        assert len(store) == len(kept)
    assert [id for id in map(str, range(len(operations))) if store.get(id) is not None] == sorted(
        (id for id, _ in kept), key=int
    )
    assert store.num_bytes == sum(one.num_bytes for _, one in kept)


def test_a_response_that_is_too_large_is_not_kept() -> None:
    store = ResponseStore(max_bytes=MAX_BYTES)
    store.put("small", StoredResponse(body=b"x", input=b"x"))
    store.put("large", StoredResponse(body=b"x" * MAX_BYTES, input=b"x"))
    assert (store.get("large"), len(store)) == (None, 1)
