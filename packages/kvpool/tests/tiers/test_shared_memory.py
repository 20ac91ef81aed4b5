"""Pages in shared memory: a process may end at any system call, and nothing is torn, lost for others, or left over."""

import errno
import os
import stat
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from pagewood.kvpool.tiers import SharedFolder, shared_memory
from pagewood.kvpool.tiers.pages.arrays import Bytes
from pagewood.kvpool.tiers.testing import store_conformance

PAGE = 100
NUM_PAGES = 32
ROOM = NUM_PAGES * (PAGE + 64)  # with tables


def key(index: int) -> bytes:
    return bytes([index]) * 32


def page(index: int) -> Bytes:
    return np.random.default_rng(index).integers(0, 256, PAGE, np.uint8)


def opened(memory: Path, name: str = "a", *, num_bytes: int = ROOM, **options: Any) -> SharedFolder:
    options = {"page_bytes": PAGE, "fingerprint": b"x", **options}
    return shared_memory(name, num_bytes=num_bytes, memory=memory, **options)


def files(memory: Path) -> list[Path]:
    return [path for path in memory.rglob("*") if path.is_file()]


MEMORY = tempfile.TemporaryDirectory()

Conformance = store_conformance(
    lambda page_bytes: shared_memory(
        "a", page_bytes=page_bytes, num_bytes=80 * page_bytes + 10_000, memory=Path(tempfile.mkdtemp(dir=MEMORY.name))
    )
)
Conformance.TestCase.settings = settings(max_examples=15, deadline=None)
TestConformance = Conformance.TestCase


def test_only_this_user_can_read_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        opened(tmp_path).put([key(1)], [page(1)])
    finally:
        os.umask(before)
    (folder,) = tmp_path.iterdir()
    assert folder.name == f"pagewood-{os.geteuid()}-a"
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())}
    assert modes == {0o700}
    assert [stat.S_IMODE(path.stat().st_mode) for path in files(tmp_path)] == [0o600]


@pytest.mark.parametrize("kind", ["open to others", "link", "file"])
def test_a_folder_that_is_not_private_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"pagewood-{os.geteuid()}-a"
    match kind:
        case "open to others":
            path.mkdir()
            path.chmod(0o755)
        case "link":
            (tmp_path / "elsewhere").mkdir(mode=0o700)
            path.symlink_to(tmp_path / "elsewhere")
        case _:
            path.touch()
    with pytest.raises(ValueError, match=r"path must be a folder .* with the mode 0700, got "):
        opened(tmp_path)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-a", "x" * 65, "a\n"])
def test_a_wrong_name_is_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="name must match"):
        opened(tmp_path, name)


def test_more_than_the_memory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"num_bytes must be at most \d+, the size of .*, got "):
        opened(tmp_path, num_bytes=2**60)
    with pytest.raises(ValueError, match="memory must be a folder in tmpfs, got"):
        opened(tmp_path / "missing")


