"""Settings in the log: one line for each subject, with what differs from the defaults."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any


def log_settings(
    log: logging.Logger, config: Any, subjects: Mapping[str, Sequence[str]], defaults: Mapping[str, Any]
) -> None:
    """Log a configuration: at level info the settings that differ from their defaults, at level debug all.

    Records have the `fields` `subject` and `settings`, for logs in JSON.

    Args:
        log: gets the records.
        config: has the settings as attributes.
        subjects: subject -> names of its settings, in the order of the lines.
        defaults: name -> default; a setting without one always differs.
    """
    level = logging.DEBUG if log.isEnabledFor(logging.DEBUG) else logging.INFO
    for subject, names in subjects.items():
        values = {name: getattr(config, name) for name in names}
        if level == logging.INFO:
            values = {name: value for name, value in values.items() if name not in defaults or defaults[name] != value}
        if values:
            listed = ", ".join(f"{name}={value}" for name, value in values.items())
            log.log(level, "%s: %s", subject, listed, extra={"fields": {"subject": subject, "settings": values}})
