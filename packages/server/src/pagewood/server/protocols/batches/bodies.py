"""Bodies and answers of the routes for files and batches."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from pagewood.server.http.field_limits import Id
from pagewood.server.http.validation import WHOLE
from pagewood.server.jobs.lines import Endpoint
from pagewood.server.jobs.objects import Batch, FileObject

_HOUR_S, _MONTH_S = 3_600, 2_592_000


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ExpiresAfter(_Strict):
    """How long a file is kept."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=_HOUR_S, le=_MONTH_S), WHOLE]


class BatchRequest(_Strict):
    """A batch to create."""

    input_file_id: Id
    """A file with the purpose `batch`: a request in each line."""
    endpoint: Endpoint
    """The `url` of all lines."""
    completion_window: Literal["24h"]
    """Lines without an answer by then get the error `batch_expired`."""
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = None
    output_expires_after: ExpiresAfter | None = None
    """How long the files of the results are kept; by default until they are deleted."""


class UploadForm(_Strict):
    """A file to keep, as a form."""

    file: Annotated[Any, Field(json_schema_extra={"type": "string", "format": "binary"})]
    purpose: Literal["batch"]
    expires_after: ExpiresAfter | None = None
    """How long it is kept, as the fields `expires_after[anchor]` and `expires_after[seconds]`; by default until it is
    deleted."""


class FileList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of files."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of batches."""

    object: Literal["list"] = "list"
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that is gone."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True
