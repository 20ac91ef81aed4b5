"""The emulated GPU runs PTX like a GPU: warps in lockstep, barriers, blocks that wait for each other, products."""

# pyright: basic, reportMissingImports=false
# tools are scripts, which are imported by path.

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

TOOLS = Path(__file__).parents[1] / "tools"
HEAD = ".version 9.0\n.target sm_90a\n.address_size 64\n.extern .shared .align 16 .b8 dynamic[];\n"
RUNNER = """
#include <dlfcn.h>
#include "execute.hpp"
extern "C" void run(const char* library, unsigned blocks, unsigned threads, unsigned shared, uint8_t* values) {
  auto* kernel = static_cast<const Kernel*>(dlsym(dlopen(library, RTLD_NOW), "translated"));
  emulated::run(*kernel, library, {blocks, 1, 1}, {threads, 1, 1}, shared, values);
}
"""
SUM = (
    HEAD
    + """
.visible .entry sum(.param .u64 source, .param .u64 target) {
  .reg .pred %p<4>; .reg .b32 %r<16>; .reg .f32 %f<8>; .reg .b64 %rd<8>;
  .shared .align 4 .b8 parts[8];
  ld.param.u64 %rd1, [source];
  ld.param.u64 %rd2, [target];
  mov.u32 %r1, %tid.x;
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, %ntid.x;
  mad.lo.s32 %r4, %r2, %r3, %r1;
  mul.wide.u32 %rd3, %r4, 4;
  add.s64 %rd4, %rd1, %rd3;
  ld.global.f32 %f1, [%rd4];
  mov.u32 %r5, 16;
LOOP:
  mov.b32 %r6, %f1;
  shfl.sync.bfly.b32 %r7, %r6, %r5, 31, -1;
  mov.b32 %f2, %r7;
  add.f32 %f1, %f1, %f2;
  shr.u32 %r5, %r5, 1;
  setp.ne.s32 %p1, %r5, 0;
  @%p1 bra LOOP;
  and.b32 %r8, %r1, 31;
  setp.eq.s32 %p2, %r8, 0;
  shr.u32 %r9, %r1, 5;
  shl.b32 %r10, %r9, 2;
  mov.u32 %r11, parts;
  add.s32 %r12, %r11, %r10;
  @%p2 st.shared.f32 [%r12], %f1;
  bar.sync 0;
  setp.ne.s32 %p3, %r1, 0;
  @%p3 bra DONE;
  ld.shared.v2.f32 {%f3, %f4}, [parts];
  add.f32 %f5, %f3, %f4;
  mul.wide.u32 %rd5, %r2, 4;
  add.s64 %rd6, %rd2, %rd5;
  st.global.f32 [%rd6], %f5;
DONE:
  ret;
}
"""
)
TURN = (
    HEAD
    + """
.visible .entry turn(.param .u64 values) {
  .reg .b32 %r<8>; .reg .b64 %rd<8>;
  ld.param.u64 %rd1, [values];
  mov.u32 %r1, %tid.x;
  xor.b32 %r2, %r1, 1;
  mul.wide.u32 %rd2, %r1, 4;
  mul.wide.u32 %rd3, %r2, 4;
  add.s64 %rd4, %rd1, %rd2;
  add.s64 %rd5, %rd1, %rd3;
  ld.global.u32 %r3, [%rd5];
  st.global.u32 [%rd4], %r3;
  ret;
}
"""
)
REDUCE = (
    HEAD
    + """
.visible .entry reduce(.param .u64 values) {
  .reg .b32 %r<4>; .reg .b64 %rd<4>;
  ld.param.u64 %rd1, [values];
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd2, %r1, 4;
  add.s64 %rd3, %rd1, %rd2;
  ld.global.b32 %r2, [%rd3];
  redux.sync.KIND %r3, %r2, -1;
  st.global.b32 [%rd3], %r3;
  ret;
}
"""
)
MEET = (
    HEAD
    + """
.visible .entry meet(.param .u64 counter, .param .u64 target) {
  .reg .pred %p<2>; .reg .b32 %r<8>; .reg .b64 %rd<8>;
  ld.param.u64 %rd1, [counter];
  ld.param.u64 %rd2, [target];
  atom.global.add.u32 %r1, [%rd1], 1;
AGAIN:
  ld.acquire.gpu.global.u32 %r2, [%rd1];
  setp.lt.u32 %p1, %r2, 3;
  @%p1 bra AGAIN;
  mul.wide.u32 %rd3, %r1, 4;
  add.s64 %rd4, %rd2, %rd3;
  st.global.u32 [%rd4], %r2;
  ret;
}
"""
)
STUCK = (
    HEAD
    + """
.visible .entry stuck() {
  .reg .pred %p<2>; .reg .b32 %r<2>;
  mov.u32 %r1, %tid.x;
  setp.eq.s32 %p1, %r1, 0;
  @%p1 bar.sync 1, 64;
  ret;
}
"""
)
PRODUCT = (
    HEAD
    + """
.visible .entry product(.param .u64 a, .param .u64 b, .param .u64 target) {
  .reg .b32 %r<24>; .reg .f32 %f<8>; .reg .b64 %rd<12>;
  ld.param.u64 %rd1, [a];
  ld.param.u64 %rd2, [b];
  ld.param.u64 %rd3, [target];
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd4, %r1, 16;
  add.s64 %rd5, %rd1, %rd4;
  shl.b32 %r2, %r1, 4;
  mov.u32 %r3, dynamic;
  add.s32 %r4, %r3, %r2;
  cp.async.cg.shared.global [%r4], [%rd5], 16;
  cp.async.wait_group 0;
  bar.warp.sync -1;
  and.b32 %r5, %r1, 15;
  shr.u32 %r6, %r1, 4;
  shl.b32 %r7, %r5, 5;
  shl.b32 %r8, %r6, 4;
  add.s32 %r9, %r3, %r7;
  add.s32 %r10, %r9, %r8;
  ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r11, %r12, %r13, %r14}, [%r10];
  and.b32 %r15, %r1, 3;
  shr.u32 %r16, %r1, 2;
  shl.b32 %r17, %r16, 3;
  add.s32 %r18, %r17, %r15;
  mul.wide.u32 %rd6, %r18, 4;
  add.s64 %rd7, %rd2, %rd6;
  ld.global.u32 %r19, [%rd7];
  ld.global.u32 %r20, [%rd7+16];
  mov.f32 %f1, 0f3F800000;
  mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
    {%f2, %f3, %f4, %f5}, {%r11, %r12, %r13, %r14}, {%r19, %r20}, {%f1, %f1, %f1, %f1};
  shl.b32 %r21, %r16, 2;
  add.s32 %r22, %r21, %r15;
  mul.wide.u32 %rd8, %r22, 8;
  add.s64 %rd9, %rd3, %rd8;
  st.global.v2.f32 [%rd9], {%f2, %f3};
  st.global.v2.f32 [%rd9+256], {%f4, %f5};
  ret;
}
"""
)


