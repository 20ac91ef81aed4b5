"""A digest of all bytes that the weights and the keys and values of a model depend on.

Reading all of a large model takes longer than a start. So the digest is computed once, and a record of it is kept in
the cache folder, with size, times and inode of every file: while these are the same, so are the bytes. An editor can
set the time of modification back, but not that of change (ctime). A record does not count if a file was changed less
than two seconds before it was read: a later change might have got the same times.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b, sha256
from pathlib import Path
from threading import Thread, get_native_id

from pagewood.engine.cache_folder import REMEDY, cache_root
from pagewood.engine.models.stored.checkpoint_files import checkpoint_files, index_file

_log = logging.getLogger(__name__)

_VERSION = 1
_AT_ONCE_BYTES = 1 << 28
"""A model of this size is read in a fraction of a second, so callers wait for its digest."""
_CHUNK_BYTES = 1 << 24
_BUFFER_BYTES = 1 << 20
_MOST_THREADS = 4
_NICENESS = 10
_GRANULARITY_NS = 2_000_000_000
"""The coarsest clock of a file system, that of FAT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileState:
    """The properties that change when a file is written to, replaced, or its times are set."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @property
    def newest_ns(self) -> int:
        """The time of the file's last known change."""
        return max(self.mtime_ns, self.ctime_ns)


class ModelDigest:
    """The digest of the files of a folder as they were when this was made. Other threads may wait for it.

    Invariant: a digest is returned only if, from then until now, no file has changed. Equal bytes under equal names
    give the same digest on every machine.
    """

    __slots__ = ("_digest", "_folder", "_paths", "_states", "_thread")

    def __init__(self, folder: Path) -> None:
        """Take the sizes and times of the files; nothing is read. A folder that cannot be loaded has no digest."""
        self._folder = folder
        try:
            self._paths = _files(folder)
        except (OSError, ValueError):  # loading it says so
            self._paths = []
        self._states = _states(self._paths)
        self._digest: bytes | None = None  # written by: begin, _find
        self._thread: Thread | None = None  # written by: begin

    def begin(self) -> None:
        """Find the digest in a record, or compute it: at once if the model is small, otherwise in the background.

        Repeated calls do nothing.
        """
        if self._thread is not None or self._digest is not None or not self._paths:
            return
        self._digest = self._recorded()
        if self._digest is None:
            self._thread = Thread(target=self._find, name="model-digest", daemon=True)
            self._thread.start()
            if sum(state.size for state in self._states) <= _AT_ONCE_BYTES:
                self._thread.join()

    def known(self) -> bytes | None:
        """Return the digest, 32 bytes, if it is known by now; otherwise None."""
        return self._digest if self._digest is not None and self._is_current() else None

    def wait(self) -> bytes | None:
        """Return the digest, 32 bytes, as soon as it is known; None if the files have changed or cannot be read."""
        self.begin()
        if self._thread is not None:
            self._thread.join()
        return self.known()

    def _is_current(self) -> bool:
        try:
            return _files(self._folder) == self._paths and _states(self._paths) == self._states
        except (OSError, ValueError):
            return False

    def _find(self) -> None:
        """Compute the digest and keep a record of it."""
        began_ns = time.time_ns()
        try:
            digest = _read(self._paths, self._states)
        except OSError as error:
            _log.warning("%s cannot be read, so its caches are not used: %s", self._folder, error)
            return
        if not self._is_current():
            _log.warning("%s has changed since the start, so its caches are not used", self._folder)
            return
        _log.info("%s was read for its digest in %.1f s", self._folder, (time.time_ns() - began_ns) / 1e9)
        self._digest = digest
        self._record(digest, began_ns)

    def _recorded(self) -> bytes | None:
        """Return the digest of a record, or None without a valid record."""
        try:
            found = json.loads(_record_file(self._folder).read_text(encoding="utf-8"))
            began_ns = int(found["began_ns"])
            digest = bytes.fromhex(found.pop("digest"))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # none, or damaged
            return None
        newest_ns = max(state.newest_ns for state in self._states)
        is_settled = newest_ns + _GRANULARITY_NS <= began_ns
        return digest if is_settled and len(digest) == 32 and found == self._description(began_ns) else None

    def _record(self, digest: bytes, began_ns: int) -> None:
        file = _record_file(self._folder)
        content = json.dumps({**self._description(began_ns), "digest": digest.hex()})
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            number, name = tempfile.mkstemp(prefix=f"{file.name}.", suffix=".tmp", dir=file.parent)
            try:
                with os.fdopen(number, "w", encoding="utf-8") as written:
                    written.write(content)
                Path(name).replace(file)
            except OSError:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            _log.warning(
                "the digest of %s cannot be kept in %s, so each start reads the model again: %s; %s",
                self._folder, file.parent, error, REMEDY,
            )  # fmt: skip

    def _description(self, began_ns: int) -> dict[str, object]:
        states = zip(self._paths, self._states, strict=True)
        return {
            "version": _VERSION,
            "began_ns": began_ns,
            "files": [[str(path), one.size, one.mtime_ns, one.ctime_ns, one.inode] for path, one in states],
        }


def _files(folder: Path) -> list[Path]:
    """Return the files that determine the computation of a model, in a fixed order."""
    index = index_file(folder)
    return [folder / "config.json", *([index] if index.exists() else []), *checkpoint_files(folder)]


def _states(paths: Sequence[Path]) -> list[FileState]:
    found = [path.stat() for path in paths]
    return [
        FileState(size=one.st_size, mtime_ns=one.st_mtime_ns, ctime_ns=one.st_ctime_ns, inode=one.st_ino)
        for one in found
    ]


def _record_file(folder: Path) -> Path:
    name = sha256(os.fsencode(folder.resolve())).hexdigest()[:32]
    return cache_root() / "digests" / f"{name}.json"


def _read(paths: Sequence[Path], states: Sequence[FileState]) -> bytes:
    """Return a digest of names, sizes and contents.

    Raises:
        OSError: a file cannot be read, or is shorter than it was.
    """
    chunks = [
        (path, start, min(_CHUNK_BYTES, state.size - start))
        for path, state in zip(paths, states, strict=True)
        for start in range(0, state.size, _CHUNK_BYTES)
    ]
    digests: list[bytes | OSError] = [b""] * len(chunks)
    work = iter(range(len(chunks)))

    def run() -> None:
        with suppress(OSError):
            if sys.platform == "linux":  # on Linux, threads have priorities of their own
                os.setpriority(os.PRIO_PROCESS, get_native_id(), _NICENESS)
        for at in work:  # next() of a range's iterator is atomic
            try:
                digests[at] = _read_chunk(*chunks[at])
            except OSError as error:
                digests[at] = error

    threads = [Thread(target=run, daemon=True) for _ in range(min(_MOST_THREADS, os.cpu_count() or 1, len(chunks)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    whole = blake2b(digest_size=32)
    for path, state in zip(paths, states, strict=True):
        whole.update(f"{path.name}\n{state.size}\n".encode(errors="surrogateescape"))
    for found in digests:
        if isinstance(found, OSError):
            raise found
        whole.update(found)
    return whole.digest()


def _read_chunk(path: Path, start: int, length: int) -> bytes:
    digest, buffer = blake2b(digest_size=32), memoryview(bytearray(_BUFFER_BYTES))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while length:
            count = file.readinto(buffer[: min(length, _BUFFER_BYTES)])
            if not count:
                raise OSError(f"{path} has become shorter while it was read")
            digest.update(buffer[:count])
            length -= count
    return digest.digest()
