"""Settings that cannot work are refused before a process is started."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagewood.engine.folder import model_folder
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
