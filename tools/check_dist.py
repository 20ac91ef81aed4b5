"""Checks built packages before they are published: `python tools/check_dist.py DIST`.

DIST holds one wheel and one sdist of each of the five packages, as `nox -s build` makes them. The script checks
what the archives contain, how large they are, that the links of each README work on a package index (relative links do
not), and that the packages accept each other's versions. It does not repeat `twine check`.
"""

from __future__ import annotations

import argparse
import email
import email.message
import re
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from typing import Any

from markdown_it import MarkdownIt
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
KIB = 1 << 10
MAX_BYTES = {"engine": 7 * KIB * KIB, "schedpolicy": 1 * KIB * KIB, "server": 832 * KIB}
"""Largest archive, by package; the engine ships a model, the sdist of schedpolicy pictures, the server pages."""
OTHER_MAX_BYTES = 400 * KIB
SUFFIXES = {".py", ".typed", ".html", ".json", ".jinja", ".safetensors"}
"""Of files in a wheel, beside its metadata."""
IN_SDIST = {"src", "tests", "benchmarks", "examples", "gallery", "monitoring", "conftest.py", "mypy.ini", ".gitignore"}
REQUIRED_IN_SDIST = {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "PKG-INFO"}
GENERATED = re.compile(r"(^|/)(__pycache__|\.[a-z]+_cache|\.hypothesis|\.benchmarks)(/|$)|\.(pyc|nbi|nbc|so)$")
TESTS = re.compile(r"(^|/)(tests?/|test_[^/]*\.py$|conftest\.py$|stand_ins/)")
FOR_TESTS_OF_USERS = {
    "radixcache": ("testing/__init__", "testing/machine", "testing/oracle", "testing/protocol", "testing/soaking"),
    "kvpool": ("testing", "tiers/testing"),
    "schedpolicy": (
        "testing/__init__", "testing/one_step", "testing/oracles", "testing/requests", "testing/routing",
        "testing/traffic",
    ),
    "engine": (
        "testing/__init__", "testing/conformance", "testing/random_drafting", "testing/watched_runner", "testing/echo",
        "testing/echo_drafts", "testing/echo_grammar", "testing/made_up_tokens", "testing/simulated_device",
        "testing/simulated_engine",
    ),
}  # fmt: skip
"""Modules of `testing` that a README explains to users, with what these import; others belong into tests/support."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Check; print each problem on a line of its own; return 0 if there is none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dist", type=Path, help="the folder with the wheels and sdists")
    dist: Path = parser.parse_args(arguments).dist
    versions = member_versions()
    problems = list(problems_of(dist, versions))
    print("\n".join(problems) or f"{2 * len(versions)} archives are fit to publish")
    return 1 if problems else 0


def member_versions() -> dict[str, str]:
    """Return the version of each of our packages by its name, such as `radixcache`."""
    projects = sorted((ROOT / "packages").glob("*/pyproject.toml"))
    return {path.parent.name: tomllib.loads(path.read_text())["project"]["version"] for path in projects}


def problems_of(dist: Path, versions: Mapping[str, str]) -> Iterator[str]:
    """Yield what is wrong with the archives in `dist`, given the version that each package must have."""
    expected = {f"pagewood_{name}-{version}{end}" for name, version in versions.items() for end in ENDS}
    found = {path.name for path in dist.iterdir()}
    yield from (f"{name}: is missing" for name in sorted(expected - found))
    yield from (f"{name}: is not one of our archives" for name in sorted(found - expected))
    for name, version in versions.items():
        for end, problems_of_archive in ENDS.items():
            path = dist / f"pagewood_{name}-{version}{end}"
            if path.exists():
                yield from (f"{path.name}: {text}" for text in problems_of_archive(path, name, versions))


def wheel_problems(path: Path, package: str, versions: Mapping[str, str]) -> Iterator[str]:
    """Yield what is wrong with a wheel."""
    yield from _size_problems(path, package)
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        info = f"pagewood_{package}-{versions[package]}.dist-info"
        if f"{info}/licenses/LICENSE" not in names:
            yield "LICENSE is missing"
        elif archive.read(f"{info}/licenses/LICENSE") != (ROOT / "LICENSE").read_bytes():
            yield "LICENSE is not that of the repository"
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
    if f"pagewood/{package}/py.typed" not in names:
        yield "py.typed is missing"
    for name in sorted(names):
        if name.startswith(f"{info}/"):
            continue
        if not name.startswith(f"pagewood/{package}/"):
            yield f"{name} is outside of pagewood/{package}"
        elif TESTS.search(name) or GENERATED.search(name) or PurePosixPath(name).suffix not in SUFFIXES:
            yield f"{name} does not belong into a wheel"
        elif "testing" in PurePosixPath(name).with_suffix("").parts and not _is_for_users(name, package):
            yield f"{name} does not belong into a wheel, unless it is for the tests of users"
    yield from _metadata_problems(metadata, versions)


def sdist_problems(path: Path, package: str, versions: Mapping[str, str]) -> Iterator[str]:
    """Yield what is wrong with an sdist."""
    yield from _size_problems(path, package)
    root = f"pagewood_{package}-{versions[package]}/"
    with tarfile.open(path) as archive:
        members = archive.getmembers()
    names = {member.name.removeprefix(root) for member in members if not member.isdir()}
    yield from (f"{name} is missing" for name in sorted(REQUIRED_IN_SDIST - names))
    for member in members:
        if not (member.isfile() or member.isdir()):
            yield f"{member.name} is neither a file nor a folder"
    for name in sorted(names - REQUIRED_IN_SDIST):
        if PurePosixPath(name).parts[0] not in IN_SDIST or GENERATED.search(name):
            yield f"{name} does not belong into an sdist"


def _is_for_users(name: str, package: str) -> bool:
    return name.removesuffix(".py").removeprefix(f"pagewood/{package}/") in FOR_TESTS_OF_USERS.get(package, ())


ENDS = {"-py3-none-any.whl": wheel_problems, ".tar.gz": sdist_problems}


def _size_problems(path: Path, package: str) -> Iterator[str]:
    limit = MAX_BYTES.get(package, OTHER_MAX_BYTES)
    if path.stat().st_size > limit:
        yield f"must have at most {limit // KIB} KiB, got {path.stat().st_size // KIB}"


def _metadata_problems(metadata: email.message.Message[Any, Any], versions: Mapping[str, str]) -> Iterator[str]:
    if metadata["License-Expression"] != "Apache-2.0":
        yield f"License-Expression must be Apache-2.0, got {metadata['License-Expression']}"
    for line in metadata.get_all("Requires-Dist", []):
        need = Requirement(line)
        if need.name.startswith("pagewood-"):
            yield from requirement_problems(need, versions.get(need.name.removeprefix("pagewood-")))
    if metadata["Description-Content-Type"] != "text/markdown":
        yield f"the description must be text/markdown, got {metadata['Description-Content-Type']}"
    payload = metadata.get_payload(decode=True)
    assert isinstance(payload, bytes)
    yield from readme_problems(payload.decode())


def requirement_problems(need: Requirement, version: str | None) -> Iterator[str]:
    """Yield what is wrong with a requirement of one of our packages on another, which has `version`."""
    if version is None:
        yield f"{need} is not one of our packages"
    elif not need.specifier.contains(version):
        yield f"{need} excludes the current version {version}"
    if sorted(specifier.operator for specifier in need.specifier) != ["<", ">="]:
        yield f"{need} must be a range with >= and <"


class _Addresses(HTMLParser):
    """Collects the targets of links and images."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take the target of a tag."""
        self.found += [value or "" for name, value in attrs if name in ("href", "src")]


def readme_problems(markdown: str) -> Iterator[str]:
    """Yield the links and images of a README that do not work on a package index.

    Relative addresses do not, nor do addresses of headings, which have no names there. An address of a file of our
    repository must name one that exists.
    """
    repository = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pagewood"]["repository"]
    raw = repository.replace("https://github.com/", "https://raw.githubusercontent.com/")
    in_repository = re.compile(rf"(?:{re.escape(repository)}/(?:blob|tree|raw)|{re.escape(raw)})/main/([^#?]+)")
    parser = _Addresses()
    parser.feed(MarkdownIt("commonmark", {"html": True}).enable("table").render(markdown))
    for address in parser.found:
        match = in_repository.match(address)
        if not address.startswith("https://"):
            yield f"the README's link {address} must be absolute, with https"
        elif match and not (ROOT / match[1]).exists():
            yield f"the README's link {address} leads to no file of the repository"


if __name__ == "__main__":
    sys.exit(main())
