"""Settings that cannot work are refused before a process is started."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagewood.engine.model_folder.folder import model_folder
from pagewood.server.config import ServeConfig


def config(**fields: Any) -> ServeConfig:
    settings: dict[str, Any] = {"served_model_name": "m", "model_folder": model_folder(None), **fields}
    return ServeConfig(**settings)


@pytest.fixture
def few_files() -> Iterator[None]:
    """Allow 128 open files, as `ulimit -n 128` does."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("few_files")
def test_no_more_connections_than_open_files() -> None:
    """Otherwise idle connections take all files, and `/health` fails."""
    assert config(max_connections=48).http_limits().max_connections == 48
    with pytest.raises(ValueError, match=r"max_connections must be <= 48 .* got 49"):
        config(max_connections=49)


@pytest.mark.parametrize("host", ["proxy", "*", "*.example.com", "10.0.0.1", "my_host", "example.com."])
def test_allowed_hosts(host: str) -> None:
    config(allowed_hosts=(host,))


@pytest.mark.parametrize("host", ["", "http://proxy", "proxy:80", "abc:80", "a/b", "*.*.com"])
def test_hosts_that_could_never_match_are_refused(host: str) -> None:
    with pytest.raises(ValueError, match="allowed_hosts must be names"):
        config(allowed_hosts=(host,))


@pytest.mark.parametrize(
    "origin", ["*", "null", "https://chat.example.com", "http://localhost:3000/", "app://obsidian"]
)
def test_allowed_origins(origin: str) -> None:
    config(allowed_origins=(origin,))


@pytest.mark.parametrize("origin", ["", "chat.example.com", "https://chat.example.com/page", "https://"])
def test_origins_that_could_never_match_are_refused(origin: str) -> None:
    with pytest.raises(ValueError, match="allowed_origins must be"):
        config(allowed_origins=(origin,))


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model must be a folder with a config\.json"):
        config(model_folder=tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"model must be a folder with a tokenizer\.json"):
        config(model_folder=tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("drain_s", -1.0, ">= 0"),
        ("max_retries", -1, ">= 0"),
        ("max_quick_deaths", 0, ">= 1"),
        ("watchdog_s", 1.0, ">= 3"),
        ("watchdog_s", float("nan"), ">= 3"),
        ("max_ttft_s", 0.0, "> 0"),
    ],
)
def test_limits_that_cannot_work_are_refused(field: str, value: float, rule: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be {rule}, got {value}"):
        config(**{field: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"log_format": "xml"}, "log_format must be one of text, json, got 'xml'"),
        ({"metrics_compat": ("tgi",)}, "metrics_compat must have names of vllm, sglang, got 'tgi'"),
        ({"metrics_compat": ("vllm",), "metrics": False}, "metrics must be true for metrics_compat, got vllm"),
        ({"otlp_endpoint": "localhost:4318"}, "otlp_endpoint must be like http://localhost:4318, got 'localhost:4318'"),
        ({"otlp_endpoint": "http://localhost:4318", "metrics": False}, "metrics must be true for otlp_endpoint"),
    ],
)
def test_how_a_server_shows_itself_is_checked(fields: dict[str, Any], message: str) -> None:
    if "otlp_endpoint" in fields:
        pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with pytest.raises(ValueError, match=re.escape(message)):
        config(**fields)


@pytest.mark.parametrize("is_nested", [False, True])
def test_traces_need_the_extra(monkeypatch: pytest.MonkeyPatch, is_nested: bool) -> None:
    def find_nothing(name: str) -> None:
        if is_nested:  # the package around it is missing, too
            raise ModuleNotFoundError(name)

    monkeypatch.setattr("pagewood.server.config.find_spec", find_nothing)
    with pytest.raises(ValueError, match=re.escape("otlp_endpoint needs the extra pagewood-server[otel]")):
        config(otlp_endpoint="http://localhost:4318")


def test_trusted_proxies() -> None:
    assert config(trusted_proxies=("127.0.0.1", "10.0.0.0/8", "::1")).trusted_proxies[0] == "127.0.0.1"
    for wrong in ("proxy.example.com", "*", "10.0.0.1/8", ""):
        with pytest.raises(ValueError, match="trusted_proxies must be addresses or networks"):
            config(trusted_proxies=(wrong,))


def test_one_http_process_at_least() -> None:
    with pytest.raises(ValueError, match="http_processes must be >= 1, got 0"):
        config(http_processes=0)
