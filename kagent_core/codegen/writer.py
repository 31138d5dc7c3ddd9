"""Writing one kernel: its parameters, and the values of expressions as statements at the right depth of its loops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from kagent_core.codegen.c_family import DIVISION_BY_ZERO, INDEX_OUT_OF_BOUNDS, INDEX_OUT_OF_RANGE, REPORT, CFamily
from kagent_core.codegen.expressions import INTEGER_DIVISIONS, Check, Expr, Load, operands, walk
from kagent_core.codegen.indices import Axis, Computed, Index, Quotient
from kagent_core.codegen.kernel import KernelArg
from kagent_core.codegen.text import bare
from kagent_core.specs import Access, TensorSpec

LITERAL_SIZES = range(5)
"""Sizes that stand in the text as they are, since kernels of other shapes would seldom share it anyhow."""

REPEATING = frozenset({"max", "min", "abs", "not", "shl", "shr", "isnan"})
"""Primitives whose spelling has an operand more than once."""

_MATH = (
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "pow", "sqrt", "rsqrt", "cbrt", "hypot", "fma", "fabs"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
    *("erf", "erfc", "lgamma", "tgamma", "floor", "ceil", "trunc", "round", "rint", "fmod", "remainder", "ldexp"),
    *("frexp", "fmin", "fmax", "fdim", "copysign", "nextafter", "isnan", "isinf", "isfinite", "signbit"),
)
_KEYWORDS = (
    *("auto", "break", "case", "char", "const", "continue", "default", "do", "double", "else", "enum", "extern"),
    *("float", "for", "goto", "if", "inline", "int", "long", "register", "restrict", "return", "short", "signed"),
    *("sizeof", "static", "struct", "switch", "typedef", "union", "unsigned", "void", "volatile", "while"),
    *("and", "or", "xor", "not", "bool", "true", "false", "new", "delete", "this", "template", "operator"),
    *("half", "kernel", "global", "local", "constant", "private", "select", "min", "max", "abs", "clamp", "sign"),
)
RESERVED = frozenset({*_MATH, *(f"{name}f" for name in _MATH), *_KEYWORDS})
"""Names that a value must not have: words and functions of C, C++, CUDA and OpenCL C."""


WIDE = "_wide"
"""Behind the name of a size that a kernel is given as int64 and takes in 32 bits."""

COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
"""Primitives that give the same in 32 bits, where their operands fit."""


class WideIndexError(Exception):
    """A kernel with indices of 32 bits would compute one that does not fit."""


class Parameters:
    """The parameters of one kernel, in the order in which they are first needed: tensors, and sizes as int64.

    Sizes, strides and offsets are parameters, so that the same text serves other shapes. Where the language's indices
    have 32 bits, they are converted once, on entry, and whatever does not fit is a `WideIndexError`.

    Parameters
    ----------
    language
        For the pointers' types.
    written
        Tensors that the kernel writes.
    read
        Tensors that it reads.
    slack
        How far loops may step past a size.
    """

    def __init__(
        self, language: CFamily, written: Iterable[TensorSpec], read: Iterable[TensorSpec], slack: int = 0
    ) -> None:
        self._language = language
        self._slack = slack
        self._written = set(written)
        read = list(read)
        buffers = Counter({spec.buffer for spec in read})
        buffers.update(spec.buffer for spec in self._written)
        self._shared = {buffer for buffer, count in buffers.items() if count > 1}
        self._pointers: dict[TensorSpec, KernelArg] = {}
        self._sizes: dict[int, KernelArg] = {}
        self.reports = False

    def pointer(self, spec: TensorSpec) -> str:
        """Return the name of the pointer to a tensor's first element."""
        arg = self._pointers.get(spec)
        if arg is None:
            written = spec in self._written
            count = sum((other in self._written) is written for other in self._pointers)
            name = f"{'y' if written else 'x'}{count}"
            kind = self._language.pointer_type(spec.dtype.name, written, spec.buffer not in self._shared)
            arg = self._pointers[spec] = KernelArg(name, kind, spec, Access.OUT if written else Access.IN)
        return arg.name

    def size(self, value: int) -> str:
        """Return a size as it stands in the text: the name of a parameter, or a small number."""
        if value in LITERAL_SIZES:
            return str(value)
        if value < 0:
            return f"-{self.size(-value)}"
        arg = self._sizes.get(value)
        if arg is None:
            self.fits(value + self._slack)
            arg = self._sizes[value] = KernelArg(f"n{len(self._sizes)}", "i64", value)
        return arg.name

    def fits(self, *values: int) -> None:
        """Raise `WideIndexError` where indices have 32 bits and a number that the text computes has more."""
        if self._language.is_narrow and any(not -(2**31) <= value < 2**31 for value in values):
            raise WideIndexError(f"{values} in indices of 32 bits")

    def entry(self) -> list[str]:
        """Return what the kernel begins with: pointers that come in parts, and sizes as indices."""
        lines = [f"    {line}" for line in self._language.entry(self.args, self.reports)]
        if not self._language.is_narrow:
            return lines
        kind = self._language.index_type
        return lines + [f"    const {kind} {arg.name} = ({kind}){arg.name}{WIDE};" for arg in self._sizes.values()]

    @property
    def args(self) -> tuple[KernelArg, ...]:
        """Tensors that are read, tensors that are written, sizes."""
        pointers = sorted(self._pointers.values(), key=lambda arg: arg.access is Access.OUT)
        wide = WIDE if self._language.is_narrow else ""
        return (*pointers, *(replace(arg, name=arg.name + wide) for arg in self._sizes.values()))

    def index(self, index: Index, value: Callable[[Expr], str]) -> str:
        """Return index arithmetic as text.

        Parameters
        ----------
        index
            What to print.
        value
            Gives the text of the expressions that it is computed from.
        """
        parts: list[str] = []
        partial = Index()
        for atom, factor in index.terms:
            partial = Index((*partial.terms, (atom, factor)))
            self.fits(*partial.bounds, *Index(((atom, factor),)).bounds)
            if isinstance(atom, Axis):
                text = atom.name
            elif isinstance(atom, Computed):
                text = value(atom.value)
                if self._language.is_narrow:
                    text = f"({self._language.index_type}){text}"
            else:
                sign = "/" if isinstance(atom, Quotient) else "%"
                text = f"({self.index(atom.index, value)}) {sign} {self.size(atom.divisor)}"
                text = f"({text})"
            parts.append(text if factor == 1 else f"{text} * {self.size(factor)}")
        if index.constant or not parts:
            self.fits(*index.bounds)
            parts.append(self.size(index.constant))
        return " + ".join(parts).replace("+ -", "- ")


