"""What parametrised kernels are written with: tensors by name, sizes as parameters, loops, stores with an epilogue."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kagent_core.codegen.c_family import REPORT, CFamily
from kagent_core.codegen.dtypes import compute_dtype
from kagent_core.codegen.generic.tiles import DEFAULT_TILES, Tiles
from kagent_core.codegen.indices import Index, offset_of
from kagent_core.codegen.kernel import KernelSource, Store
from kagent_core.codegen.lowering import Lowering
from kagent_core.codegen.table import RuleTable
from kagent_core.codegen.text import Text
from kagent_core.codegen.writer import Parameters, Statements, loads_of
from kagent_core.errors import LaunchConfigError
from kagent_core.specs import OpCall, TensorSpec

SLACK = 1 << 25
"""How far a kernel may step past a size: more than the largest tiles that a launch config can ask for."""


@dataclass(frozen=True)
class Tensor:
    """A tensor in a kernel's text.

    Attributes
    ----------
    spec
        The tensor.
    pointer
        Name of the pointer to its first element.
    """

    spec: TensorSpec
    pointer: str
    _builder: KernelBuilder

    @property
    def dtype(self) -> str:
        """Name of its element type."""
        return self.spec.dtype.name

    def place(self, *index: str) -> str:
        """Return the element at an index, given as one text per dimension, as something that can be assigned to."""
        return f"{self.pointer}[{self.offset(*index)}]"

    def offset(self, *index: str) -> str:
        """Return where an element lies, from the first one."""
        self._builder.fits(sum(max(n - 1, 0) * s for n, s in zip(self.spec.shape, self.spec.strides, strict=True)))
        if len(index) != len(self.spec.shape):
            raise ValueError(f"{len(index)} indices into {self.spec}")
        terms: list[str] = []
        for part, size, stride in zip(index, self.spec.shape, self.spec.strides, strict=True):
            if size != 1 and stride != 0 and part != "0":
                factor = self._builder.size(stride)
                plain = part.isidentifier() or part.isdigit()
                if factor == "1":
                    terms.append(part if plain else f"({part})")
                else:
                    terms.append(f"{part if plain else f'({part})'} * {factor}")
        return " + ".join(terms) or "0"

    def at(self, *index: str) -> str:
        """Return the value of the element at an index, in the type that is computed in."""
        return self._builder.language.load(self.dtype, self.place(*index))

    def flat(self, offset: str) -> str:
        """Return the value of the element that lies so far from the first one."""
        return self._builder.language.load(self.dtype, f"{self.pointer}[{offset}]")

    def size(self, dim: int) -> str:
        """Return its size along a dimension, as text."""
        return self._builder.size(self.spec.shape[dim])


class KernelBuilder:
    """Writes one parametrised kernel.

    Parameters
    ----------
    call
        What it computes.
    rest
        Pointwise operators that follow, computed where its result is stored.
    stored
        Buffers of the results that are written; None for all of them.
    language
        The device's.
    rules
        Lowering rules of `rest`.
    round_halves
        As for `kagent_core.codegen.expressions.Expressions`.
    tiles
        How much of a product one work-item computes.

    Raises
    ------
    NotLoweredError
        When `rest` cannot be an epilogue.
    """

    def __init__(
        self,
        call: OpCall,
        rest: Sequence[OpCall],
        stored: Collection[int] | None,
        language: CFamily,
        rules: RuleTable,
        round_halves: bool = True,
        tiles: Tiles = DEFAULT_TILES,
    ) -> None:
        self.call = call
        self.tiles = tiles
        self.language = language
        self.text = Text()
        self._epilogue = _Epilogue(call, rest, stored, rules, round_halves) if rest else None
        written = list(call.outputs) if self._epilogue is None else [s.tensor for s in self._epilogue.stores]
        read = set(call.inputs) | (set() if self._epilogue is None else self._epilogue.read)
        self._parameters = Parameters(language, written, read, SLACK)
        self._items = 1
        self._item_nbytes = 0
        self._names = 0

    # -- tensors and numbers

    def read(self, spec: TensorSpec) -> Tensor:
        """Return an argument."""
        return Tensor(spec, self._parameters.pointer(spec), self)

    def result(self, number: int = 0) -> Tensor:
        """Return a result. With an epilogue, it is written by `store` only."""
        spec = self.call.results[number]
        if spec is None:
            raise ValueError(f"{self.call.name} does not give its result {number}")
        return Tensor(spec, "" if self._epilogue else self._parameters.pointer(spec), self)

    def gives(self, number: int) -> bool:
        """Whether a result is wanted: some operators can leave out one or the other."""
        return self.call.results[number] is not None

    def size(self, value: int) -> str:
        """Return a size, a stride or another whole number that depends on shapes: the name of a parameter."""
        return self._parameters.size(value)

    def fits(self, *values: int) -> None:
        """Say how large the numbers become that the text computes from sizes, and that no size or offset bounds.

        Raises
        ------
        WideIndexError
            When indices have 32 bits and a number has more; the kernel is then written with indices of 64 bits.
        """
        self._parameters.fits(*(value + SLACK for value in values))

    @property
    def index_type(self) -> str:
        """The C type of variables that count and address elements; those that become data are ``i64``."""
        return self.language.index_type

    def number(self, value: bool | float, dtype: str) -> str:
        """Return a number that does not depend on shapes, in a type."""
        return self.language.literal(value, dtype)

    def compute_type(self, dtype: str) -> str:
        """Return the C type in which elements of a type are computed with: ``f32`` for the half types."""
        return self.language.value_type(compute_dtype(dtype))

    def name(self, base: str) -> str:
        """Return a name that no other variable has."""
        self._names += 1
        return f"{base}_{self._names}"

    # -- text

    def add(self, *lines: str) -> None:
        """Add statements."""
        self.text.add(*lines)

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """Write a block: a loop or a condition, given without its brace."""
        self.text.open(f"{head} {{".lstrip())
        yield
        self.text.close()

    def array(self, kind: str, name: str, length: int) -> None:
        """Declare memory of the work-item's own."""
        self.claim(kind, length)
        self.add(f"{kind} {name}[{length}];")

    def claim(self, kind: str, length: int) -> None:
        """Count some elements as memory of the work-item's own.

        Raises
        ------
        LaunchConfigError
            When it is more than a work-item has: its tiles are too large.
        """
        self._item_nbytes += length * int(kind.lstrip("biuf")) // 8
        if self._item_nbytes > self.language.item_nbytes:
            raise LaunchConfigError(
                f"the tiles of {self.call.signature} take more than {self._item_nbytes} bytes of a work-item's own "
                f"memory, expected at most {self.language.item_nbytes}",
                hint="take smaller tile sizes: what they are is in docs/launch-configs.md",
            )

    def least(self, a: str, b: str) -> str:
        """Return the smaller one of two whole numbers."""
        return f"({a} < {b} ? {a} : {b})"

    @contextmanager
    def loop(
        self,
        name: str,
        end: str | int,
        start: str | int = 0,
        step: str | int = 1,
        simd: bool = False,
        reduction: str = "",
    ) -> Iterator[None]:
        """Write a loop over ``name`` from `start` to `end` - 1.

        Parameters
        ----------
        simd
            Whether steps may be taken together.
        reduction
            As for `CFamily.simd`, which it implies.
        """
        marked = self.language.simd(reduction) if simd or reduction else ""
        if marked:
            self.add(marked)
        advance = f"{name}++" if str(step) == "1" else f"{name} += {step}"
        with self.block(f"for ({self.index_type} {name} = {start}; {name} < {end}; {advance})"):
            yield

    @contextmanager
    def items(self, *axes: tuple[str, int], steps: int = 1) -> Iterator[None]:
        """Write what runs independently for each step of some loops: work-items on a device that has them.

        Parameters
        ----------
        axes
            Name and extent of each loop, outermost first.
        steps
            Roughly what one step costs, in additions.
        """
        steps = 1 << max(steps, 1).bit_length() - 1  # so that kernels of like shapes have the same text
        extents = 1
        for _, extent in axes:
            extents *= extent
        self._items = max(self._items, extents)
        self._item_nbytes = 0
        self.fits(extents, *(extent for _, extent in axes))  # a device may count the steps of all loops together
        opened = self.language.open_items(self.text, [(name, self.size(n), n) for name, n in axes], steps)
        yield
        self.text.close(opened)

    def report(self, condition: str, code: int) -> None:
        """Report an error of the user's where a condition holds."""
        self._parameters.reports = True
        self.add(f"if ({condition}) {{ *{REPORT} = {code}; }}")

    def store(self, index: Sequence[str], value: str, number: int = 0) -> None:
        """Write an element of a result: its epilogue, then the statement that stores it.

        Parameters
        ----------
        index
            A text per dimension of the result.
        value
            In the type that is computed in (`compute_type`).
        number
            Of the result.
        """
        if self._epilogue is not None:
            # named before the epilogue opens, whose own names may hide those in the texts
            made, places = self.name("made"), [self.name("at") for _ in index]
            self.add(f"const {self.compute_type(self.call.outputs[0].dtype.name)} {made} = {value};")
            kind = self.index_type
            self.add(*(f"const {kind} {place} = {part};" for place, part in zip(places, index, strict=True)))
            self.text.open("{")
            self._epilogue.write(self.text, self._parameters, self.language, places, made)
            self.text.close()
            return
        out = self.result(number)
        self.add(self.language.store(out.dtype, out.place(*index), value))

    def source(self, name: str) -> KernelSource:
        """Return the kernel."""
        args = self._parameters.args
        head = self.language.head(name, args, self._parameters.reports)
        text = "\n".join([f"{head} {{", *self._parameters.entry(), *self.text.lines, "}"]) + "\n"
        return KernelSource(name, text, args, self._parameters.reports, self._items)


