import errno
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from pagewood.kvpool.tiers import DiskTier
from pagewood.kvpool.tiers.pages.arrays import Bytes
from pagewood.kvpool.tiers.testing import store_conformance

PAGE = 5000


def key(index: int) -> bytes:
    return bytes([index]) * 32


def page(index: int) -> Bytes:
    return np.random.default_rng(index).integers(0, 256, PAGE, np.uint8)


def opened(folder: Path, num_pages: int = 4, **options: Any) -> DiskTier:
    return DiskTier(folder / "pages", page_bytes=PAGE, num_bytes=num_pages * PAGE, **options)


def put(disk: DiskTier, *indices: int) -> None:
    disk.put([key(index) for index in indices], [page(index) for index in indices])


def held(disk: DiskTier, *indices: int) -> list[bool]:
    """Return which pages it has; fail if a page has the wrong contents."""
    rows = np.zeros((len(indices), PAGE), np.uint8)
    found = disk.get([key(index) for index in indices], list(rows))
    for index, row, is_there in zip(indices, rows, found, strict=True):
        assert not is_there or np.array_equal(row, page(index))
    return found


def store_of(page_bytes: int) -> DiskTier:
    folder = tempfile.mkdtemp()
    disk = DiskTier(Path(folder) / "pages", page_bytes=page_bytes, num_bytes=64 * page_bytes)
    (Path(folder) / "pages").unlink()
    Path(folder).rmdir()
    return disk


DiskConformance = store_conformance(store_of)
DiskConformance.TestCase.settings = settings(max_examples=30, deadline=None)
TestConformance = DiskConformance.TestCase


