import errno
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from pagewood.kvpool.tiers import SharedFolder
from pagewood.kvpool.tiers.pages.arrays import Bytes
from pagewood.kvpool.tiers.testing import store_conformance

PAGE = 100


def key(index: int) -> bytes:
    return bytes([index]) * 32


def page(index: int) -> Bytes:
    return np.full(PAGE, index, np.uint8)


def opened(folder: Path, num_pages: int = 64, fingerprint: bytes = b"x") -> SharedFolder:
    return SharedFolder(folder, page_bytes=PAGE, num_bytes=num_pages * PAGE, fingerprint=fingerprint)


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


# A folder for the stores of the conformance tests, which need many stores and have no fixtures.
FOLDERS = tempfile.TemporaryDirectory()


def store_of(page_bytes: int) -> SharedFolder:
    return SharedFolder(tempfile.mkdtemp(dir=FOLDERS.name), page_bytes=page_bytes, num_bytes=64 * page_bytes)


FolderConformance = store_conformance(store_of)
FolderConformance.TestCase.settings = settings(max_examples=20, deadline=None)
TestConformance = FolderConformance.TestCase


def test_pages_are_shared_between_users_with_the_same_fingerprint(tmp_path: Path) -> None:
    one, two, other = opened(tmp_path), opened(tmp_path), opened(tmp_path, fingerprint=b"y")
    one.put([key(1)], [page(1)])
    memory = np.zeros(PAGE, np.uint8)
    assert two.get([key(1)], [memory]) == [True]
    assert np.array_equal(memory, page(1))
    assert other.get([key(1)], [memory]) == [False]


def test_a_page_that_is_put_after_a_failed_query_is_found(tmp_path: Path) -> None:
    one, two = opened(tmp_path), opened(tmp_path)
    (folder,) = tmp_path.iterdir()
    for index in range(3):
        assert two.exists([key(index)]) == [False]
        changed_ns = folder.stat().st_mtime_ns
        one.put([key(index)], [page(index)])
        os.utime(folder, ns=(changed_ns, changed_ns))  # the clock of the file system has not ticked
        assert two.exists([key(index)]) == [True]


def test_a_page_in_two_segments_remains_when_one_is_deleted(tmp_path: Path) -> None:
    store, elsewhere = opened(tmp_path / "here"), opened(tmp_path / "elsewhere")
    store.put([key(1), key(2)], [page(1), page(2)])
    (first,) = files(tmp_path / "here")
    elsewhere.put([key(1), key(3)], [page(1), page(3)])
    (second,) = files(tmp_path / "elsewhere")
    second.rename(first.with_name(second.name))
    assert store.exists([key(1), key(2), key(3)]) == [True] * 3
    first.unlink()
    assert store.exists([key(1), key(2), key(3), key(4)]) == [True, False, True, False]
    assert store.get([key(1)], [page(0)]) == [True]


def test_pages_that_two_users_put_are_stored_once(tmp_path: Path) -> None:
    one, two = opened(tmp_path), opened(tmp_path)
    for store in (one, two):
        store.put([key(1), key(2)], [page(1), page(2)])
    assert len(files(tmp_path)) == 1
    two.put([key(2), key(3)], [page(2), page(3)])
    assert sorted(path.stat().st_size // PAGE for path in files(tmp_path)) == [1, 3]  # with their tables
    memory = np.zeros((3, PAGE), np.uint8)
    assert one.get([key(3), key(1), key(2)], list(memory)) == [True] * 3
    assert memory[:, 0].tolist() == [3, 1, 2]


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "zeros", "other table"])
def test_a_torn_segment_is_absent_and_deleted(tmp_path: Path, damage: str) -> None:
    store = opened(tmp_path)
    store.put([key(1), key(2)], [page(1), page(2)])
    (path,) = files(tmp_path)
    content = path.read_bytes()
    path.write_bytes(
        {
            "cut": content[:-1],
            "flip": content[:50] + b"x" + content[51:],
            "empty": b"",
            "zeros": bytes(len(content)),
            "other table": content[: 2 * PAGE + 32] + bytes(16) + content[2 * PAGE + 48 :],
        }[damage]
    )
    memory = np.zeros((2, PAGE), np.uint8)
    restarted = opened(tmp_path)
    assert restarted.get([key(1), key(2)], list(memory))[0] is False
    assert files(tmp_path) == []
    store.get([key(1)], [memory[0]])  # notices that the segment is gone
    store.put([key(1), key(2)], [page(1), page(2)])
    assert store.get([key(1), key(2)], list(memory)) == [True, True]
    assert restarted.get([key(1), key(2)], list(memory)) == [True, True]


def test_a_segment_deleted_by_another_user_is_absent(tmp_path: Path) -> None:
    one, two = opened(tmp_path), opened(tmp_path)
    one.put([key(1)], [page(1)])
    assert two.exists([key(1)]) == [True]
    files(tmp_path)[0].unlink()
    assert one.get([key(1)], [page(0)]) == [False]
    assert one.exists([key(1)]) == [False]
    assert two.exists([key(1), key(2)]) == [False, False]
    one.put([key(1)], [page(1)])
    assert two.get([key(1)], [page(0)]) == [True]


