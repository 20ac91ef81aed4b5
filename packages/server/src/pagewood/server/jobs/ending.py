"""The end of a batch: its results become two files, one with answers and one with errors."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pagewood.server.jobs.lines import Failure, Line, Result, texts
from pagewood.server.jobs.objects import BatchUsage, InputDetails, OutputDetails

_OK = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What has become of the lines of a batch."""

    num_answered: int
    num_failed: int
    usage: BatchUsage


def divide(results: Path, *, answers: Path, errors: Path, expired: Iterable[Line] = ()) -> Ended:
    """Write results to a file of answers and a file of errors, and return their counts.

    Args:
        results: of the lines that were sent; need not exist.
        answers: written.
        errors: written.
        expired: lines that were not sent in time; each gets an error.
    """
    num_answered = num_failed = 0
    counts = [0, 0, 0, 0]
    with answers.open("wb") as good, errors.open("wb") as bad:
        for _, text in texts(results) if results.exists() else ():
            result = msgspec.json.decode(text, type=Result)
            if result.response is not None and result.response.status_code == _OK:
                num_answered += 1
                good.write(text)
                counts = [sum(pair) for pair in zip(counts, _counts(result.response.body), strict=True)]
            else:
                num_failed += 1
                bad.write(text)
        for line in expired:
            num_failed += 1
            bad.write(msgspec.json.encode(_expired(line)) + b"\n")
        for file in (good, bad):
            file.flush()
            os.fsync(file.fileno())
    num_input, num_cached, num_output, num_reasoning = counts
    usage = BatchUsage(
        input_tokens=num_input,
        input_tokens_details=InputDetails(cached_tokens=num_cached),
        output_tokens=num_output,
        output_tokens_details=OutputDetails(reasoning_tokens=num_reasoning),
        total_tokens=num_input + num_output,
    )
    return Ended(num_answered=num_answered, num_failed=num_failed, usage=usage)


def _expired(line: Line) -> Result:
    message = "This request could not be executed before the completion window expired."
    return Result(
        id=f"batch_req_{uuid.uuid4().hex}",
        custom_id=line.custom_id,
        response=None,
        error=Failure(code="batch_expired", message=message),
    )


def _counts(body: msgspec.Raw) -> tuple[int, int, int, int]:
    """Return tokens of the input, those of them that were cached, of the output, and those of them of reasoning."""
    usage: dict[str, Any] = msgspec.json.decode(body).get("usage") or {}
    prompt: dict[str, Any] = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    output: dict[str, Any] = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
    return (
        usage.get("prompt_tokens", usage.get("input_tokens", 0)),
        prompt.get("cached_tokens") or 0,
        usage.get("completion_tokens", usage.get("output_tokens", 0)),
        output.get("reasoning_tokens") or 0,
    )
