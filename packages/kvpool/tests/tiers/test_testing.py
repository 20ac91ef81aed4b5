"""The conformance suite catches stores that are wrong in one way each."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test  # pyright: ignore[reportUnknownVariableType]

from pagewood.kvpool.tiers.arrays import Bytes
from pagewood.kvpool.tiers.testing import store_conformance


class Right:
    """A store as plain as it can be."""

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


class Aliasing(Right):
    def copy(self, page: Bytes) -> Bytes:
        return page


class Forgetful(Right):
    def put(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> None:
        super().put(keys[:2], pages[:2])


class Careless(Right):
    def put(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> None:
        for key, page in zip(keys, pages, strict=True):
            self.pages[key] = page.copy()


class Boasting(Right):
    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return [bool(self.pages)] * len(keys)

    def get(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> list[bool]:
        return [key in self.pages for key in keys]


def run(make_store: Callable[[int], Right]) -> None:
    machine = store_conformance(make_store)
    run_state_machine_as_test(  # pyright: ignore[reportUnknownMemberType]
        machine, settings=settings(max_examples=50, phases=[Phase.generate], deadline=None, database=None)
    )


def test_a_right_store_passes() -> None:
    run(Right)


@pytest.mark.parametrize("make_store", [Aliasing, Forgetful, Careless, Boasting])
def test_a_wrong_store_is_caught(make_store: Callable[[int], Right]) -> None:
    with pytest.raises(AssertionError):
        run(make_store)
