"""Settings of a server."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pagewood.engine.api import EngineConfig
from pagewood.engine.images.limits import ImageLimits
from pagewood.server.http.limits import HttpLimits, default_max_connections, possible_connections
from pagewood.server.keys.key import ApiKey
from pagewood.server.metrics.metrics import COMPAT, Compat
from pagewood.server.observe import logs
from pagewood.server.replicas.division import address_of_each, check_fleet, cuda_devices, engine_of_each, num_cores

_IMAGES = ImageLimits()
_IMAGE_HOST = re.compile(r"(\*\.)?[A-Za-z0-9._-]+(:[0-9]{1,5})?")
_HOST = re.compile(r"\*|(\*\.)?[A-Za-z0-9._-]+")
_EVENTS_ADDRESS = re.compile(r"tcp://[^/]+:(\d+|\*)|ipc://.+")
_OTLP_URL = re.compile(r"https?://[^/?#\s]+(/[^?#\s]*)?")
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)*")
_ORIGIN = re.compile(r"\*|null|[A-Za-z][A-Za-z0-9+.-]*://[^/?#]+/?")

LEAST_PRIORITY = -(2**31 - 1)
JOB_DISTANCE = 2**30
"""Distance of priorities from which a request preempts another one, if batches run and the operator gives none: a line
of a batch, and hardly anything else."""
MAX_PORT = 65535
MIN_WATCHDOG_S = 3.0
"""The engine sends a pulse once per second; a shorter limit would end it while it works."""


def _can_trace() -> bool:
    try:
        return all(map(find_spec, ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")))
    except ModuleNotFoundError:  # a parent package is missing
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """All settings of a server.

    Raises:
        ValueError: a field is out of its range.
    """

    engine: EngineConfig = field(default_factory=EngineConfig)
    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free port."""
    served_model_name: str
    """Clients' name of the model."""
    model_folder: Path
    """Folder with the tokenizer and the configuration of the model."""
    adapter_folders: tuple[Path, ...] = ()
    """Admins may load adapters that lie below these; empty: none."""
    update_folders: tuple[Path, ...] = ()
    """Admins may update weights from files below these; empty: from none."""
    replicas: int = 1
    """Engines that serve the model, each with cores and KV memory of its own."""
    prefill_replicas: int = 0
    """Those of them that only compute prompts, for the others, which find them in `EngineConfig.remote_cache`."""
    tokenizer_workers: int = 1
    """Tokenizer processes."""
    http_processes: int = 1
    """Processes that take connections; the first one answers the requests of all."""
    max_queued: int = 1024
    """Requests that may be queued beyond those that run."""
    max_body_bytes: int = 16 * 1024 * 1024
    """Longest request body."""
    image_hosts: tuple[str, ...] = ()
    """Hosts from which images are fetched; empty: from none."""
    image_timeout_s: float = 10.0
    """How long fetching an image may take, seconds."""
    max_images: int = _IMAGES.max_images
    """Images of a request."""
    max_image_bytes: int = _IMAGES.max_bytes
    """Longest file of an image."""
    max_image_pixels: int = _IMAGES.max_pixels
    """Most pixels of an image, as its file says."""
    max_connections: int | None = None
    """Open connections of each HTTP process; None: as many as the process's limit of open files allows."""
    allowed_hosts: tuple[str, ...] = ()
    """Further host names under which clients reach the server; `*.example.com` and `*` are patterns."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may use the server, or `*`."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses or networks of proxies whose `X-Forwarded-For` and `X-Forwarded-Proto` name the client."""
    root_path: str = ""
    """Prefix under which a proxy shows the server, such as `/llm`; empty: none."""
    api_keys: tuple[ApiKey, ...] = ()
    """Keys that do not come from `api_key_file`."""
    api_key_file: Path | None = None
    """Read at the start and again at every SIGHUP."""
    insecure_no_keys: bool = False
    """Whether the server may listen beyond loopback without keys."""
    tls_cert: Path | None = None
    """Certificate chain in PEM."""
    tls_key: Path | None = None
    """Its private key in PEM, without a passphrase."""
    batch_store: Path | None = None
    """Folder with the files and batches of clients; None: the server keeps none."""
    batch_store_gb: float = 10.0
    """Most space of uploaded files, GB (1e9 bytes)."""
    batch_lines: int = 16
    """Lines of batches under way at a time."""
    batch_lines_beside: int = 0
    """Those of them that go on while a model has other requests; the rest waits."""
    drain_s: float = 5.0
    """How long running requests may continue when the server stops, seconds."""
    watchdog_s: float | None = None
    """An engine that is stuck for this long is ended and started again, seconds; None: it is reported only."""
    max_retries: int = 3
    """How often in a row a request is sent again, without having got on, because a process died that held it. It goes
    on behind what its client has. 0: it then ends with an error."""
    restart_order: Literal["auto", "new-first", "old-first"] = "auto"
    """new-first: an engine process that is replaced works until the next one has loaded beside it; old-first: it ends
    first, so that there need not be memory for two; auto: the former, unless something has one owner."""
    max_quick_deaths: int = 10
    """Deaths of one process in a row, each soon after its start, after which the server ends."""
    max_ttft_s: float | None = None
    """Requests whose first token is predicted to come later are refused, seconds; None: no limit."""
    log_level: str = "info"
    """Lowest level that the log of every process shows: debug, info, warning or error."""
    log_format: logs.LogFormat = "text"
    """One line of text, or one JSON object, for each record."""
    metrics: bool = True
    """Whether `/metrics` is served."""
    metrics_compat: tuple[Compat, ...] = ()
    """Servers under whose names `/metrics` shows the series, too: vllm, sglang."""
    otlp_endpoint: str | None = None
    """URL of an OTLP receiver over HTTP that gets traces, such as `http://localhost:4318`; None: nothing is traced."""
    dashboard_text: bool = False
    """Whether the dashboard shows the text of cached prompts."""

    kv_events: str | None = None
    """Address at which the engine process publishes the changes of its prefix cache, host tier and disk tier, such as
    `tcp://*:5557`. Replica N has the port plus N, or the path with -N behind it."""
    kv_events_replay: str | None = None
    """Address at which it repeats batches that a subscriber has lost; of replica N in the same way."""
    kv_events_form: Literal["map", "array"] = "map"
    """How events are written: vLLM's maps, or arrays for older readers."""
    kv_events_topic: str = ""
    """First frame of each message, by which subscribers choose, such as `kv@pod-1@my-model` for llm-d."""
    gateway_headers: bool = False
    """Whether the headers of llm-d's gateway count: service levels, fairness id and objective."""
    inference_objectives: tuple[tuple[str, int], ...] = ()
    """Names of objectives that the gateway may send, and their priorities."""

    def __post_init__(self) -> None:
        if self.kv_events is None and self.kv_events_replay is not None:
            raise ValueError("kv_events must be given with kv_events_replay")
        if self.kv_events is None and self.kv_events_topic:
            raise ValueError(f"kv_events must be given with kv_events_topic, got {self.kv_events_topic!r} alone")
        if self.inference_objectives and not self.gateway_headers:
            raise ValueError("gateway_headers must be true for inference_objectives")
        names = [name for name, _ in self.inference_objectives]
        if len(set(names)) < len(names) or "" in names:
            raise ValueError(f"inference_objectives must have different names, none empty, got {', '.join(names)!r}")
        if self.kv_events is not None and not self.engine.prefix_cache:
            raise ValueError("prefix_cache must be true for kv_events")
        if self.kv_events is not None and self.engine.enable_dp_attention:
            raise ValueError(f"kv_events must be None with enable_dp_attention, got {self.kv_events!r}")
        for name in ("kv_events", "kv_events_replay"):
            address = getattr(self, name)
            if address is not None and not _EVENTS_ADDRESS.fullmatch(address):
                raise ValueError(f"{name} must be like tcp://*:5557 or ipc:///path, got {address!r}")
        if self.kv_events_form not in ("map", "array"):
            raise ValueError(f"kv_events_form must be map or array, got {self.kv_events_form!r}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key must be given together")
        if not (self.has_keys or self.is_local or self.insecure_no_keys):
            raise ValueError(
                f"host must be a loopback address without API keys, got {self.host!r}: give keys with --api-key-file "
                "or PAGEWOOD_API_KEY, or let everyone in who reaches the port with --insecure-no-keys"
            )
        if self.has_keys and self.insecure_no_keys:
            raise ValueError("insecure_no_keys must be false with API keys")
        if not 0 <= self.port <= MAX_PORT:
            raise ValueError(f"port must be in [0, {MAX_PORT}], got {self.port}")
        for name in ("replicas", "tokenizer_workers", "http_processes", "max_body_bytes", "max_connections"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        self._check_replicas()
        self._check_batches()
        self._check_images()
        for name in ("drain_s", "max_retries"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        if self.restart_order not in ("auto", "new-first", "old-first"):
            raise ValueError(f"restart_order must be auto, new-first or old-first, got {self.restart_order!r}")
        if self.restart_order == "new-first" and self.has_one_owner:
            raise ValueError(
                "restart_order must be auto or old-first with kv_events, disk_cache_path or decision_log, which one "
                "engine process has at a time, got 'new-first'"
            )
        if self.max_quick_deaths < 1:
            raise ValueError(f"max_quick_deaths must be >= 1, got {self.max_quick_deaths}")
        if self.watchdog_s is not None and not self.watchdog_s >= MIN_WATCHDOG_S:
            raise ValueError(f"watchdog_s must be >= {MIN_WATCHDOG_S:g}, got {self.watchdog_s}")
        if self.max_ttft_s is not None and not self.max_ttft_s > 0:
            raise ValueError(f"max_ttft_s must be > 0, got {self.max_ttft_s}")
        possible = possible_connections()
        if self.max_connections is not None and possible is not None and self.max_connections > possible:
            raise ValueError(
                f"max_connections must be <= {possible} here, because `ulimit -n` allows no more open files, "
                f"got {self.max_connections}"
            )
        if self.max_queued < 0:
            raise ValueError(f"max_queued must be >= 0, got {self.max_queued}")
        if self.log_level not in logs.LEVELS:
            raise ValueError(f"log_level must be one of {', '.join(logs.LEVELS)}, got {self.log_level!r}")
        if self.log_format not in logs.FORMATS:
            raise ValueError(f"log_format must be one of {', '.join(logs.FORMATS)}, got {self.log_format!r}")
        for name in self.metrics_compat:
            if name not in COMPAT:
                raise ValueError(f"metrics_compat must have names of {', '.join(COMPAT)}, got {name!r}")
        if self.metrics_compat and not self.metrics:
            raise ValueError(f"metrics must be true for metrics_compat, got {', '.join(self.metrics_compat)}")
        if self.otlp_endpoint is not None and not _OTLP_URL.fullmatch(self.otlp_endpoint):
            raise ValueError(f"otlp_endpoint must be like http://localhost:4318, got {self.otlp_endpoint!r}")
        if self.otlp_endpoint is not None and not _can_trace():
            raise ValueError("otlp_endpoint needs the extra pagewood-server[otel], which is not installed")
        if self.otlp_endpoint is not None and not self.metrics:
            raise ValueError("metrics must be true for otlp_endpoint: traces are made of what is measured")
        if not self.served_model_name:
            raise ValueError("served_model_name must not be empty")
        for host in self.allowed_hosts:
            if not _HOST.fullmatch(host):
                raise ValueError(f"allowed_hosts must be names without scheme, port or path, got {host!r}")
        for proxy in self.trusted_proxies:
            try:
                ipaddress.ip_network(proxy)
            except ValueError as error:
                raise ValueError(f"trusted_proxies must be addresses or networks, got {proxy!r}: {error}") from error
        if not _ROOT_PATH.fullmatch(self.root_path) or {".", ".."} & {*self.root_path.split("/")}:
            raise ValueError(f"root_path must be like /llm, without a slash at its end, got {self.root_path!r}")
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"allowed_origins must be '*' or like 'https://chat.example.com', without path, got {origin!r}"
                )
        for name in ("config.json", "tokenizer.json"):
            if not (self.model_folder / name).is_file():
                raise ValueError(f"model must be a folder with a {name}, got {str(self.model_folder)!r}")

    def _check_batches(self) -> None:
        most = max(1, self.engine.num_rows // 2)
        if self.batch_store is not None and not 1 <= self.batch_lines <= most:
            raise ValueError(
                f"batch_lines must be in [1, {most}], half of the requests computed together, got {self.batch_lines}"
            )
        if not 0 <= self.batch_lines_beside <= self.batch_lines:
            raise ValueError(
                f"batch_lines_beside must be in [0, batch_lines = {self.batch_lines}], got {self.batch_lines_beside}"
            )
        if not self.batch_store_gb > 0:
            raise ValueError(f"batch_store_gb must be > 0, got {self.batch_store_gb}")
        if self.batch_store is not None and self.engine.schedule_policy == "priority-low":
            raise ValueError(
                "batch_store must be None with schedule_policy 'priority-low', which admits the least important "
                f"requests first, got {str(self.batch_store)!r}"
            )

    def _check_images(self) -> None:
        for name in ("max_images", "max_image_bytes", "max_image_pixels"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if not 0 < self.image_timeout_s < float("inf"):
            raise ValueError(f"image_timeout_s must be > 0 and finite, got {self.image_timeout_s}")
        for host in self.image_hosts:
            if not _IMAGE_HOST.fullmatch(host):
                raise ValueError(f"image_hosts must be like images.example.com or *.example.com:8080, got {host!r}")

    @property
    def image_limits(self) -> ImageLimits:
        """What an image may be."""
        return ImageLimits(max_images=self.max_images, max_bytes=self.max_image_bytes, max_pixels=self.max_image_pixels)

    @property
    def job_priority(self) -> int:
        """Priority of the lines of batches: no request has a less important one."""
        return LEAST_PRIORITY if not self.engine.low_priority_first else -LEAST_PRIORITY

    def _check_replicas(self) -> None:
        num_prefill = self.prefill_replicas
        check_fleet(
            self.engine,
            num_replicas=self.replicas,
            num_prefill=num_prefill,
            num_cores=num_cores(),
            num_devices=len(cuda_devices()),
        )
        for number in range(self.replicas) if self.replicas > 1 else ():
            engine_of_each(self.engine, number, num_replicas=self.replicas, num_prefill=num_prefill)
        addresses = [
            address_of_each(address, number)
            for address in (self.kv_events, self.kv_events_replay)
            for number in range(self.replicas)
            if address is not None and not address.endswith(":*")
        ]
        if len({*addresses}) < len(addresses):
            raise ValueError(
                "kv_events and kv_events_replay must leave each replica addresses of its own, with its number added to "
                f"the port, got {self.kv_events!r} and {self.kv_events_replay!r}"
            )
        if any(one.startswith("tcp://") and int(one.rpartition(":")[2]) > MAX_PORT for one in addresses):
            raise ValueError(
                f"kv_events and kv_events_replay must have ports of at most {MAX_PORT} for all replicas, "
                f"got {self.kv_events!r} and {self.kv_events_replay!r}"
            )

    @property
    def has_keys(self) -> bool:
        """Whether clients need an API key."""
        return bool(self.api_keys) or self.api_key_file is not None

    @property
    def has_one_owner(self) -> bool:
        """Whether something can belong to one engine process only."""
        return any(one is not None for one in (self.kv_events, self.engine.disk_cache_path, self.engine.decision_log))

    @property
    def restarts_beside(self) -> bool:
        """Whether an engine process that is replaced works until the next one has loaded."""
        return self.restart_order != "old-first" and not self.has_one_owner

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def http_limits(self) -> HttpLimits:
        """Return the limits of the HTTP process."""
        return HttpLimits(
            max_connections=self.max_connections or default_max_connections(),
            max_body_bytes=self.max_body_bytes,
            max_buffered_bytes=16 * self.max_body_bytes,
        )
