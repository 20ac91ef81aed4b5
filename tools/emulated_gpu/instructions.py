"""Translations of the PTX instructions that FlashInfer's and Triton's kernels use."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from emulated_gpu.ptx import WIDTH, Unknown, elements

if TYPE_CHECKING:
    from emulated_gpu.translation import Translator

Instruction = Callable[["Translator", list[str], list[str]], None]
"""Gets the translator, the parts of the name (`add.s32`), and the operands, usually with the target first."""

INSTRUCTIONS: dict[str, Instruction] = {}

FLOATS = {"f16": "half", "bf16": "bfloat", "f32": "float", "f64": "double", "f16x2": "half2", "bf16x2": "bfloat2"}
_SPACES = ("global", "shared", "local", "param")
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_TO_WHOLE = ("rni", "rzi", "rmi", "rpi")


def c_type(kind: str) -> str:
    """Return the C++ type of a PTX type."""
    if kind in FLOATS:
        return FLOATS[kind]
    return "bool" if kind == "pred" else f"{'int' if kind[0] == 's' else 'uint'}{WIDTH[kind]}_t"


def c_name(name: str) -> str:
    """Return the C++ name of a PTX name."""
    return name.replace("%", "r_").replace("$", "_S").replace(".", "_")


def _instruction(*names: str) -> Callable[[Instruction], Instruction]:
    def register(function: Instruction) -> Instruction:
        INSTRUCTIONS.update(dict.fromkeys(names, function))
        return function

    return register


def _type(op: list[str]) -> str:
    return next(part for part in reversed(op) if part in WIDTH)


def _bits(kind: str) -> str:
    """Return the untyped type of the same width."""
    return f"b{WIDTH[kind]}" if kind in FLOATS else kind


def _wide(kind: str) -> str:
    return f"{kind[0]}{2 * WIDTH[kind]}"


def _space(op: list[str]) -> str:
    return next((part.split("::")[0] for part in op if part.split("::")[0] in _SPACES), "generic")


def _true(condition: bool) -> str:
    return str(condition).lower()


# Numbers.


@_instruction("add", "sub", "mul", "min", "max", "and", "or", "xor", "div", "rem", "copysign")
def _binary(t: Translator, op: list[str], args: list[str]) -> None:
    kind = _type(op)
    values = t.values(args[1:3], kind)
    if "wide" in op:
        wide = _wide(kind)
        t.set(args[0], wide, f"mul_of({', '.join(f'{c_type(wide)}({t.value(one, kind)})' for one in args[1:3])})")
    else:
        t.set(args[0], kind, f"{op[0]}{'_high' if 'hi' in op else ''}_of({values})")


@_instruction("mad", "fma")
def _fused(t: Translator, op: list[str], args: list[str]) -> None:
    kind = _type(op)
    if kind in FLOATS:
        t.set(args[0], kind, f"fma_of({t.values(args[1:4], kind)})")
        return
    result = _wide(kind) if "wide" in op else kind
    factors = ", ".join(f"{c_type(result)}({t.value(one, kind)})" for one in args[1:3])
    t.set(args[0], result, f"add_of(mul_of({factors}), {t.value(args[3], result)})")


@_instruction("neg", "abs", "not", "clz", "ex2", "lg2", "sin", "cos", "rcp", "rsqrt", "tanh")
def _unary(t: Translator, op: list[str], args: list[str]) -> None:
    kind = _type(op)
    t.set(args[0], "u32" if op[0] == "clz" else kind, f"{op[0]}_of({t.value(args[1], kind)})")


@_instruction("shl", "shr", "bfe")
def _shift(t: Translator, op: list[str], args: list[str]) -> None:
    kind = _type(op)
    t.set(args[0], kind, f"{op[0]}_of({t.value(args[1], kind)}, {t.values(args[2:], 'u32')})")


@_instruction("bfi")
def _bfi(t: Translator, op: list[str], args: list[str]) -> None:
    kind = _type(op)
    t.set(args[0], kind, f"bfi_of({t.values(args[1:3], kind)}, {t.values(args[3:], 'u32')})")


@_instruction("prmt")
def _prmt(t: Translator, op: list[str], args: list[str]) -> None:
    if op[1:] != ["b32"]:
        raise Unknown("mode")
    t.set(args[0], "u32", f"prmt_of({t.values(args[1:4], 'u32')})")


def _comparison(t: Translator, word: str, kind: str, args: list[str]) -> str:
    """Return the condition; comparisons that end in u are also true for NaN."""
    x, y = (t.value(one, kind) for one in args)
    if kind in FLOATS:
        x, y = f"number({x})", f"number({y})"
    if word in _COMPARISONS:
        ordered = f" && {x} == {x} && {y} == {y}" if word == "ne" and kind in FLOATS else ""
        return f"({x} {_COMPARISONS[word]} {y}{ordered})"
    opposite = {"neu": "==", "ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<"}
    return f"!({x} {opposite[word]} {y})" if word in opposite else f"({x} == {y} || {x} != {x} || {y} != {y})"


@_instruction("setp")
def _setp(t: Translator, op: list[str], args: list[str]) -> None:
    condition = _comparison(t, op[1], _type(op), args[1:3])
    if combined := {"and": "&&", "or": "||", "xor": "!="}.get(op[2]):
        condition = f"{condition} {combined} {t.value(args[3], 'pred')}"
    t.set(args[0], "pred", condition)


@_instruction("set")
def _set(t: Translator, op: list[str], args: list[str]) -> None:
    if op[-2] != "f32":
        raise Unknown("result")
    t.set(args[0], "f32", f"{_comparison(t, op[1], op[-1], args[1:3])} ? 1.0f : 0.0f")


@_instruction("selp")
def _selp(t: Translator, op: list[str], args: list[str]) -> None:
    kind = _bits(_type(op))
    t.set(args[0], kind, f"{t.value(args[3], 'pred')} ? {t.value(args[1], kind)} : {t.value(args[2], kind)}")


@_instruction("mov")
def _mov(t: Translator, op: list[str], args: list[str]) -> None:
    kind = _type(op)
    bits = kind if kind == "pred" else f"b{WIDTH[kind]}"
    target, source = elements(args[0]), elements(args[1])
    part = f"b{WIDTH[kind] // max(len(target), len(source))}"
    if len(target) > 1:
        t.set_all(target, part, f"parts<{c_type(part)}>({t.value(args[1], bits)})")
    elif len(source) > 1:
        t.set(args[0], bits, f"joined<{c_type(bits)}, {c_type(part)}>({{{t.values(source, part)}}})")
    else:
        t.set(args[0], bits, t.value(args[1], bits))


@_instruction("cvt")
def _cvt(t: Translator, op: list[str], args: list[str]) -> None:
    if op[1:] == ["rna", "tf32", "f32"]:
        t.set(args[0], "b32", f"({t.value(args[1], 'b32')} + 0x1000) & ~0x1fffu")
        return
    kinds = [part for part in op[1:] if part in WIDTH or part in ("e4m3x2", "e5m2x2")]
    target, source = kinds
    whole = next((part for part in op if part in _TO_WHOLE), None)
    if target in ("f16x2", "bf16x2") and source == "f32":
        high, low = (f"to<uint16_t>({c_type(target[:-2])}({t.value(one, 'f32')}))" for one in args[1:3])
        t.set(args[0], "b32", f"uint32_t({high}) << 16 | {low}")
    elif target in ("e4m3x2", "e5m2x2") and source == "f32":
        high, low = (f"to_{target[:4]}({t.value(one, 'f32')})" for one in args[1:3])
        t.set(args[0], "b16", f"{high} << 8 | {low}")
    elif target == "f16x2":
        t.set(args[0], "b32", f"half2_of_{source}({t.value(args[1], 'b16')})")
    elif target in FLOATS and source in FLOATS and not whole:
        t.set(args[0], target, f"{c_type(target)}(number({t.value(args[1], source)}))")
    elif target in FLOATS and source not in FLOATS:
        way = "convert_down" if "rm" in op else "convert"
        t.set(args[0], target, f"{way}<{c_type(target)}>({t.value(args[1], source)})")
    elif source in FLOATS:
        value = f"{whole}_of(number({t.value(args[1], source)}))"
        t.set(args[0], target, value if target in FLOATS else f"nearest<{c_type(target)}>({value})")
    elif "sat" in op:
        raise Unknown("saturation")
    else:
        t.set(args[0], target, t.value(args[1], source))


# Memory.


@_instruction("cvta")
def _cvta(t: Translator, op: list[str], args: list[str]) -> None:
    kind = _type(op)
    value = t.value(args[1], kind)
    if _space(op) == "shared":
        value = f"T.shared_offset({value})" if "to" in op else f"uint64_t(T.shared(uint32_t({value})))"
    t.set(args[0], kind, value)


@_instruction("isspacep")
def _isspacep(t: Translator, op: list[str], args: list[str]) -> None:
    if op[1] != "local":
        raise Unknown("space")
    t.set(args[0], "pred", "false")  # generic access works for local memory, too


@_instruction("ld")
def _ld(t: Translator, op: list[str], args: list[str]) -> None:
    kind, space = _bits(_type(op)), _space(op)
    if any(part in op for part in ("volatile", "acquire", "relaxed")) and space != "shared":
        t.emit("T.look_again();")
    targets = elements(args[0])
    t.set_all(targets, kind, f"load<{c_type(kind)}, {len(targets)}>({t.address(args[1], space)})")


@_instruction("st")
def _st(t: Translator, op: list[str], args: list[str]) -> None:
    kind, space, sources = _bits(_type(op)), _space(op), elements(args[1])
    if space in ("global", "generic", "shared"):
        t.emit("T.before_write();")
    t.emit(f"store<{c_type(kind)}, {len(sources)}>({t.address(args[0], space)}, {{{t.values(sources, kind)}}});")


@_instruction("atom", "red")
def _atom(t: Translator, op: list[str], args: list[str]) -> None:
    kind = _type(op)
    word = next(part for part in op if part in ("add", "min", "inc", "cas"))
    target = args.pop(0) if op[0] == "atom" else "_"
    t.emit("T.look_again();")
    t.set(target, kind, f"atom_{word}<{c_type(kind)}>({t.address(args[0], _space(op))}, {t.values(args[1:], kind)})")


# Control.


@_instruction("bra")
def _bra(t: Translator, op: list[str], args: list[str]) -> None:
    t.emit(f"goto {t.label(args[0])};")


@_instruction("ret")
def _ret(t: Translator, op: list[str], args: list[str]) -> None:
    t.emit("return;")


@_instruction("trap")
def _trap(t: Translator, op: list[str], args: list[str]) -> None:
    t.emit('T.fail("the kernel traps");')


@_instruction("call")
def _call(t: Translator, op: list[str], args: list[str]) -> None:
    results = elements(args.pop(0).replace("(", "{").replace(")", "}")) if args[0].startswith("(") else []
    name = args.pop(0)
    buffers = [str(t.named(one)) for one in [*results, *(elements("{" + args[0].strip("()") + "}") if args else [])]]
    if name == "vprintf":
        t.emit(f"memset({buffers[0]}, 0, 4);")
    elif name == "__assertfail":
        t.emit(f"T.fail(*reinterpret_cast<const char**>({buffers[0]}));")
    elif name in t.module.functions:
        t.called.add(name)
        t.emit(f"{c_name(name)}({', '.join(['T', *buffers])});")
    else:
        raise Unknown(f"function {name}")


@_instruction("fence", "membar", "griddepcontrol", "prefetch", "setmaxnreg")
def _nothing(t: Translator, op: list[str], args: list[str]) -> None:
    pass  # one thread runs at a time, so all see the same memory


@_instruction("nanosleep")
def _nanosleep(t: Translator, op: list[str], args: list[str]) -> None:
    t.emit("T.look_again();")


# Operations of a whole warp or block.


@_instruction("bar", "barrier")
def _bar(t: Translator, op: list[str], args: list[str]) -> None:
    if op[1] == "warp":
        t.emit(f"T.sync_warp({t.value(args[0], 'u32')});")
    elif op[1:3] == ["red", "or"]:
        t.set(args[0], "pred", f"T.barrier_any({t.value(args[1], 'u32')}, {t.value(args[2], 'pred')})")
    elif op[1] in ("sync", "arrive"):
        count = t.value(args[1], "u32") if len(args) > 1 else "0"
        t.emit(f"T.{'arrive' if op[1] == 'arrive' else 'barrier'}({t.value(args[0], 'u32')}, {count});")
    else:
        raise Unknown("form")


@_instruction("shfl")
def _shfl(t: Translator, op: list[str], args: list[str]) -> None:
    target, *is_inside = (part.strip() for part in args[0].split("|"))
    t.emit("{ bool is_inside;")
    t.set(target, "b32", f"T.shfl_{op[2]}({t.values(args[1:5], 'u32')}, is_inside)")
    if is_inside:
        t.set(is_inside[0], "pred", "is_inside")
    t.emit("}")


@_instruction("redux")
def _redux(t: Translator, op: list[str], args: list[str]) -> None:
    if op[2] not in ("max", "min") or op[3] not in ("s32", "u32"):
        raise Unknown("form")
    value = t.value(args[1], op[3])
    t.set(args[0], op[3], f"T.redux_{op[2]}<{c_type(op[3])}>({value}, {t.value(args[2], 'u32')})")


@_instruction("elect")
def _elect(t: Translator, op: list[str], args: list[str]) -> None:
    leader, is_leader = (part.strip() for part in args[0].split("|"))
    t.emit(f"{{ uint32_t elected = T.elect({t.value(args[1], 'u32')});")
    t.set(leader, "b32", "elected")
    t.set(is_leader, "pred", "elected == T.laneid()")
    t.emit("}")


@_instruction("ldmatrix")
def _ldmatrix(t: Translator, op: list[str], args: list[str]) -> None:
    targets = elements(args[0])
    loaded = f"T.ldmatrix<{len(targets)}, {_true('trans' in op)}>({t.address(args[1], _space(op))})"
    t.set_all(targets, "b32", loaded)


@_instruction("stmatrix")
def _stmatrix(t: Translator, op: list[str], args: list[str]) -> None:
    if "trans" in op:
        raise Unknown("transposed")
    sources = elements(args[1])
    t.emit(f"T.stmatrix<{len(sources)}>({t.address(args[0], _space(op))}, {{{t.values(sources, 'b32')}}});")


@_instruction("mma")
def _mma(t: Translator, op: list[str], args: list[str]) -> None:
    is_tf32 = "m16n8k8" in op and op[-2] == "tf32"
    if ("m16n8k16" not in op and not is_tf32) or op[-4] != "f32":
        raise Unknown("shape")
    a, b, c = (f"{{{t.values(elements(one), 'b32')}}}" for one in args[1:4])
    t.set_all(elements(args[0]), "b32", f"T.mma<{'Tf32' if is_tf32 else c_type(op[-2])}>({a}, {b}, {c})")


# Hopper.


@_instruction("cp")
def _cp(t: Translator, op: list[str], args: list[str]) -> None:
    match op[2]:
        case "cg":
            size, filled = t.value(args[2], "u32"), t.value(args[3] if len(args) > 3 else args[2], "u32")
            places = f"{t.address(args[0], 'shared')}, {t.address(args[1], 'global')}"
            t.emit(f"T.copy({places}, {size}, {filled});")
        case "commit_group" | "wait_group":
            pass  # copies are done immediately
        case "mbarrier" if "noinc" not in op:
            pass  # this form subtracts from the barrier what it added
        case "bulk" if op[3] == "tensor" and "global" in op:
            match = re.fullmatch(r"\[\s*([^,\s]+)\s*,\s*(\{.*\})\s*\]", args[1])
            if match is None:
                raise Unknown("operand")
            places = f"{t.address(args[0], 'shared')}, {t.address(f'[{match[1]}]')}"
            corner = t.values(elements(match[2]), "s32")
            t.emit(f"T.copy_tile<{op[4][0]}>({places}, {{{corner}}}, {t.address(args[2], 'shared')});")
        case _:
            raise Unknown("form")


@_instruction("mbarrier")
def _mbarrier(t: Translator, op: list[str], args: list[str]) -> None:
    if op[1] == "init":
        t.emit(f"T.mbarrier_init({t.address(args[0], 'shared')}, {t.value(args[1], 'u32')});")
    elif op[1] == "try_wait":
        t.set(args[0], "pred", f"T.mbarrier_try_wait({t.address(args[1], 'shared')}, {t.value(args[2], 'u32')})")
    elif op[1] == "arrive" and args[0] == "_":
        expected = t.value(args[2], "s32") if "expect_tx" in op else "0"
        t.emit(f"T.mbarrier_arrive({t.address(args[1], 'shared')}, {expected});")
    else:
        raise Unknown("form")


@_instruction("mapa")
def _mapa(t: Translator, op: list[str], args: list[str]) -> None:
    t.set(args[0], "u32", t.value(args[1], "u32"))  # a cluster is one block here


@_instruction("wgmma")
def _wgmma(t: Translator, op: list[str], args: list[str]) -> None:
    if op[1] != "mma_async":
        return  # products are computed immediately
    shape = re.fullmatch(r"m64n(\d+)k16", op[4])
    if not shape or op[5] != "f32":
        raise Unknown("shape")
    sums, has_registers, keeps = elements(args[0]), args[1].startswith("{"), t.value(args[3], "pred")
    a = f"{{{t.values(elements(args[1]), 'b32')}}}" if has_registers else t.value(args[1], "b64")
    is_transposed = [_true(one == "1") for one in args[6:]]
    if args[4:6] != ["1", "1"] or (not has_registers and is_transposed[0] == "true"):
        raise Unknown("signs, or a transposed A")
    t.emit(f"{{ std::array<uint32_t, {len(sums)}> sums = {{{t.values(sums, 'b32')}}};")
    factors = f"{a}, {t.value(args[2], 'b64')}, {is_transposed[-1]}, {keeps}"
    t.emit(f"T.wgmma<{shape[1]}, {c_type(op[-1])}>(sums, {factors});")
    for i, one in enumerate(sums):
        t.set(one, "b32", f"sums[{i}]")
    t.emit("}")
