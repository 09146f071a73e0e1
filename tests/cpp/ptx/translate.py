"""PTX, as nvcc writes it, to C++ that runs on the machine of machine.h.

Each register becomes a local variable, each label a label, each instruction a
statement: what it computes is a row of EXPRESSIONS, in C++ of instructions.h. An
instruction that no row knows ends the translation, with its name.

1. `Source` cuts a file into functions, kernels and constants.
2. Kernels whose text differs in numbers alone, as those of lists of 4, 88 and 984
   tensors do, are one C++ function; the numbers that differ are an array of each
   (`shared`).
3. `Body` translates the text of one function.

    python translate.py ARCHITECTURE OUTPUT.cpp A.ptx B.ptx ...
"""

import re
import sys
from collections import defaultdict
from pathlib import Path

BITS = {f"{kind}{n}": n for kind in "bus" for n in (8, 16, 32, 64)}
BITS |= {"f32": 32, "f64": 64, "u16x2": 32, "pred": 1}
FLOATS = ("f32", "f64")

# By an instruction's name without its type: {a} to {d} are its operands after the first
# one, which is the result, as values of its type.
EXPRESSIONS = {
    "abs": "absolute({a})",
    "add": "{a} + {b}",
    "and": "{a} & {b}",
    "clz": "leading_zeros({a})",
    "fma.rn": "std::fma({a}, {b}, {c})",
    "mad.lo": "{a} * {b} + {c}",
    "max": "most({a}, {b})",
    "min": "least({a}, {b})",
    "mov": "{a}",
    "mul": "{a} * {b}",
    "mul.hi": "upper_product({a}, {b})",
    "mul.lo": "{a} * {b}",
    "mul.rn": "{a} * {b}",
    "mul.wide": "wide_product({a}, {b})",
    "neg": "-{a}",
    "not": "~{a}",
    "or": "{a} | {b}",
    "rsqrt.approx.ftz": "rough_rsqrt({a})",
    "sqrt.rn": "std::sqrt({a})",
    "sub": "{a} - {b}",
    "xor": "{a} ^ {b}",
    "cvta.param": "{a}",
    "cvta.to.global": "{a}",
    **{
        f"setp.{name}": f"{{a}} {sign} {{b}}"
        for name, sign in zip(
            ("eq", "ne", "lt", "le", "gt", "ge"),
            ("==", "!=", "<", "<=", ">", ">="),
            strict=True,
        )
    },
}
# As above, of one type.
OF_TYPES = {
    ("not", "pred"): "!{a}",
    ("min", "u16x2"): "least_halves({a}, {b})",
    ("max", "u16x2"): "most_halves({a}, {b})",
}
# By a name without or with its type: also the types of operands, which are the
# instruction's where they are "". T is the thread, LINE the instruction's in the PTX.
WITH_TYPES = {
    "selp": ("{c} ? {a} : {b}", ("", "", "pred")),
    "shl": ("shifted_left({a}, {b})", ("", "u32")),
    "shr": ("shifted_right({a}, {b})", ("", "u32")),
    "bfi": ("inserted({a}, {b}, {c}, {d})", ("", "", "u32", "u32")),
    "prmt": ("chosen_bytes({a}, {b}, {c})", ("", "", "")),
    "div": ("quotient({a}, {b}, LINE)", ("", "")),
    "bar.red.or": ("barrier(T, {b}, LINE)", ("u32", "pred")),
    "redux.sync.min.u32": ("least_of_lanes(T, {a}, {b}, LINE)", ("", "u32")),
    "redux.sync.max.u32": ("most_of_lanes(T, {a}, {b}, LINE)", ("", "u32")),
    "shfl.sync.bfly.b32": (
        "from_lane_xor(T, {a}, {b}, {c}, {d}, LINE)",
        ("u32", "u32", "u32", "u32"),
    ),
}
CONVERSIONS = {("f64", "f32"): "double({a})", ("f32", "f64"): "float({a})"}
SPECIAL = {
    "%tid.x": "T.tid",
    "%ntid.x": "T.ntid",
    "%ctaid.x": "T.ctaid",
    "%nctaid.x": "T.nctaid",
}
SPACES = {"global": "kGlobal", "shared": "kShared", "": "kGeneric"}
# What says how to cache, and changes nothing else.
HINTS = {"nc", "L1::no_allocate", "uni"}
# Numbers, but not those within names or of floating point.
NUMBER = re.compile(r"(?<![\w$%.])-?(?:0x[0-9a-fA-F]+|\d+)\b")
OWN = "#"  # then a number: the one of the kernel's own that stands there
FUNCTION = re.compile(
    r"(?:\.visible |\.weak |\.internal )?\.(?P<kind>entry|func)\s*"
    r"(?:\((?P<result>[^)]*)\)\s*)?(?P<name>[\w$]+)\s*"
    r"\((?P<parameters>[^)]*)\)(?P<directives>[^{;]*)(?P<end>[{;])"
)
PARAMETER = re.compile(
    r"\.param (?:\.align \d+ )?\.(?P<type>\w+) (?P<name>[\w$]+)(?:\[(?P<size>\S+)\])?"
)
CONSTANT = re.compile(
    r"\.global \.align (?P<align>\d+) \.b8 (?P<name>[\w$]+)\[(?P<size>\d+)\]"
    r" = \{(?P<bytes>[^}]*)\};"
)
SHARED = re.compile(
    r"\.shared \.align (?P<align>\d+) \.b8 (?P<name>[\w$]+)\[(?P<size>\d+)\];"
)
TOKEN = re.compile(
    r"\s*(?:(?P<label>\$?\w+):(?!:)|(?P<brace>[{}])|(?P<statement>[^;]*;))"
)


