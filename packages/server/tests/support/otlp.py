"""A receiver of OpenTelemetry's protocol over HTTP, in a thread."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class OtlpReceiver:
    """Keeps the spans that it is sent, as protobuf messages; use it as a context."""

    def __init__(self) -> None:
        self.spans: list[Any] = []  # written by: do_POST
        self.resources: list[dict[str, Any]] = []  # written by: do_POST
        self.paths: list[str] = []  # written by: do_POST
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                message = ExportTraceServiceRequest.FromString(body)
                receiver.paths.append(self.path)
                for resource_spans in message.resource_spans:
                    receiver.resources.append(attributes_of(resource_spans.resource))
                    for scope in resource_spans.scope_spans:
                        receiver.spans += scope.spans
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> OtlpReceiver:
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def attributes_of(message: Any) -> dict[str, Any]:
    """Return the attributes of a span or a resource as plain values."""
    return {one.key: _value(one.value) for one in message.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)
