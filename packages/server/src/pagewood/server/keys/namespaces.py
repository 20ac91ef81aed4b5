"""The cache's namespace of a request: its tenant, and the salt of its client."""

from __future__ import annotations

_MARK = "@"


def namespace_of(tenant: str, salt: str | None) -> str | None:
    """Return the namespace of a tenant and a salt; different pairs have different namespaces.

    A tenant is written as `@`, its length, `:`, the tenant and `:`, and the salt follows. So the length tells where the
    tenant ends, whatever characters both contain. Without a tenant, a salt is its own namespace, unless it begins like
    that of a tenant. Without both, there is no namespace.

    Args:
        tenant: empty if the server has no keys.
        salt: of the client; None and empty are the same.
    """
    salt = salt or ""
    if not tenant and not salt.startswith(_MARK):
        return salt or None
    return f"{_MARK}{len(tenant)}:{tenant}:{salt}"
