"""Products of bytes for ARM: compiled here for aarch64, and run on an emulated processor."""

# pyright: basic
# llvmlite and unicorn have no types.

from __future__ import annotations

import struct
from functools import cache
from operator import attrgetter
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest
from llvmlite import ir
from numpy.typing import NDArray

from pagewood.engine.runner.cpu.compiled.products.code_tile import emit_codes
from pagewood.engine.runner.cpu.compiled.products.dot import DotLevel, dot_levels
from pagewood.engine.runner.cpu.compiled.products.weight_kind import WeightKind
from pagewood.engine.runner.cpu.weights.packing import PackedWeight, pack
from pagewood.engine.weights.matrix_forms import Int4, Int8Group, Weight, quantise_int4, quantise_int8
from weight_makers import float4

_TRIPLE = "aarch64-unknown-linux-gnu"
_POINTERS = (1, 2, 3, 4, 5, 6, 7, 11)  # among the arguments of a tile
_ROWS, _DEPTH, _WIDTH = 3, 128, 32
_QUARTERS = {264: 0, 266: 1, 268: 2, 269: 3}
"""Which 16 bits of an address an instruction holds, by the type of its relocation: R_AARCH64_MOVW_UABS_G0_NC to G3."""
_CODE, _CONSTANTS, _STACK, _MEMORY, _END = 0x10000, 0x100000, 0x200000, 0x400000, 0x1000
NAME = attrgetter("name")


