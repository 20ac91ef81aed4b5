"""Which caller sent a request: the keys of a server, and how requests present them."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers

from pagewood.server.http.errors import ApiError
from pagewood.server.keys.caller import Caller
from pagewood.server.keys.key import ApiKey, digest_of
from pagewood.server.keys.quota import Quota

RUN_KEY_NAME = "run"
"""Name of the key that a server made for its run, in the log. Its caller has no tenant, as all callers without keys."""
_HOW = "send 'Authorization: Bearer KEY' or 'x-api-key: KEY'"


@dataclass(frozen=True, slots=True)
class OneCaller:
    """Finds the same caller for every request."""

    found: Caller

    def caller(self, headers: Headers, *, is_open: bool) -> Caller:
        """Return it."""
        return self.found


class KeyGate:
    """Finds the caller of each request. Invariant: a server with keys always has at least one.

    Args:
        keys: without keys, every request is accepted, and only `run_key` gives the rights of an admin.
        run_key: digest of a further admin key, valid until the server ends; None: no such key.

    Raises:
        ValueError: two keys are the same.
    """

    __slots__ = ("_callers", "_nobody", "_operator")

    def __init__(self, keys: Sequence[ApiKey] = (), *, run_key: bytes | None = None) -> None:
        self._operator = {} if run_key is None else {run_key: Caller(name=RUN_KEY_NAME, is_admin=True)}
        self._nobody = Caller(has_run_key=run_key is not None)
        self._callers = _callers(keys, self._nobody, {})  # written by: replace

    @property
    def has_keys(self) -> bool:
        """Whether callers need a key."""
        return bool(self._callers)

    def replace(self, keys: Sequence[ApiKey]) -> None:
        """Use other keys from now on. The use of a key stays counted if its limits are the same.

        Raises:
            ValueError: there are none, or two are the same; the keys stay as they were.
        """
        if not keys:
            raise ValueError("keys must hold at least one key, got none")
        self._callers = _callers(keys, self._nobody, self._callers)

    def caller(self, headers: Headers, *, is_open: bool) -> Caller:
        """Return the caller that sends a request.

        Args:
            headers: of the request.
            is_open: whether its path needs no key.

        Raises:
            ApiError: 401 if it needs a key and has none, or a wrong one.
        """
        if is_open:
            return self._nobody
        key = _presented(headers)
        found = None if key is None else self._owner(digest_of(key))
        if found is None and not self._callers:
            return self._nobody  # also with some other key, because OpenAI's clients always send one
        if key is None:
            raise _unauthorized(f"This server needs an API key: {_HOW}.", code="missing_api_key")
        if found is None:
            raise _unauthorized(f"The API key is wrong; {_HOW}.", code="invalid_api_key")
        return found

    def named(self, tenant: str, name: str) -> Caller | None:
        """Return the caller with that tenant and name of key; None: there is none any more."""
        if not tenant and not self._callers:
            return self._nobody
        callers = (*self._operator.values(), *self._callers.values())
        return next((one for one in callers if (one.tenant, one.name) == (tenant, name)), None)

    def _owner(self, digest: bytes) -> Caller | None:
        """Return the caller with a key; None: it is unknown."""
        found = None
        for known, caller in (*self._operator.items(), *self._callers.items()):
            if hmac.compare_digest(known, digest):  # compare with all, so that the time does not show which matches
                found = caller
        return found


def _callers(keys: Sequence[ApiKey], nobody: Caller, before: dict[bytes, Caller]) -> dict[bytes, Caller]:
    found: dict[bytes, Caller] = {}
    for key in keys:
        if key.digest in found:
            raise ValueError(f"keys must differ, got the key {key.name} twice")
        known = before.get(key.digest)
        quota = known.quota if known is not None else None
        found[key.digest] = Caller(
            tenant=key.tenant,
            name=key.name,
            is_admin=key.admin,
            has_run_key=nobody.has_run_key,
            max_priority=key.max_priority,
            models=key.models,
            adapters=key.adapters,
            quota=quota if quota is not None and quota.key == key else Quota(key=key),
        )
    return found


def _presented(headers: Headers) -> str | None:
    """Return the key that a request presents; None: no key, or several."""
    bearer, own = headers.getlist("authorization"), headers.getlist("x-api-key")
    if len(bearer) > 1 or len(own) > 1:
        return None
    if bearer:
        scheme, _, key = bearer[0].strip().partition(" ")
        return key.strip() if scheme.lower() == "bearer" and key.strip() else None
    return own[0].strip() if own and own[0].strip() else None


def _unauthorized(message: str, *, code: str) -> ApiError:
    return ApiError(message, status=401, code=code, headers={"WWW-Authenticate": "Bearer"})
