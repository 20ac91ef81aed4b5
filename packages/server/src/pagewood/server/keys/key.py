"""One API key: its digest, its tenant, and its rights. The text of a key is not kept."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

SHORTEST_KEY = 16
"""Characters. Wrong guesses are not slowed down, so keys must be too long to guess."""
_TENANT = re.compile(r"[A-Za-z0-9._:@/+-]{1,128}")
_KEY = re.compile(r"[!-~]+")
_MAKE_ONE = "python -c 'import secrets; print(secrets.token_urlsafe(32))' makes one"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key and its rights; None: no limit.

    Raises:
        ValueError: a field is out of its range.
    """

    digest: bytes
    """SHA-256 of the key."""
    tenant: str = ""
    """Requests share cached prefixes and kept responses only within a tenant. Empty: the key is a tenant of its own."""
    name: str = ""
    """For the log; empty: the beginning of the digest."""
    admin: bool = False
    """Whether it opens admin routes, and may abort the requests of all tenants."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Tokens of prompts, cached ones too, and of answers."""
    max_concurrent: int | None = None
    """HTTP requests that it may have at a time."""
    max_priority: int | None = None
    """Highest priority of its requests."""
    models: tuple[str, ...] | None = None
    """The models that its requests may name."""
    adapters: tuple[str, ...] | None = None
    """The adapters that its requests may name; a model without an adapter needs no entry here."""

    def __post_init__(self) -> None:
        if len(self.digest) != hashlib.sha256().digest_size:
            raise ValueError(f"digest must be a SHA-256 digest of 32 bytes, got {len(self.digest)} bytes")
        own = self.digest.hex()[:12]
        object.__setattr__(self, "tenant", self.tenant or f"key-{own}")
        object.__setattr__(self, "name", self.name or own)
        for field in ("tenant", "name"):
            if not _TENANT.fullmatch(getattr(self, field)):
                raise ValueError(
                    f"{field} must be 1 to 128 letters, digits or characters of ._:@/+-, got {getattr(self, field)!r}"
                )
        for field in ("requests_per_minute", "tokens_per_minute", "max_concurrent"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"{field} must be >= 1, got {value}")


def digest_of(key: str) -> bytes:
    """Return the SHA-256 of a key."""
    return hashlib.sha256(key.encode()).digest()


def checked_digest(key: str) -> bytes:
    """Return the digest of a key as an operator writes it: the key, or `sha256:` and its digest in hexadecimal.

    Raises:
        ValueError: the key is too short, or has characters that no header can carry. The message does not quote it.
    """
    if key.startswith("sha256:"):
        if not re.fullmatch(r"sha256:[0-9a-fA-F]{64}", key):
            raise ValueError("a digest must be sha256: and 64 hexadecimal digits")
        return bytes.fromhex(key[len("sha256:") :])
    if len(key) < SHORTEST_KEY:
        raise ValueError(f"a key must have at least {SHORTEST_KEY} characters, got {len(key)}; {_MAKE_ONE}")
    if not _KEY.fullmatch(key):
        raise ValueError(f"a key must consist of visible ASCII characters; {_MAKE_ONE}")
    return digest_of(key)
