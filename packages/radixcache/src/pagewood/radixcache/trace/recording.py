"""Recorded requests in the format of the Mooncake traces."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from pagewood.radixcache.arrays import Int32


def read_trace(path: Path) -> list[Int32]:
    """Read a JSONL file with `timestamp` and `hash_ids` on each line; other fields are ignored.

    Returns:
        The blocks of each prompt, `[num_blocks] int32`, in order of arrival. Two blocks have the same number exactly if
        they have the same hash id. Hash ids in the file may be of any size.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is not such a request, or the file has no request; the message names the file and the line.

    Source: the FAST'25 traces of Mooncake (arXiv 2407.00079).
    """
    numbers: dict[int, int] = {}
    arrivals: list[tuple[float, Int32]] = []
    with path.open(encoding="utf-8") as lines:
        for line_number, line in enumerate(lines, 1):
            if line.strip():
                arrivals.append(_parse(line, numbers, f"{path}:{line_number}"))
    if not arrivals:
        raise ValueError(f"{path} must contain at least one request, got none")
    arrivals.sort(key=lambda arrival: arrival[0])
    return [blocks for _, blocks in arrivals]


def num_blocks_of(requests: Iterable[Int32]) -> int:
    """Return the number of blocks of all prompts, the denominator of a hit rate."""
    return sum(map(len, requests))


def _parse(line: str, numbers: dict[int, int], place: str) -> tuple[float, Int32]:
    """Return the arrival time of a request, and its blocks."""
    try:
        fields: Any = json.loads(line)
        if not isinstance(fields["hash_ids"], list):
            raise TypeError("hash_ids must be a list")
        blocks = [numbers.setdefault(hash_id, len(numbers)) for hash_id in fields["hash_ids"]]
        timestamp = float(fields["timestamp"])
        if not math.isfinite(timestamp):
            raise ValueError("timestamp must be finite")
        return timestamp, np.array(blocks, np.int32)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(
            f"{place} must be a JSON object with timestamp and hash_ids, got {line.strip()[:80]}"
        ) from error
