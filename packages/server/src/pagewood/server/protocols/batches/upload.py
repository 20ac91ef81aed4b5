"""An uploaded file: the form in which it comes, written to the store without being held in memory."""

from __future__ import annotations

import asyncio
import re
import shutil
from pathlib import Path
from typing import Any

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from pagewood.server.http.bodies import Bodies
from pagewood.server.http.errors import ApiError
from pagewood.server.http.validation import validated
from pagewood.server.protocols.batches.bodies import UploadForm

FORM_BYTES = 64 * 1024
"""Bytes that a form may have beside the content of its file."""
_MAX_FIELDS = 8
_NESTED = re.compile(r"(\w+)\[(\w+)\]")


async def receive(request: Request, bodies: Bodies, upload: Path, *, max_bytes: int) -> tuple[UploadForm, str]:
    """Write an uploaded file to `upload`, and return the form and the name of the file.

    Raises:
        ApiError: the body is no form with a file, a field is wrong, or the file is longer than `max_bytes`.
        ClientDisconnect: the client left before the body was complete.
    """
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "multipart/form-data":
        raise ApiError(
            f"The Content-Type of an upload must be 'multipart/form-data', but got '{kind[:200]}'.",
            status=415,
            code="unsupported_media_type",
        )
    body = bodies.stream(request, max_bytes=max_bytes + FORM_BYTES)
    parser = MultiPartParser(request.headers, body, max_files=1, max_fields=_MAX_FIELDS, max_part_size=FORM_BYTES)
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise ApiError(f"We could not parse the form of your request: {error.message}", code="invalid_form") from error
    try:
        said = validated(UploadForm, _nested(form.multi_items()))
        file: object = said.file
        if not isinstance(file, UploadFile):
            raise ApiError("Invalid type for 'file': expected a file.", param="file", code="invalid_type")
        if (file.size or 0) > max_bytes:
            raise ApiError(
                f"Invalid value for 'file': expected at most {max_bytes} bytes, but got {file.size} instead.",
                status=413,
                param="file",
                code="file_too_large",
            )
        source = file.file
        await asyncio.to_thread(_copy, source, upload)
        return said, file.filename or "file"
    finally:
        await form.close()


def _copy(source: Any, target: Path) -> None:
    with target.open("wb") as out:
        shutil.copyfileobj(source, out)


def _nested(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields of a form; `name[part]` becomes an object, and its digits a number."""
    found: dict[str, Any] = {}
    for name, value in items:
        if isinstance(value, str) and value.isascii() and value.isdecimal():
            value = int(value[:18])
        match = _NESTED.fullmatch(name)
        if match is None:
            found[name] = value
        elif isinstance(inner := found.setdefault(match[1], {}), dict):
            inner[match[2]] = value
    return found
