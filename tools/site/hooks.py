"""What MkDocs calls while it builds the site: it adds what is made from the source, and files of the repository."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from commands import options_page
from http_api import http_page
from mkdocs.structure.files import File, Files
from modules import module_pages
from plots import plots_pages
from repository import repository_pages
from series import metrics_page

ROOT = Path(__file__).resolve().parents[2]


def on_files(files: Files, *, config: Any) -> Files:
    """Add pages that no file in `docs/` holds."""
    for uri, content in _pages():
        files.append(File.generated(config, uri, content=content))
    return files


def _pages() -> Iterator[tuple[str, str | bytes]]:
    """Yield where each page or picture stands in the site, and its content."""
    address = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pagewood"]["repository"]
    yield "reference/options.md", options_page()
    yield "reference/http.md", http_page()
    yield "reference/metrics.md", metrics_page()
    yield from module_pages()
    yield from plots_pages(ROOT, address)
    yield from repository_pages(ROOT, address)
