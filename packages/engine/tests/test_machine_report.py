"""What `pagewood doctor` says of machines that lack something."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from pagewood.engine.assembly import machine_report
from pagewood.engine.assembly.machine_report import Finding, describe, examine, memory_rate, rooflines
from pagewood.engine.model_folder.inspection import inspect_model
from pagewood.engine.runner.ranks.cores import num_cores


def machine(root: Path, **files: str) -> dict[str, Finding]:
    """Return what is found where these files are, by subject; __ stands for / in their names."""
    meminfo = "MemTotal: 16000000 kB\nMemAvailable: 8000000 kB\n"
    for name, text in {"proc__meminfo": meminfo, **files}.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {one.subject: one for one in examine(root=root)}


def test_nothing_need_be_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    found = machine(tmp_path, proc__cpuinfo="processor : 0\nmodel name : A fast one\n")
    assert found["memory"].text == "8.2 GB available"
    assert found["processor"].text.startswith("A fast one, with ")
    assert not any(one.is_obstacle or one.advice for name, one in found.items() if name != "processor")


@pytest.mark.parametrize(
    ("quota", "advice"), [("50000 100000", "--threads 1,"), ("max 100000", ""), ("9900000 100000", "")]
)
def test_a_container_with_fewer_cores(quota: str, advice: str, tmp_path: Path) -> None:
    found = machine(tmp_path, **{"sys__fs__cgroup__cpu.max": quota})
    assert found["cores"].advice.startswith(advice)
    assert bool(found["cores"].advice) == bool(advice)
    assert ("may use 0.5 of them" in found["cores"].text) == bool(advice)


def test_a_driver_without_the_torch_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine(tmp_path)["GPU"].text == "none with a driver, so the CPU computes"
    for version, advice in ((None, "install torch for CUDA"), ("13.0", "see what `nvidia-smi` says")):
        monkeypatch.setattr(torch.version, "cuda", version)
        assert machine(tmp_path, proc__driver__nvidia__version="NVRM")["GPU"].advice.startswith(advice)


def test_a_torch_that_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version, is_old in (("2.11.0", False), ("2.9.1+cu128", True), ("3.0.0", False)):
        monkeypatch.setattr(torch, "__version__", version)
        assert machine(tmp_path)["software"].is_obstacle == is_old


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(machine_report.os, "access", lambda path, mode: False)
    monkeypatch.setenv("PAGEWOOD_CACHE", str(tmp_path / "none" / "such"))
    found = machine(tmp_path)
    assert "`pip install 'pagewood-engine[transformers]'` for models" in found["extras"].advice
    assert found["cache"].advice.startswith("set PAGEWOOD_CACHE")
    lines = describe([found["cache"], found["memory"]]).splitlines()
    assert [line[:8].rstrip() for line in lines] == ["cache", "", "memory"]
    assert lines[1].startswith("        -> set")


def test_the_bound_is_what_a_token_reads(tmp_path: Path) -> None:
    model = inspect_model(None)
    assert memory_rate(num_cores()) > 1e8
    found = {one.form: one for one in rooflines(model, 1e9, memory_bytes=10**9)}
    assert found["float32"].tokens_per_s == pytest.approx(1e9 / (4 * model.num_parameters), rel=0.02)
    assert found["int8"].tokens_per_s > 3 * found["float32"].tokens_per_s
    assert all(one.fits for one in found.values())
    least = min(model.kv_bytes_of_longest.values())
    tight = {one.form: one.fits for one in rooflines(model, 1e9, memory_bytes=least + model.weights_bytes["int8"])}
    assert (tight["float32"], tight["int8"]) == (False, True)
