"""The caller that sends a request, and its rights."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from pagewood.server.http.errors import ApiError
from pagewood.server.keys.gateway import GatewayTerms
from pagewood.server.keys.namespaces import namespace_of
from pagewood.server.keys.quota import Quota
from pagewood.server.messages import wire


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The sender of a request."""

    tenant: str = ""
    """Empty: the server has no keys, so all senders are one tenant; or the sender has the admin key of this run."""
    name: str = ""
    """Name of its key, for the log."""
    is_admin: bool = False
    has_run_key: bool = False
    """Whether the server has made an admin key for its run."""
    max_priority: int | None = None
    models: tuple[str, ...] | None = None
    """The models that its requests may name; None: all."""
    adapters: tuple[str, ...] | None = None
    """The adapters that its requests may name; None: all."""
    quota: Quota | None = None
    """The limits and the use of its key; None: the server has no keys."""
    terms: GatewayTerms | None = None
    """What a gateway says of this request; None: its headers are not read."""
    job_priority: int | None = None
    """Priority of its requests, whatever they ask for, if they are lines of a batch; None: they are not."""

    @property
    def is_job(self) -> bool:
        """Whether its requests are lines of a batch."""
        return self.job_priority is not None

    def stamped(self, message: wire.NewRequest) -> wire.NewRequest:
        """Return a message with the tenant, with the namespace of the tenant and the client's salt, if it has any, and
        with the terms of the gateway.

        Raises:
            ApiError: its priority is higher than the caller's highest, or it names an adapter that the caller may not
                use.
        """
        if isinstance(message, wire.RetainText):
            self.check_adapter(message.adapter)
            return msgspec.structs.replace(message, namespace=namespace_of(self.tenant, message.namespace))
        if not isinstance(message, wire.Generate):
            return message
        self.check_adapter(message.options.adapter)
        namespace = namespace_of(self.tenant, message.options.namespace)
        changed = {} if self.terms is None else self.terms.changes(message.options)
        if self.job_priority is None:
            self.check_priority(message.options.priority)
        else:
            changed["priority"] = self.job_priority
        if not self.tenant and namespace == message.options.namespace and not changed:
            return message
        return message.with_options(**{"namespace": namespace, "tenant": self.tenant or None, **changed})

    def check_priority(self, priority: int) -> None:
        """Check a priority that the caller asks for.

        Raises:
            ApiError: 403 if it is higher than the caller's highest.
        """
        if self.max_priority is not None and priority > self.max_priority:
            raise ApiError(
                f"Invalid value for 'priority': the highest priority of this API key is {self.max_priority}, "
                f"but got {priority} instead.",
                status=403,
                param="priority",
                code="priority_not_allowed",
            )

    def may_use(self, model: str) -> bool:
        """Return whether the caller's requests may name a model."""
        return self.models is None or model in self.models

    def check_model(self, model: str) -> None:
        """Check a model that the caller asks for.

        Raises:
            ApiError: 403 if it may not use it.
        """
        if not self.may_use(model):
            raise ApiError(
                f"This API key may not use the model '{model}'.", status=403, param="model", code="model_not_allowed"
            )

    def check_adapter(self, adapter: str | None) -> None:
        """Check the adapter that the caller asks for; None: it asks for none.

        Raises:
            ApiError: 403 if it may not use it.
        """
        if adapter is not None and self.adapters is not None and adapter not in self.adapters:
            raise ApiError(
                f"This API key may not use the adapter '{adapter}'.",
                status=403,
                param="model",
                code="adapter_not_allowed",
            )

    def owns(self, tenant: str) -> bool:
        """Return whether the caller may change the requests of that tenant."""
        return self.is_admin or self.tenant == tenant

    def check_admin(self) -> None:
        """Check that the caller may use admin routes.

        Raises:
            ApiError: 403 if it may not.
        """
        if not self.is_admin:
            message = "This path is for admins: send an admin key as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
            if self.has_run_key:
                message += " This server has made one for its run; its start message names the file."
            raise ApiError(message, status=403, code="admin_key_required")

    def check_overview(self) -> None:
        """Check that the caller may see sums over all tenants; without keys there is only one.

        Raises:
            ApiError: 403 if it may not.
        """
        if self.tenant:
            self.check_admin()


_NOBODY = Caller()
_current: ContextVar[Caller] = ContextVar("caller", default=_NOBODY)


def current_caller() -> Caller:
    """Return the caller that sends the request that is being served; outside a request, a caller without any right.

    It is a variable of the context rather than an argument, so that no endpoint can forget to pass it on.
    """
    return _current.get()


def set_caller(caller: Caller) -> None:
    """Set the caller of the request that is served in this context."""
    _current.set(caller)


def checked_by(
    check: Callable[[Caller], None], endpoint: Callable[[Request], Awaitable[ASGIApp]]
) -> Callable[[Request], Awaitable[ASGIApp]]:
    """Return an endpoint that refuses callers for whom `check` raises, before it reads anything of the request."""

    async def checked(request: Request) -> ASGIApp:
        check(current_caller())
        return await endpoint(request)

    return checked