def test_pages_are_found_after_the_file_is_reopened(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    put(disk, 1, 2, 3)
    disk.close()
    disk = opened(tmp_path)
    assert disk.num_held == 3
    assert held(disk, 1, 2, 3, 4) == [True, True, True, False]
    put(disk, 4, 5)  # the oldest page makes room
    assert disk.num_held == 4
    assert held(disk, 2, 3, 4, 5) == [True] * 4
    disk.close()


def test_the_least_recently_used_page_makes_room(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    put(disk, 1, 2, 3, 4)
    assert held(disk, 1) == [True]
    put(disk, 5)
    assert disk.exists([key(index) for index in range(6)]) == [False, True, False, True, True, True]
    put(disk, 6, 7, 8, 9, 10)  # more than fit: the first are kept, because the others are useless without them
    assert held(disk, 6, 7, 8, 9, 10) == [True, True, True, True, False]
    disk.close()


@pytest.mark.parametrize("offset", [0, 4999, 2500])
def test_a_changed_page_is_absent_and_makes_room(tmp_path: Path, offset: int) -> None:
    disk = opened(tmp_path)
    put(disk, 1, 2, 3, 4)
    with (tmp_path / "pages").open("r+b") as file:
        file.seek(4096 + 4096 + PAGE + offset)  # the second slot
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    assert held(disk, 1, 2, 3, 4) == [True, False, True, True]
    assert disk.exists([key(2)]) == [False]
    put(disk, 2)
    assert held(disk, 1, 2, 3, 4) == [True] * 4
    disk.close()


def test_swapped_blocks_are_detected(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path / "pages", page_bytes=8192, num_bytes=8192)
    image = np.random.default_rng(0).integers(0, 256, 8192, np.uint8)
    disk.put([key(1)], [image])
    with (tmp_path / "pages").open("r+b") as file:
        file.seek(8192)
        file.write(image[4096:].tobytes() + image[:4096].tobytes())
    assert disk.get([key(1)], [np.zeros(8192, np.uint8)]) == [False]
    disk.close()


def test_a_truncated_file_loses_only_the_pages_cut_off(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    put(disk, 1, 2, 3)
    disk.close()
    os.truncate(tmp_path / "pages", 8192 + PAGE + 100)
    disk = opened(tmp_path)
    assert held(disk, 1, 2, 3) == [True, False, False]
    disk.close()


def test_an_entry_without_its_page_is_absent_after_a_crash(tmp_path: Path) -> None:
    """The table was written to the disk, but the page was not."""
    disk = opened(tmp_path)
    put(disk, 1, 2)
    disk.close()
    with (tmp_path / "pages").open("r+b") as file:
        file.seek(8192)
        file.write(bytes(2 * PAGE))
    disk = opened(tmp_path)
    assert held(disk, 1, 2) == [False, False]
    disk.close()


def test_a_full_disk_keeps_its_pages_and_continues_to_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = opened(tmp_path)
    put(disk, 1)
    write = os.pwritev

    def half(file: int, buffers: Sequence[Any], offset: int) -> int:
        if offset < 8192:
            return write(file, buffers, offset)
        if offset > 8192 + PAGE:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, [buffers[0][: PAGE // 2]], offset)

    monkeypatch.setattr(os, "pwritev", half)
    with pytest.raises(OSError, match="No space left"):
        put(disk, 2, 3)
    monkeypatch.undo()
    assert held(disk, 1, 2, 3) == [True, False, False]
    put(disk, 2, 3, 4)
    assert held(disk, 1, 2, 3, 4) == [True] * 4
    disk.close()


def test_short_writes_and_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = os.pwritev, os.preadv
    disk = opened(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", lambda file, buffers, offset: write(file, [buffers[0][:777]], offset))  # pyright: ignore
        patch.setattr(os, "preadv", lambda file, buffers, offset, *_: read(file, [buffers[0][:777]], offset))  # pyright: ignore
        put(disk, 1, 2, 3)
        assert held(disk, 1, 2, 3) == [True] * 3
    disk.close()


def test_pages_that_cannot_be_read_are_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = opened(tmp_path)
    put(disk, 1)

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    assert held(disk, 1) == [False]
    disk.close()


def test_a_file_belongs_to_one_process_and_one_model(tmp_path: Path) -> None:
    disk = opened(tmp_path, fingerprint=b"llama")
    with pytest.raises(ValueError, match="path must not be in use"):
        opened(tmp_path, fingerprint=b"llama")
    put(disk, 1)
    disk.close()
    with pytest.raises(ValueError, match="path must hold pages of the same model and layout"):
        opened(tmp_path, fingerprint=b"qwen")
    disk = opened(tmp_path, num_pages=5, fingerprint=b"llama")  # with another size the file is emptied
    assert (disk.num_pages, disk.num_held) == (5, 0)
    disk.close()


def test_another_kind_of_file_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "pages").write_text("my thesis")
    with pytest.raises(ValueError, match="path must be a page file or not exist"):
        opened(tmp_path)
    assert (tmp_path / "pages").read_text() == "my thesis"


def test_bad_input_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_bytes must hold at least one page of 5000 bytes, got 0"):
        opened(tmp_path, num_pages=0)
    with pytest.raises(ValueError, match="page_bytes must be >= 1, got 0"):
        DiskTier(tmp_path / "pages", page_bytes=0, num_bytes=1)
    with pytest.raises(ValueError, match="fingerprint must have at most 32 bytes, got 33"):
        opened(tmp_path, fingerprint=bytes(33))
    with pytest.raises(ValueError, match=r"must have \d+ bytes free"):
        opened(tmp_path, num_pages=10**12)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="path must be a file that can be made and written"):
        opened(tmp_path / "file")


def test_a_head_of_zeros_is_no_head(tmp_path: Path) -> None:
    """As after a loss of power: the file has its size, and nothing was written to it."""
    disk = opened(tmp_path)
    put(disk, 1)
    disk.close()
    size = (tmp_path / "pages").stat().st_size
    (tmp_path / "pages").write_bytes(bytes(size))
    disk = opened(tmp_path)
    assert disk.num_held == 0
    put(disk, 1)
    assert held(disk, 1) == [True]
    disk.close()


def test_a_file_of_another_kind_is_set_aside_on_request(tmp_path: Path) -> None:
    (tmp_path / "pages").write_bytes(b"garbage" * 1000)
    disk = opened(tmp_path, sets_aside=True)
    put(disk, 1)
    disk.close()
    assert (tmp_path / "pages.aside").read_bytes() == b"garbage" * 1000
    disk = opened(tmp_path)
    assert held(disk, 1) == [True]
    disk.close()


def test_garbage_in_the_table_is_not_believed(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    put(disk, 1)
    disk.close()
    with (tmp_path / "pages").open("r+b") as file:
        file.seek(4096 + 64)
        file.write(b"\xff" * 128)
    disk = opened(tmp_path)
    put(disk, 2, 3)
    assert held(disk, 1, 2, 3) == [True, True, True]
    disk.close()


def test_keys_of_a_wrong_size_are_refused_and_cost_no_slot(tmp_path: Path) -> None:
    disk = opened(tmp_path, num_pages=2)
    for _ in range(5):
        with pytest.raises(ValueError, match="keys must have 32 bytes, got 5"):
            disk.put([b"short"], [page(1)])
    put(disk, 1, 2)
    assert held(disk, 1, 2) == [True, True]
    disk.close()


def test_pages_of_another_form_are_not_read(tmp_path: Path) -> None:
    """The magic names the form, and with it the checksum."""
    disk = opened(tmp_path, fingerprint=b"llama")
    put(disk, 1, 2)
    disk.close()
    with (tmp_path / "pages").open("r+b") as file:
        file.write(b"pagewood pages 1")
    with pytest.raises(ValueError, match="path must hold pages of the same model and layout"):
        opened(tmp_path, fingerprint=b"qwen")
    disk = opened(tmp_path, fingerprint=b"llama", sets_aside=True)
    assert disk.num_held == 0
    assert [path.name for path in tmp_path.iterdir()] == ["pages"]
    put(disk, 1)
    disk.close()
    disk = opened(tmp_path, fingerprint=b"llama")
    assert held(disk, 1, 2) == [True, False]
    disk.close()
