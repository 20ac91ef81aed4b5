"""Recorded requests, in the format of the Mooncake traces."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pagewood.radixcache.arrays import Int32


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRequest:
    """One request of a trace.

    Attributes:
        arrival_s: when it came, in seconds from the start of the trace.
        blocks: `[num_blocks] int32`, one number per block of the prompt; two blocks of a trace have the same number
            exactly if they have the same hash id.
    """

    arrival_s: float
    blocks: Int32


def read_trace(path: Path) -> list[TracedRequest]:
    """Read a JSONL file with `timestamp` (milliseconds) and `hash_ids` on each line; other fields are not needed.

    Hash ids may be of any size, and are numbered in the order in which they appear.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is not such a request, or there is none; the message names file and line.

    Source: the FAST'25 traces of Mooncake (arXiv 2407.00079).
    """
    numbers: dict[int, int] = {}
    requests: list[TracedRequest] = []
    with path.open(encoding="utf-8") as lines:
        for line_number, line in enumerate(lines, 1):
            if line.strip():
                requests.append(_parse(line, numbers, f"{path}:{line_number}"))
    if not requests:
        raise ValueError(f"{path} must hold a request, got none")
    return requests


def num_blocks_of(requests: Iterable[TracedRequest]) -> int:
    """Return the number of blocks of all prompts: what a hit rate is a share of."""
    return sum(len(request.blocks) for request in requests)


def _parse(line: str, numbers: dict[int, int], place: str) -> TracedRequest:
    try:
        fields: Any = json.loads(line)
        timestamp_ms, hash_ids = float(fields["timestamp"]), fields["hash_ids"]
        blocks = [numbers.setdefault(hash_id, len(numbers)) for hash_id in hash_ids]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{place} must be a JSON object with timestamp and hash_ids, got {line.strip()[:80]}"
        ) from error
    return TracedRequest(arrival_s=timestamp_ms / 1000, blocks=np.array(blocks, np.int32))
