"""Pages for browsers: each is one file that loads nothing, and talks to this server only."""

from __future__ import annotations

import base64
import re
from functools import cache
from hashlib import sha256
from importlib.resources import files

from starlette.responses import HTMLResponse, Response

_INLINE = {name: re.compile(rf"<{name}>(.*?)</{name}>", re.DOTALL) for name in ("script", "style")}


def page(name: str) -> Response:
    """Return the page `name.html`. Its Content-Security-Policy allows its own script and style, by their hashes."""
    text, policy = _read(name)
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return HTMLResponse(text, headers=headers)


@cache
def _read(name: str) -> tuple[str, str]:
    """Return the text of a page, and its policy."""
    text = (files(__package__ or "") / f"{name}.html").read_text(encoding="utf-8")
    hashes = {kind: " ".join(map(_hash, inline.findall(text))) for kind, inline in _INLINE.items()}
    policy = (
        f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text, policy


def _hash(inline: str) -> str:
    return f"'sha256-{base64.b64encode(sha256(inline.encode()).digest()).decode()}'"
