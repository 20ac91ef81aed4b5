"""A file of packed weights holds what was written, and a damaged one is not taken for whole."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from pagewood.engine.weights.cache import DamagedFile, PackedReader, PackedWriter, weights_file

SIZES = [("a 3 x 5", 15), ("b 100 x 100", 10_000), ("c", 1)]


def written(path: Path) -> Path:
    with PackedWriter(path.parent) as writer:
        for place, (label, size) in enumerate(SIZES):
            writer.add(label, size)[:] = np.arange(size) % 251 + place
        writer.finish(path)
    return path


def test_matrices_come_back_in_order_and_aligned(tmp_path: Path) -> None:
    reader = PackedReader(written(tmp_path / "below" / "file"))
    for place, (label, size) in enumerate(SIZES):
        memory = reader.take(label, size)
        assert np.array_equal(memory, np.arange(size) % 251 + place)
        assert memory.ctypes.data % 4096 == 0
        with pytest.raises(ValueError, match="read-only"):
            memory[0] = 1
    reader.finish()
    assert [path.name for path in (tmp_path / "below").iterdir()] == ["file"]


def test_memory_that_was_written_stays_valid(tmp_path: Path) -> None:
    with PackedWriter(tmp_path) as writer:
        memory = writer.add("a", 5000)
        memory[:] = 7
        writer.finish(tmp_path / "file")
    assert (memory == 7).all()
    (tmp_path / "file").unlink()
    assert (memory == 7).all()


def test_an_unfinished_file_has_no_name(tmp_path: Path) -> None:
    with PackedWriter(tmp_path) as writer:
        writer.add("a", 5)
    assert list(tmp_path.iterdir()) == []


def test_damage_is_found(tmp_path: Path) -> None:
    path = written(tmp_path / "file")
    whole = path.read_bytes()
    changed = bytearray(whole)
    changed[-3] ^= 1
    other = bytearray(whole)
    other[0] ^= 1
    for content, reason in [
        (whole[:-1], "must be a file of packed weights of"),
        (whole + b"x", "must be a file of packed weights of"),
        (whole[:40], "must have at least 56 bytes, got 40"),
        (b"", "must have at least 56 bytes, got 0"),
        (bytes(changed), "must have an index with the checksum"),
        (bytes(other), "must be a file of packed weights"),
        (bytes(len(whole)), "must be a file of packed weights"),
    ]:
        path.write_bytes(content)
        with pytest.raises(DamagedFile, match=reason):
            PackedReader(path)
    with pytest.raises(FileNotFoundError):
        PackedReader(tmp_path / "another")


@pytest.mark.parametrize("num_threads", [1, 3])
def test_every_byte_of_a_matrix_is_compared(tmp_path: Path, num_threads: int) -> None:
    size = (9 << 20) + 5  # several runs
    path = tmp_path / "file"
    with PackedWriter(tmp_path) as writer:
        writer.add("a", size)[:] = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
        writer.finish(path)
    content = np.frombuffer(path.read_bytes(), np.uint8)
    PackedReader(path, num_threads=num_threads)
    for place in (0, 1, 4095, 4096, size // 2, 4 << 20, (4 << 20) - 1, 8 << 20, size - 1):
        for bit in (0, 7):
            changed = content.copy()
            changed[4096 + place] ^= 1 << bit
            path.write_bytes(changed.tobytes())
            with pytest.raises(DamagedFile, match=f"the first at {(4096 + place) // 4096 * 4096}$"):
                PackedReader(path, num_threads=num_threads)
    swapped = content.copy()
    swapped[4096:8192], swapped[8192:12288] = content[8192:12288], content[4096:8192]
    path.write_bytes(swapped.tobytes())
    with pytest.raises(DamagedFile, match="got others in 2 of its 2305 pages of 4096 bytes, the first at 4096"):
        PackedReader(path)
    swapped = content.copy()
    swapped[4096:4104], swapped[4104:4112] = content[4104:4112], content[4096:4104]
    path.write_bytes(swapped.tobytes())
    with pytest.raises(DamagedFile, match="got others in 1 of"):
        PackedReader(path)


def test_unfinished_files_of_processes_that_were_killed_are_removed(tmp_path: Path) -> None:
    for name, age_s in (("old.tmp", 90_000), ("new.tmp", 3600), ("file.int8", 90_000)):
        (tmp_path / name).write_bytes(b"")
        then_s = time.time() - age_s
        os.utime(tmp_path / name, (then_s, then_s))
    with PackedWriter(tmp_path):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.int8", "new.tmp"]


def test_a_file_of_other_matrices_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "file")
    with pytest.raises(DamagedFile, match="must hold other of 15 bytes as matrix 0"):
        PackedReader(path).take("other", 15)
    with pytest.raises(DamagedFile, match="must hold a 3 x 5 of 16 bytes as matrix 0"):
        PackedReader(path).take("a 3 x 5", 16)
    reader = PackedReader(path)
    with pytest.raises(DamagedFile, match="must hold 0 matrices, got 3"):
        reader.finish()
    for label, size in SIZES:
        reader.take(label, size)
    with pytest.raises(DamagedFile, match="must hold d behind its 3 matrices"):
        reader.take("d", 1)


def test_the_place_depends_on_model_and_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWOOD_CACHE", str(tmp_path))
    places = {weights_file(identity, form) for identity in (b"a", b"b") for form in ("int8", "int4")}
    assert len(places) == 4
    assert {place.parent for place in places} == {tmp_path / "weights"}
    monkeypatch.delenv("PAGEWOOD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "usual"))
    assert weights_file(b"a", "int8").parent == tmp_path / "usual" / "pagewood" / "weights"
