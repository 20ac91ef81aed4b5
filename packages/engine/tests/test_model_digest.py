"""The digest of a model: no edit of any byte escapes it, and what is kept under it is never that of other bytes."""

# pyright: basic
# safetensors is typed in part only.

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import small_disk
from pagewood.engine import LLM, SamplingParams
from pagewood.engine.model_folder import model_digest
from pagewood.engine.model_folder.folder import model_folder
from pagewood.engine.model_folder.model_digest import ModelDigest

LONG_AGO_NS = 1_500_000_000 * 10**9


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test."""
    monkeypatch.setenv("PAGEWOOD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files that matter, whose contents nothing here reads as weights."""
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text("{}")
    index = {"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}
    (made / "model.safetensors.index.json").write_text(json.dumps(index))
    random = np.random.default_rng(1)
    for name in ("x", "y"):
        (made / f"{name}.safetensors").write_bytes(random.bytes(5000))
    return made


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often files were read for a digest."""
    calls: list[int] = []
    read: Callable[..., bytes] = model_digest._read

    def counted(*args: Any) -> bytes:
        calls.append(1)
        return read(*args)

    monkeypatch.setattr(model_digest, "_read", counted)
    return calls


def digest_of(folder: Path) -> bytes:
    found = ModelDigest(folder).wait()
    assert found is not None
    return found


def settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files count as written long before now."""
    now_ns = time.time_ns
    monkeypatch.setattr(model_digest.time, "time_ns", lambda: now_ns() + 10**10)


def test_it_is_computed_once(folder: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    settle(monkeypatch)
    first = digest_of(folder)
    assert [digest_of(folder) for _ in range(3)] == [first] * 3
    assert len(reads) == 1


def test_a_record_does_not_count_if_a_file_was_changed_just_before(folder: Path, reads: list[int]) -> None:
    """A change after the file was read may leave no trace in its times. Later, the digest is computed once more."""
    first = digest_of(folder)
    assert digest_of(folder) == first
    assert len(reads) == 2


def test_times_in_the_future_are_no_proof(folder: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    settle(monkeypatch)
    future_ns = time.time_ns() + 10**12
    os.utime(folder / "config.json", ns=(future_ns, future_ns))
    digest_of(folder)
    digest_of(folder)
    assert len(reads) == 2


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "x.safetensors", "y.safetensors"])
@pytest.mark.parametrize("replaces", [False, True])
def test_no_edit_escapes_it(folder: Path, name: str, replaces: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one that keeps the size and sets the times back, in place or with another file in its place."""
    settle(monkeypatch)
    file = folder / name
    os.utime(file, ns=(LONG_AGO_NS, LONG_AGO_NS))
    content = file.read_bytes()
    seen = {digest_of(folder)}
    places = [0, len(content) // 2, len(content) - 1] if name.endswith(".safetensors") else [len(content)]
    for number, place in enumerate(places, 1):
        edited = bytearray(content + b" ")
        edited[place] ^= 0 if place == len(content) else 1
        if name.endswith(".safetensors"):
            edited.pop()
        if replaces:
            (folder / "other").write_bytes(edited)
            os.utime(folder / "other", ns=(LONG_AGO_NS, LONG_AGO_NS))
            (folder / "other").replace(file)
        else:
            file.write_bytes(edited)
            os.utime(file, ns=(LONG_AGO_NS, LONG_AGO_NS))
        assert ModelDigest(folder).known() is None
        seen.add(digest_of(folder))
        assert len(seen) == number + 1


def test_equal_bytes_have_equal_digests_on_every_machine(
    folder: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = digest_of(folder)
    monkeypatch.setenv("PAGEWOOD_CACHE", str(tmp_path / "another cache"))
    (folder / "README.md").write_text("This does not matter.")
    (folder / "unused.safetensors").write_text("Nor does this.")
    assert digest_of(Path(shutil.copytree(folder, tmp_path / "another place"))) == first


def test_chunks_and_files_are_not_confused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = digest_of(folder)
    one, other = folder / "x.safetensors", folder / "y.safetensors"
    contents = one.read_bytes(), other.read_bytes()
    one.write_bytes(contents[1])
    other.write_bytes(contents[0])
    assert digest_of(folder) != first
    monkeypatch.setattr(model_digest, "_CHUNK_BYTES", 1000)
    several = digest_of(folder)
    one.write_bytes(contents[1][1000:2000] + contents[1][:1000] + contents[1][2000:])
    assert digest_of(folder) != several


@pytest.mark.parametrize(
    "damage", [b"", b"[]", b"{", b'{"began_ns": "x"}', b'{"began_ns": 1, "digest": 3, "files": []}', b"\xff"]
)
def test_a_damaged_record_is_none(
    folder: Path, cache: Path, damage: bytes, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(monkeypatch)
    first = digest_of(folder)
    [record] = (cache / "digests").iterdir()
    record.write_bytes(damage)
    assert digest_of(folder) == first
    assert len(reads) == 2


def test_a_change_while_it_is_read_leaves_no_digest(folder: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    settle(monkeypatch)
    read = model_digest._read

    def interrupted(*args: Any) -> bytes:
        found = read(*args)
        (folder / "y.safetensors").write_bytes(b"other")
        return found

    monkeypatch.setattr(model_digest, "_read", interrupted)
    assert ModelDigest(folder).wait() is None
    assert not (cache / "digests").exists()


def test_a_change_after_it_is_known_takes_it_back(folder: Path) -> None:
    digest = ModelDigest(folder)
    assert digest.wait() is not None
    (folder / "config.json").write_text("{ }")
    assert digest.known() is None
    assert digest.wait() is None


def test_without_room_for_a_record_it_is_computed_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk.mounted(tmp_path / "disk", num_bytes=1 << 16) as disk:
        small_disk.fill(disk)
        monkeypatch.setenv("PAGEWOOD_CACHE", str(disk))
        first = digest_of(folder)
        assert digest_of(folder) == first
        assert list(disk.rglob("*.tmp")) == []
    assert f"cannot be kept in {disk / 'digests'}, so each start reads the model again" in caplog.text
    assert "set PAGEWOOD_CACHE to a folder that can be written" in caplog.text


# Whole engines, with the embedded model. Its `draft/` is a decoder too, and smaller.

CHAT: Any = [{"role": "user", "content": "Sort these words: " + "stone river cloud apple " * 8}]


def copy_of_the_model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder(None), tmp_path / "served"))


def edit_one_row(folder: Path, row: int) -> None:
    """Change one row of the embedding table, and set the times back."""
    file = folder / "model.safetensors"
    before = file.stat()
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][row] = -tensors["model.embed_tokens.weight"][row]
    save_file(tensors, file, metadata={"format": "pt"})
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def cached_tokens(folder: Path, **options: Any) -> tuple[int, str]:
    """Return how many tokens of a prompt came from a cache, and the answer."""
    with LLM(str(folder), max_total_tokens=1024, speculative="off", num_threads=1, **options) as llm:
        [answer] = llm.chat([CHAT], SamplingParams(max_tokens=8, temperature=0.0))
        return answer.num_cached_tokens, answer.text


def test_an_edited_row_gets_other_weights(tmp_path: Path, cache: Path) -> None:
    folder = copy_of_the_model(tmp_path)
    cached_tokens(folder, weights="int8")
    [first] = (cache / "weights").iterdir()
    content = first.read_bytes()
    edit_one_row(folder, 100)
    cached_tokens(folder, weights="int8")
    [second] = set((cache / "weights").iterdir()) - {first}
    assert second.read_bytes() != content


@pytest.mark.parametrize("place", ["disk", "shared"])
def test_an_edited_row_gets_other_keys_and_values(place: str, tmp_path: Path) -> None:
    folder = copy_of_the_model(tmp_path)
    where = str(tmp_path / "kv")
    options: dict[str, Any] = {"host_cache_gb": 0.01}
    options |= (
        {"disk_cache_path": where, "disk_cache_gb": 0.05}
        if place == "disk"
        else {"remote_cache": where, "remote_cache_gb": 0.05}
    )
    assert cached_tokens(folder, **options)[0] == 0
    assert cached_tokens(folder, **options)[0] > 0
    edit_one_row(folder, 100)
    if place == "disk":
        with pytest.raises(ValueError, match="must hold pages of the same model and layout"):
            cached_tokens(folder, **options)
    else:
        assert cached_tokens(folder, **options)[0] == 0
        assert cached_tokens(folder, **options)[0] > 0


@pytest.mark.parametrize("place", ["disk", "shared"])
def test_a_large_model_starts_before_its_digest_is_known(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its files of KV are opened later, and never under another name."""
    monkeypatch.setattr(model_digest, "_AT_ONCE_BYTES", 0)
    may_read, read = Event(), model_digest._read

    def waiting(*args: Any) -> bytes:
        may_read.wait()
        return read(*args)

    monkeypatch.setattr(model_digest, "_read", waiting)
    where = tmp_path / "kv"
    options: dict[str, Any] = {"host_cache_gb": 0.01, "max_total_tokens": 1024, "num_threads": 1}
    options |= (
        {"disk_cache_path": str(where), "disk_cache_gb": 0.05}
        if place == "disk"
        else {"remote_cache": str(where), "remote_cache_gb": 0.05}
    )
    folder = copy_of_the_model(tmp_path)
    with LLM(str(folder), speculative="draft", **options) as llm:
        [expected] = llm.chat([CHAT], SamplingParams(max_tokens=8, temperature=0.0))
        assert not where.exists()
        may_read.set()
        deadline_s = time.monotonic() + 60
        while not where.exists():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
    with LLM(str(folder), speculative="draft", **options) as llm:
        [answer] = llm.chat([CHAT], SamplingParams(max_tokens=8, temperature=0.0))
    assert answer.text == expected.text
