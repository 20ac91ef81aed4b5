"""Translates a PTX kernel to C++ that a thread of `machine.hpp` runs.

A register becomes an unsigned integer of its width, an instruction one or a few statements. An operation that several
threads do together becomes a call that waits for them.
"""

from __future__ import annotations

import re

from emulated_gpu.instructions import FLOATS, INSTRUCTIONS, c_name, c_type
from emulated_gpu.ptx import WIDTH, Function, Module, Unknown, Variable, elements, parse_variable, split, statements

_FIRST_SHARED = 1024
"""Offset of a block's own shared memory; the system reserves what is below it."""


def translate(text: str, kernel: str) -> str:
    """Return a C++ file with a kernel of a module, the functions that it calls, and its variables.

    Raises:
        Unknown: the module has no such kernel, or uses something that is not translated.
    """
    module = Module.parse(text)
    if kernel not in module.functions:
        raise Unknown(f"the module has no kernel {kernel}")
    shared = _SharedMemory(module)
    done: dict[str, Translator] = {}
    texts: list[str] = []
    waiting = [kernel]
    while waiting:
        name = waiting.pop()
        if name not in done:
            done[name] = Translator(module, module.functions[name], shared)
            texts.append(done[name].translate())
            waiting += done[name].called
    used = sorted({name for one in done.values() for name in one.used})
    function = module.functions[kernel]
    places = function.places()
    parameters = ", ".join(f"{{{places[name]}, {variable.size}}}" for name, variable in function.parameters)
    size = max((places[name] + variable.size for name, variable in function.parameters), default=0)
    lines = [
        '#include "machine.hpp"',
        *(_definition(name, module.variables[name]) for name in used),
        *(one.signature() + ";" for one in done.values()),
        *texts,
        f"static const Parameter parameters_of_kernel[] = {{{parameters or '{0, 0}'}}};",
        'extern "C" const Kernel translated = '
        f"{{kernel, {len(places)}, parameters_of_kernel, {size}, {shared.end()}}};",
    ]
    return "\n".join(lines) + "\n"