class Untranslated(Exception):
    """The PTX has something that this translation does not know."""


def cpp_name(name):
    """The name of a symbol or a register in C++."""
    return "v" + re.sub(r"\W", "_", name)


def parameters_of(text):
    """The names of a function's parameters, with the bytes of each."""
    return {
        each["name"]: each["size"] or BITS[each["type"]] // 8
        for each in PARAMETER.finditer(text)
    }


class Source:
    """The functions and kernels of a file, by name, with their lines; its constants."""

    def __init__(self, path):
        text = re.sub(r"//[^\n]*", "", Path(path).read_text())
        # A function's number in its labels and in names of the compiler.
        text = re.sub(r"\$L__BB\d+_", "$L__BB_", text)
        text = re.sub(r"(?<=\w)\$\d+\b", "", text)
        self.constants = {m["name"]: m[0] for m in CONSTANT.finditer(text)}
        self.functions, self.kernels = {}, {}
        at = 0
        while found := FUNCTION.search(text, at):
            at = found.end()
            if found["end"] == ";":
                continue
            begin, depth = at, 1
            for brace in re.finditer(r"[{}]", text[begin:]):
                depth += 1 if brace[0] == "{" else -1
                if depth == 0:
                    at = begin + brace.end()
                    break
            # Names of a kernel and of what is its own have the list's size in them.
            mangled = found["name"].removeprefix("_Z")
            whole = text[found.start() : at].replace(mangled, "KERNEL")
            line = text.count("\n", 0, found.start()) + 1
            if found["kind"] == "entry":
                self.kernels[found["name"]] = (whole, line)
            else:
                whole = whole.replace("KERNEL", mangled)
                self.functions[found["name"]] = (whole, line)


