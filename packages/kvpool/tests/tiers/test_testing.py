"""The conformance tests detect stores with one fault each."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test  # pyright: ignore[reportUnknownVariableType]

from pagewood.kvpool.tiers.pages.arrays import Bytes
from pagewood.kvpool.tiers.testing import store_conformance


class Correct:
    """The simplest correct store."""

    def __init__(self, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.pages: dict[bytes, Bytes] = {}

    def put(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> None:
        for key, page in zip(keys, pages, strict=True):
            if page.nbytes != self.page_bytes:
                raise ValueError(page.nbytes)
            self.pages.setdefault(key, self.copy(page))

    def copy(self, page: Bytes) -> Bytes:
        return page.copy()

    def get(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> list[bool]:
        found = self.exists(keys)
        for key, page, is_there in zip(keys, pages, found, strict=True):
            if is_there:
                page[:] = self.pages[key]
        return found

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self.pages for key in keys]

    def close(self) -> None:
        self.pages.clear()


class Aliasing(Correct):
    def copy(self, page: Bytes) -> Bytes:
        return page


class Forgetful(Correct):
    def put(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> None:
        super().put(keys[:2], pages[:2])


class Unchecked(Correct):
    def put(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> None:
        for key, page in zip(keys, pages, strict=True):
            self.pages[key] = page.copy()


class Overstating(Correct):
    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return [bool(self.pages)] * len(keys)

    def get(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> list[bool]:
        return [key in self.pages for key in keys]


def run(make_store: Callable[[int], Correct]) -> None:
    machine = store_conformance(make_store)
    run_state_machine_as_test(  # pyright: ignore[reportUnknownMemberType]
        machine, settings=settings(max_examples=50, phases=[Phase.generate], deadline=None, database=None)
    )


def test_a_correct_store_passes() -> None:
    run(Correct)


@pytest.mark.parametrize("make_store", [Aliasing, Forgetful, Unchecked, Overstating])
def test_a_wrong_store_is_caught(make_store: Callable[[int], Correct]) -> None:
    with pytest.raises(AssertionError):
        run(make_store)
