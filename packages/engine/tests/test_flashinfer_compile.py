"""Which kernels are compiled before a model is loaded, by the installed FlashInfer's generators. Compiles nothing."""

# pyright: basic
# FlashInfer has no types.

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NAMES = """
import json, sys, warnings
warnings.simplefilter("ignore")
from pagewood.engine.runner.cuda.kernels.flashinfer_compile import KernelNeeds, kernel_specs

needs = [KernelNeeds(dtype="bfloat16", head_dim=128, group=4, has_windows=(False,))]
if sys.argv[1] == "all":
    needs += [
        KernelNeeds(dtype="float16", head_dim=64, group=1, has_windows=(False, True), has_soft_cap=True),
        KernelNeeds(dtype="float16", head_dim=64, group=4, has_windows=(False,), batch_invariant=True),
    ]
specs = kernel_specs(needs, prefill_backend="fa3")
assert all(spec.sources for spec in specs)
print(json.dumps([spec.name for spec in specs]))
"""


def names(which: str, folder: Path) -> list[str]:
    environment = {**os.environ, "FLASHINFER_WORKSPACE_BASE": str(folder), "FLASHINFER_CUDA_ARCH_LIST": "9.0a"}
    command = [sys.executable, "-c", NAMES, which]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    return json.loads(output.splitlines()[-1])


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer-python is not installed")
def test_a_model_needs_these_kernels(tmp_path: Path) -> None:
    plain = names("one", tmp_path)
    assert plain[:5] == ["norm", "rope", "page", "sampling", "silu_and_mul"]
    fa2, fa3 = plain[5:]
    shape = "dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32_head_dim_qk_128_head_dim_vo_128"
    assert shape in fa2
    assert shape in fa3
    assert fa3.endswith("_sm90")
    assert not fa2.endswith("_sm90")
    assert all(name.startswith("batch_prefill_with_kv_cache") for name in (fa2, fa3))
    more = names("all", tmp_path)[7:]
    assert sum(name.startswith("batch_decode") for name in more) == 2  # without and with a window
    assert sum(name.endswith("_sm90") for name in more) == 2
    assert sum("use_logits_cap_True" in name for name in more) == 4
    assert sum(name.startswith("batch_prefill") and "cap_False" in name for name in more) == 1