def normal(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def int8_groups(group: int, *, has_zeros: bool = False, has_offsets: bool = False) -> Weight:
    random, shape = np.random.default_rng(1), (_WIDTH, _DEPTH // group)
    codes = random.integers(-128, 128, (_WIDTH, _DEPTH), dtype=np.int8)
    zeros = random.integers(-128, 128, shape, dtype=np.int8) if has_zeros else None
    return Int8Group(codes, normal(*shape), zeros, group, normal(*shape, seed=2) if has_offsets else None)


FOUR = quantise_int4(normal(_WIDTH, _DEPTH))
WEIGHTS: dict[WeightKind, Weight] = {
    WeightKind.INT8: quantise_int8(normal(_WIDTH, _DEPTH)),
    WeightKind.INT4: FOUR,
    WeightKind.INT4_ZEROS: quantise_int4(normal(_WIDTH, _DEPTH), group=64, symmetric=False),
    WeightKind.INT4_OFFSETS: Int4(FOUR.codes, FOUR.scales, None, 32, normal(_WIDTH, _DEPTH // 32, seed=3)),
    WeightKind.INT8_GROUP: int8_groups(64),
    WeightKind.INT8_GROUP_ZEROS: int8_groups(32, has_zeros=True),
    WeightKind.INT8_GROUP_OFFSETS: int8_groups(32, has_offsets=True),
    WeightKind.INT8_16: int8_groups(16),
    WeightKind.INT8_16_OFFSETS: int8_groups(16, has_offsets=True),
    WeightKind.MXFP4: float4(normal(_WIDTH, _DEPTH), group=32),
    WeightKind.NVFP4: float4(normal(_WIDTH, _DEPTH), group=16),
}


@cache
def machine() -> Any:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple(_TRIPLE)
    return target.create_target_machine(cpu="neoverse-n1", features="+dotprod", opt=2, reloc="static")


def compiled(kind: WeightKind) -> Any:
    """Return a module with one function, a tile of three rows."""
    module = ir.Module()
    module.triple = _TRIPLE
    byte, number = ir.IntType(8).as_pointer(), ir.IntType(64)
    arguments = [byte if place in _POINTERS else number for place in range(13)]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), arguments), "tile")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    emit_codes(builder, kind, DotLevel.SDOT, _ROWS, function.args[0], list(function.args[1:]))
    builder.ret_void()
    return llvm.parse_assembly(str(module))


@pytest.mark.parametrize("kind", [kind for kind in WeightKind if kind.has_codes], ids=NAME)
def test_every_kind_is_multiplied_by_sdot(kind: WeightKind) -> None:
    lines = machine().emit_assembly(compiled(kind)).split("\n")
    num_dots = sum("\tsdot\t" in line for line in lines)
    assert num_dots >= _ROWS * (8 if kind == WeightKind.INT8 else 4)
    assert not any("\tbl\t" in line for line in lines)


def test_sdot_is_not_chosen_without_it() -> None:
    assert (DotLevel.SDOT in dot_levels()) == bool(llvm.get_host_cpu_features().get("dotprod"))


def linked(file: Any) -> tuple[bytes, bytes]:
    """Return the code of an object file with the address of its constants in it, and the constants."""
    sections = {section.name(): section.data() for section in file.sections()}
    code = bytearray(sections[b".text"])
    constants = [data for name, data in sections.items() if name and name.startswith(b".rodata")]
    assert len(constants) <= 1  # so that every relocation means it
    for place, info, addend in struct.iter_unpack("<QQq", sections.get(b".rela.text", b"")):
        quarter = _QUARTERS[info & 0xFFFFFFFF]
        value = (_CONSTANTS + addend) >> 16 * quarter & 0xFFFF
        [word] = struct.unpack_from("<I", code, place)
        struct.pack_into("<I", code, place, word | value << 5)
    return bytes(code), b"".join(constants)


def run(kind: WeightKind, weight: PackedWeight, x: NDArray[np.int8], out_shape: tuple[int, int]) -> NDArray[np.float32]:
    """Run the tile on an emulated processor: codes `[T, K]` times a panel, with scales of rows 2, 3, 4 and a bias."""
    unicorn = pytest.importorskip("unicorn")
    registers = pytest.importorskip("unicorn.arm64_const")
    group = weight.shape.group
    sums = x.reshape(_ROWS, -1, group).astype(np.int32).sum(axis=2).T * kind.factor
    scales = np.zeros(1, np.float32) if weight.scales is None else weight.scales
    inputs = [
        np.ascontiguousarray(x.reshape(_ROWS, -1, 4).transpose(1, 0, 2)),
        np.ascontiguousarray(sums, np.int32),
        np.arange(2, 2 + _ROWS, dtype=np.float32),
        weight.panels,
        scales,
        np.arange(_WIDTH, dtype=np.float32),
        np.zeros(out_shape, np.float32),
    ]
    file = llvm.ObjectFileRef.from_data(machine().emit_object(compiled(kind)))
    code, constants = linked(file)
    arm = unicorn.Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
    arm.ctl_set_cpu_model(registers.UC_CPU_ARM64_MAX)
    for start, size in ((_CODE, _STACK - _CODE), (_STACK, 0x100000), (_MEMORY, 0x100000)):
        arm.mem_map(start, size)
    arm.mem_write(_CODE, code)
    arm.mem_write(_CONSTANTS, constants)
    addresses: list[int] = []
    end = _MEMORY
    for array in inputs:
        addresses.append(end)
        arm.mem_write(end, array.tobytes())
        end += -(-array.nbytes // 64) * 64
    arguments = [_ROWS, *addresses, out_shape[1], _DEPTH, group, _MEMORY, 64]
    for place, value in enumerate(arguments[:8]):
        arm.reg_write(registers.UC_ARM64_REG_X0 + place, value)
    top = _STACK + 0x80000
    arm.mem_write(top, np.array(arguments[8:], np.int64).tobytes())
    arm.reg_write(registers.UC_ARM64_REG_SP, top)
    arm.reg_write(registers.UC_ARM64_REG_X30, _END)
    arm.reg_write(registers.UC_ARM64_REG_CPACR_EL1, 3 << 20)  # floating point
    arm.emu_start(_CODE, _END, count=10_000_000)
    assert arm.reg_read(registers.UC_ARM64_REG_PC) == _END
    return np.frombuffer(bytes(arm.mem_read(addresses[6], inputs[6].nbytes)), np.float32).reshape(out_shape)


@pytest.mark.parametrize("kind", WEIGHTS, ids=NAME)
def test_an_emulated_processor_computes_the_product(kind: WeightKind) -> None:
    weight, x = WEIGHTS[kind], np.random.default_rng(7).integers(-127, 128, (_ROWS, _DEPTH), dtype=np.int8)
    found = run(kind, pack(weight), x, (_ROWS, _WIDTH + 4))
    wide = weight.dequantised().astype(np.float64)
    factors = np.arange(2, 2 + _ROWS)[:, None]
    expected = x.astype(np.float64) @ wide.T * factors + np.arange(_WIDTH)
    largest = np.abs(x.astype(np.float64)) @ np.abs(wide).T * factors + 1
    assert (np.abs(found[:, :_WIDTH] - expected) <= 1e-6 * largest).all()
    assert not found[:, _WIDTH:].any()
