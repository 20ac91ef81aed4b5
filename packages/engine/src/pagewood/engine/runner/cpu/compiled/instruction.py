"""What an instruction of a program is: a kernel whose parameters are its operands, and the rule for its parts.

An instruction is declared once, by decorating its kernel. Everything else follows from the kernel's signature: the
names of the operands, their columns in a row of a program, and the code that reads them there. Instructions that are
compiled together are a `Unit`: one function, whose source is generated, and whose address is in the rows.
"""

# pyright: basic
# numba has no types.

from __future__ import annotations

import hashlib
import inspect
import linecache
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias, get_type_hints

from pagewood.engine.runner.cpu.compiled.layout import NUM_SCOPE_COLUMNS
from pagewood.engine.runner.cpu.compiled.machine.kernel import Kernel, inlined, kernel
from pagewood.engine.runner.cpu.compiled.machine.memory import doubles, long_rows, longs

FUNCTION, OPERATION, ROWS, PART_ROWS, IS_AHEAD, RULE, OPERANDS = range(7)
"""Columns of a row of a program: the address of the unit, which of its instructions, which of the counts of a run is
the number of rows, the rows of a part where an instruction goes row by row, whether a thread claims its next part
before it computes one, the rule for parts, and the first operand."""
ASKED, BLOCKS, SINGLE = range(3)
"""Rules for parts: those of BLOCKS (`blocks_of_rows`) and SINGLE (`single_rows`) are computed without a call of the
unit, which the shortest steps would notice; for all others it is asked."""
_LEAST_ROWS, _PART_SIZE = 4, 8192  # elements; two threads take longer to meet than one takes for less

# What a parameter of a kernel is, by its annotation: how the generated code gets it. With {} it is an operand, and {}
# is its column; `Any` is one that is passed as it is, an address or a whole number.
PLAIN, REAL, IN_SCOPE, COUNT = "one[{}]", "reals[{}]", "scopes[one[{}]]", "counts_at + 8 * one[{}]"
Real: TypeAlias = Annotated[Any, REAL]
"""A floating point number."""
InScope: TypeAlias = Annotated[Any, IN_SCOPE]
"""A scope; the kernel gets its row of the table of scopes."""
Count: TypeAlias = Annotated[Any, COUNT]
"""A number of rows that the kernel writes; it gets the address of an int64. Instructions behind it have these rows."""
NumRows: TypeAlias = Annotated[Any, "num_rows"]
Part: TypeAlias = Annotated[Any, "part"]
"""Index of the part that is computed."""
Following: TypeAlias = Annotated[Any, "following"]
"""The part that the thread computes next, so that its operands can be prefetched."""
First: TypeAlias = Annotated[Any, "part * part_rows"]
"""First row of the part, where an instruction goes row by row."""
Last: TypeAlias = Annotated[Any, "min((part + 1) * part_rows, num_rows)"]
"""The row behind its last one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Instruction:
    """A kind of instruction. Invariant: names and columns are those of the kernel's parameters, in their order."""

    name: str
    """For profiles and errors."""
    kernel: Any
    """The compiled function that computes a part."""
    parts: Any
    """The compiled function that returns how many parts there are; its parameters are some of the kernel's, or
    `num_rows` and `part_rows`."""
    operands: Mapping[str, str]
    """By name, how the kernel gets each: PLAIN, REAL, IN_SCOPE or COUNT."""
    arguments: Mapping[str, str]
    """The source of each argument of the kernel, by parameter."""

    @property
    def rule(self) -> int:
        """Which rule for parts it has."""
        return BLOCKS if self.parts is blocks_of_rows else SINGLE if self.parts is single_rows else ASKED

    @property
    def is_ahead(self) -> bool:
        """Whether the kernel prefetches what the next part reads."""
        return "following" in self.arguments.values()