def test_the_least_recently_used_segments_are_deleted_to_keep_the_budget(tmp_path: Path) -> None:
    store = opened(tmp_path, num_pages=32)
    for index in range(32):
        store.put([key(index)], [page(index)])
        newest = max(files(tmp_path), key=lambda path: path.stat().st_mtime)
        os.utime(newest, (0, index))
    assert store.get([key(0)], [page(99)]) == [True]  # touched
    store.put([key(index) for index in range(32, 48)], [page(index) for index in range(32, 48)])
    assert len(files(tmp_path)) <= 16 + 8  # the 16 new ones are in segments of two, a sixteenth of the budget
    there = store.exists([key(index) for index in range(48)])
    assert there[0]
    assert not any(there[1:17])
    assert all(there[32:])


def test_unfinished_files_of_a_dead_process_are_deleted(tmp_path: Path) -> None:
    store = opened(tmp_path)
    old, new = (tmp_path / f"pages-xxh3-{b'x'.hex()}-{PAGE}" / f"{name}.tmp" for name in ("old", "new"))
    old.touch()
    new.touch()
    os.utime(old, (0, time.time() - 7200))
    del store
    opened(tmp_path)
    assert (old.exists(), new.exists()) == (False, True)


@pytest.mark.parametrize("call", ["pwritev", "link"])
def test_a_full_file_system_leaves_no_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    store = opened(tmp_path)

    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError, match="No space left"):
            store.put([key(1)], [page(1)])
    assert files(tmp_path) == []


def test_bad_input_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_bytes must hold at least one page of 100 bytes, got 0"):
        opened(tmp_path, num_pages=0)
    with pytest.raises(ValueError, match="page_bytes must be >= 1, got 0"):
        SharedFolder(tmp_path, page_bytes=0, num_bytes=1)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="path must be a folder that can be made and written"):
        opened(tmp_path / "file")


def fail_to_read(*_: Any) -> int:
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("what", ["page", "table"])
def test_a_segment_that_cannot_be_read_is_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    store = opened(tmp_path)
    store.put([key(1), key(2)], [page(1), page(2)])
    if what == "table":
        store = opened(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail_to_read)
        assert store.get([key(1)], [page(0)]) == [False]
    assert len(files(tmp_path)) == 1
    opened(tmp_path).put([key(3)], [page(3)])  # the folder changes
    memory = np.zeros((3, PAGE), np.uint8)
    assert store.get([key(1), key(2), key(3)], list(memory)) == [True] * 3
    assert memory[:, 0].tolist() == [1, 2, 3]


def test_a_page_that_was_misread_once_does_not_cost_its_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    store.put([key(1)], [page(1)])
    read, left = os.preadv, [1]

    def misread(file: int, buffers: Any, offset: int, flags: int = 0) -> int:
        n = read(file, buffers, offset, flags)
        if not flags and left[0]:
            left[0] -= 1
            buffers[0][0] ^= 1
        return n

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", misread)
        assert store.get([key(1)], [page(0)]) == [False]
    assert left == [0]
    assert store.get([key(1)], [page(0)]) == [True]


def test_the_segment_of_another_user_with_other_bits_is_taken(tmp_path: Path) -> None:
    """Two users compute the same page in batches of different shapes, so its last bits differ, and put it at once."""
    one, two = opened(tmp_path / "one"), opened(tmp_path / "two")
    one.put([key(1)], [page(1)])
    two.put([key(1)], [page(2)])
    (mine,), (theirs,) = files(tmp_path / "one"), files(tmp_path / "two")
    theirs.replace(mine)
    memory = np.zeros(PAGE, np.uint8)
    assert one.get([key(1)], [memory]) == [False]
    assert mine.exists()
    assert one.get([key(1)], [memory]) == [True]
    assert np.array_equal(memory, page(2))


@pytest.mark.parametrize("moment", ["before", "between"])
@pytest.mark.parametrize("damage", ["page", "mark", "budget"])
def test_a_segment_that_was_put_again_meanwhile_is_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str, moment: str
) -> None:
    """Another process replaces the file that this one has judged, before or between the two calls that delete it."""
    store = opened(tmp_path, num_pages=16)
    store.put([key(1)], [page(1)])
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    if damage == "budget":
        os.utime(path, (0, 0))
    else:
        path.write_bytes(bytes(PAGE) + whole[PAGE:] if damage == "page" else whole[:-1])
        if damage == "mark":
            store = opened(tmp_path, num_pages=16)
    num_replaced = 0

    def put_again() -> None:
        nonlocal num_replaced
        num_replaced += 1
        spare = path.with_suffix(".spare")
        spare.write_bytes(whole)
        os.replace(spare, path)

    stat, rename = Path.stat, Path.rename

    def stat_later(self: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if self == path and not num_replaced:
            put_again()
        return stat(self, follow_symlinks=follow_symlinks)

    def rename_later(self: Path, target: Path) -> Path:
        if self == path and not num_replaced:
            put_again()
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(
            Path, "stat" if moment == "before" else "rename", stat_later if moment == "before" else rename_later
        )
        if damage == "budget":
            store.put([key(index) for index in range(2, 20)], [page(index) for index in range(2, 20)])
        else:
            assert store.get([key(1)], [page(0)]) == [False]
    assert num_replaced == 1
    assert path.read_bytes() == whole
    assert not [left for left in files(tmp_path) if left.suffix != ".pages"]
    assert opened(tmp_path, num_pages=64).get([key(1)], [page(0)]) == [True]


def test_a_page_that_is_put_twice_at_once_is_found(tmp_path: Path) -> None:
    opened(tmp_path).put([key(1), key(1), key(2)], [page(1), page(1), page(2)])
    memory = np.zeros((2, PAGE), np.uint8)
    assert opened(tmp_path).get([key(1), key(2)], list(memory)) == [True, True]
    assert memory[:, 0].tolist() == [1, 2]