def test_all_models_share_one_limit(tmp_path: Path) -> None:
    old, new = opened(tmp_path, fingerprint=b"old"), opened(tmp_path, fingerprint=b"new")
    other = opened(tmp_path, "b", fingerprint=b"old")
    for index in range(NUM_PAGES):
        old.put([key(index)], [page(index)])
        other.put([key(index)], [page(index)])
    for path in files(tmp_path):
        os.utime(path, (0, 0))
    for index in range(NUM_PAGES):
        new.put([key(index)], [page(index)])
    (folder,) = {path.parent.parent for path in files(tmp_path) if path.parent.parent.name.endswith("-a")}
    assert sum(path.stat().st_size for path in files(folder)) <= ROOM + ROOM // 16
    assert all(new.exists([key(index) for index in range(NUM_PAGES // 2, NUM_PAGES)]))
    assert sum(old.exists([key(index) for index in range(NUM_PAGES)])) < NUM_PAGES // 4
    assert all(other.exists([key(index) for index in range(NUM_PAGES)]))  # another store
    memory = np.zeros(PAGE, np.uint8)
    assert new.get([key(NUM_PAGES - 1)], [memory]) == [True]
    assert np.array_equal(memory, page(NUM_PAGES - 1))


@pytest.mark.parametrize("first", range(0, 48, 6))
def test_what_was_just_put_stays_though_the_clock_stands_still(
    first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagewood.kvpool.tiers.stores.folder._files", _files_of_one_tick)
    store = opened(tmp_path)
    for start in (first + 6 * number for number in range(20)):
        indices = [index % 128 for index in range(start, start + 6)]
        store.put([key(index) for index in indices], [page(index) for index in indices])
        assert all(store.exists([key(index) for index in indices]))


def _files_of_one_tick(folder: Path) -> Iterator[tuple[Any, Any]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            os.utime(entry.path, (1, 1))
            yield entry, entry.stat()


class Crash(BaseException):
    """The process ends."""


@contextmanager
def crash_at(number: int) -> Generator[list[int]]:
    """Let the process end at the given call that changes files, in the middle of a write; count the calls.

    Nothing that an ended process would not do happens afterwards: a file without a name is closed, and so is gone.
    """
    left, has_ended = [number], [False]
    real: dict[str, Callable[..., Any]] = {
        name: getattr(os, name) for name in ("pwritev", "link", "rename", "replace", "unlink", "utime", "open", "mkdir")
    }

    def call(name: str, *arguments: Any, **options: Any) -> Any:
        if has_ended[0]:  # what an `except` or a `finally` would still do
            raise Crash
        left[0] -= 1
        if left[0] > 0:
            return real[name](*arguments, **options)
        has_ended[0] = True
        if name == "pwritev":
            file, buffers, offset = arguments
            whole = b"".join(map(bytes, buffers))
            os.pwrite(file, whole[: len(whole) // 2], offset)
        raise Crash

    with pytest.MonkeyPatch.context() as patch:
        for name in real:
            patch.setattr(os, name, partial(call, name))
        try:
            yield left
        except Crash:
            assert has_ended[0]


class Crashes(RuleBasedStateMachine):
    """Two users of a store against a dictionary; either may end at any call that changes files, and begins again."""

    @initialize(unnamed=st.booleans())
    def make(self, unnamed: bool) -> None:
        self.memory = Path(tempfile.mkdtemp(dir=MEMORY.name))
        self.patch = pytest.MonkeyPatch()
        if not unnamed:  # as on a file system that has only files with names
            self.patch.setattr("pagewood.kvpool.tiers.stores.segments._UNNAMED", None)
        self.users = [opened(self.memory), opened(self.memory)]
        self.pages: dict[int, Bytes] = {}
        self.is_damaged = False
        """Whether a file was damaged: then a user may know a page from a table that another one can read no more."""

    @rule(
        user=st.integers(0, 1),
        indices=st.lists(st.integers(0, 63), min_size=1, max_size=6, unique=True),
        number=st.none() | st.integers(1, 24),
    )
    def put(self, user: int, indices: list[int], number: int | None) -> None:
        self.pages.update({index: page(index) for index in indices})
        arguments = [key(index) for index in indices], [page(index) for index in indices]
        if number is None:
            self.users[user].put(*arguments)
            self._check(1 - user, indices, is_new=not self.is_damaged)
            return
        with crash_at(number):
            self.users[user].put(*arguments)
        self._start(user)
        self._check(1 - user, indices)
        self._check(user, indices)

    @rule(user=st.integers(0, 1), indices=st.lists(st.integers(0, 63), min_size=1, max_size=8))
    def get(self, user: int, indices: list[int]) -> None:
        self._check(user, indices)

    @rule(user=st.integers(0, 1), number=st.integers(1, 6), at=st.integers(0, 99_999), bit=st.integers(0, 7))
    def damage(self, user: int, number: int, at: int, bit: int) -> None:
        """Flip a bit of a file; the user that notices ends while it deletes the file."""
        found = sorted(files(self.memory))
        if not found:
            return
        path = found[at % len(found)]
        content = bytearray(path.read_bytes())
        if content:
            content[at % len(content)] ^= 1 << bit
        path.write_bytes(content)
        self.is_damaged = True
        with crash_at(number):
            self._check(user, sorted(self.pages))
        self._start(user)
        self._check(user, sorted(self.pages))

    def teardown(self) -> None:
        if hasattr(self, "patch"):
            self.patch.undo()
            for one in self.users:
                one.close()
            # A new user finds room for all pages, whatever the others have left.
            last = opened(self.memory)
            for index in range(64):
                last.put([key(index)], [page(index)])
            used = sum(path.stat().st_size for path in files(self.memory))
            assert used <= ROOM + 2 * ROOM // 16, f"{used} bytes are used of {ROOM}"
            assert last.exists([key(63)]) == [True]
            last.close()

    def _start(self, user: int) -> None:
        self.users[user] = opened(self.memory)

    def _check(self, user: int, indices: Sequence[int], *, is_new: bool = False) -> None:
        rows = np.zeros((len(indices), PAGE), np.uint8)
        found = self.users[user].get([key(index) for index in indices], list(rows))
        for index, row, is_there in zip(indices, rows, found, strict=True):
            assert not is_there or np.array_equal(row, self.pages[index]), f"page {index} is wrong"
        assert all(found) or not is_new, f"pages {indices} were stored, {found} are found"


Crashes.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestCrashes = Crashes.TestCase


def test_a_process_that_ends_while_it_writes_leaves_nothing(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for number in range(1, 30):
        with crash_at(number) as left:
            store.put([key(number)], [page(number)])
        found = files(tmp_path)
        assert [path for path in found if path.suffix != ".pages"] == []
        store = opened(tmp_path)
        memory = np.zeros(PAGE, np.uint8)
        if store.get([key(number)], [memory]) == [True]:
            assert np.array_equal(memory, page(number))
        if left[0] > 0:
            return
    raise AssertionError("it never got to the end")


def test_file_systems_without_unnamed_files_are_supported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def named_only(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", named_only)
    store = opened(tmp_path)
    store.put([key(1), key(2)], [page(1), page(2)])
    memory = np.zeros((2, PAGE), np.uint8)
    assert opened(tmp_path).get([key(1), key(2)], list(memory)) == [True, True]
    assert [path.suffix for path in files(tmp_path)] == [".pages"]
