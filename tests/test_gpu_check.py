"""The script that checks a GPU, without one: its checks hold for the stand-in, and fail for a wrong one."""

# pyright: basic
# the script is loaded by its path.

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewood.engine.testing import flashinfer_torch


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_check", Path(__file__).parents[1] / "tools" / "gpu_check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "gpu_check", module)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture(autouse=True)
def small_buffers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pagewood.engine.runner.attention_flashinfer.WORKSPACE_BYTES", 1024)
        patch.setattr("pagewood.engine.runner.staging.STAGING_BYTES", 1024)
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # tiny tensors: a second thread only waits
        yield
        torch.set_num_threads(num_threads)


def test_every_check_holds_for_the_stand_in(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--stand-in"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["ok"] * 4 + ["skipped"]


def test_a_wrong_library_fails(
    script: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong:
        def __getattr__(self, name: str) -> Any:
            return getattr(flashinfer_torch, name)

        def silu_and_mul(self, input: torch.Tensor) -> torch.Tensor:
            return flashinfer_torch.silu_and_mul(input) * 1.1

    host = script.Host(device=script.RecordingDevice(), flashinfer=Wrong(), is_gpu=False)
    with pytest.raises(script.Failed, match="silu_and_mul: differs by"):
        script.check_operations(host)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_host_without_a_gpu_is_told_so(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main([]) == 2
    assert "there is nothing to check" in capsys.readouterr().out