@pytest.fixture(scope="module")
def tools() -> None:
    """Make the tools importable; skip if the emulated GPU cannot be compiled here."""
    if platform.machine() != "x86_64" or shutil.which("c++") is None:
        pytest.skip("the emulated GPU needs a C++ compiler on x86-64")
    sys.path.insert(0, str(TOOLS))


@pytest.fixture(scope="module")
def runner(tools: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runner")
    (folder / "runner.cpp").write_text(RUNNER)
    compile_with("library", folder / "runner.cpp", folder / "runner.so")
    return folder / "runner.so"


def compile_with(module: str, source: Path, library: Path) -> None:
    import importlib

    flags = importlib.import_module(f"emulated_gpu.{module}").FLAGS
    include = f"-I{TOOLS / 'emulated_gpu'}"
    subprocess.run(["c++", *flags, include, str(source), "-o", str(library)], check=True)


def run(
    runner: Path, text: str, folder: Path, *arrays: np.ndarray, blocks: int = 1, threads: int, shared: int = 0
) -> None:
    from emulated_gpu.translation import translate

    name = text.split(".entry ")[1].split("(")[0]
    (folder / "kernel.cpp").write_text(translate(text, name))
    compile_with("translate", folder / "kernel.cpp", folder / "kernel.so")
    values = (ctypes.c_uint64 * max(len(arrays), 1))(*(array.ctypes.data for array in arrays))
    ctypes.CDLL(str(runner)).run(str(folder / "kernel.so").encode(), blocks, threads, shared, values)


def test_warps_exchange_and_a_block_meets_at_its_barrier(runner: Path, tmp_path: Path) -> None:
    source, target = np.arange(192, dtype=np.float32), np.zeros(3, np.float32)
    run(runner, SUM, tmp_path, source, target, blocks=3, threads=64)
    assert target.tolist() == source.reshape(3, 64).sum(1).tolist()


def test_lanes_read_before_any_of_them_writes(runner: Path, tmp_path: Path) -> None:
    values = np.arange(32, dtype=np.uint32)
    run(runner, TURN, tmp_path, values, threads=32)
    assert values.tolist() == [i ^ 1 for i in range(32)]


@pytest.mark.parametrize("kind", ["min.s32", "max.s32", "min.u32", "max.u32"])
def test_a_warp_reduces(runner: Path, tmp_path: Path, kind: str) -> None:
    name, dtype = kind.split(".")
    values = np.random.default_rng(0).integers(-(2**31), 2**31, 32).astype(np.int32)
    typed = values.view(np.int32 if dtype == "s32" else np.uint32)
    expected = getattr(typed, name)()
    run(runner, REDUCE.replace("KIND", kind), tmp_path, values, threads=32)
    assert (typed == expected).all()


def test_blocks_may_wait_for_each_other(runner: Path, tmp_path: Path) -> None:
    counter, target = np.zeros(1, np.uint32), np.zeros(3, np.uint32)
    run(runner, MEET, tmp_path, counter, target, blocks=3, threads=1)
    assert target.tolist() == [3, 3, 3]


def test_a_warp_multiplies_matrices(runner: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(np.float16) for shape in ((16, 16), (16, 8)))
    columns, target = np.ascontiguousarray(b.T), np.zeros((16, 8), np.float32)
    run(runner, PRODUCT, tmp_path, a, columns, target, threads=32, shared=512)
    np.testing.assert_allclose(target, 1 + a.astype(np.float32) @ b.astype(np.float32), rtol=1e-5, atol=1e-5)


def test_threads_that_wait_forever_are_reported(runner: Path, tmp_path: Path) -> None:
    program = "import sys; sys.path[:0] = sys.argv[1:3]; import test_emulated_gpu as t; from pathlib import Path\n"
    program += "t.run(Path(sys.argv[3]), t.STUCK, Path(sys.argv[4]), threads=64)"
    command = [sys.executable, "-c", program, str(TOOLS), str(Path(__file__).parent), str(runner), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert "its threads wait for each other" in done.stderr


def test_what_is_not_translated_is_named(tools: None) -> None:
    from emulated_gpu.ptx import Unknown
    from emulated_gpu.translation import translate

    with pytest.raises(Unknown, match="popc"):
        translate(HEAD + ".entry odd() { .reg .b32 %r<2>; popc.b32 %r1, %r1; ret; }", "odd")
    with pytest.raises(Unknown, match="no kernel"):
        translate(SUM, "other")


def test_the_compiler_stops_at_ptx(tools: None, tmp_path: Path) -> None:
    from gpu_host.toolkit import keep_ptx

    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text('#!/bin/sh\necho "$@"\n')
    nvcc.chmod(0o755)
    keep_ptx(tmp_path)
    done = subprocess.run([nvcc, "-gencode=arch=compute_90a,code=sm_90a", "a b.cu"], capture_output=True, text=True)
    assert done.stdout.split("\n")[0] == "--no-compress -gencode=arch=compute_90a,code=compute_90a a b.cu"
