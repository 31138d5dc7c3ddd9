"""What kernels have in common whose threads share pieces of operands: copies in shared memory, made stage by stage.

Of each copy there are two: while the threads compute with one, the next stage is on its way to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kagent_core.codegen.generic.block_tiles import pitch
from kagent_core.codegen.generic.builder import KernelBuilder
from kagent_core.codegen.groups import THREAD

if TYPE_CHECKING:
    from kagent_core.codegen.generic.tiled import Operand

MOST_UNROLLED = 512
"""Most products of a stage that are written out."""


@dataclass(frozen=True)
class Copy:
    """How the threads of a block copy a piece of an operand to shared memory, one step of the depth after the other.

    Neighbouring threads copy what lies next to each other in memory.

    Attributes
    ----------
    k
        Where to write it.
    operand, name
        What is copied, and what it is called.
    memory
        Name of the shared memory.
    lines, depth
        Of the piece.
    threads
        Of the block.
    first, end
        The piece's first line, and the one behind the operand's last.
    begin
        Where in the shared memory it begins.
    """

    k: KernelBuilder
    operand: Operand
    name: str
    memory: str
    lines: int
    depth: int
    threads: int
    first: str
    end: str
    begin: int = 0

    @property
    def length(self) -> int:
        """Values of the copy."""
        return self.depth * pitch(self.lines)

    def read(self, kind: str, depth_first: str, depth_end: str) -> None:
        """Write what reads a thread's values to registers: 0 in place of those that are not there."""
        k = self.k
        k.add(f"{kind} {self._registers}[{self._count}];")
        with k.unrolled("t", self._count):
            k.add(f"const i32 place = {self._place};")
            self._value(kind, depth_first, depth_end, self._within)
            k.add(f"{self._registers}[t] = value;")

    def put(self, number: str) -> None:
        """Write what puts them into shared memory, as one of two copies."""
        k = self.k
        with k.unrolled("t", self._count):
            k.add(f"const i32 place = {self._place};")
            condition = f"if ({self._within}) " if self._within else ""
            k.add(f"{condition}{self.at(number)}{self._to}] = {self._registers}[t];")

    def at(self, number: str) -> str:
        """Return the beginning of one of two copies, as far as an index into it."""
        begin = f"{self.begin} + " if self.begin else ""
        return f"{self.memory}[{begin}{number} * {self.length} + "

    def whole(self, kind: str, depth_end: str) -> None:
        """Write what copies all of the depth, at once."""
        k = self.k
        with k.block(f"for (i32 place = {THREAD}; place < {self.lines * self.depth}; place += {self.threads})"):
            self._value(kind, "0", depth_end, "")
            k.add(f"{self.memory}[{self._to}] = value;")

    def _value(self, kind: str, depth_first: str, depth_end: str, within: str) -> None:
        k, line, depth = self.k, self.k.name("line"), self.k.name("p")
        k.add(f"const {k.index_type} {line} = {_sum(self.first, self._line)};")
        k.add(f"const {k.index_type} {depth} = {_sum(depth_first, self._depth)};")
        k.add(f"{kind} value = 0;")
        conditions = [f"{line} < {self.end}", f"{depth} < {depth_end}", *([within] if within else [])]
        with k.block(f"if ({' && '.join(conditions)})"):
            own = self.operand.lines.coordinates(k, line)
            along = self.operand.depth.coordinates(k, depth)
            k.add(f"value = {self.operand.value(own, along)};")

    @property
    def _registers(self) -> str:
        return f"next_{self.name}"

    @property
    def _count(self) -> int:
        return -(-self.lines * self.depth // self.threads)

    @property
    def _place(self) -> str:
        return f"{THREAD} + t * {self.threads}" if self._count > 1 else THREAD

    @property
    def _within(self) -> str:
        """Return when a place is one of the copy; empty for always."""
        return f"place < {self.lines * self.depth}" if self.lines * self.depth % self.threads else ""

    @property
    def _line(self) -> str:
        return f"place / {self.depth}" if self.operand.along_depth else f"place % {self.lines}"

    @property
    def _depth(self) -> str:
        return f"place % {self.depth}" if self.operand.along_depth else f"place / {self.lines}"

    @property
    def _to(self) -> str:
        return f"{self._depth} * {pitch(self.lines)} + {self._line}"


def write_stages(
    k: KernelBuilder,
    kind: str,
    copies: Sequence[Copy],
    depth: tuple[str, str],
    multiply: Callable[[Sequence[str]], None],
    computing: int,
    before: str = "",
) -> None:
    """Write the loop over a depth: a step reads one stage, computes with the one before, and puts its own.

    A barrier ends each step, and there is at least one.

    Parameters
    ----------
    k
        Where to.
    kind
        Type of what is copied.
    copies
        What each stage copies, all of the same depth.
    depth
        Where the depth begins and ends.
    multiply
        Given where each copy begins, writes what is computed with a stage.
    computing
        How many threads compute.
    before
        Name for how much of the depth comes before a stage that is computed with.
    """
    (begin, end), step = depth, copies[0].depth
    length = end if begin == "0" else f"{end} - {begin}"
    for copy in copies:
        k.shared(kind, copy.memory, copy.begin + 2 * copy.length)
    stages, stage, first = k.name("stages"), k.name("stage"), k.name("p_first")
    k.add(f"const {k.index_type} {stages} = ({length} + {step - 1}) / {step};")
    with k.block(f"for ({k.index_type} {stage} = 0; {stage} <= {stages}; {stage}++)"):
        k.add(f"const {k.index_type} {first} = {_sum(begin, f'{stage} * {step}')};")
        for copy in copies:
            copy.read(kind, first, end)
        idle = f" && {THREAD} < {computing}" if computing < copies[0].threads else ""
        with k.block(f"if ({stage} > 0{idle})"):
            k.add(f"const i32 own = (i32)(({stage} - 1) % 2);")
            if before:
                k.add(f"const i32 {before} = (i32)({stage} - 1) * {step};")
            multiply([copy.at("own") for copy in copies])
        with k.block(f"if ({stage} < {stages})"):
            k.add(f"const i32 other = (i32)({stage} % 2);")
            for copy in copies:
                copy.put("other")
        k.barrier()


@dataclass(frozen=True)
class Registers:
    """Sums that a thread keeps in registers.

    Attributes
    ----------
    name
        Of the array.
    kind, dtype
        C type of a sum, and the type of the operands.
    tall, wide
        Rows and columns.
    """

    name: str
    kind: str
    dtype: str
    tall: int
    wide: int

    @property
    def length(self) -> int:
        """How many sums there are."""
        return self.tall * self.wide

    def declare(self, k: KernelBuilder) -> None:
        """Write the declaration: all are 0."""
        k.add(f"{self.kind} {self.name}[{self.length}];")
        with k.unrolled("t", self.length):
            k.add(f"{self.name}[t] = 0;")

    def place(self, row: str, column: str) -> str:
        """Return one of them."""
        return f"{self.name}[{row} * {self.wide} + {column}]" if self.wide > 1 else f"{self.name}[{row}]"

    def multiply(self, k: KernelBuilder, steps: int, depth: str, row: str, column: str) -> None:
        """Write what adds products to them.

        Parameters
        ----------
        steps
            How many of each.
        depth
            The depth of step ``s``, which is ``p`` in what follows.
        row, column
            Value ``t`` of the rows and of the columns.
        """
        written_out = steps * self.length <= MOST_UNROLLED
        with k.unrolled("s", steps) if written_out else k.block(f"for (i32 s = 0; s < {steps}; s++)"):
            k.add(f"const i32 p = {depth};", f"{self.kind} row[{self.tall}], column[{self.wide}];")
            with k.unrolled("t", self.tall):
                k.add(f"row[t] = {row};")
            with k.unrolled("t", self.wide):
                k.add(f"column[t] = {column};")
            with k.unrolled("r", self.tall), k.unrolled("c", self.wide):
                place = self.place("r", "c")
                k.add(f"{place} = {k.language.multiply_add('row[r]', 'column[c]', place, self.dtype)};")


def _sum(first: str, second: str) -> str:
    return second if first == "0" else f"{first} + {second}"
