"""The fields of a request that is computed by two servers: one its prompt, the other its answer.

Servers that share a cache need no addresses of each other, and no ids of memory: pages are found by their content. So
only two fields of `kv_transfer_params` mean something here, and those of a handshake have no effect.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, Field

from pagewood.server.http.validation import kind

PARAM_NAMES = {"handover": "kv_transfer_params"}
"""The client's names of options of the engine, for errors."""
_FLAGS = ("do_remote_decode", "do_remote_prefill")


def _transfer(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    said = cast("dict[str, Any]", value)
    for name in _FLAGS:
        flag = said.get(name)
        if not (flag is None or isinstance(flag, bool)):
            raise ValueError(f"expected true, false or null as '{name}', but got {kind(flag)} instead")
    if all(said.get(name) for name in _FLAGS):
        raise ValueError(f"expected at most one of '{_FLAGS[0]}' and '{_FLAGS[1]}' to be true, but got both")
    return said


class SharedKVFields(BaseModel):
    """Fields for KV that servers share."""

    cache_hit_threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of the prompt that must be cached, here or in the shared cache; with less, the answer is empty and ends
    with `cache_threshold`. 0: it is computed in any case."""
    kv_transfer_params: Annotated[dict[str, Any] | None, BeforeValidator(_transfer, dict[str, Any] | None)] = None
    """With `do_remote_decode`, the answer comes when the prompt is in the shared cache; with `do_remote_prefill`, the
    request waits while another server puts its prompt there."""

    @property
    def handover(self) -> Literal["publish", "await"] | None:
        """What another server does for the request, see `RequestOptions`."""
        said = self.kv_transfer_params or {}
        return "publish" if said.get("do_remote_decode") else "await" if said.get("do_remote_prefill") else None
