"""The settings in the log at the start: by subject, and only what differs from the defaults unless all are wished."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import pytest

from pagewood.engine.api import EngineConfig
from pagewood.engine.assembly.subjects import SUBJECTS as OF_ENGINE
from pagewood.engine.observe.settings_log import log_settings
from pagewood.server.config import ServeConfig
from pagewood.server.observe.logs import JsonLines
from pagewood.server.observe.subjects import SUBJECTS as OF_SERVER


@pytest.mark.parametrize(
    ("config", "subjects", "without"),
    [(EngineConfig, OF_ENGINE, set[str]()), (ServeConfig, OF_SERVER, {"engine", "api_keys"})],
)
def test_every_setting_has_one_subject(
    config: type[Any], subjects: Mapping[str, Sequence[str]], without: set[str]
) -> None:
    named = Counter(name for names in subjects.values() for name in names)
    assert named.keys() == {one.name for one in fields(config)} - without
    assert set(named.values()) == {1}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Some settings."""

    name: str
    port: int = 8000
    host: str = "here"
    size: int = 5


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("INFO", ["model: name=m", "network: port=1"]),
        ("DEBUG", ["model: name=m", "network: port=1, host=here", "memory: size=5"]),
        ("WARNING", []),
    ],
)
def test_what_is_shown(level: str, expected: list[str], caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("pagewood.of-this-test")
    caplog.set_level(level, log.name)
    subjects = {"model": ("name",), "network": ("port", "host"), "memory": ("size",)}
    log_settings(log, Settings(name="m", port=1), subjects, {"port": 8000, "host": "here", "size": 5})
    assert [record.getMessage() for record in caplog.records] == expected
    if expected:
        line = json.loads(JsonLines("http").format(caplog.records[1]))
        assert (line["subject"], line["settings"]["port"]) == ("network", 1)
