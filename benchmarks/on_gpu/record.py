"""The rows of the table, their targets, and the recorded files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A measured number, or the reason why it is missing."""

    name: str
    value: float | None = None
    unit: str = ""
    share: float | None = None
    """Share of the device's limit."""
    at_least: float | None = None
    """Target for the share."""
    below: float | None = None
    """Target for the value."""
    note: str = ""

    @property
    def is_met(self) -> bool | None:
        """Whether the target is met, or None without a target or a value."""
        if self.at_least is not None and self.share is not None:
            return self.share >= self.at_least
        if self.below is not None and self.value is not None:
            return self.value < self.below
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The results of one run of the benchmark."""

    device: str
    date: str
    versions: Mapping[str, str]
    subject: str
    seconds: float
    """Duration of the run."""
    rows: Sequence[Row]


def markdown(record: Record) -> str:
    """Return the record as a Markdown page."""
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    lines = [
        f"# {record.subject} on {record.device}",
        "",
        f"{record.date}; {versions}; {record.seconds:.0f} s. Repeat: `python benchmarks/gpu.py`.",
        "",
        "| what | measured | of what the device can do | target | met |",
        "|---|---|---|---|---|",
        *(_line(row) for row in record.rows),
    ]
    return "\n".join(lines) + "\n"


def write(record: Record, folder: Path) -> list[Path]:
    """Write the record as JSON and Markdown, named by date and device; return both paths."""
    folder.mkdir(parents=True, exist_ok=True)
    name = "".join(c if c.isalnum() else "-" for c in f"{record.date[:16]}-{record.device}".lower()).replace("--", "-")
    paths = [folder / f"{name}.json", folder / f"{name}.md"]
    paths[0].write_text(json.dumps(asdict(record), indent=1) + "\n")
    paths[1].write_text(markdown(record))
    return paths


def _line(row: Row) -> str:
    value = "-" if row.value is None else f"{row.value:.4g} {row.unit}".strip()
    value = f"{value} ({row.note})" if row.note else value
    share = "" if row.share is None else f"{row.share:.0%}"
    target = f">= {row.at_least:.0%}" if row.at_least is not None else f"< {row.below:g}" if row.below else ""
    met = {True: "yes", False: "**no**", None: "not measured" if target else ""}[row.is_met]
    return f"| {row.name} | {value} | {share} | {target} | {met} |"
