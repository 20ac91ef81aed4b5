"""The sessions that need torch's CUDA build fail without it, instead of passing by being skipped."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

NOXFILE = Path(__file__).parents[1] / "noxfile.py"


class Failed(Exception):
    """What nox raises for a session that fails."""


class Session:
    """Stands for nox's session: keeps what is installed and run, and does neither."""

    posargs = ()
    cache_dir = Path("cache")

    def __init__(self, name: str, *, cuda: str) -> None:
        self.name = name
        self.cuda = cuda
        self.installed: list[tuple[tuple[str, ...], dict[str, str]]] = []
        self.ran: list[tuple[str, ...]] = []

    def install(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.installed.append((arguments, env or {}))

    def run(self, *arguments: str, **_: Any) -> str:
        self.ran.append(arguments)
        return self.cuda if "torch.version.cuda" in arguments[-1] else "site"

    def error(self, message: str) -> None:
        raise Failed(message)


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[Session], None]]:
    def unchanged(function: Any) -> Any:
        return function

    def session(function: Any = None, **_: Any) -> Any:
        return function or unchanged

    def parametrize(*_: Any) -> Any:
        return unchanged

    nox: Any = ModuleType("nox")
    nox.session, nox.parametrize, nox.options = session, parametrize, SimpleNamespace()
    nox.Session = Session
    monkeypatch.setitem(sys.modules, "nox", nox)
    monkeypatch.delenv("TORCH_INDEX_URL", raising=False)
    return runpy.run_path(str(NOXFILE))


@pytest.mark.parametrize("name", ["emulated", "hollow"])
def test_a_session_without_the_cuda_build_fails_and_says_how_it_is_run(
    name: str, sessions: dict[str, Callable[[Session], None]]
) -> None:
    session = Session(name, cuda="\n")
    with pytest.raises(Failed, match=f"needs torch's CUDA build.*TORCH_INDEX_URL=[^ ]+ nox -s {name}") as failure:
        sessions[name](session)
    assert "\n" not in str(failure.value)
    assert len(session.ran) == 1
    assert f"nox -s {name}`" in str(sessions[name].__doc__)


@pytest.mark.parametrize("name", ["emulated", "hollow"])
def test_torch_comes_from_the_index_that_is_named_and_from_no_other(
    name: str, sessions: dict[str, Callable[[Session], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_INDEX_URL", "https://example.org/cuda")
    session = Session(name, cuda="13.0")
    sessions[name](session)
    arguments, env = session.installed[0]
    assert arguments == ("-c", "constraints.txt", "--index-url", "https://example.org/cuda", "torch")
    assert env["PIP_EXTRA_INDEX_URL"] == ""
    assert len(session.installed) == 2
    compiling = next(command for command in session.ran if "tools/gpu_host/kernels.py" in command)
    assert compiling[-2:] == ("--folder", str(session.cache_dir / "flashinfer"))
