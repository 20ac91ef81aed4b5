"""A folder with the files and batches of all tenants."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from pagewood.server.jobs.objects import OPEN, Batch, FileObject, StoredBatch, StoredFile

T = TypeVar("T", StoredFile, StoredBatch)
MAX_FILES = 10_000
"""Most files of a tenant."""
MAX_BATCHES = 2_000
"""Most batches of a tenant; of more, the oldest that has ended is forgotten."""
_META = "meta.json"


class JobStore:
    """Files and batches, each in a folder of its own with its object (`meta.json`).

    Invariant: what a method has returned from survives a kill of the process. One process has the folder at a time.

    Args:
        folder: made if it is missing.
        max_bytes: most bytes of uploaded files; results of batches are kept beyond.
        clock: Unix time, seconds.

    Raises:
        ValueError: the folder cannot be used, or another process uses it.
    """

    __slots__ = ("_batches", "_clock", "_files", "_folder", "_lock", "_number", "max_bytes")

    def __init__(self, folder: Path, *, max_bytes: int, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self.max_bytes = max_bytes
        self._clock = clock
        try:
            for part in ("files", "batches", "uploads"):
                (folder / part).mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = (folder / "lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise ValueError(f"batch_store must be a folder that no other server uses, got {str(folder)!r}") from error
        except OSError as error:
            raise ValueError(
                f"batch_store must be a folder that can be written, got {str(folder)!r}: {error}"
            ) from error
        for left in (folder / "uploads").iterdir():
            left.unlink()
        self._files = _load(folder / "files", StoredFile)  # written by: add_file, delete_file
        self._batches = _load(folder / "batches", StoredBatch)  # written by: add_batch, put_batch
        self._number = max([0, *(one.number for one in (*self._files.values(), *self._batches.values()))])
        # written by: _next_number

    def close(self) -> None:
        """Let another process have the folder."""
        self._lock.close()

    @property
    def num_bytes(self) -> int:
        """Bytes of all uploaded files."""
        return sum(one.shown.bytes for one in self._files.values() if one.shown.purpose == "batch")

    @property
    def now_s(self) -> int:
        """Unix time, seconds."""
        return int(self._clock())

    def files(self, tenant: str) -> Sequence[StoredFile]:
        """Return the files of a tenant, the oldest first."""
        self.drop_expired()
        return [one for one in self._files.values() if one.tenant == tenant]

    def file(self, id: str, tenant: str) -> StoredFile | None:
        """Return a file of a tenant; None: it has no such file."""
        self.drop_expired()
        found = self._files.get(id)
        return found if found is not None and found.tenant == tenant else None

    def content(self, id: str) -> Path:
        """Return the place of the content of a file."""
        return self._folder / "files" / id / "content"

    def new_upload(self) -> Path:
        """Return a place for a file that is being written; `add_file` takes it from there."""
        return self._folder / "uploads" / uuid.uuid4().hex

    def add_file(self, upload: Path, shown: FileObject, tenant: str) -> None:
        """Take a file that was written to `new_upload`. One with the same id is replaced."""
        stored = StoredFile(shown=shown, tenant=tenant, number=self._next_number())
        folder = self._folder / "files" / shown.id
        folder.mkdir(exist_ok=True, mode=0o700)
        upload.replace(folder / "content")
        _write(folder / _META, stored)
        self._files[shown.id] = stored

    def delete_file(self, id: str) -> None:
        """Delete a file. Batches that were made of it go on."""
        del self._files[id]
        (self._folder / "files" / id / _META).unlink()  # first, so that no object without content is left
        shutil.rmtree(self._folder / "files" / id, ignore_errors=True)

    def drop_expired(self) -> None:
        """Delete the files whose time is over."""
        now_s = self._clock()
        for id, one in tuple(self._files.items()):
            if one.shown.expires_at is not None and one.shown.expires_at <= now_s:
                self.delete_file(id)

    def batches(self, tenant: str) -> Sequence[StoredBatch]:
        """Return the batches of a tenant, the oldest first."""
        return [one for one in self._batches.values() if one.tenant == tenant]

    def open_batches(self) -> Sequence[StoredBatch]:
        """Return the batches of all tenants that have not ended, the oldest first."""
        return [one for one in self._batches.values() if one.shown.status in OPEN]

    def all_batches(self) -> Iterable[StoredBatch]:
        """Return the batches of all tenants."""
        return self._batches.values()

    def batch(self, id: str) -> StoredBatch | None:
        """Return a batch; None: there is no such batch."""
        return self._batches.get(id)

    def input(self, id: str) -> Path:
        """Return the place of the requests of a batch."""
        return self._folder / "batches" / id / "input"

    def results(self, id: str) -> Path:
        """Return the place of the results of a batch that has not ended."""
        return self._folder / "batches" / id / "results"

    def add_batch(self, shown: Batch, *, tenant: str, key: str, output_expires_s: int | None) -> bool:
        """Keep a batch with the requests of its input file; return whether there is room for it."""
        own = self.batches(tenant)
        if len(own) >= MAX_BATCHES:
            ended = next((one for one in own if one.shown.status not in OPEN), None)
            if ended is None:
                return False
            del self._batches[ended.shown.id]
            shutil.rmtree(self._folder / "batches" / ended.shown.id, ignore_errors=True)
        folder = self._folder / "batches" / shown.id
        folder.mkdir(mode=0o700)
        _link(self.content(shown.input_file_id), self.input(shown.id))
        stored = StoredBatch(
            shown=shown, tenant=tenant, key=key, number=self._next_number(), output_expires_s=output_expires_s
        )
        self.put_batch(stored)
        return True

    def put_batch(self, stored: StoredBatch, *, saves: bool = True) -> None:
        """Replace a batch; one that has ended loses its input and results, which are in files now.

        Args:
            stored: the batch.
            saves: whether it is written, too; counts of lines need not be, because they follow from the results.
        """
        id = stored.shown.id
        self._batches[id] = stored
        if not saves:
            return
        _write(self._folder / "batches" / id / _META, stored)
        if stored.shown.status not in OPEN:
            for left in (self.input(id), self.results(id)):
                left.unlink(missing_ok=True)

    def _next_number(self) -> int:
        self._number += 1
        return self._number


def _load(folder: Path, kind: type[T]) -> dict[str, T]:
    """Return the objects in a folder by id, in the order in which they were made; what was not complete is removed.

    Raises:
        ValueError: an object cannot be read.
    """
    found: list[T] = []
    for one in folder.iterdir():
        if not (one / _META).is_file():
            shutil.rmtree(one, ignore_errors=True)
            continue
        try:
            found.append(msgspec.json.decode((one / _META).read_bytes(), type=kind))
        except msgspec.DecodeError as error:
            raise ValueError(f"batch_store must hold files and batches, got {str(one / _META)!r}: {error}") from error
    return {one.shown.id: one for one in sorted(found, key=lambda one: one.number)}


def _write(file: Path, stored: StoredFile | StoredBatch) -> None:
    """Write an object so that either it or the one before it is there after a kill."""
    new = file.with_name("new")
    with new.open("wb") as out:
        out.write(msgspec.json.encode(stored))
        out.flush()
        os.fsync(out.fileno())
    new.replace(file)


def _link(source: Path, target: Path) -> None:
    """Give a file a second name, or a copy where the file system has no second names."""
    with suppress(OSError):
        os.link(source, target)
        return
    shutil.copyfile(source, target)
