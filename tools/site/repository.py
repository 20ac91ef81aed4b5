"""Pages of the site that are files of the repository, and stand there beside what they are about."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from types import MappingProxyType

SHOWN: Mapping[str, str] = MappingProxyType(
    {
        "engine/families.md": "packages/engine/src/pagewood/engine/models/families/README.md",
        "results/policies.md": "packages/schedpolicy/gallery/README.md",
        "internals/architecture.md": "ARCHITECTURE.md",
        "internals/contributing.md": "CONTRIBUTING.md",
        "internals/security.md": "SECURITY.md",
    }
)
"""Addresses in the site and files. The READMEs of the rooms in the source are added below `internals/`."""
_LINK = re.compile(r"(\]\(|^\[[^\]]+\]: )((?!https?://|#|mailto:)[^)\s]+)", re.MULTILINE)


def shown(root: Path) -> dict[str, str]:
    """Return which address of the site shows which file."""
    rooms = {
        f"internals/{'-'.join(path.parent.relative_to(root).parts[4:])}.md": str(path.relative_to(root))
        for path in sorted(root.glob("packages/*/src/pagewood/**/README.md"))
    }
    known = set(SHOWN.values())
    return dict(SHOWN) | {page: path for page, path in rooms.items() if path not in known}


def repository_pages(root: Path, address: str) -> Iterator[tuple[str, str | bytes]]:
    """Yield pages and the pictures in them; their other relative links lead to the repository at `address`."""
    places = {path: page for page, path in shown(root).items()}
    for path, page in places.items():
        folder = (root / path).parent
        text = (root / path).read_text()
        yield page, _LINK.sub(lambda link: link[1] + _target(link[2], folder, page, root, address, places), text)  # noqa: B023
        for picture in {link[2] for link in _LINK.finditer(text) if link[2].endswith(".png")}:
            yield f"{PurePosixPath(page).parent}/{PurePosixPath(picture).name}", (folder / picture).read_bytes()


def _target(link: str, folder: Path, page: str, root: Path, address: str, places: Mapping[str, str]) -> str:
    """Return where a link of a file in `folder` leads on `page`: to a page, to a picture beside it, or elsewhere."""
    name, sign, part = link.partition("#")
    found = (folder / name).resolve()
    path = found.relative_to(root)
    if found.suffix == ".png":
        return found.name
    shown_as = places.get(str(path / "README.md") if found.is_dir() else str(path))
    if shown_as is not None:
        return "../" * (len(PurePosixPath(page).parts) - 1) + shown_as + sign + part
    return f"{address}/{'tree' if found.is_dir() else 'blob'}/main/{path}{sign}{part}"
