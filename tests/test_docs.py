"""The pages in docs/: their snippets run, and options, endpoints and files that they name exist."""

# pyright: basic
# argparse has no public names for what a parser takes.

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools" / "site"))

import commands
import http_api
import plots
import repository
import series

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
ADDRESS = "http://127.0.0.1:8000"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SNIPPETS = {page: FENCE.findall(page.read_text()) for page in PAGES}
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z]")
OF_OTHERS = {
    "--index-url", "--extra-index-url", "--no-index", "--find-links", "--dest", "--local-dir",  # pip, hf
    "--radix-cache-backend", "--cache-type", "--scheduler-cls", "--additional-config",  # SGLang, mini-sglang, vLLM
    "--incremental-streaming-output", "--only", "--compile-for", "--all", "--run",  # SGLang, tools of the repository
    "--benchmark-enable", "--dashboard",
    "--rm", "--build", "--from-file", "--set",  # docker, kubectl, helm
}  # fmt: skip
_KEY = re.compile(r'(\w+)="')
RUN_BY_CLIENTS = re.compile(r'^```sh title="run"\n.*?^```$', re.MULTILINE | re.DOTALL)
"""Commands of other programs, which `nox -s clients` runs."""
MIGRATION = DOCS / "howto" / "migrate.md"


def code_of(page: Path) -> list[str]:
    return [code for language, code in SNIPPETS[page] if language == "python"]


def needs_server(page: Path) -> bool:
    return any(ADDRESS in code for language, code in SNIPPETS[page] if language in ("python", "bash"))


def run(pages: list[Path], tmp_path: Path, url: str = ADDRESS) -> None:
    """Run the snippets of pages in one process, because each would import torch and compile kernels again.

    The snippets of a page share their names, so a tutorial goes on where the one before has ended.
    """
    lines = ["import sys"]
    for page in pages:
        name = str(page.relative_to(ROOT))
        lines.append(f"names = {{'__name__': '__main__'}}; print({name!r}, file=sys.stderr)")
        for number, code in enumerate(code_of(page), 1):
            lines.append(
                f"exec(compile({code.replace(ADDRESS, url)!r}, {f'{name}, snippet {number}'!r}, 'exec'), names)"
            )
    env = {**os.environ, "TMPDIR": str(tmp_path), "PAGEWOOD_API_KEY": "any"}
    program = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=280, check=False, env=env)
    assert done.returncode == 0, done.stderr[-4000:]


IN_PROCESS = [page for page in PAGES if code_of(page) and not needs_server(page)]


@pytest.mark.parametrize("room", sorted({page.parent.name for page in IN_PROCESS}))
def test_snippets_run(room: str, tmp_path: Path) -> None:
    run([page for page in IN_PROCESS if page.parent.name == room], tmp_path)


def test_snippets_with_a_server_run(url: str, tmp_path: Path) -> None:
    run([page for page in PAGES if code_of(page) and needs_server(page)], tmp_path, url)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_shell_commands_and_json(page: Path, request: pytest.FixtureRequest) -> None:
    """Commands marked as `bash` run; `sh` marks those that install, or that need a model or another machine."""
    for language, code in SNIPPETS[page]:
        if language == "json":
            json.loads(code)
        if language != "bash":
            continue
        for line in code.splitlines():
            command = line.replace("python -m", f"{sys.executable} -m")
            if ADDRESS in command:
                command = command.replace(ADDRESS, request.getfixturevalue("url"))
            done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=240, check=False)
            assert done.returncode == 0, done.stderr
            assert done.stdout.strip()
            assert '"error"' not in done.stdout


@pytest.mark.parametrize("plot", plots.PLOTS, ids=lambda plot: plot.name)
def test_plots_have_numbers_of_their_records(plot: plots.Plot) -> None:
    text = (ROOT / "benchmarks" / "results" / plot.record).read_text()
    table = plots.read_table(text, plot)
    assert table
    assert all(any(numbers.values()) for numbers in table.values())
    assert plots.draw(plot, table, "dark").startswith(b"<?xml")
    with pytest.raises(ValueError, match="must have"):
        plots.read_table(text.replace(plot.header, ""), plot)