class Body:
    """The translation of one function or kernel.

    Args:
        text: The function, from its head on.
        line: Its first line in the PTX.
        constants: The names of constants.
    """

    def __init__(self, text, line, constants):
        self.text, self.line, self.constants = text, line, constants
        self.head = FUNCTION.match(text)
        self.is_kernel = self.head["kind"] == "entry"
        self.parameters = parameters_of(self.head["parameters"])
        self.results = parameters_of(self.head["result"] or "")
        self.arrays = {} if self.is_kernel else {**self.parameters, **self.results}
        self.shared, self.shared_bytes = {}, 0
        self.registers = set()
        self.out = []
        self.of_memory = {"ld": self.load, "st": self.store, "atom": self.atomic}
        self.of_control = {
            "bra": self.branch,
            "call": self.call,
            "ret": lambda *_: "return;",
            "cvt": self.convert,
            "cvt.rn": self.convert,
            "mov": self.move,
            "bar.sync": lambda *_: "barrier(T, false, LINE);",
            "membar.sys": lambda *_: "check_fence(T, LINE);",
        }

    def signature(self):
        arrays = "".join(f", uint8_t* {cpp_name(each)}" for each in self.arrays)
        return f"static void {cpp_name(self.head['name'])}(Thread& T{arrays})"

    def translate(self):
        """The lines of C++."""
        self.out.append(self.signature() + " {")
        at, line = 0, self.line
        for token in TOKEN.finditer(self.text, self.head.end(), len(self.text) - 1):
            begin = token.start(token.lastgroup)
            line += self.text.count("\n", at, begin)
            at = begin
            if token["label"]:
                self.out.append(f"{cpp_name(token['label'])}:;")
            elif token["brace"]:
                self.out.append(token["brace"])
            else:
                statement = " ".join(token["statement"][:-1].split())
                if statement.startswith("."):
                    self.declare(statement)
                elif statement:
                    self.out.append(
                        self.instruction(statement).replace("LINE", str(line))
                    )
        self.out.append("}")
        return self.out

    def declare(self, statement):
        kind, _, rest = statement.partition(" ")
        if kind == ".reg":
            type, _, names = rest.partition(" ")
            bits = BITS[type[1:]]
            c_type = "bool" if bits == 1 else f"uint{bits}_t"
            for each in names.split(","):
                stem, _, count = each.strip().partition("<")
                if count:
                    names = [f"{stem}{i}" for i in range(int(count[:-1]))]
                else:
                    names = [stem]
                self.registers.update(names)
                self.out.append(f"{c_type} {', '.join(map(cpp_name, names))};")
        elif kind == ".param":
            for name, size in parameters_of(statement).items():
                self.arrays[name] = size
                self.out.append(f"alignas(16) uint8_t {cpp_name(name)}[{size}];")
        elif kind == ".shared":
            found = SHARED.match(statement + ";")
            align, size = int(found["align"]), int(found["size"])
            begin = -(-self.shared_bytes // align) * align
            self.shared[found["name"]] = begin
            self.shared_bytes = begin + size
        elif kind not in (".pragma", ".loc"):
            raise Untranslated(statement)

    def value(self, text, type):
        """An operand as a value of a type."""
        text = text.strip()
        if text in SPECIAL:
            return f"{type}({SPECIAL[text]})"
        if found := re.fullmatch(r"0[fFdD]([0-9a-fA-F]+)", text):
            return f"{type}(0x{found[1]}ull)"
        if NUMBER.fullmatch(text):
            return f"{type}({int(text, 0) % 2**64}ull)"
        if text.startswith(OWN):
            return f"{type}(T.own[{text[1:]}])"
        symbol, _, offset = text.partition("+")
        if symbol in self.shared:
            return f"{type}({self.shared[symbol]}u + {offset or 0})"
        if self.is_kernel and symbol in self.parameters:
            return f"{type}(T.parameter + {self.offset(offset)})"
        if symbol in self.constants or symbol in self.arrays:
            return f"{type}(uint64_t({cpp_name(symbol)}) + {offset or 0})"
        if text in self.registers:
            return f"{type}({cpp_name(text)})"
        raise Untranslated(text)

    def offset(self, text):
        return f"T.own[{text[1:]}]" if text.startswith(OWN) else text or "0"

    def address(self, text):
        inner = re.fullmatch(r"\[(.+?)\s*(?:\+\s*(\S+))?\]", text.strip())
        return f"{self.value(inner[1], 'u64')} + {self.offset(inner[2] or '')}"

    def instruction(self, statement):
        condition = re.match(r"@(!?)(%\w+) ", statement)
        if condition:
            then = self.instruction(statement[condition.end() :])
            return f"if ({condition[1]}{cpp_name(condition[2])}) {{ {then} }}"
        name, _, rest = statement.partition(" ")
        parts = [part for part in name.split(".") if part not in HINTS]
        kept = next((i for i, part in enumerate(parts) if part in BITS), len(parts))
        name, types = ".".join(parts[:kept]), parts[kept:]
        operands = [
            e.strip()
            for e in re.findall(r"[^,{]*(?:\{[^}]*\})?[^,{]*", rest)
            if e.strip()
        ]
        if parts[0] in self.of_memory:
            return self.of_memory[parts[0]](parts[1:kept], types, operands)
        if name in self.of_control:
            return self.of_control[name](types, operands)
        return self.compute(name, types, operands)

    def compute(self, name, types, operands):
        """A result of operands alone."""
        if len(types) != 1:
            raise Untranslated(".".join([name, *types]))
        (type,) = types
        expression = OF_TYPES.get((name, type)) or EXPRESSIONS.get(name)
        own_types = ("",) * len(operands)
        if row := WITH_TYPES.get(name) or WITH_TYPES.get(f"{name}.{type}"):
            expression, own_types = row
        # Of two nans, neither eq nor ne; C++ has another mind.
        is_known = expression is not None and len(own_types) >= len(operands) - 1
        if not is_known or (name == "setp.ne" and type in FLOATS):
            raise Untranslated(f"{name}.{type}")
        result, *rest = operands
        values = {
            letter: self.value(operand, own or type)
            for letter, operand, own in zip("abcd", rest, own_types, strict=False)
        }
        computed = expression.format_map(values)
        is_float = type in FLOATS and not name.startswith("setp")
        return self.assign(result, f"bits({computed})" if is_float else computed)

    def assign(self, result, computed):
        """Of a second result, that of a shuffle, all are true: each lane is there."""
        first, _, second = result.partition("|")
        also = f" {cpp_name(second)} = true;" if second and second != "_" else ""
        if first == "_":
            return f"(void)({computed});"
        return f"{cpp_name(first)} = {computed};{also}"

    def branch(self, types, operands):
        return f"goto {cpp_name(operands[0])};"

    def call(self, types, operands):
        text = ", ".join(operands)
        found = re.fullmatch(
            r"(?:\( ?(\w+) ?\), )?([\w$]+)(?:, \( ?([^)]*?) ?\))?", text
        )
        # Parameters first, as signature() has them.
        names = [each for each in re.split(r"[\s,]+", found[3] or "") if each]
        names += [found[1]] if found[1] else []
        return f"{cpp_name(found[2])}({', '.join(['T', *map(cpp_name, names)])});"

    def convert(self, types, operands):
        to, of = types
        result, source = operands
        value = self.value(source, of)
        if to in FLOATS or of in FLOATS:
            if (to, of) not in CONVERSIONS:
                raise Untranslated(f"cvt.{to}.{of}")
            converted = CONVERSIONS[to, of].format(a=value)
            return self.assign(result, f"bits({converted})")
        return self.assign(result, f"{to}({value})")

    def move(self, types, operands):
        """Also between a register and several of its parts, the low one first."""
        (type,) = types
        result, source = operands
        if "{" not in result + source:
            bits = "pred" if type == "pred" else f"b{BITS[type]}"
            return self.assign(result, self.value(source, bits))
        several = re.search(r"\{(.*)\}", result + source)[1]
        parts = [each.strip() for each in several.split(",")]
        width = BITS[type] // len(parts)
        if "{" in source:
            joined = " | ".join(
                f"uint64_t({self.value(each, f'b{width}')}) << {i * width}"
                for i, each in enumerate(parts)
            )
            return self.assign(result, f"b{BITS[type]}({joined})")
        assigned = [
            self.assign(each, f"b{width}(whole >> {i * width})")
            for i, each in enumerate(parts)
            if each != "_"
        ]
        whole = self.value(source, f"b{BITS[type]}")
        return f"{{ const auto whole = {whole}; {' '.join(assigned)} }}"

    def access(self, modifiers, types):
        """The space, the C++ type and how many values an instruction accesses."""
        type = types[0].replace("f", "b")
        count = next((int(m[1]) for m in modifiers if m in ("v2", "v4")), 1)
        rest = [m for m in modifiers if m not in ("v2", "v4", "volatile")]
        space = rest[0] if rest else ""
        if len(rest) > 1 or space not in (*SPACES, "param"):
            raise Untranslated(".".join(modifiers))
        return space, type, count

    def is_checked_here(self, space, type, count, address):
        """True for a parameter by its name, whose bounds are checked here."""
        if space != "param":
            return False
        found = re.fullmatch(r"\[([\w$]+)\s*(?:\+\s*(\S+))?\]", address.strip())
        size = found and {**self.parameters, **self.arrays}.get(found[1])
        if size is None:
            return False  # the address is in a register
        if OWN in f"{size}{found[2]}":
            return False
        end = int(found[2] or 0) + BITS[type] // 8 * count
        if end > int(size):
            raise Untranslated(f"an access past the end of a parameter: {address}")
        return True

    def load(self, modifiers, types, operands):
        space, type, count = self.access(modifiers, types)
        result, address = operands
        names = [each.strip() for each in result.strip("{} ").split(",")]
        value = type if count == 1 else f"Several<{type}, {count}>"
        at = self.address(address)
        if self.is_checked_here(space, type, count, address):
            loaded = f"load_parameter<{value}>({at})"
        else:
            space = "" if space == "param" else space
            loaded = f"load<{value}, Space::{SPACES[space]}>(T, {at}, LINE)"
        if count == 1:
            return self.assign(result, loaded)
        assigned = [self.assign(e, f"several.at[{i}]") for i, e in enumerate(names)]
        return f"{{ const auto several = {loaded}; {' '.join(assigned)} }}"

    def store(self, modifiers, types, operands):
        space, type, count = self.access(modifiers, types)
        address, source = operands
        names = [each.strip() for each in source.strip("{} ").split(",")]
        value, given = type, self.value(names[0], type)
        if count > 1:
            value = f"Several<{type}, {count}>"
            given = f"{value}{{{', '.join(self.value(each, type) for each in names)}}}"
        at = self.address(address)
        if self.is_checked_here(space, type, count, address):
            return f"store_parameter<{value}>({at}, {given});"
        if space == "param":
            raise Untranslated("a store to a parameter by an address")
        kind = ", Kind::kVolatile" if "volatile" in modifiers else ""
        return f"store<{value}, Space::{SPACES[space]}{kind}>(T, {at}, {given}, LINE);"

    def atomic(self, modifiers, types, operands):
        space, what = modifiers
        if space != "global" or what not in ("add", "or", "min", "max"):
            raise Untranslated(".".join(["atom", *modifiers]))
        result, address, value = operands
        given = f"{self.address(address)}, {self.value(value, types[0])}"
        return self.assign(result, f"atomic_{what}<{types[0]}>(T, {given}, LINE)")


def merged(tables):
    """One table of several, whose equal names must mean the same."""
    all = {}
    for table in tables:
        for name, (text, line) in table.items():
            if all.setdefault(name, (text, line))[0] != text:
                raise Untranslated(f"two files with another {name}")
    return all


def shared(kernels):
    """Kernels that differ in numbers alone, together.

    Yields:
        The text, with OWN numbers where they differ; its line; and for each kernel its
        name, its text, and its own numbers.
    """
    groups = defaultdict(list)
    for name, (text, line) in kernels.items():
        groups[tuple(NUMBER.split(text))].append((name, text, line))
    for between, group in groups.items():
        numbers = [NUMBER.findall(text) for _, text, _ in group]
        columns = list(zip(*numbers, strict=True))
        differing = [i for i, column in enumerate(columns) if len(set(column)) > 1]
        text = between[0]
        for i, rest in enumerate(between[1:]):
            own = f"{OWN}{differing.index(i)}" if i in differing else columns[i][0]
            text += own + rest
        each = [
            (name, whole, [row[i] for i in differing])
            for (name, whole, _), row in zip(group, numbers, strict=True)
        ]
        yield text, group[0][2], each


def translated(architecture, paths):
    """The lines of C++ for the kernels of some files."""
    sources = [Source(path) for path in paths]
    constants = {
        name: text for each in sources for name, text in each.constants.items()
    }
    out = ['#include "machine.h"', "namespace ptx {"]
    for text in constants.values():
        found = CONSTANT.match(text)
        array = f"{cpp_name(found['name'])}[{found['size']}]"
        out.append(f"alignas({found['align']}) static const uint8_t {array} = ")
        out.append(f"{{{found['bytes']}}};")
    functions = merged(each.functions for each in sources).values()
    bodies = [Body(text, line, constants) for text, line in functions]
    out += [body.signature() + ";" for body in bodies]
    for body in bodies:
        out += body.translate()
    rows = []
    for number, (text, line, group) in enumerate(
        shared(merged(s.kernels for s in sources))
    ):
        body = Body(text.replace("KERNEL", f"kernel_{number}"), line, constants)
        out += body.translate()
        for name, whole, own in group:
            head = FUNCTION.match(whole)
            (size,) = parameters_of(head["parameters"]).values()
            threads = re.search(r"\.maxntid (\d+)", head["directives"])[1]
            numbers = ", ".join([*own, "0"])
            out.append(f"static const int64_t own_{len(rows)}[] = {{{numbers}}};")
            rows.append(
                f'{{"{name}", {size}, {body.shared_bytes}, {threads},'
                f" {cpp_name(body.head['name'])}, own_{len(rows)}}},"
            )
    out += ["extern const Kernel kernels[] = {", *rows, "{}};"]
    out += ["extern const Constant constants[] = {"]
    out += [f"{{{cpp_name(each)}, sizeof {cpp_name(each)}}}," for each in constants]
    out += ["{}};", f"extern const int architecture = {architecture};", "}"]
    return out


def main(architecture, output, *paths):
    try:
        lines = translated(architecture, paths)
    except Untranslated as error:
        sys.exit(f"translate.py does not know: {error}")
    Path(output).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