class _Epilogue:
    """Pointwise operators on each element of a result, at the place where it is stored."""

    def __init__(
        self, call: OpCall, rest: Sequence[OpCall], stored: Collection[int] | None, rules: RuleTable, round_halves: bool
    ) -> None:
        self._made = call.outputs[0]
        wanted = None if stored is None else set(stored)
        lowering = Lowering(rest, rules, wanted, round_halves, given=self._made)
        nest = lowering.run()
        self.axes = nest.outer
        self.stores = list(nest.stores)
        if stored is not None and self._made.buffer in stored:
            axes = iter(self.axes)
            index = tuple(Index() if size == 1 else Index.of(next(axes)) for size in self._made.shape)
            made = lowering.operand(self._made).at(index)
            self.stores.insert(0, Store(self._made, offset_of(index, self._made.strides), made.expr, False))
        self._labels = nest.labels
        self.read = {node.payload.tensor for node in loads_of(*(store.value for store in self.stores))}

    def write(self, text: Text, parameters: Parameters, language: CFamily, index: Sequence[str], value: str) -> None:
        axes = iter(self.axes)
        for part, size in zip(index, self._made.shape, strict=True):
            if size != 1:
                text.add(f"const {language.index_type} {next(axes).name} = {part};")
        statements = Statements(language, parameters, self._labels)
        statements.given = value
        values = [store.value for store in self.stores]
        text.add(*statements.place(values, [])[0])
        for store in self.stores:
            place = f"{parameters.pointer(store.tensor)}[{parameters.index(store.offset, statements.value)}]"
            text.add(language.store(store.tensor.dtype.name, place, statements.value(store.value)))
