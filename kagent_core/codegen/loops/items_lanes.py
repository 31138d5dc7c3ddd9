"""Values of work-items that are vectors: of each step of one loop, the lane, a vector's worth is computed at once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

from kagent_core.codegen.c_family import INFIX, SHORT, CFamily
from kagent_core.codegen.dtypes import NBITS, compute_dtype
from kagent_core.codegen.expressions import Expr, Load, walk
from kagent_core.codegen.indices import Axis
from kagent_core.codegen.kernel import Store
from kagent_core.codegen.loops.half_values import NO_HALVES, HalfValues, half_bits
from kagent_core.codegen.loops.reductions import EXTREMES, OPENMP, Accumulator
from kagent_core.codegen.text import bare
from kagent_core.codegen.vectors import Vectors, neighbours
from kagent_core.codegen.work_items import WorkItemLanguage
from kagent_core.codegen.writer import Parameters, Statements


def vectors_of(language: CFamily) -> Vectors | None:
    """Return what spells a language's vectors; None where it has none."""
    return language.vectors if isinstance(language, WorkItemLanguage) else None


class LaneStatements(Statements):
    """Statements of which those that depend on the lane are of vectors, whose first element is at the lane's value.

    Parameters
    ----------
    halves
        Values whose vectors are of halves as they are in memory.
    """

    def __init__(
        self,
        language: CFamily,
        parameters: Parameters,
        labels: Mapping[int, str],
        halves: HalfValues = NO_HALVES,
    ) -> None:
        super().__init__(language, parameters, labels)
        self._vectors = vectors_of(language)
        self._lane: Axis | None = None
        self._halves = halves
        self._names_of_halves: dict[int, str] = {}
        self._wide: dict[int, str] = {}

    @contextmanager
    def lanes(self, lane: Axis) -> Iterator[None]:
        """Compute vectors along an axis for as long as the block lasts; their names are forgotten then."""
        self._lane = lane
        try:
            yield
        finally:
            self._lane = None
            self.forget({lane})

    def forget(self, loops: Collection[Axis]) -> None:
        """Drop the names of what depends on the variables of loops that have ended."""
        for number in [number for number in self.names if self.axes[number].intersection(loops)]:
            del self.names[number]

    @property
    def lane(self) -> Axis | None:
        """The axis along which values are vectors now."""
        return self._lane

    def is_vector(self, node: Expr) -> bool:
        """Whether a value is a vector now."""
        return self._lane is not None and self._lane in node.axes

    def vector(self, node: Expr) -> str:
        """Return the text of a value as a vector, whether it depends on the lane or not."""
        text = self.value(node)
        return text if self.is_vector(node) else self.spelling.broadcast(text, node.dtype)

    @property
    def spelling(self) -> Vectors:
        """What spells vectors."""
        assert self._vectors is not None
        return self._vectors

    def address(self, load: Load) -> str:
        """Return the address of an element."""
        return f"{self._parameters.pointer(load.tensor)} + {self._parameters.index(load.offset, self.value)}"

    def stored(self, store: Store) -> str:
        """Return the statement of a store."""
        load, dtype = Load(store.tensor, store.offset), store.tensor.dtype.name
        if self._lane is None or self._lane not in store.offset.axes:
            pointer, place = self._parameters.pointer(load.tensor), self._parameters.index(load.offset, self.value)
            return self._language.store(dtype, f"{pointer}[{place}]", self.value(store.value))
        if self._is_halves(store.value) and self._halves.kinds[store.value.number] == dtype:
            return self.spelling.write(self.address(load), self._of_halves(store.value))
        return self.spelling.store(dtype, self.address(load), self.vector(store.value))

    # -- what is kept in memory of its own

    def kind_of(self, node: Expr) -> str:
        """Return the type of what keeps a value."""
        if self._is_halves(node):
            return self.spelling.named(SHORT[self._halves.kinds[node.number]])
        return self.spelling.kind(node.dtype) if self.is_vector(node) else self._language.value_type(node.dtype)

    def kept(self, node: Expr) -> str:
        """Return the text of what is kept of a value."""
        if self._is_halves(node):
            return self._of_halves(node)
        return self.value(node)

    def take_kept(self, node: Expr, place: str) -> None:
        """Let a place where a value is kept stand for it from here on."""
        if self._is_halves(node):
            self._names_of_halves[node.number] = place
            place = self.spelling.widened(place, self._halves.kinds[node.number])
        self.name(node, place)

    # -- inside

    def _declare(self, node: Expr, label: str | None, lines: list[str]) -> None:
        if not self.is_vector(node):
            super()._declare(node, label, lines)
            return
        if self._widens_halves(node):
            if not self._has_halves(node.args[0]):
                self._declare(node.args[0], label, lines)
            self.name(node, self.value(node.args[0]))
            return
        if self._is_halves(node):
            self._declare_halves(node, label, lines)
            return
        name = self._variable(node, label)
        lines.append(f"const {self.spelling.kind(node.dtype)} {name} = {bare(self._text(node))};")
        self.name(node, name)

    def _variable(self, node: Expr, label: str | None) -> str:
        """Return the name of the variable that has a value, which may have been computed in an earlier loop, too."""
        name = self._declared.get(node.number)
        if name is None:
            name = self._declared[node.number] = self.fresh_name(label or ("v" if node.op == "load" else "t"))
        return name

    # -- vectors of halves

    def _declare_halves(self, node: Expr, label: str | None, lines: list[str]) -> None:
        """Declare a value in 16 bits, and in float32 where it is needed there."""
        kind, text = self._halves.kinds[node.number], self._of_halves(node)
        if not text.isidentifier():
            name = self._variable(node, label)
            lines.append(f"const {self.spelling.named(SHORT[kind])} {name} = {bare(text)};")
            text = name
        self._names_of_halves[node.number] = text
        wide = self.spelling.widened(text, kind)
        if node.number in self._halves.widened:
            name = self._wide.get(node.number) or self.fresh_name(f"{text}_wide")
            self._wide[node.number] = name
            lines.append(f"const {self.spelling.kind(kind)} {name} = {wide};")
            wide = name
        self.name(node, wide)

    def _is_halves(self, node: Expr) -> bool:
        """Whether a value is a vector of halves now."""
        return node.number in self._halves.kinds and self.is_vector(node)

    def _has_halves(self, node: Expr) -> bool:
        """Whether a value is a vector of halves that has a name."""
        return node.number in self.names and node.number in self._names_of_halves

    def _widens_halves(self, node: Expr) -> bool:
        """Whether a value is that of a vector of halves: it is made where it is needed, if it is."""
        return node.op == "cast" and node.dtype == "float32" and self._is_halves(node.args[0])

    def _of_halves(self, node: Expr) -> str:
        """Return the text of a value as a vector of halves."""
        if self._has_halves(node):
            return self._names_of_halves[node.number]
        kind = self._halves.kinds[node.number]
        if node.op == "load":
            zero = self.spelling.all_halves("0", kind)
            return self._under(node, self.spelling.read(self.address(node.payload)), zero)
        if node.op == "cast":
            [rounded] = node.args
            if self._is_halves(rounded):
                return self._of_halves(rounded)
            return self.spelling.halved(self.vector(rounded), rounded.dtype, kind)
        return self.spelling.of_halves(node.op, [self._half_operand(arg, kind) for arg in node.args], kind)

    def _half_operand(self, node: Expr, kind: str) -> str:
        if self._widens_halves(node):
            return self._of_halves(node.args[0])
        if node.op == "constant":
            return self.spelling.all_halves(f"({SHORT[kind]}){half_bits(node.payload, kind):#06x}", kind)
        return self.spelling.all_halves(f"store_{SHORT[kind]}({bare(self.value(node))})", kind)

    # -- the texts of vectors

    def _text(self, node: Expr) -> str:
        if not self.is_vector(node):
            return super()._text(node)
        if self._is_halves(node):
            return self.spelling.widened(self._of_halves(node), self._halves.kinds[node.number])
        if node.op == "load":
            return self._loaded(node)
        if node.op == "given":
            return self.given or ""
        if node.op == "index":
            return self._counted(node)
        if node.op == "cast":
            return self.spelling.cast(self.value(node.args[0]), node.args[0].dtype, node.dtype)
        if node.op == "bitcast":
            return self.spelling.bitcast(self.value(node.args[0]), node.dtype)
        if node.op == "select" and not self.is_vector(node.args[0]):
            condition, then, otherwise = node.args
            return f"({self.value(condition)} ? {self.vector(then)} : {self.vector(otherwise)})"
        return self.spelling.primitive(node, [self._operand(node, arg) for arg in node.args])

    def _operand(self, node: Expr, arg: Expr) -> str:
        """Return an operand; an operator takes a value that is the same in every lane as it is."""
        widens = node.op in INFIX and NBITS[compute_dtype(arg.dtype)] >= 32
        return self.value(arg) if widens else self.vector(arg)

    def _loaded(self, node: Expr) -> str:
        zero = self.spelling.broadcast(self._language.literal(0, node.dtype), node.dtype)
        return self._under(node, self.spelling.load(node.dtype, self.address(node.payload)), zero)

    def _under(self, load: Expr, text: str, zero: str) -> str:
        """Return what is read under a load's condition, if it has one, and else zero."""
        return f"({self.value(load.args[0])} ? {text} : {zero})" if load.args else text

    def _counted(self, node: Expr) -> str:
        assert self._lane is not None
        step = neighbours(node.payload, self._lane)
        first = self._parameters.index(node.payload, self.value)
        return self.spelling.counting(f"({first})", self._parameters.size(cast(int, step)))


