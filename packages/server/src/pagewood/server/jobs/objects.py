"""OpenAI's objects of files and batches, and what the store keeps with them."""

from __future__ import annotations

from typing import Literal

import msgspec

from pagewood.server.jobs.lines import Endpoint, WrongLine

Purpose = Literal["batch", "batch_output"]
State = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
OPEN: frozenset[State] = frozenset({"validating", "in_progress", "finalizing", "cancelling"})
"""States that another one follows."""


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    """A file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    """Unix time, seconds."""
    expires_at: int | None = None
    """When it is deleted, Unix time; null: at no time."""
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"
    status_details: None = None


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Lines of a batch."""

    total: int = 0
    completed: int = 0
    """Answered with 200."""
    failed: int = 0
    """Answered with an error."""


class InputDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of the input."""

    cached_tokens: int = 0


class OutputDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of the output."""

    reasoning_tokens: int = 0


class BatchUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of all lines that have answers."""

    input_tokens: int = 0
    input_tokens_details: InputDetails = InputDetails()
    output_tokens: int = 0
    output_tokens_details: OutputDetails = OutputDetails()
    total_tokens: int = 0


class BatchErrors(msgspec.Struct, frozen=True, kw_only=True):
    """Why a batch has failed."""

    object: Literal["list"] = "list"
    data: list[WrongLine]


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch. Times are Unix times in seconds, null if that has not happened."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: Endpoint
    model: str | None = None
    """The model of all lines; null: not read yet, or lines name several."""
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str = "24h"
    status: State = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    usage: BatchUsage | None = None
    """Null until it has ended."""
    metadata: dict[str, str] | None = None


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file with its owner."""

    shown: FileObject
    tenant: str
    number: int
    """Grows with every object of the store."""


class StoredBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch with its owner."""

    shown: Batch
    tenant: str
    key: str
    """Name of the key that created it; empty: the server had no keys."""
    number: int
    output_expires_s: int | None = None
    """How long the files of its results are kept, seconds; None: until they are deleted."""
