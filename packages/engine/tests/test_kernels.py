"""Compiled code is cached on disk, and progress reports what is compiled."""

# pyright: basic
# numba has no types.

from __future__ import annotations

import fcntl
import inspect
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import small_disk
from pagewood.engine.runner.cpu.compiled.attention.heads import attend, split
from pagewood.engine.runner.cpu.compiled.drafting.passes import tag
from pagewood.engine.runner.cpu.compiled.instruction import OPERANDS, ROWS, Instruction, Unit
from pagewood.engine.runner.cpu.compiled.machine.clock import clock
from pagewood.engine.runner.cpu.compiled.machine.kernel import Kernel, _Locator, kernel
from pagewood.engine.runner.cpu.compiled.rows import scale
from pagewood.engine.runner.cpu.kernels import log_not_kept, warm_up

COMPILE_ONE = """
import numpy as np
from pagewood.engine.runner.cpu.compiled.layout import NUM_SCOPE_COLUMNS, Column, collect
collect.compile()
scopes = np.zeros((1, NUM_SCOPE_COLUMNS), np.int64)
firsts, grants = np.array([0, 3, 4], np.int32), np.arange(2, dtype=np.int32)
scopes[0, Column.FIRSTS], scopes[0, Column.SAMPLED] = firsts.ctypes.data, grants.ctypes.data
found, yielded = np.array([[5], [6], [7], [8]], np.int32), np.array([[2], [1]], np.int32)
nums, promised = np.array([3, 1], np.int32), np.array([3, 1], np.int32)
tokens, counts, drafted = np.zeros(4, np.int32), np.zeros(2, np.int32), np.zeros(2, np.int32)
assert collect(scopes, 0, found, yielded, nums, promised, tokens, counts, drafted) == 3
assert (tokens[:3].tolist(), counts.tolist(), drafted.tolist()) == ([5, 6, 8], [2, 1], [2, 0])
print(collect.loaded)
"""


def loaded_in_another_process(cache: Path) -> bool:
    """Return whether a new process, which also calls the kernel, finds its code in the cache."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    output = subprocess.run([sys.executable, "-c", COMPILE_ONE], env=environment, check=True, capture_output=True)
    return output.stdout.strip() == b"True"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has an environment variable for it")
def test_the_second_process_compiles_nothing(tmp_path: Path) -> None:
    assert not loaded_in_another_process(tmp_path)
    assert loaded_in_another_process(tmp_path)


VARIANTS = """
from pagewood.engine.runner.cpu.compiled.machine.kernel import kernel

def make(factor):
    def scaled(number):
        return factor * number

    return kernel("int64(int64)", variant=factor)(scaled)
"""

LOAD_VARIANTS = """
import ctypes
import sys
sys.path.insert(0, sys.argv[1])
from variants import make
kernels = {factor: make(factor) for factor in map(int, sys.argv[2:])}
for factor, one in kernels.items():
    one.compile()
call = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
print([call(one.address)(10) for one in kernels.values()], all(one.loaded for one in kernels.values()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has an environment variable for it")
def test_variants_that_several_processes_have_compiled_do_not_replace_each_other(tmp_path: Path) -> None:
    (tmp_path / "variants.py").write_text(VARIANTS)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}

    def run(*factors: int) -> str:
        command = [sys.executable, "-c", LOAD_VARIANTS, str(tmp_path), *map(str, factors)]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()

    assert [run(2), run(3), run(5)] == ["[20] False", "[30] False", "[50] False"]
    assert run(5, 2, 3) == "[50, 20, 30] True"


def plus_one(number: int) -> int:
    return number + 1


Report = Callable[[Path], tuple[bool, str]]


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Report:
    """Make a kernel anew, as each process does; return whether its code was in the cache, and what was logged."""

    def compile_one(cache: Path) -> tuple[bool, str]:
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        caplog.clear()
        one = kernel("i8(i8)")(plus_one)
        one.compile()
        assert one(1) == 2
        log_not_kept([one])
        return one.loaded, caplog.text

    return compile_one


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has an environment variable for it")
@pytest.mark.parametrize("room", [0, 4096, 8192])
def test_a_full_disk_costs_the_cache_only(room: int, tmp_path: Path, report: Report) -> None:
    """Whether the room ends before the index, before the code, or in it."""
    with small_disk.mounted(tmp_path / "disk", num_bytes=max(room, 4096)) as disk:
        if not room:
            small_disk.fill(disk)
        for _ in range(2):
            loaded, log = report(disk)
            assert not loaded
            assert f"1 compiled kernels cannot be kept in {disk}/pagewood/kernels/" in log
            assert "No space left on device; make room there, or set XDG_CACHE_HOME to a folder" in log
        assert not [path for path in disk.rglob("*") if ".tmp." in path.name or path.suffix == ".nbc"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has an environment variable for it")
def test_a_cache_folder_that_is_read_only_is_used(tmp_path: Path, report: Report) -> None:
    with small_disk.mounted(tmp_path / "disk", num_bytes=1 << 22) as disk:
        small_disk.forbid_writing(disk)
        loaded, log = report(disk)
        assert not loaded
        assert f"cannot be kept in {disk}/pagewood/kernels/" in log
        assert "Read-only file system" in log
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        assert report(disk) == (False, "")
        small_disk.forbid_writing(disk)
        assert report(disk) == (True, "")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has an environment variable for it")
def test_what_another_process_compiles_is_left_for_later(
    tmp_path: Path, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert report(tmp_path) == (False, "")
    [lock] = tmp_path.rglob("*.lock")
    stored = sorted(path for path in lock.parent.iterdir() if path != lock)  # the index is the last
    for path in stored:
        path.rename(tmp_path / path.name)
    one = kernel("i8(i8)")(plus_one)
    with lock.open() as other:  # as another process that compiles has it
        fcntl.flock(other, fcntl.LOCK_EX)
        assert not one.compile(waits=False)
        with monkeypatch.context() as patch:
            patch.setattr("pagewood.engine.runner.cpu.compiled.machine.kernel._PATIENCE_S", 0.1)
            impatient = kernel("i8(i8)")(plus_one)
            assert impatient.compile()  # by itself: the other process may be stopped
            assert not impatient.loaded
        for path in stored:
            path.unlink()
        waiting = threading.Thread(target=one.compile)
        waiting.start()
        while one._cache is None or one._cache._reserved is None:
            time.sleep(0.01)
        for path in stored:
            (tmp_path / path.name).rename(path)
    waiting.join()
    assert one.loaded
    assert one(1) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has an environment variable for it")
def test_a_damaged_file_of_the_cache_is_made_again(tmp_path: Path, report: Report) -> None:
    """As a loss of power leaves it. The kernel is made again from each damage, and is what the next one damages."""
    assert report(tmp_path) == (False, "")
    for suffix in ("nbi", "nbc"):
        for content in (b"", b"no pickle", None):
            [file] = tmp_path.rglob(f"*.{suffix}")
            whole = file.read_bytes()
            damaged = whole[: len(whole) // 2] if content is None else content
            file.write_bytes(damaged)
            loaded, log = report(tmp_path)
            assert not loaded
            assert "plus_one is compiled again, because its code in" in log
            [file] = tmp_path.rglob(f"*.{suffix}")
            assert len(file.read_bytes()) > len(damaged)
        assert report(tmp_path) == (True, "")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has an environment variable for it")
def test_without_a_cache_folder_it_compiles_every_time(tmp_path: Path, report: Report) -> None:
    not_a_folder = tmp_path / "file"
    not_a_folder.write_text("")
    assert [report(not_a_folder)[0] for _ in range(2)] == [False, False]


def test_warming_up_reports_progress() -> None:
    reports: list[tuple[str, int, int]] = []
    warm_up(16, progress=lambda text, done, total: reports.append((text, done, total)))
    total = reports[0][2]
    assert [(done, of) for _, done, of in reports] == [(i, total) for i in range(total + 1)]
    assert reports[0][0].startswith("loading kernel ")


def test_warming_up_leaves_for_the_end_what_another_process_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compile_it = Kernel.compile

    def noted(kernel: Kernel, *, waits: bool = True) -> bool:
        if kernel.name == "rows" and not waits:
            return False
        compiled.append(kernel.name)
        return compile_it(kernel, waits=waits)

    monkeypatch.setattr(Kernel, "compile", noted)
    reports: list[int] = []
    warm_up(16, progress=lambda text, done, total: reports.append(done - total))
    assert compiled[-1] == "rows"
    assert len(compiled) == len(set(compiled))
    assert reports[-1] == 0
    assert reports == sorted(reports)


def test_an_instruction_without_a_compiled_function_is_refused() -> None:
    plain = warm_up(16)
    assert plain.place(attend(16, int8=False, sees_later=False, sees_images=False))[0] == plain.place(split(16))[0] != 0
    for other, name in (
        (attend(64, int8=False, sees_later=False, sees_images=False), "attend"),
        (attend(16, int8=True, sees_later=False, sees_images=False), "attend"),
        (tag, "tag"),
    ):
        with pytest.raises(ValueError, match=f"{name} must be in one of the units that were compiled, see `warm_up`"):
            plain.place(other)


def test_variants_of_one_source_are_cached_separately(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def plus(amount: int) -> int:
        one = kernel("i8(i8)", variant=amount)(lambda number: number + amount)
        one.compile()
        return one(1)

    assert [plus(amount) for amount in (1, 2, 1)] == [2, 3, 2]


def test_generated_code_is_stale_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same instructions in another order, or another column, are other code."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def is_loaded(*instructions: Instruction) -> bool:
        unit = Unit("some", *instructions)
        unit.kernel.compile()
        return unit.kernel.loaded

    assert [is_loaded(clock, scale), is_loaded(scale, clock)] == [False, False]
    monkeypatch.setattr("pagewood.engine.runner.cpu.compiled.instruction.OPERATION", ROWS)
    assert not is_loaded(clock, scale)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert [is_loaded(clock, scale), is_loaded(scale, clock)] == [True, True]


def test_generated_code_can_be_read_where_a_debugger_looks_for_it() -> None:
    unit = Unit("some", clock)
    assert inspect.getsource(unit.kernel._dispatcher.py_func) == unit.source
    assert f"        clock_0(one[{OPERANDS}])\n" in unit.source


def test_a_call_compiles_nothing() -> None:
    untouched = kernel("i8(i8)")(lambda number: number)
    with pytest.raises(RuntimeError, match="must be compiled before it is called"):
        untouched(1)
    untouched.compile()
    assert untouched(1) == 1


def test_code_is_stale_when_a_file_of_another_room_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = tmp_path / "compiled"
    for room in ("machine", "products"):
        (compiled / room).mkdir(parents=True)
        (compiled / room / "one.py").write_text("x = 1")
    monkeypatch.setattr("pagewood.engine.runner.cpu.compiled.machine.kernel._COMPILED", compiled)
    file = compiled / "machine" / "one.py"

    def stamp() -> str:
        return _Locator(stamp, str(file)).get_source_stamp()

    before = stamp()
    assert stamp() == before
    (compiled / "products" / "one.py").write_text("x = 2")
    assert stamp() != before
