"""The endpoints of files and batches."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from functools import partial

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from pagewood.server.http.errors import ApiError
from pagewood.server.http.operations import Operation
from pagewood.server.http.validation import parser
from pagewood.server.jobs.objects import Batch, FileObject, StoredBatch, StoredFile
from pagewood.server.jobs.store import MAX_BATCHES, MAX_FILES
from pagewood.server.jobs.worker import JobWorker
from pagewood.server.keys.caller import current_caller
from pagewood.server.protocols.batches.bodies import (
    BatchList,
    BatchRequest,
    DeletedFile,
    FileList,
    UploadForm,
)
from pagewood.server.protocols.batches.upload import receive
from pagewood.server.protocols.common.models import Models
from pagewood.server.protocols.common.paging import read_page
from pagewood.server.protocols.common.respond import json_response

MAX_FILE_BYTES = 200 * 1024 * 1024
"""Longest file."""
WINDOW_S = 86_400
"""How long a batch may take, seconds."""
TAG = "Batches"
_MAX_FILES_LISTED, _MAX_BATCHES_LISTED, _BATCHES_LISTED = 10_000, 100, 20
_LONGEST_NAME = 255
_FILE, _BATCH = "/v1/files/{id}", "/v1/batches/{id}"
_AFTER = {"type": "string", "description": "The id of the last item of the page before."}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEndpoints:
    """Files and batches. A caller sees those of its tenant."""

    models: Models
    jobs: JobWorker | None
    """Keeps and runs them; None: the server was started without a store, and all routes answer 404."""

    def operations(self) -> list[Operation]:
        """Return the operations."""
        operation = partial(Operation, tag=TAG)
        return [
            operation(
                name="CreateFile", path="/v1/files", endpoint=self.create_file,
                body=UploadForm, body_type="multipart/form-data", answer=FileObject, statuses=(507,),
            ),
            operation(
                name="ListFiles", method="GET", path="/v1/files", endpoint=self.list_files,
                query={
                    "purpose": {"type": "string"},
                    "limit": _limit(_MAX_FILES_LISTED, _MAX_FILES_LISTED),
                    "order": {"enum": ["asc", "desc"], "default": "desc"},
                    "after": _AFTER,
                },
                answer=FileList, statuses=(404,),
            ),
            operation(
                name="GetFile", method="GET", path=_FILE, endpoint=self.get_file,
                answer=FileObject, statuses=(404,),
            ),
            operation(
                name="GetFileContent", method="GET", path=f"{_FILE}/content", endpoint=self.get_content,
                answer=str, answer_type="application/octet-stream", statuses=(404,),
            ),
            operation(
                name="DeleteFile", method="DELETE", path=_FILE, endpoint=self.delete_file,
                answer=DeletedFile, statuses=(404,),
            ),
            operation(
                name="CreateBatch", path="/v1/batches", endpoint=self.create_batch,
                body=BatchRequest,
                example={
                    "input_file_id": "file-0123456789abcdef",
                    "endpoint": "/v1/chat/completions",
                    "completion_window": "24h",
                },
                answer=Batch,
            ),
            operation(
                name="ListBatches", method="GET", path="/v1/batches", endpoint=self.list_batches,
                query={"limit": _limit(_MAX_BATCHES_LISTED, _BATCHES_LISTED), "after": _AFTER},
                answer=BatchList, statuses=(404,),
            ),
            operation(
                name="GetBatch", method="GET", path=_BATCH, endpoint=self.get_batch,
                answer=Batch, statuses=(404,),
            ),
            operation(
                name="CancelBatch", path=f"{_BATCH}/cancel", endpoint=self.cancel_batch,
                answer=Batch,
            ),
        ]  # fmt: skip

    async def create_file(self, request: Request) -> Response:
        """Keep a file for batches. It comes as a form with the fields `file` and `purpose`."""
        store, tenant = self._jobs().store, current_caller().tenant
        left = store.max_bytes - store.num_bytes
        if left <= 0 or len(store.files(tenant)) >= MAX_FILES:
            raise ApiError(
                f"There is no room for another file: all may have {store.max_bytes} bytes, and those of a key "
                f"{MAX_FILES} files. Delete some.",
                status=507,
                code="store_full",
            )
        upload = store.new_upload()
        try:
            said, name = await receive(request, self.models.reader.bodies, upload, max_bytes=min(MAX_FILE_BYTES, left))
            now_s = store.now_s
            shown = FileObject(
                id=f"file-{uuid.uuid4().hex}",
                bytes=upload.stat().st_size,
                created_at=now_s,
                expires_at=None if said.expires_after is None else now_s + said.expires_after.seconds,
                filename=name[-_LONGEST_NAME:],
                purpose="batch",
            )
            store.add_file(upload, shown, tenant)
        finally:
            upload.unlink(missing_ok=True)
        return json_response(shown)

    async def list_files(self, request: Request) -> Response:
        """List the files, the latest first."""
        page = read_page(request, most=_MAX_FILES_LISTED, default=_MAX_FILES_LISTED)
        purpose = request.query_params.get("purpose")
        own = [one.shown for one in self._jobs().store.files(current_caller().tenant)]
        found = page.cut([one for one in own if purpose in (None, one.purpose)], lambda one: one.id)
        first, last = (found.shown[0].id, found.shown[-1].id) if found.shown else (None, None)
        return json_response(FileList(data=found.shown, first_id=first, last_id=last, has_more=found.has_more))

    async def get_file(self, request: Request) -> Response:
        """Return what is known of a file."""
        return json_response(self._file(request).shown)

    async def get_content(self, request: Request) -> Response:
        """Return the content of a file."""
        id = self._file(request).shown.id
        return FileResponse(self._jobs().store.content(id), media_type="application/octet-stream")

    async def delete_file(self, request: Request) -> Response:
        """Delete a file. Batches that were created with it go on."""
        id = self._file(request).shown.id
        self._jobs().store.delete_file(id)
        return json_response(DeletedFile(id=id))

    async def create_batch(self, request: Request) -> Response:
        """Have the requests of a file answered. They are checked first, and run when there are no others."""
        jobs, caller = self._jobs(), current_caller()
        said = await self.models.reader.read(request, parser(BatchRequest))
        file = jobs.store.file(said.input_file_id, caller.tenant)
        if file is None or file.shown.purpose != "batch":
            raise ApiError(
                f"Invalid value for 'input_file_id': no file '{said.input_file_id[:100]}' with the purpose 'batch'.",
                param="input_file_id",
                code="invalid_value",
            )
        now_s = jobs.store.now_s
        shown = Batch(
            id=f"batch_{uuid.uuid4().hex}",
            endpoint=said.endpoint,
            input_file_id=said.input_file_id,
            created_at=now_s,
            expires_at=now_s + WINDOW_S,
            metadata=said.metadata,
        )
        kept = said.output_expires_after
        expires_s = None if kept is None else kept.seconds
        if not jobs.store.add_batch(shown, tenant=caller.tenant, key=caller.name, output_expires_s=expires_s):
            raise ApiError(
                f"{MAX_BATCHES} batches have not ended yet; try again later.",
                status=429,
                type="rate_limit_error",
                code="too_many_batches",
            )
        jobs.added()
        return json_response(shown)

    async def list_batches(self, request: Request) -> Response:
        """List the batches, the latest first."""
        page = read_page(request, most=_MAX_BATCHES_LISTED, default=_BATCHES_LISTED)
        found = page.cut([one.shown for one in self._jobs().store.batches(current_caller().tenant)], lambda one: one.id)
        first, last = (found.shown[0].id, found.shown[-1].id) if found.shown else (None, None)
        return json_response(BatchList(data=found.shown, first_id=first, last_id=last, has_more=found.has_more))

    async def get_batch(self, request: Request) -> Response:
        """Return a batch as it is now."""
        return json_response(self._batch(request).shown)

    async def cancel_batch(self, request: Request) -> Response:
        """Cancel a batch. What has been answered by then is kept in its files."""
        stored = self._batch(request)
        if stored.shown.status in ("validating", "in_progress"):
            stored = self._jobs().cancel(stored)
        elif stored.shown.status != "cancelling":
            raise ApiError(f"Cannot cancel a batch with status '{stored.shown.status}'.", code="not_cancellable")
        return json_response(stored.shown)

    def _jobs(self) -> JobWorker:
        if self.jobs is None:
            raise ApiError(
                "This server keeps no files and batches: it was started without --batch-store.",
                status=404,
                code="not_available",
            )
        return self.jobs

    def _file(self, request: Request) -> StoredFile:
        id: str = request.path_params["id"]
        found = self._jobs().store.file(id, current_caller().tenant)
        if found is None:
            raise ApiError(f"No such File object: {id[:100]}", status=404, param="id", code="file_not_found")
        return found

    def _batch(self, request: Request) -> StoredBatch:
        id: str = request.path_params["id"]
        found = self._jobs().store.batch(id)
        if found is None or found.tenant != current_caller().tenant:
            raise ApiError(f"No batch found with id '{id[:100]}'.", status=404, param="id", code="batch_not_found")
        return found


def _limit(most: int, default: int) -> dict[str, object]:
    return {"type": "integer", "minimum": 1, "maximum": most, "default": default}