class Statements:
    """Turns expressions into statements, each at the outermost loop where it can stand.

    Parameters
    ----------
    language
        How primitives are spelled.
    parameters
        The kernel's.
    labels
        Names for the values of whole operators, by number of the expression.
    """

    def __init__(self, language: CFamily, parameters: Parameters, labels: Mapping[int, str]) -> None:
        self._language = language
        self._parameters = parameters
        self._labels = labels
        self._taken: Counter[str] = Counter()
        self._declared: dict[int, str] = {}
        self.names: dict[int, str] = {}
        """Text of values that were computed before: variables, elements of arrays."""
        self.given: str | None = None
        """Text of the value that expressions begin with, in an epilogue."""
        self.axes: dict[int, frozenset[Axis]] = {}
        """What each of them depends on."""

    def fresh_name(self, base: str) -> str:
        """Return a name that is not taken yet, and that means nothing else in a C-family language."""
        base = base.strip("_") or "t"
        if base in RESERVED:
            base += "_"
        number = self._taken[base]
        self._taken[base] += 1
        return base if number == 0 else f"{base}_{number}"

    def place(self, roots: Sequence[Expr], loops: Sequence[Collection[Axis]]) -> list[list[str]]:
        """Compute some expressions inside loops; afterwards `value` gives their text.

        Parameters
        ----------
        roots
            What is needed in the innermost loop.
        loops
            The variables of each loop around it, outermost first. Axes that are in none of them are those of loops
            further out.

        Returns
        -------
        list
            Statements for before the first loop, for inside the first one, and so on.
        """
        lines: list[list[str]] = [[] for _ in range(len(loops) + 1)]
        nodes = self._missing(roots)
        uses = Counter(arg.number for node in nodes for arg in operands(node) if node.op != "reduce")
        uses.update(root.number for root in roots)
        for node in nodes:  # a spelling that repeats its operands must not repeat their computation
            if node.op in REPEATING or (node.op == "checked" and node.payload.wraps):
                uses.update(arg.number for arg in node.args if arg.op != "constant")
        depths = {node.number: self._depth(node, loops) for node in nodes}
        used_at: dict[int, int] = {}
        for node in nodes:
            for arg in operands(node):
                used_at[arg.number] = max(used_at.get(arg.number, 0), depths[node.number])
        for root in roots:
            used_at[root.number] = len(loops)
        for node in nodes:
            if node.op in ("constant", "size") or _is_loop_variable(node):
                continue
            hoisted = used_at.get(node.number, 0) > depths[node.number]
            label = self._labels.get(node.number)
            if uses[node.number] > 1 or hoisted or label or node.op == "checked" or divides(node):
                self._declare(node, label, lines[depths[node.number]])
        return lines

    def value(self, node: Expr) -> str:
        """Return the text of an expression whose variables have been computed."""
        known = self.names.get(node.number)
        return known if known is not None else self._text(node)

    def load(self, node: Expr) -> str:
        """Return the text of a load, under its condition if it has one."""
        text = self._read(node)
        if node.args:
            return f"({self.value(node.args[0])} ? {text} : {self._language.literal(0, node.dtype)})"
        return text

    # -- inside

    def _missing(self, roots: Sequence[Expr]) -> list[Expr]:
        """Return the nodes that have no name yet, operands first."""
        found: list[Expr] = []
        seen: set[int] = set()
        stack: list[tuple[Expr, bool]] = [(root, False) for root in reversed(roots)]
        while stack:
            node, ready = stack.pop()
            if ready:
                found.append(node)
            elif node.number not in seen and node.number not in self.names:
                seen.add(node.number)
                stack.append((node, True))
                stack.extend((arg, False) for arg in reversed(operands(node)))
        return found

    def _depth(self, node: Expr, loops: Sequence[Collection[Axis]]) -> int:
        return max((n for n, axes in enumerate(loops, 1) if node.axes.intersection(axes)), default=0)

    def _declare(self, node: Expr, label: str | None, lines: list[str]) -> None:
        name = self._declared.get(node.number)
        if name is None:  # what is computed again, in a later loop, keeps its name
            name = self._declared[node.number] = self.fresh_name(label or _short_name(node))
        if node.op == "checked":
            lines.extend(self._check(node, name))
        else:
            if divides(node):
                self._parameters.reports = True
                lines.append(f"if ({self.value(node.args[1])} == 0) {{ *{REPORT} = {DIVISION_BY_ZERO}; }}")
            kind = "i64" if node.op == "index" else self._language.value_type(node.dtype)
            lines.append(f"const {kind} {name} = {bare(self._text(node))};")
        self.name(node, name)

    def name(self, node: Expr, text: str) -> None:
        """Let a text stand for a value from here on."""
        self.names[node.number] = text
        self.axes[node.number] = node.axes

    def _check(self, node: Expr, name: str) -> list[str]:
        """Wrap an index around and check it; one that is out of range is reported, and 0 is read in its place."""
        check: Check = node.payload
        self._parameters.reports = True
        value, size = self.value(node.args[0]), self._parameters.size(check.size)
        code = INDEX_OUT_OF_RANGE if check.error is IndexError else INDEX_OUT_OF_BOUNDS
        wrapped = f"{value} + ({value} < 0 ? {size} : 0)" if check.wraps else bare(value)
        report = f"*{REPORT} = {code};"
        if len(node.args) > 1:
            report = f"if ({bare(self.value(node.args[1]))}) {{ {report} }}"
        return [f"i64 {name} = {wrapped};", f"if ({name} < 0 || {name} >= {size}) {{ {report} {name} = 0; }}"]

    def _text(self, node: Expr) -> str:
        if node.op == "load":
            return self.load(node)
        if node.op == "constant":
            return self._language.literal(node.payload, node.dtype)
        if node.op in ("size", "index"):
            text = self._index(node)
            # as a value it is an int64, and may be computed with as such
            return f"(i64){text}" if self._language.is_narrow and not text.isdigit() else text
        if node.op == "given":
            return self.given or ""
        if node.op == "reduce" or node.op == "checked":
            raise AssertionError(f"{node} has no variable yet")
        if node.op == "select":
            condition, *branches = node.args
            chosen = (self._branch(arg, condition, holds) for arg, holds in zip(branches, (True, False), strict=True))
            return self._language.primitive(node, [self.value(condition), *chosen])
        args = [self.value(arg) for arg in node.args]
        if node.op in COMPARISONS and self._language.is_narrow:
            narrow = [self._narrow(arg) for arg in node.args]
            args = [text for text in narrow if text is not None] if None not in narrow else args
        if node.op == "cast":
            return self._language.cast(args[0], node.args[0].dtype, node.dtype)
        if node.op == "bitcast":
            return self._language.bitcast(args[0], node.args[0].dtype, node.dtype)
        return self._language.primitive(node, args)

    def _index(self, node: Expr) -> str:
        """Return the text of an index or a size, as an index."""
        if node.op == "size":
            return self._parameters.size(node.payload)
        text = self._parameters.index(node.payload, self.value)
        return text if text.isidentifier() or text.isdigit() else f"({text})"

    def _narrow(self, node: Expr) -> str | None:
        """Return the text of an integer in 32 bits, where it has no variable and is known to fit, or None."""
        if node.number in self.names:
            return None
        if node.op in ("size", "index"):
            return self._index(node)
        fits = node.op == "constant" and node.dtype == "int64" and -(2**31) < node.payload < 2**31
        return self._language.literal(node.payload, "int32") if fits else None

    def _read(self, node: Expr) -> str:
        load: Load = node.payload
        place = f"{self._parameters.pointer(load.tensor)}[{self._parameters.index(load.offset, self.value)}]"
        return self._language.load(node.dtype, place)

    def _branch(self, node: Expr, condition: Expr, holds: bool) -> str:
        """Return a branch of a selection; a load under the same condition does not ask again."""
        if node.op == "load" and node.args and node.number not in self.names:
            under = node.args[0]
            if under is condition if holds else under.op == "not" and under.args[0] is condition:
                return self._read(node)
        return self.value(node)


def divides(node: Expr) -> bool:
    """Whether a node divides integers, by what may be zero."""
    if node.op not in INTEGER_DIVISIONS or node.is_float:
        return False
    divisor = node.args[1]
    return divisor.op != "constant" or divisor.payload == 0


def _is_loop_variable(node: Expr) -> bool:
    if node.op != "index" or node.payload.constant or len(node.payload.terms) != 1:
        return False
    [(atom, factor)] = node.payload.terms
    return isinstance(atom, Axis) and factor == 1


def _short_name(node: Expr) -> str:
    return {"load": "v", "index": "at", "cast": "c", "checked": "k"}.get(node.op, "t")


def loads_of(*roots: Expr) -> list[Expr]:
    """Return every load that some expressions need, reductions' included."""
    return [node for node in walk(*roots) if node.op == "load"]
