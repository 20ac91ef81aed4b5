"""The admin key that a server makes for its run, and the file in which the user's programs find it."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pagewood.server.keys.key import digest_of

FOLDER_VARIABLE = "PAGEWOOD_RUNTIME_DIR"
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]", "0.0.0.0", "[::]")
"""Hosts in URLs that always mean this machine; the last two are in the start messages of servers on all addresses."""
_LOCALHOST = "127.0.0.1"
_PREFIX = "pagewood-"
"""Shows the purpose of a key. Without it, one key in 64 would begin with a dash, like an option."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunKey:
    """An admin key that is valid until its server ends. Invariant: its text is in its files only."""

    paths: tuple[Path, ...]
    """A file for each loopback address of its server."""
    digest: bytes
    """SHA-256 of the key."""

    @property
    def path(self) -> Path:
        """The first of its files."""
        return self.paths[0]

    def remove(self) -> None:
        """Remove the files, except where a later server has written its own key."""
        for path in self.paths:
            with contextlib.suppress(OSError, ValueError):
                if digest_of(_read(path)) == self.digest:
                    path.unlink()


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundKey:
    """The key of a server on this machine, and the address to which it may be sent."""

    url: str
    """Address of the server; it has an IP address instead of `localhost` where only that identifies the server."""
    key: str


def make_run_key(host: str, port: int) -> RunKey:
    """Make an admin key and write it to the file of a server; it replaces the key of a killed server.

    Args:
        host: address on which the server listens.
        port: its port.

    Raises:
        OSError: the file cannot be written, or its folder belongs to another user.
        RuntimeError: the user has no home.
    """
    paths = [run_key_path(host, port)]
    if host == "::":  # it also listens on all addresses of IPv4, as `bind` asks for
        paths.append(run_key_path(_LOCALHOST, port))
    _make_private(paths[0].parent)
    key = f"{_PREFIX}{secrets.token_urlsafe(32)}"
    made = RunKey(paths=tuple(paths), digest=digest_of(key))
    try:
        for path in paths:
            _write(path, key)
    except OSError:
        made.remove()
        raise
    return made


def _write(path: Path, key: str) -> None:
    """Write a key to a file, and replace the file if it exists.

    Raises:
        OSError: the file cannot be written; it is unchanged.
    """
    descriptor, written = tempfile.mkstemp(prefix="new-", dir=path.parent)  # 0600, and never an existing file
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{key}\n")
        Path(written).replace(path)
    except OSError:
        Path(written).unlink(missing_ok=True)
        raise


def run_key_path(host: str, port: int) -> Path:
    """Return the key file of the server that listens on an address, or is reached by that address from its own machine.

    It is in the folder of the environment's PAGEWOOD_RUNTIME_DIR, or in ~/.cache/pagewood/run, in a folder with the
    name of the machine, because machines may share a home. XDG_RUNTIME_DIR is not used: a server may outlive the
    session that it belongs to.

    Raises:
        ValueError: `host` is neither an address nor `localhost`.
        RuntimeError: the user has no home.
    """
    address = ipaddress.ip_address(_LOCALHOST if host == "localhost" else host)
    if address.is_unspecified:  # no other server can share the port with such a server
        address = ipaddress.ip_address("::1" if address.version == 6 else _LOCALHOST)
    root = os.environ.get(FOLDER_VARIABLE)
    if not root:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagewood" / "run"
    return Path(root) / socket.gethostname() / f"{address}-{port}.key"


def find_run_key(url: str) -> FoundKey | None:
    """Return the key that the server at a URL made for its run; None: no key that this user may read.

    Hosts other than `LOCAL_HOSTS` have none. For `localhost` it is the key of the server on 127.0.0.1. Without TLS,
    it must then be sent to that address: `localhost` may also mean ::1, where another user may listen on the port.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        if (f"[{host}]" if ":" in host else host) not in LOCAL_HOSTS:
            return None
        key = _read(run_key_path(host, port))
    except (OSError, RuntimeError, ValueError):
        return None
    if host == "localhost" and parts.scheme != "https":
        url = parts._replace(netloc=f"{_LOCALHOST}:{port}").geturl()
    return FoundKey(url=url, key=key) if key else None


def _read(path: Path) -> str:
    return path.read_text(encoding="ascii").strip()


def _make_private(folder: Path) -> None:
    """Make a folder that only this user can access.

    Raises:
        OSError: it cannot be made, is not the user's own, or is in a folder of another user.
    """
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    above = folder.parent.stat()  # its owner, and every user with write access to it, can replace this folder
    is_open = above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX
    if above.st_uid not in (os.geteuid(), 0) or is_open:
        raise PermissionError(
            f"{folder.parent} must be a folder of the user who runs the server or of root, in which no "
            "other user may rename files"
        )
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{folder} must be a folder of the user who runs the server")
    folder.chmod(0o700)
