"""Pages in the memory of one host, for all engines of one user there: a shared folder in tmpfs."""

import os
import re
from pathlib import Path

from pagewood.kvpool.tiers.stores.folder import SharedFolder

_MEMORY = Path("/dev/shm")
"""Where Linux has files in memory."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def shared_memory(
    name: str, *, page_bytes: int, num_bytes: int, fingerprint: bytes = b"", memory: Path = _MEMORY
) -> SharedFolder:
    """Open the store with a name, and create it if it does not exist; no process serves it.

    Any process may be killed at any moment: what it was writing has no name yet, and disappears. Files stay until the
    machine restarts or `rm -r` removes the folder, `/dev/shm/pagewood-UID-NAME`.

    Args:
        name: Its name among the stores of this user.
        page_bytes: Size of a page image, in bytes.
        num_bytes: Largest size of all its pages, whatever their fingerprint, in bytes. The users of a store give the
            same; otherwise the smallest counts.
        fingerprint: Identifies the content of pages: model, dtype, layout.
        memory: A folder in tmpfs.

    Raises:
        ValueError: The name has other characters than letters, digits, ".", "_" and "-", or is too long; the store is
            larger than the file system; or it cannot be used, see `SharedFolder`.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"name must match {_NAME.pattern}, got {name!r}")
    try:
        status = os.statvfs(memory)
    except OSError as error:
        raise ValueError(f"memory must be a folder in tmpfs, got {memory}: {error}") from error
    size = status.f_frsize * status.f_blocks
    if num_bytes > size:
        raise ValueError(f"num_bytes must be at most {size}, the size of {memory}, got {num_bytes}")
    return SharedFolder(
        memory / f"pagewood-{os.geteuid()}-{name}",
        page_bytes=page_bytes,
        num_bytes=num_bytes,
        fingerprint=fingerprint,
        is_private=True,
    )
