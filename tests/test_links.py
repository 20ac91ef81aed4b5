"""Relative links in Markdown files lead to files of the repository."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    *ROOT.glob("*.md"),
    *(page for folder in ("packages", "tools", "benchmarks") for page in ROOT.glob(f"{folder}/**/*.md")),
]
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_exist(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    assert [target for target in LINK.findall(text) if not (page.parent / target).exists()] == []
