"""The cache's namespace of a request: its tenant, and the salt of its client."""

from __future__ import annotations

_MARK = "@"


def namespace_of(tenant: str, salt: str | None) -> str | None:
    """Return the namespace of a tenant and a salt; different pairs have different namespaces.

    A tenant is written as `@`, its length, `:`, the tenant and `:`, and the salt follows. So the end of the tenant is
    known from the beginning, whatever both contain. Without a tenant, a salt is its own namespace, unless it begins as
    that of a tenant; and without a salt, too, there is none.

    Args:
        tenant: empty: the server has no keys.
        salt: of the client; None and empty are the same.
    """
    salt = salt or ""
    if not tenant and not salt.startswith(_MARK):
        return salt or None
    return f"{_MARK}{len(tenant)}:{tenant}:{salt}"