def known_options() -> set[str]:
    found = {name for parser in commands.parsers().values() for one in parser._actions for name in one.option_strings}
    simulate = subprocess.run(
        [sys.executable, "-m", "pagewood.schedpolicy.simulate", "--help"], capture_output=True, text=True, check=True
    )
    trace = subprocess.run(
        [sys.executable, "-m", "pagewood.radixcache.trace", "--help"], capture_output=True, text=True, check=True
    )
    return found | {*OPTION.findall(simulate.stdout), *OPTION.findall(trace.stdout)}


def test_options_that_pages_name_exist() -> None:
    known = known_options() | OF_OTHERS
    unknown: dict[str, set[str]] = {}
    for page in PAGES:
        text = RUN_BY_CLIENTS.sub("", page.read_text())
        if page != MIGRATION and (lacking := {*OPTION.findall(text)} - known):
            unknown[str(page.relative_to(DOCS))] = lacking
    assert unknown == {}


def rows_of(heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading of the migration page."""
    section = MIGRATION.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


@pytest.mark.parametrize("heading", ["Options of vLLM", "Options of SGLang"])
def test_options_of_the_migration_tables_exist(heading: str) -> None:
    options = {name for one in commands.parsers()["serve"]._actions for name in one.option_strings}
    rows = rows_of(heading)
    assert len(rows) >= 25
    for row in rows:
        ours = {*OPTION.findall(row[1]), *OPTION.findall("" if len(row) < 3 else row[2])}
        assert ours or row[1] == "-" or "pagewood serve" in row[1], row
        assert ours <= options, row


def test_endpoints_of_the_migration_table_exist() -> None:
    paths = http_api.document()["paths"]
    rows = rows_of("Endpoints")
    for row in rows:
        named = re.findall(r"`(/[\w/]+)`", row[1] if row[2].startswith("the same") else row[2])
        assert named, row
        assert [path for path in named if path not in paths] == [], row


def test_files_of_the_repository_that_pages_link_exist() -> None:
    address = re.compile(r"https://github\.com/pagewood/pagewood/(?:blob|tree)/main/([^)#?\s]+)")
    for page in PAGES:
        lacking = [path for path in address.findall(page.read_text()) if not (ROOT / path).exists()]
        assert lacking == [], page


def test_every_page_is_in_the_navigation() -> None:
    """MkDocs says so, too, but only where it is installed."""
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [page for page in PAGES if f" {page.relative_to(DOCS)}\n" not in navigation] == []


def test_the_reference_has_every_option_path_and_series() -> None:
    options = commands.options_page()
    named = {name for one in commands.parsers()["serve"]._actions for name in one.option_strings}
    assert {name for name in named - {"-h", "--help"} if f"`{name}" not in options} == set()
    http = http_api.http_page()
    lacking = [
        f"{method.upper()} {path}"
        for path, methods in http_api.document()["paths"].items()
        for method in methods
        if f"### `{method.upper()} {path}`" not in http
    ]
    assert lacking == []


def test_the_reference_has_every_series_of_a_server(url: str) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \|", series.metrics_page(), re.MULTILINE)
    page = {name: (kind, {*re.findall(r"`(\w+)`", labels)}) for name, kind, labels in rows}
    assert len(page) == len(rows)
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        text = answer.read().decode()
    for name, kind in re.findall(r"^# TYPE (pagewood_\w+) (\w+)", text, re.MULTILINE):
        assert page[name][0] == kind
        labels = {
            label for line in re.findall(rf"^{name}(?:_bucket)?{{(.*?)}} ", text, re.M) for label in _KEY.findall(line)
        }
        assert labels - {"model_name", "le"} <= page[name][1], name


def test_files_of_the_repository_stand_in_the_site_with_links_that_lead_on() -> None:
    pages = dict(repository.repository_pages(ROOT, "https://example.com/repo"))
    rooms = [path.parent for path in ROOT.glob("packages/*/src/pagewood/**/README.md")]
    assert len([page for page in pages if page.endswith(".md")]) == len(rooms) + 4
    architecture = str(pages["internals/architecture.md"])
    assert "](../internals/engine-core.md)" in architecture  # a room that the site has
    assert "](https://example.com/repo/tree/main/packages/server/src" not in architecture
    assert isinstance(pages["results/tenants.png"], bytes)
