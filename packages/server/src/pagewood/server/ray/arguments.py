"""The arguments of the application, and the configuration that follows from them."""

from __future__ import annotations

import argparse
import contextlib
import io
import shlex
from dataclasses import replace

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pagewood.engine.model_folder.folder import model_name
from pagewood.server.cli.options.engine import engine_config
from pagewood.server.cli.options.page import Page
from pagewood.server.cli.serve import add_options, configs_of
from pagewood.server.config import ServeConfig
from pagewood.server.models.pool_config import DEFAULTS as NO_POOL

DRAIN_S = 600.0
"""Default of `--drain-seconds`: how long a replica that Ray Serve ends may keep what cannot move."""

COUNTED_APART = "each ingress would count what a tenant has for itself"

_REASONS = {
    "Ray Serve does this": (
        *("host", "port", "tls_cert", "tls_key", "trusted_proxies", "max_connections", "http_processes"),
        *("replicas", "restart_order", "max_quick_deaths", "watchdog_s"),
    ),
    "replicas of one host would share it": ("disk_cache_path", "decision_log"),
    "replicas have one role": ("prefill_replicas", "role"),
    "a replica is on one host": ("nnodes", "node_rank"),
    "an application serves one model, given by model=": ("path", "model", "models_dir", *NO_POOL),
    "a replica that starts later would lack what was loaded": ("adapter_folders", "update_folders"),
    "an ingress has no folder of its own": ("batch_store",),
    "traces are not made here": ("otlp_endpoint",),
    "each host must have the folder of the model": ("offline", "merge_adapter"),
}
_REFUSED = {name: reason for reason, names in _REASONS.items() for name in names}
"""Options that are refused, with the reason."""


class Arguments(BaseModel):
    """Arguments of `serve run pagewood.server.ray:app NAME=VALUE ...`; docs/howto/ray.md describes them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = None
    options: str = ""
    num_replicas: int | None = Field(default=None, ge=1)
    min_replicas: int | None = Field(default=None, ge=0)
    max_replicas: int | None = Field(default=None, ge=1)
    target_load: float = Field(default=0.8, gt=0, le=1)
    target_kv_use: float = Field(default=0.8, gt=0, le=1)
    upscale_delay_s: float = Field(default=10.0, ge=0)
    downscale_delay_s: float = Field(default=300.0, ge=0)
    look_back_s: float = Field(default=30.0, gt=0)
    num_cpus: float = Field(default=1.0, gt=0)
    num_gpus: float = Field(default=0.0, ge=0)
    resources: dict[str, float] = {}
    num_ingress: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _check(self) -> Arguments:
        if (self.min_replicas is None) != (self.max_replicas is None):
            raise ValueError("min_replicas and max_replicas must be given together")
        if self.min_replicas is not None and self.num_replicas is not None:
            raise ValueError(f"num_replicas must not be given with min_replicas, got {self.num_replicas}")
        return self

    @property
    def most_replicas(self) -> int:
        """Most engines that work at a time, but for those that replace others."""
        return self.max_replicas or self.num_replicas or 1


def config_of(arguments: Arguments) -> ServeConfig:
    """Return the configuration of the server; raise ValueError if an option is wrong, or has no meaning here."""
    given, unset = _parsed(shlex.split(arguments.options)), _parsed([])
    for name, reason in _REFUSED.items():
        if getattr(given, name, None) != getattr(unset, name, None):
            raise ValueError(f"options must not set {name}, got {getattr(given, name)!r}: {reason}")
    for name in ("kv_events", "kv_events_replay"):
        address: str | None = getattr(given, name)
        if address is not None and not (address.startswith("tcp://") and address.endswith(":*")):
            raise ValueError(f"options must set {name} to tcp://HOST:*, a free port for each replica, got {address!r}")
    engine = engine_config(given, model=arguments.model)
    if engine.quotas and arguments.num_ingress > 1:
        raise ValueError(f"num_ingress must be 1 with --quota, got {arguments.num_ingress}: {COUNTED_APART}")
    if engine.num_threads is None:
        engine = replace(engine, num_threads=max(1, int(arguments.num_cpus)))
    if engine.device == "cuda" and not arguments.num_gpus:
        raise ValueError(f"num_gpus must be > 0 with --device cuda, got {arguments.num_gpus}")
    names: list[str] = given.served_model_name or [model_name(arguments.model)]
    (config,) = configs_of(given, [engine], names[:1])
    return config


def _parsed(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="options", add_help=False)
    add_options(Page(parser=parser))
    parser.set_defaults(drain_s=DRAIN_S)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return parser.parse_args(words)
    except SystemExit as error:
        raise ValueError(f"options must be those of `pagewood serve`: {said.getvalue().splitlines()[-1]}") from error