def instruction(parts: Any) -> Callable[[Any], Instruction]:
    """Declare an instruction, by decorating its kernel; `parts` is the rule for its parts.

    The name of an operand is that of the parameter, without `_at`, which marks an address.
    """

    def declare(compiled: Any) -> Instruction:
        function, operands, arguments = compiled.py_func, {}, {}
        hints = get_type_hints(function, include_extras=True)
        for parameter in inspect.signature(function).parameters:
            source = getattr(hints[parameter], "__metadata__", (PLAIN,))[0]
            arguments[parameter] = source.format(OPERANDS + len(operands))
            if "{}" in source:
                operands[parameter.removesuffix("_at")] = source
        return Instruction(
            name=function.__name__, kernel=compiled, parts=parts, operands=operands, arguments=arguments
        )  # fmt: skip

    return declare


@inlined
def blocks_of_rows(num_rows: Any, part_rows: Any) -> Any:
    """Return the parts of an instruction that goes row by row, and has many elements or few in a row."""
    return (num_rows + part_rows - 1) // part_rows


@inlined
def one_part() -> Any:
    """Return the only part of an instruction, also if it has no rows."""
    return 1


@inlined
def single_rows(num_rows: Any) -> Any:
    """Return the parts of an instruction each of whose rows is a part."""
    return num_rows


def rows_of_part(size: int) -> int:
    """Return the rows of a part of an instruction that goes row by row; `size` elements are in its longest rows."""
    return max(_LEAST_ROWS, _PART_SIZE // size)


class Unit:
    """Instructions that are compiled as one function.

    It computes a part of one of them. For the part -1 it returns how many parts there are, if the rule is ASKED.
    """

    __slots__ = ("instructions", "kernel", "source")

    def __init__(self, name: str, *instructions: Instruction, variant: int = 0) -> None:
        """Generate the function; nothing is compiled before `kernel.compile`.

        Args:
            name: of the function.
            instructions: that it computes.
            variant: distinguishes units of this name whose kernels have the same source and different closures.
        """
        self.instructions = instructions
        self.source: str = _source_of(name, instructions)
        file = f"{inspect.getfile(instructions[0].kernel.py_func)}:{name}"  # in the folder of a source
        names: dict[str, Any] = {
            "__name__": instructions[0].kernel.__module__,
            "longs": longs,
            "doubles": doubles,
            "long_rows": long_rows,
        }
        for number, one in enumerate(instructions):
            names |= {f"{one.name}_{number}": one.kernel, f"parts_{number}": one.parts}
        exec(compile(self.source, file, "exec"), names)
        linecache.cache[file] = len(self.source), None, self.source.splitlines(keepends=True), file  # not ours
        digest = int.from_bytes(hashlib.sha256(self.source.encode()).digest()[:16], "little")
        self.kernel: Kernel = kernel("i8(i8, i8, i8, i8, i8)", variant=(digest << 32) + variant)(names[name])


def _source_of(name: str, instructions: tuple[Instruction, ...]) -> str:
    """Return the source of a unit's function."""
    lines = [
        f"def {name}(one_at, counts_at, scopes_at, part, following):",
        "    one, reals = longs(one_at, 0), doubles(one_at, 0)",
        f"    scopes = long_rows(scopes_at, 0, {NUM_SCOPE_COLUMNS})",
        f"    num_rows, part_rows = longs(counts_at, 0)[one[{ROWS}]], one[{PART_ROWS}]",
    ]
    for number, one in enumerate(instructions):
        lines.append(f"    {'elif' if number else 'if'} one[{OPERATION}] == {number}:")
        if one.rule == ASKED:
            wanted = inspect.signature(one.parts.py_func).parameters
            rule = ", ".join(one.arguments.get(given, given) for given in wanted)
            lines += ["        if part < 0:", f"            return parts_{number}({rule})"]
        lines.append(f"        {one.name}_{number}({', '.join(one.arguments.values())})")
    return "\n".join([*lines, "    return 0", ""])
