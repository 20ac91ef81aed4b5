"""`POST /v1/requests/{id}/priority`: the body of a request."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from pagewood.server.http.validation import WHOLE, parse
from pagewood.server.protocols.common.fields import INT32_MAX


class PriorityRequest(BaseModel):
    """`{"priority": 5}`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    priority: Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX), WHOLE]


def parse_priority(body: bytes) -> int:
    """Return the new priority in `body`.

    Raises:
        ApiError: the body is not such a request.
    """
    return parse(PriorityRequest, body, neutral={}, ignored=frozenset()).priority
