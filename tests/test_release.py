"""What a tag releases, and the workflows that do it: sessions that exist, pinned actions, least permissions."""

# pyright: basic, reportMissingImports=false, reportMissingModuleSource=false
# tools are scripts, which are imported by path; YAML is untyped.

from __future__ import annotations

import itertools
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TABLE = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pagewood"]
MAY_WRITE = {("release", "publish"): {"attestations", "id-token"}, ("docs", "publish"): {"id-token", "pages"}}
each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)


def read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def sessions_of(command: str) -> list[str]:
    """Return the nox sessions that a shell command runs."""
    words = shlex.split(command, comments=True)
    if "nox" not in words or "-s" not in words:
        return []
    names = itertools.takewhile(lambda word: word not in ("&", "--"), words[words.index("-s") + 1 :])
    return [name.split("(")[0] for name in names]


def test_there_are_three_workflows() -> None:
    assert [path.stem for path in WORKFLOWS] == ["ci", "docs", "release"]


@each_workflow
def test_every_session_that_is_named_exists(path: Path) -> None:
    defined = set(re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(), re.MULTILINE))
    workflow = read(path)
    named = {name for step in steps(workflow) for name in sessions_of(step.get("run", ""))}
    matrices = [job["strategy"]["matrix"]["session"] for job in workflow["jobs"].values() if "strategy" in job]
    named = (named - {"$SESSION"}) | {name for matrix in matrices for name in matrix}
    assert named
    assert named <= defined


def test_ci_runs_the_sessions_of_the_local_script_on_every_python() -> None:
    (job,) = read(ROOT / ".github" / "workflows" / "ci.yml")["jobs"].values()
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    local = {name for line in script if line.startswith("python -m nox") for name in sessions_of(line)}
    assert set(job["strategy"]["matrix"]["session"]) == local
    assert job["strategy"]["matrix"]["python"] == TABLE["python"]


@each_workflow
def test_actions_are_pinned_to_full_versions(path: Path) -> None:
    uses = [step["uses"] for step in steps(read(path)) if "uses" in step]
    assert uses
    assert [use for use in uses if not re.fullmatch(r"[\w-]+/[\w-]+@v\d+\.\d+\.\d+", use)] == []


@each_workflow
def test_no_text_from_outside_is_put_into_a_shell_command(path: Path) -> None:
    assert [step["run"] for step in steps(read(path)) if "${{" in step.get("run", "")] == []


@each_workflow
def test_jobs_have_limits_and_the_least_permissions(path: Path) -> None:
    workflow = read(path)
    assert workflow["permissions"] in ({}, {"contents": "read"})
    for name, job in workflow["jobs"].items():
        assert job["timeout-minutes"] <= 60
        allowed = MAY_WRITE.get((path.stem, name), set())
        permissions = job.get("permissions", {})
        assert {scope for scope, access in permissions.items() if access == "write"} == allowed
    checkouts = [step for step in steps(workflow) if step.get("uses", "").startswith("actions/checkout@")]
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_what_is_published_was_checked_attested_and_waits_for_an_environment() -> None:
    workflow = read(ROOT / ".github" / "workflows" / "release.yml")
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    assert dict[Any, Any](workflow)[True] == {"push": {"tags": ["*-v[0-9]*"]}}  # YAML 1.1 reads the key `on` as true
    assert (publish["needs"], publish["environment"]) == ("build", "pypi")
    assert [step["run"] for step in build["steps"] if "run" in step][1:] == [
        "python -m nox -s build",
        'python tools/release.py "$TAG"',
    ]
    used = [step["uses"].split("@")[0] for step in publish["steps"]]
    assert used == ["actions/download-artifact", "actions/attest-build-provenance", "pypa/gh-action-pypi-publish"]


def test_the_site_is_published_from_main_only_and_as_it_was_built() -> None:
    build, publish = read(ROOT / ".github" / "workflows" / "docs.yml")["jobs"].values()
    on_main = "github.ref == 'refs/heads/main'"
    assert (publish["needs"], publish["if"], build["steps"][-1]["if"]) == ("build", on_main, on_main)
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert build["steps"][-1]["with"]["path"].rstrip("/") == site["site_dir"]
    assert site["strict"] is True


@pytest.fixture
def dist(tmp_path: Path) -> Path:
    folder = tmp_path / "dist"
    folder.mkdir()
    for package in ("engine", "kvpool"):
        version = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]["version"]
        (folder / f"pagewood_{package}-{version}-py3-none-any.whl").touch()
        (folder / f"pagewood_{package}-{version}.tar.gz").touch()
    return folder


@pytest.fixture(autouse=True)
def tools_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))


def test_a_tag_releases_the_two_archives_of_its_package(dist: Path, tmp_path: Path) -> None:
    import release

    out = tmp_path / "release"
    assert release.main(["engine-v0.1.0", "--dist", str(dist), "--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {
        "pagewood_engine-0.1.0-py3-none-any.whl", "pagewood_engine-0.1.0.tar.gz",
    }  # fmt: skip


@pytest.mark.parametrize(
    "tag",
    [
        "v0.1.0",
        "kvpool-0.1.0",
        "kvpool-v9.9.9",
        "other-v0.1.0",
        "../kvpool-v0.1.0",
        "kvpool-v0.1.0;ls",
        "server-v0.1.0",
    ],
)
def test_a_tag_that_does_not_fit_releases_nothing(
    tag: str, dist: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import release

    out = tmp_path / "release"
    assert release.main([tag, "--dist", str(dist), "--out", str(out)]) == 1
    assert not out.exists()
    assert tag in capsys.readouterr().err or tag == "server-v0.1.0"  # the fixture has no archives of it


@pytest.mark.parametrize(
    ("changelog", "is_dated"),
    [
        ("## [0.1.0] - 2026-11-21\n", True),
        ("## 0.1.0 - 2026-11-21\n", True),
        ("## 0.1.0 (unreleased)\n", False),
        ("## [0.1.0]\n", False),
        ("## [10.1.0] - 2026-11-21\n", False),
        ("## [0x1.0] - 2026-11-21\n", False),
    ],
)
def test_a_changelog_must_date_the_version(changelog: str, is_dated: bool) -> None:
    import release

    assert release.is_dated(changelog, "0.1.0") == is_dated
