"""Selects what a tag releases: `python tools/release.py radixcache-v0.1.0 --dist dist --out release`.

A tag names a package and its version. Both must agree with the package's pyproject.toml, and its changelog must have a
dated section for the version. Then the wheel and the sdist of this package, and nothing else, are copied to OUT.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TAG = re.compile(r"(?P<package>[a-z]+)-v(?P<version>\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Select; print the copied files; return 0, or 1 if the tag is not one that can be released."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tag", help="the package, -v and the version, such as radixcache-v0.1.0")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="the built archives (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "release", help="the folder to make (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        files = released_files(options.tag, options.dist)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    options.out.mkdir(parents=True)
    for path in files:
        print(shutil.copy(path, options.out))
    return 0


def released_files(tag: str, dist: Path) -> list[Path]:
    """Return the wheel and the sdist that a tag releases.

    Raises:
        ValueError: the tag does not agree with the repository, or an archive is missing.
    """
    match = TAG.fullmatch(tag)
    project = ROOT / "packages" / match["package"] / "pyproject.toml" if match else None
    if match is None or project is None or not project.exists():
        raise ValueError(f"tag must be PACKAGE-vVERSION with one of our packages, got {tag}")
    package, version = match["package"], match["version"]
    current = tomllib.loads(project.read_text())["project"]["version"]
    if version != current:
        raise ValueError(f"tag must have the version of {package}, {current}, got {tag}")
    if not is_dated((project.parent / "CHANGELOG.md").read_text(), version):
        raise ValueError(f"the changelog of {package} must have a section '## [{version}] - YYYY-MM-DD'")
    files = [dist / f"pagewood_{package}-{version}{end}" for end in ("-py3-none-any.whl", ".tar.gz")]
    if missing := [path.name for path in files if not path.exists()]:
        raise ValueError(f"dist must have {' and '.join(missing)}, got {dist}")
    return files


def is_dated(changelog: str, version: str) -> bool:
    """Return whether a changelog has a section with a date for the version."""
    return re.search(rf"^## \[?{re.escape(version)}\]? - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE) is not None


if __name__ == "__main__":
    sys.exit(main())
