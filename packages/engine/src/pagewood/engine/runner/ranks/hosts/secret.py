"""The secret that the nodes of a group share, and the proof that both ends of a connection know it."""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from pathlib import Path

from pagewood.engine.runner.ranks.link import WrongMessageError, read_exactly

_PROTOCOL = b"pagewood-nodes-1"
_NUM_RANDOM = 32
_MIN_LENGTH = 16
_OTHERS = 0o077
_ACCEPTED, _REFUSED = b"\x01", b"\x00"


class WrongSecretError(ValueError):
    """The other end of a connection does not know the secret."""


def read_secret(path: str | None) -> bytes:
    """Return the secret in a file, without white space around it; nothing if there is no file.

    Raises:
        ValueError: the file cannot be read, is open to other users, or its secret is short.
    """
    if path is None:
        return b""
    try:
        text, mode = Path(path).read_bytes().strip(), Path(path).stat().st_mode
    except OSError as error:
        raise ValueError(f"node_secret_file cannot be read: {error}") from error
    if mode & _OTHERS:
        raise ValueError(f"node_secret_file must be closed to other users (chmod 600), got mode {mode & 0o777:o}")
    if len(text) < _MIN_LENGTH:
        raise ValueError(f"node_secret_file must hold at least {_MIN_LENGTH} bytes, got {len(text)}")
    return text


def prove(connection: socket.socket, secret: bytes, *, listens: bool, limit_s: float) -> None:
    """Prove to the other end that this one knows the secret, and let it do the same. The secret is not sent.

    The end that has dialled proves first, so the other one shows nothing to those who cannot.

    Args:
        connection: a connected stream; its timeout is changed.
        secret: of all nodes.
        listens: whether this is the end that listened.
        limit_s: how long that may take.

    Raises:
        WrongSecretError: the other end has another secret.
        WrongMessageError: the other end speaks another protocol, or another version of this one.
        OSError: the connection is lost, or the time is up.
        EOFError: likewise.
    """
    ends_s = time.monotonic() + limit_s

    def read(length: int) -> bytes:
        return bytes(read_exactly(connection, length, ends_s=ends_s))

    own = secrets.token_bytes(_NUM_RANDOM)
    connection.settimeout(limit_s)
    connection.sendall(_PROTOCOL + own)
    found = read(len(_PROTOCOL))
    if found != _PROTOCOL:
        raise WrongMessageError(f"a node must begin with {_PROTOCOL!r}, got {found!r}")
    theirs = read(_NUM_RANDOM)
    dialled, listened = (theirs, own) if listens else (own, theirs)
    proofs = [hmac.digest(secret, role + dialled + listened, "sha256") for role in (b"dialled", b"listened")]
    if listens:
        if not hmac.compare_digest(read(len(proofs[0])), proofs[0]):
            connection.sendall(_REFUSED)
            raise WrongSecretError("node_secret_file must hold the same on all nodes")
        connection.sendall(_ACCEPTED + proofs[1])
        return
    connection.sendall(proofs[0])
    if read(1) != _ACCEPTED or not hmac.compare_digest(read(len(proofs[1])), proofs[1]):
        raise WrongSecretError("node_secret_file must hold the same on all nodes, got another secret on the other one")