class LaneAccumulator(Accumulator):
    """The running values of one reduction, one in every lane of a vector."""

    def __init__(self, node: Expr, name: str, in_chunks: bool, language: CFamily) -> None:
        super().__init__(node, name, in_chunks, language)
        vectors = vectors_of(language)
        assert vectors is not None
        self._vectors = vectors
        self._short, self.type = self.type, vectors.kind(node.dtype)

    @property
    def running_type(self) -> str:
        """The running values' type."""
        return self._vectors.named(SHORT[self._language.wide]) if self.in_chunks else self.type

    @property
    def first(self) -> str:
        """What they start from."""
        if self.node.dtype == "bool":
            return f"({self.type})({-1 if self.kind == 'all' else 0})"
        return f"({self.running_type})({super().first})"

    def declared(self) -> Iterator[str]:
        """Yield the statements that declare them."""
        yield f"{self.running_type} {self.name} = {self.first};"
        yield from self.rest()
        if self.tracks_nan:
            kind = self._vectors.named("i32")
            yield f"{kind} {self.name}_nan = ({kind})(0);"

    def declared_chunk(self) -> str:
        """Return the statement that declares the sums of a chunk."""
        return f"{self.type} {self.taking} = ({self.type})(0);"

    def folded(self) -> str:
        """Return the statement that adds the sums of a chunk to the sums, lane by lane."""
        return self.add(self._vectors.convert(self.taking, self._short, SHORT[self._language.wide]))

    def _update(self, name: str, value: str, lane: str) -> list[str]:
        if self.kind in EXTREMES:
            dtype = self.node.dtype
            beyond = self._vectors.mask(f"({value} {'<' if self.kind == 'min' else '>'} {name})", dtype)
            lines = [f"{name} = {self._vectors.choose(beyond, value, name, dtype)};"]
            unequal = self._vectors.mask(f"({value} != {value})", dtype)
            return [*lines, f"{self.name}_nan |= {bare(unequal)};"] if self.tracks_nan else lines
        return [f"{name} {OPENMP[self.kind]}= {bare(value)};"]

    def found(self, lane: str = "") -> str:
        """Return the running values once all is taken in."""
        if not self.tracks_nan:
            return self.name
        nan = self._vectors.broadcast(self._language.literal(float("nan"), self.node.dtype), self.node.dtype)
        return self._vectors.choose(f"{self.name}_nan", nan, self.name, self.node.dtype)

    def result(self, lane: str = "") -> str:
        """Return the reduction's values once all is taken in."""
        if self.compensated:
            return super().result(lane)
        return self._vectors.convert(self.name, "f64", self._short) if self.in_chunks else self.found()

    def over_lanes(self, single: Accumulator) -> list[str]:
        """Return statements by which the running value of a row takes in those of all lanes."""
        name = self.name if not self.in_chunks else self.taking
        kind = {"any": "or", "all": "and", "fmax": "max"}.get(self.kind, self.kind)
        short = "i32" if self.node.dtype == "bool" else self._short
        found = self._vectors.over_lanes(kind, short, name)
        if self.node.dtype == "bool":
            return [f"{single.name} {OPENMP[self.kind]}= ({found} != 0);"]
        if self.in_chunks:
            return [single.add(found)]
        if self.kind not in EXTREMES:
            return [f"{single.name} {OPENMP[self.kind]}= {found};"]
        lines = [f"const {self._short} {name}_lane = {found};"]
        if self.tracks_nan:
            lines.append(f"{single.name}_nan |= {self._vectors.over_lanes('or', 'i32', f'{self.name}_nan')};")
        sign = "<" if self.kind == "min" else ">"
        return [*lines, f"{single.name} = {name}_lane {sign} {single.name} ? {name}_lane : {single.name};"]


def lane_accumulators(running: Sequence[Accumulator], language: CFamily) -> list[LaneAccumulator]:
    """Return, for the running values of rows, those of a vector's lanes."""
    return [LaneAccumulator(each.node, f"{each.name}_lanes", each.in_chunks, language) for each in running]


def holds_rows_of(lane: Axis, values: Sequence[Expr]) -> bool:
    """Whether some values have reductions that differ from lane to lane."""
    return any(node.op == "reduce" and lane in node.axes for node in walk(*values, into_reductions=False))
