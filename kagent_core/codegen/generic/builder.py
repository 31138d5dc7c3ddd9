"""What parametrised kernels are written with: tensors by name, sizes as parameters, loops, stores with an epilogue."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kagent_core.codegen.c_family import REPORT, CFamily
from kagent_core.codegen.dtypes import compute_dtype
from kagent_core.codegen.generic.epilogue import Epilogue, NoLanesError, lane_dimension
from kagent_core.codegen.generic.tiles import DEFAULT_TILES, Tiles
from kagent_core.codegen.groups import WorkGroups
from kagent_core.codegen.kernel import KernelSource
from kagent_core.codegen.table import NotLoweredError, RuleTable
from kagent_core.codegen.text import Text
from kagent_core.codegen.vectors import Vectors
from kagent_core.codegen.work_items import WorkItemLanguage
from kagent_core.codegen.writer import Parameters
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
        """Return the value of the element at an index, in the type that is computed in; in lanes, a vector of them.

        Of what is the same in every lane, it is a single value there too.
        """
        if self._builder.lane_of(self.spec, index) is not None:
            return self._builder.spelling.load(self.dtype, f"{self.pointer} + {self.offset(*index)}")
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
    summed
        What adds up all places of an image that is made; see `kagent_core.codegen.generic.place_sums`.
    others
        What it reads beside the arguments of `call` and `rest`.

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
        summed: OpCall | None = None,
        others: Sequence[TensorSpec] = (),
    ) -> None:
        self.call = call
        self.summed = summed
        self._takes_sums = False
        self._kept: str | None = None
        self.tiles = tiles
        self.language = language
        self.text = Text()
        kept = None if summed is None else summed.arguments["self"]
        if kept is not None and not rest and kept != call.outputs[0]:
            raise NotLoweredError(f"{kept} is not what {call.name} makes")
        self._epilogue = Epilogue(call, rest, stored, rules, round_halves, language.wide, kept) if rest else None
        self._stores = summed is None or stored is None or call.outputs[0].buffer in stored
        written = list(call.outputs) if self._epilogue is None else [s.tensor for s in self._epilogue.stores]
        written += [] if summed is None else summed.outputs
        read = {*call.inputs, *others} | (set() if self._epilogue is None else self._epilogue.read)
        self._parameters = Parameters(language, written, read, SLACK)
        self._items = 1
        self._item_nbytes = 0
        self._names = 0
        self._lanes: frozenset[str] = frozenset()
        self._threads: int | None = None
        self._pieces = 1
        self._shared: dict[str, tuple[str, int]] = {}

    @property
    def vectors(self) -> Vectors | None:
        """What spells vectors, where the language has any."""
        return self.language.vectors if isinstance(self.language, WorkItemLanguage) else None

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

    # -- vectors

    def writes_lanes(self, write: Callable[[], None]) -> bool:
        """Write something in vectors, if it can be; else write nothing, and return False."""
        lines, depth = len(self.text.lines), self.text.depth
        try:
            write()
        except NoLanesError:
            del self.text.lines[lines:]
            self.text.depth = depth
            return False
        return True

    @contextmanager
    def lanes(self, *names: str) -> Iterator[None]:
        """Compute vectors of neighbours, for as long as the block lasts.

        What is stored are vectors then, whose first element is at the index, and what is read are vectors where their
        index has one of the variables that go from lane to lane. Arithmetic takes single values beside vectors.

        Parameters
        ----------
        names
            The variables.
        """
        self._lanes = frozenset(names)
        try:
            yield
        finally:
            self._lanes = frozenset()

    @property
    def in_lanes(self) -> bool:
        """Whether vectors are computed now."""
        return bool(self._lanes)

    @property
    def spelling(self) -> Vectors:
        """What spells vectors, in lanes."""
        assert self.vectors is not None
        return self.vectors

    def lane_of(self, spec: TensorSpec, index: Sequence[str]) -> int | None:
        """Return the dimension along which an index goes from lane to lane; None where it is the same in every lane.

        Raises
        ------
        NoLanesError
            When lanes are no neighbours in memory.
        """
        lane = lane_dimension(self._lanes, spec, index)
        if lane is not None and spec.strides[lane] != 1:
            raise NoLanesError(f"{index} of {spec}")
        return lane

    def converted(self, dtype: str, value: str) -> str:
        """Return a value in the type that elements of a type are computed in. In lanes all values are floats of it."""
        return f"({value})" if self._lanes else f"({self.compute_type(dtype)})({value})"

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

    @property
    def work_groups(self) -> WorkGroups | None:
        """How threads of a block work together on the device; None where they do not."""
        return self.language.groups if isinstance(self.language, WorkItemLanguage) else None

    @contextmanager
    def groups(self, *axes: tuple[str, int], threads: int | None = None) -> Iterator[None]:
        """Write what the threads of a block do together for each step of some loops, which blocks share out.

        Inside, ``thread`` is a thread's number in its block. Every thread must come to every `barrier`.

        Parameters
        ----------
        axes
            Name and extent of each loop, outermost first.
        threads
            Of a block; by default as many as the language says.
        """
        assert isinstance(self.language, WorkItemLanguage)
        assert self.work_groups is not None
        assert self._threads in (None, threads or self.work_groups.threads)
        self._threads = threads or self.work_groups.threads
        extents = math.prod(extent for _, extent in axes)
        self._pieces = max(self._pieces, extents)
        self.fits(extents, *(extent for _, extent in axes))
        opened = self.language.open_groups(self.text, [(name, self.size(n), n) for name, n in axes])
        yield
        self.text.close(opened)

    @property
    def threads(self) -> int:
        """How many threads a block has, inside `groups`."""
        assert self._threads is not None
        return self._threads

    def shared(self, kind: str, name: str, length: int) -> None:
        """Declare memory that the threads of a block share, at the top of the kernel.

        What is declared again, by a later part of the kernel, is the same memory, as long as the longer one.

        Raises
        ------
        LaunchConfigError
            When a block has less of it.
        """
        assert self.work_groups is not None
        before, least = self._shared.get(name, (kind, 0))
        assert before == kind
        self._shared[name] = (kind, max(least, length))
        nbytes = sum(count * int(kind.lstrip("biuf")) // 8 for kind, count in self._shared.values())
        if nbytes > self.work_groups.local_nbytes:
            raise LaunchConfigError(
                f"the tiles of {self.call.signature} take {nbytes} bytes of a block's shared memory, "
                f"expected at most {self.work_groups.local_nbytes}",
                hint="take smaller tile sizes: what they are is in docs/launch-configs.md",
            )

    def barrier(self, memory: bool = False) -> None:
        """Wait until every thread of the block has come here; with `memory`, also for what they write to tensors."""
        assert self.work_groups is not None
        self.add(self.work_groups.memory_barrier if memory else self.work_groups.barrier)

    @contextmanager
    def unrolled(self, name: str, count: int) -> Iterator[None]:
        """Write a loop of few steps that is to be written out, so that what it indexes can be kept in registers."""
        assert self.work_groups is not None
        if self.work_groups.unroll:
            self.add(self.work_groups.unroll)
        with self.block(f"for (i32 {name} = 0; {name} < {count}; {name}++)"):
            yield

    def report(self, condition: str, code: int) -> None:
        """Report an error of the user's where a condition holds."""
        self._parameters.reports = True
        self.add(f"if ({condition}) {{ *{REPORT} = {code}; }}")

    def stored_step(self, dim: int) -> int | None:
        """Return how far neighbours along a dimension of the first result are apart where they are stored.

        None where that differs, from place to place or from one tensor to another; 0 for a dimension of one element.
        """
        if self._epilogue is not None:
            return self._epilogue.stored_step(dim)
        spec = self.call.outputs[0]
        return spec.strides[dim] if spec.shape[dim] > 1 else 0

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
            spec = self.call.outputs[0]
            made, places = self.name("made"), [self.name("at") for _ in index]
            lane = lane_dimension(self._lanes, spec, index)
            made_kind = self.compute_type(spec.dtype.name) if lane is None else self.spelling.kind(spec.dtype.name)
            self.add(f"const {made_kind} {made} = {value};")
            kind = self.index_type
            self.add(*(f"const {kind} {place} = {part};" for place, part in zip(places, index, strict=True)))
            kept = None if self._kept is None else self.name("kept")
            if kept is not None:
                self.add(f"f32 {kept};")
            self.text.open("{")
            self._epilogue.write(self.text, self._parameters, self.language, places, made, lane, kept)
            self.text.close()
            if kept is not None:
                self.add(f"{self._kept} = {kept};")
            return
        if self._kept is not None:
            self.add(f"{self._kept} = {value};")
            value = self._kept  # which `value` may be computed from
        if not self._stores:
            return
        out = self.result(number)
        if self._lanes:
            if self.lane_of(out.spec, index) is None:
                raise NoLanesError(str(out.spec))
            self.add(self.spelling.store(out.dtype, f"{out.pointer} + {out.offset(*index)}", value))
            return
        self.add(self.language.store(out.dtype, out.place(*index), value))

    def following(self, epilogue: Epilogue, index: Sequence[str], value: str) -> str:
        """Write what an epilogue computes of an element that no tensor has, and return the variable that it is in.

        Parameters
        ----------
        epilogue
            Which keeps something, and stores nothing.
        index
            A text per dimension of what it begins with.
        value
            The element.
        """
        kept, made, places = self.name("kept"), self.name("made"), [self.name("at") for _ in index]
        self.add(f"f32 {kept};", f"const f32 {made} = {value};")
        self.add(*(f"const {self.index_type} {place} = {part};" for place, part in zip(places, index, strict=True)))
        with self.block(""):
            epilogue.write(self.text, self._parameters, self.language, places, made, None, kept)
        return kept

    @contextmanager
    def keeping(self, place: str) -> Iterator[None]:
        """Also write what is added up to a place of the kernel's own wherever `store` is called, if anything is."""
        self._kept = None if self.summed is None else place
        try:
            yield
        finally:
            self._kept = None

    def sums_of(self, summed: OpCall) -> Tensor:
        """Return the result of what adds up places, for a kernel that writes it."""
        self._takes_sums = True
        return Tensor(summed.outputs[0], self._parameters.pointer(summed.outputs[0]), self)

    def source(self, name: str) -> KernelSource:
        """Return the kernel.

        Raises
        ------
        NotLoweredError
            When it does not write the sums that it should.
        """
        if self.summed is not None and not self._takes_sums:
            raise NotLoweredError(f"the kernel of {self.call.name} has no place for {self.summed.name}")
        args = self._parameters.args
        head = self.language.head(name, args, self._parameters.reports)
        inside, items = self._parameters.entry(), self._items
        if self._threads is not None and self.work_groups is not None and isinstance(self.language, WorkItemLanguage):
            head = self.language.fixed_head(head, self._threads)
            shared = [self.work_groups.declared(kind, name, n) for name, (kind, n) in self._shared.items()]
            inside += [f"    {line}" for line in (*shared, self.language.thread())]
            items = max(self._pieces, -(-self._items // self._threads))
        text = "\n".join([f"{head} {{", *inside, *self.text.lines, "}"]) + "\n"
        return KernelSource(name, text, args, self._parameters.reports, items, threads=self._threads)
