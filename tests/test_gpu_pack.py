"""The tools that pack a GPU host: what it has, what it lacks, and which headers a source reaches."""

# pyright: basic, reportMissingImports=false
# tools are scripts, which are imported by path.

from __future__ import annotations

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


def test_missing_headers_are_named(tmp_path: Path) -> None:
    from check_gpu_pack import follow

    (tmp_path / "include" / "deep").mkdir(parents=True)
    source = tmp_path / "kernel.cu"
    source.write_text('#include "beside.h"\n#include <deep/one.cuh>\n  # include <cuda_runtime.h>\n#include <vector>\n')
    (tmp_path / "beside.h").write_text("")
    (tmp_path / "include" / "deep" / "one.cuh").write_text('#include "two.cuh"\n#include <deep/three.cuh>\n')
    (tmp_path / "include" / "deep" / "two.cuh").write_text("#include <deep/one.cuh>\n")
    assert follow([source], [tmp_path / "include"]) == (3, ["deep/three.cuh (of one.cuh)"])
