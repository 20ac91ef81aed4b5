"""The settings of a server by subject, as the log at the start shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SUBJECTS: Mapping[str, Sequence[str]] = {
    "model": ("served_model_name", "model_folder", "adapter_folders", "update_folders"),
    "network": (
        *("host", "port", "root_path", "tls_cert", "tls_key", "allowed_hosts", "allowed_origins", "trusted_proxies"),
        *("max_connections", "max_body_bytes", "gateway_headers", "inference_objectives"),
    ),
    "access": ("api_key_file", "insecure_no_keys"),
    "processes": (
        *(
            "replicas",
            "prefill_replicas",
            "tokenizer_workers",
            "http_processes",
            "drain_s",
            "watchdog_s",
            "max_retries",
        ),
        *("restart_order", "max_quick_deaths"),
    ),
    "images": ("image_hosts", "image_timeout_s", "max_images", "max_image_bytes", "max_image_pixels"),
    "queue": ("max_queued", "max_ttft_s"),
    "batches": ("batch_store", "batch_store_gb", "batch_lines", "batch_lines_beside"),
    "logs and metrics": (*("log_level", "log_format", "metrics", "metrics_compat", "otlp_endpoint", "dashboard_text"),),
    "KV events": ("kv_events", "kv_events_replay", "kv_events_form", "kv_events_topic"),
}
"""Subject -> names of its settings; each setting has one subject, but for the engine's and the keys."""
