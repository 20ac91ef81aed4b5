"""Headers in which the gateway of llm-d says what a request may take, for whom it is, and how much it matters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers

from pagewood.engine.api import RequestOptions
from pagewood.server.http.errors import ApiError

TTFT_MS = "x-llm-d-slo-ttft-ms"
TPOT_MS = "x-llm-d-slo-tpot-ms"
FAIRNESS_ID = "x-llm-d-inference-fairness-id"
OBJECTIVE = "x-llm-d-inference-objective"
_MOST_CHARS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayTerms:
    """The terms of one request. Each is None if its header is missing."""

    arrived_s: float
    """Time of arrival, on the clock of `time.monotonic`."""
    first_token_s: float | None = None
    """Seconds from the arrival to the first token."""
    token_s: float | None = None
    """Seconds between two tokens."""
    fairness_id: str | None = None
    """Whose share of the engine the request uses."""
    priority: int | None = None

    def changes(self, options: RequestOptions) -> dict[str, Any]:
        """Return the options that change. A deadline and a priority of the request's own body stay.

        The deadline is the time of the last token if all times are as wished, or of the first one, if nothing is said
        of the others.
        """
        changed: dict[str, Any] = {}
        if options.deadline_s is None and (self.first_token_s is not None or self.token_s is not None):
            most = options.sampling.max_tokens if options.pooling is None else None
            rest_s = 0.0 if self.token_s is None or most is None else self.token_s * most
            changed["deadline_s"] = self.arrived_s + (self.first_token_s or 0.0) + rest_s
        if self.fairness_id is not None:
            changed["tenant"] = self.fairness_id
        if self.priority is not None and not options.priority:
            changed["priority"] = self.priority
        return changed


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayHeaders:
    """Reads the headers. They are for servers that only the gateway reaches, because a client could write them, too."""

    objectives: Mapping[str, int]
    """Name of an InferenceObjective -> its priority; others have none."""

    def read(self, headers: Headers, *, arrived_s: float) -> GatewayTerms:
        """Return the terms of a request.

        Raises:
            ApiError: 400 if a time is not a number above 0, or the fairness id is too long.
        """
        fairness_id = headers.get(FAIRNESS_ID) or None
        if fairness_id is not None and len(fairness_id) > _MOST_CHARS:
            raise _invalid(FAIRNESS_ID, f"at most {_MOST_CHARS} characters", f"{len(fairness_id)} characters")
        return GatewayTerms(
            arrived_s=arrived_s,
            first_token_s=_seconds(headers, TTFT_MS),
            token_s=_seconds(headers, TPOT_MS),
            fairness_id=fairness_id,
            priority=self.objectives.get(headers.get(OBJECTIVE, "")),
        )


def _seconds(headers: Headers, name: str) -> float | None:
    said = headers.get(name)
    if said is None:
        return None
    try:
        milliseconds = float(said)
    except ValueError:
        milliseconds = math.nan
    if not 0 < milliseconds < math.inf:
        raise _invalid(name, "a number of milliseconds above 0", repr(said[:_MOST_CHARS]))
    return milliseconds / 1e3


def _invalid(name: str, rule: str, value: str) -> ApiError:
    return ApiError(f"Invalid value for the header '{name}': expected {rule}, but got {value} instead.", param=name)
