"""A file of packed weights holds what was written, and a damaged one is not taken for whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pagewood.engine.weights.cache import DamagedFile, PackedReader, PackedWriter, weights_file

SIZES = [("a 3 x 5", 15), ("b 100 x 100", 10_000), ("c", 1)]


def written(path: Path) -> Path:
    with PackedWriter(path) as writer:
        for place, (label, size) in enumerate(SIZES):
            writer.add(label, size)[:] = np.arange(size) % 251 + place
        writer.finish()
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
    with PackedWriter(tmp_path / "file") as writer:
        memory = writer.add("a", 5000)
        memory[:] = 7
        writer.finish()
    assert (memory == 7).all()
    (tmp_path / "file").unlink()
    assert (memory == 7).all()


def test_an_unfinished_file_has_no_name(tmp_path: Path) -> None:
    with PackedWriter(tmp_path / "file") as writer:
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