class _SharedMemory:
    """Assigns places in shared memory to the variables of a kernel and its functions."""

    def __init__(self, module: Module) -> None:
        self.places: dict[str, int] = {}
        self._end = _FIRST_SHARED
        self._align = max([128, *(one.align for one in module.variables.values() if one.space == "shared")])

    def place(self, name: str, variable: Variable) -> int:
        if name not in self.places:
            self.places[name] = -(-self._end // variable.align) * variable.align
            self._end = self.places[name] + variable.size
        return self.places[name]

    def end(self) -> int:
        """Return the offset of the memory that a launch requests."""
        return -(-self._end // self._align) * self._align


class Translator:
    """Translates one function, and collects what it uses of its module."""

    def __init__(self, module: Module, function: Function, shared: _SharedMemory) -> None:
        self.called: set[str] = set()
        self.used: set[str] = set()
        """Names of the module's variables that the function uses."""
        self.module = module
        self.function = function
        self.lines: list[str] = []
        self._shared = shared
        self._types: dict[str, str] = {}  # of registers, by C++ name
        self._scopes: list[dict[str, str]] = [{}]  # C++ names of registers and parameters, by PTX name
        self._open: list[int] = [0]  # numbers of the scopes around the current statement
        self._labels: dict[int, set[str]] = {}
        self._variables: dict[str, Variable] = {}
        self._num_names = 0

    def translate(self) -> str:
        """Return the function in C++."""
        parts = list(statements(self.function.body))
        self._find_labels(parts)
        num_scopes = 0
        for part in parts:
            if part == "{":
                num_scopes += 1
                self._open.append(num_scopes)
                self._scopes.append({})
                self.emit("{")
            elif part == "}":
                self._open.pop()
                self._scopes.pop()
                self.emit("}")
            elif part.endswith(":"):
                self.emit(f"{self.label(part[:-1])}:;")
            elif part.startswith("."):
                self._declare(part)
            else:
                self._translate(part)
        registers = [f"{kind} {name} = {{}};" for name, kind in self._types.items()]
        return "\n  ".join([f"{self.signature()} {{", *registers, *self.lines]) + "\n}"

    def signature(self) -> str:
        """Return the signature of the function in C++."""
        if self.function.is_kernel:
            return "static void kernel(Thread& T, uint8_t* parameters)"
        names = [f"uint8_t* {c_name(name)}" for name, _ in [*self.function.results, *self.function.parameters]]
        return f"static void {c_name(self.function.name)}({', '.join(['Thread& T', *names])})"

    def emit(self, line: str) -> None:
        """Append a line."""
        self.lines.append(line)

    def label(self, name: str) -> str:
        """Return the C++ name of a label, which inner scopes may define again."""
        for scope in reversed(self._open):
            if name in self._labels.get(scope, ()):
                return f"{c_name(name)}_{scope}"
        raise Unknown(f"label {name}")

    def named(self, name: str) -> str | None:
        """Return the C++ name of a register or local parameter, or None if the name is neither."""
        return next((scope[name] for scope in reversed(self._scopes) if name in scope), None)

    def value(self, text: str, kind: str) -> str:
        """Return an expression of type `kind` for an operand."""
        target = c_type(kind)
        if text.startswith("!"):
            return f"!{self.value(text[1:], kind)}"
        if name := self.named(text):
            return f"as<{target}>({name})"
        if match := re.fullmatch(r"0([fFdD])([0-9a-fA-F]+)", text):
            return f"as<{target}>(uint{32 if match[1] in 'fF' else 64}_t(0x{match[2]}ull))"
        if re.fullmatch(r"-?\d+\.\d*", text):
            return f"as<{target}>(std::bit_cast<uint32_t>({float(text)}f))"
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
            number = text.rstrip("U")
            return f"as<{target}>(uint{WIDTH[kind]}_t({number}))" if kind in FLOATS else f"{target}({number}ll)"
        if text.startswith("%"):
            return f"{target}(T.{text[1:].replace('.', '_')}())"
        return f"{target}({self._place(text)})"

    def values(self, texts: list[str], kind: str) -> str:
        """Return expressions of type `kind` for operands, separated by commas."""
        return ", ".join(self.value(text, kind) for text in texts)

    def address(self, text: str, space: str = "generic") -> str:
        """Return an expression for the host pointer of `[register + offset]`."""
        match = re.fullmatch(r"\[\s*([$%\w.]+)\s*(?:\+\s*(-?\s*\w+))?\s*\]", text)
        if not match:
            raise Unknown(text)
        name, offset = match[1], (match[2] or "0").replace(" ", "")
        register = self.named(name)
        if space == "param" and not (register and name.startswith("%")):
            return f"({self._parameter(name)} + {offset})"
        base = register or self._place(name)
        if space == "shared":
            return f"T.shared(uint32_t({base}) + {offset})"
        return f"reinterpret_cast<uint8_t*>(uint64_t({base}) + ({offset}))"

    def set(self, target: str, kind: str, expression: str) -> None:
        """Assign an expression of type `kind` to a register; the name _ discards it."""
        if target == "_":
            self.emit(f"(void)({expression});")
            return
        name = self.named(target)
        if name is None:
            raise Unknown(f"register {target}")
        self.emit(f"{name} = to<{self._types[name]}>({c_type(kind)}({expression}));")

    def set_all(self, targets: list[str], kind: str, expression: str) -> None:
        """Assign the elements of an array to registers."""
        self.emit(f"{{ auto values = {expression};")
        for i, target in enumerate(targets):
            self.set(target, kind, f"values[{i}]")
        self.emit("}")

    def _find_labels(self, parts: list[str]) -> None:
        """Collect the labels of each scope; a label may be used before it is defined."""
        num_scopes, stack = 0, [0]
        for part in parts:
            if part == "{":
                num_scopes += 1
                stack.append(num_scopes)
            elif part == "}":
                stack.pop()
            elif part.endswith(":"):
                self._labels.setdefault(stack[-1], set()).add(part[:-1])

    def _translate(self, text: str) -> None:
        statement, guard = text, ""
        if match := re.match(r"@(!?)\s*([%\w$]+)\s+", text):
            guard, text = f"if ({match[1]}{self.named(match[2])}) ", text[match.end() :]
        name, _, operands = text.partition(" ")
        parts = name.split(".")
        start = len(self.lines)
        try:
            INSTRUCTIONS[parts[0]](self, parts, split(operands))
        except (LookupError, ValueError, StopIteration, Unknown) as error:
            raise Unknown(f"{statement}: {error!r}") from error
        if guard:
            self.lines[start:] = [f"{guard}{{ {' '.join(self.lines[start:])} }}"]

    def _declare(self, text: str) -> None:
        if match := re.match(r"\.reg\s+\.(\w+)\s+(.*)$", text):
            kind = "bool" if match[1] == "pred" else f"uint{max(WIDTH[match[1]], 16)}_t"
            for name in split(match[2]):
                counted = re.fullmatch(r"([%\w$]+)<(\d+)>", name)
                for one in [f"{counted[1]}{i}" for i in range(int(counted[2]))] if counted else [name]:
                    self._types[self._name(one)] = kind
        elif text.startswith((".local", ".param", ".shared")):
            name, variable = parse_variable(text)
            if variable.space == "param":
                self.emit(f"alignas(16) uint8_t {self._name(name)}[{max(variable.size, 1)}];")
                return
            self._variables[name] = variable
            if variable.space == "local":
                self.emit(f"alignas({max(variable.align, 16)}) uint8_t {c_name(name)}[{variable.size}];")
        elif not text.startswith(".pragma"):
            raise Unknown(text)

    def _name(self, name: str) -> str:
        self._num_names += 1
        self._scopes[-1][name] = f"{c_name(name)}_{self._num_names}"
        return self._scopes[-1][name]

    def _place(self, text: str) -> str:
        """Return the address of a variable or parameter in its own space."""
        match = re.fullmatch(r"([$%\w]+)\s*([+-]\s*\d+)?", text)
        if not match:
            raise Unknown(text)
        name, offset = match[1], match[2] or "+ 0"
        if self.function.is_kernel and name in self.function.places():
            return f"(uint64_t({self._parameter(name)}) {offset})"
        variable = self._variables.get(name) or self.module.variables.get(name)
        if variable is None:
            raise Unknown(f"the address of {name}")
        if variable.space == "shared" and variable.count is None:
            return f"(T.first_dynamic_shared() {offset})"
        if variable.space == "shared":
            return f"({self._shared.place(name, variable)}u {offset})"
        if name not in self._variables:
            self.used.add(name)
        return f"(uint64_t({c_name(name)}) {offset})"

    def _parameter(self, name: str) -> str:
        if local := self.named(name):
            return local
        if self.function.is_kernel:
            return f"(parameters + {self.function.places()[name]})"
        return c_name(name)


def _definition(name: str, variable: Variable) -> str:
    values = ", ".join(elements(variable.values.strip()))
    if re.search(r"[^\s,0-9a-fA-FxXU.+-]", values):
        raise Unknown(f"the values of {name}")
    kind = c_type(f"b{WIDTH[variable.element]}")
    return f"alignas({variable.align}) static {kind} {c_name(name)}[{max(variable.count or 1, 1)}] = {{{values}}};"
