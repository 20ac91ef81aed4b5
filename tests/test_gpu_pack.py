"""The pack for a GPU host contains what the host lacks, and unpacks the kernels that its GPU can run."""

# pyright: basic, reportMissingImports=false
# tools are scripts, which are imported by path.

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement


@pytest.fixture(autouse=True)
def tools_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "tools"))


def wheel(folder: Path, name: str, *needs: str) -> Path:
    path = folder / f"{name.replace('-', '_')}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {n}" for n in needs)]
        archive.writestr(f"{name}-1.0.dist-info/METADATA", "\n".join(lines) + "\n")
    return path


def test_only_what_the_host_lacks_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pack_gpu_host

    host = pack_gpu_host.read_host("numpy==2.5.2\nTorch==2.11.0+cu130\nclick\nold==0.9\n")
    fetcher = pack_gpu_host.Fetcher(host=host, python="3.12", wheels=tmp_path)
    asked: list[str] = []
    monkeypatch.setattr(fetcher, "fetch", lambda need: asked.append(need.name) if not fetcher._has(need) else None)
    ours = wheel(
        tmp_path, "ours", "numpy>=1.26", "torch>=2.11", "click>=8", "old>=1", "pyzmq>=27",
        "colorama; sys_platform == 'win32'", "tomli; python_version < '3.11'", "flashinfer-python; extra == 'cuda'",
        "sphinx; extra == 'docs'",
    )  # fmt: skip
    fetcher.fetch_needs_of(ours, extras={"cuda"})
    assert asked == ["old", "pyzmq", "flashinfer-python"]
    asked.clear()
    fetcher.fetch_needs_of(wheel(tmp_path, "flashinfer-python", "nvidia-cutlass-dsl"), extras=set())
    assert "apache-tvm-ffi" in asked
    assert "nvidia-cutlass-dsl" not in asked
    assert fetcher._has(Requirement("torch>=2.11"))
    assert not fetcher._has(Requirement("torch>=2.12"))


def test_a_pack_of_files_is_the_same_every_time(tmp_path: Path) -> None:
    import pack_gpu_host

    for name in ("one", "two"):
        pack_gpu_host.pack([("a/b", b"1"), ("c", b"23")], tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    with tarfile.open(tmp_path / "one") as packed:
        assert [(info.name, info.size) for info in packed] == [("a/b", 1), ("c", 2)]


@pytest.mark.parametrize(("capability", "is_used"), [("9.0", True), ("8.9\n9.0", True), ("10.0", False), (None, False)])
def test_kernels_are_unpacked_where_a_gpu_can_run_them(
    capability: str | None, is_used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pack_gpu_host
    from gpu_host import unpack

    here, programs = tmp_path / "pack", tmp_path / "bin"
    (here / "wheels").mkdir(parents=True)
    programs.mkdir()
    if capability is not None:
        (programs / "nvidia-smi").write_text(f"#!/bin/sh\necho '{capability}'\n")
        (programs / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    wheel(here / "wheels", "ours")
    pack_gpu_host.pack([("flashinfer/__init__.py", b"")], here / "flashinfer.tar.xz")
    library = "flashinfer/data/aot/norm/norm.so"
    pack_gpu_host.pack([(library, b"compiled")], here / "kernels-9.0a.tar.xz")
    monkeypatch.setattr(unpack, "__file__", str(here / "unpack.py"))
    monkeypatch.setattr(sys, "argv", ["unpack.py", str(tmp_path / "site")])
    monkeypatch.setattr(unpack, "install", lambda wheels, site: None)
    assert unpack.main() == 0
    assert (tmp_path / "site" / "flashinfer" / "__init__.py").exists()
    assert (tmp_path / "site" / library).exists() == is_used


def run_packed(folder: Path, script: str, *options: str) -> str:
    """Run a script of a pack; return what it prints."""
    import pack_gpu_host

    pack_gpu_host.copy_scripts(folder)
    done = subprocess.run([sys.executable, folder / script, *options], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_packed_check_finds_all_that_it_imports_and_its_table_has_every_check(tmp_path: Path) -> None:
    shown = run_packed(tmp_path, "gpu_check.py", "--stand-in", "--only", "compile", "server")
    assert "2 checks, 0 failed" in shown
    assert shown.count("skipped") == 4  # printed when they end, and in the table
    assert "says nothing about a GPU" in shown


def test_the_packed_script_of_a_gpu_finds_all_that_it_imports(tmp_path: Path) -> None:
    assert "usage" in run_packed(tmp_path, "gpu.py", "--help")
