"""Matrix products in tiles: what products of matrices, convolutions and their gradients have in common.

A work-item computes a block of the product from rows and columns that are read wherever they lie. It goes over the
depth in stretches; of each it copies the columns next to each other, with whatever conversion, padding or transposition
that takes, so that the loop that does the work is always the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kagent_core.codegen.dtypes import FLOATS, compute_dtype
from kagent_core.codegen.generic.builder import KernelBuilder
from kagent_core.codegen.generic.shared_tiles import write_shared_product
from kagent_core.codegen.generic.spaces import Segment, Space
from kagent_core.codegen.vectors import Vectors

Coordinates = Sequence[str]


@dataclass(frozen=True)
class Places:
    """Values that lie at the sum of two offsets: one that follows from the line, and one that follows from the depth.

    Attributes
    ----------
    value
        Given a line and the second offset, the value there.
    step
        Given the coordinates of a depth, the second offset, which is kept in a table for a stretch of the depth. None
        when that is the depth's number: then values are read where they lie.
    """

    value: Callable[[str, str], str]
    step: Callable[[Coordinates], str] | None = None


@dataclass(frozen=True)
class Operand:
    """One of the two operands: lines, which are rows of the first or columns of the second one, along a depth.

    Attributes
    ----------
    lines
        Where its lines are.
    depth
        What is summed up over.
    value
        Given the coordinates of a line and of a depth, the value there, in the type that is computed in.
    along_depth
        Whether values along the depth are closer to each other in memory than values of neighbouring lines.
    places
        For rows, where that makes it quicker to find their values.
    """

    lines: Space
    depth: Space
    value: Callable[[Coordinates, Coordinates], str]
    along_depth: bool
    places: Places | None = None


@dataclass(frozen=True)
class Product:
    """A matrix product, for each step of some outer loops.

    Attributes
    ----------
    dtype
        Of the operands.
    batch
        Name and extent of the outer loops.
    rows, columns
        The operands.
    store
        Writes statements that store an element: coordinates of its row, of its column, and its value.
    """

    dtype: str
    batch: Sequence[tuple[str, int]]
    rows: Operand
    columns: Operand
    store: Callable[[Coordinates, Coordinates, str], None]


def write_product(k: KernelBuilder, product: Product) -> None:
    """Write a product: one block of rows by a tile of columns per work-item, or per block where threads share it."""
    if k.work_groups is not None:
        write_shared_product(k, product)
        return
    tiles, rows, columns = k.tiles, product.rows, product.columns
    height = min(tiles.rows, max(rows.lines.extent, 1))
    width, tall = tiles.columns(product.dtype), height * tiles.blocks
    kind = k.compute_type(product.dtype)
    total = k.language.value_type(tiles.total_dtype(product.dtype))
    m, n, depth = (k.size(extent) for extent in (rows.lines.extent, columns.lines.extent, rows.depth.extent))
    axes = [("bi", -(-rows.lines.extent // tall)), ("bj", -(-columns.lines.extent // width))]
    with k.items(*product.batch, *axes, steps=max(rows.depth.extent, 1) * width * tall // 16):
        k.add(f"const {k.index_type} i_first = bi * {tall}, i_end = {k.least(m, f'i_first + {tall}')};")
        k.add(f"const {k.index_type} j_first = bj * {width}, j_end = {k.least(n, f'j_first + {width}')};")
        k.array(total, "total", tall * width)
        with k.loop("t", tall * width, simd=True):
            k.add("total[t] = 0;")
        k.array(kind, "panel", tiles.depth * width)
        with k.loop("p_first", depth, step=tiles.depth):
            k.add(f"const {k.index_type} p_end = {k.least(depth, f'p_first + {tiles.depth}')};")
            _copy_columns(k, columns, width)
            _place_steps(k, rows)
            with k.loop("i", "i_end", "i_first", step=height):
                _multiply_rows(k, product, height, width)
        with k.loop("i", "i_end", "i_first"):
            row = rows.lines.coordinates(k, "i")
            with columns.lines.segments(k, "j", "j_first", "j_end") as segment:
                _store_columns(k, product, segment, row, f"total[(i - i_first) * {width} + j - j_first]")


def _store_columns(k: KernelBuilder, product: Product, segment: Segment, row: Coordinates, place: str) -> None:
    """Write what stores some neighbouring columns of a row: in vectors, where what follows can be computed so."""
    compute, total = compute_dtype(product.dtype), k.tiles.total_dtype(product.dtype)
    kind, wide = k.language.value_type(compute), k.language.value_type(total)
    vectors = k.vectors

    def write(column: Coordinates) -> None:
        value = place if wide == kind else f"({kind}){place}"
        if k.in_lanes:
            value = k.spelling.convert(k.spelling.load(total, f"&{place}"), wide, kind)
        product.store(row, column, value)

    has_lanes = vectors is not None and product.dtype in FLOATS and segment.extent >= vectors.width
    if has_lanes and k.writes_lanes(lambda: segment.vectors(k.spelling.width, write)):
        return
    with segment.steps() as column:
        write(column)


def _copy_columns(k: KernelBuilder, columns: Operand, width: int) -> None:
    """Copy a stretch of the columns to ``panel``, one step of the depth after the other; 0 beyond the last column."""
    place = f"panel[(p - p_first) * {width} + j - j_first]"
    with k.block(f"if (j_end - j_first < {width})"), k.loop("t", f"(p_end - p_first) * {width}", simd=True):
        k.add("panel[t] = 0;")
    _copy(k, columns, "j", ("j_first", "j_end"), place)


def _copy(k: KernelBuilder, operand: Operand, line: str, bounds: tuple[str, str], place: str) -> None:
    """Copy a stretch of the depth of some lines: what lies next to each other in memory follows each other."""
    first, end = bounds
    if operand.along_depth:
        with k.loop(line, end, first):
            own = operand.lines.coordinates(k, line)
            with operand.depth.segments(k, "p", "p_first", "p_end") as segment, segment.steps() as along:
                k.add(f"{place} = {operand.value(own, along)};")
        return
    with operand.lines.segments(k, line, first, end) as segment, k.loop("p", "p_end", "p_first"):
        depth = operand.depth.coordinates(k, "p")
        with segment.steps() as lines:
            k.add(f"{place} = {operand.value(lines, depth)};")


def _place_steps(k: KernelBuilder, rows: Operand) -> None:
    """Write where each depth of a stretch lies, to ``steps``."""
    if rows.places is None or rows.places.step is None:
        return
    k.array(k.index_type, "steps", k.tiles.depth)
    with k.loop("p", "p_end", "p_first"):
        depth = rows.depth.coordinates(k, "p")
        k.add(f"steps[p - p_first] = {rows.places.step(depth)};")


def _multiply_rows(k: KernelBuilder, product: Product, height: int, width: int) -> None:
    """Multiply some rows with ``panel``. Beyond the last row, the last one stands in, and its sums are not stored."""
    places = product.rows.places
    if places is not None and places.step is None:
        lines = [k.name("i") for _ in range(height)]
        for n, line in enumerate(lines):
            k.add(f"const {k.index_type} {line} = {k.least(f'i + {n}', 'i_end - 1')};")

        def value(n: int, p: str) -> str:
            return places.value(lines[n], f"p_first + {p}")
    else:
        stretch = k.tiles.depth
        _copy_rows(k, product, height)

        def value(n: int, p: str) -> str:
            return f"strip[{n * stretch} + {p}]"

    multiply_tile(
        k,
        product.dtype,
        (height, width),
        "p_end - p_first",
        value,
        lambda p, j: f"panel[{p} * {width} + {j}]",
        Sums(lambda n, j: f"total[(i - i_first + {n}) * {width} + {j}]", k.tiles.total_dtype(product.dtype)),
    )


def _copy_rows(k: KernelBuilder, product: Product, height: int) -> None:
    """Copy a stretch of some rows to ``strip``, one row after the other."""
    rows, stretch = product.rows, k.tiles.depth
    k.array(k.compute_type(product.dtype), "strip", height * stretch)
    k.add(f"const {k.index_type} line_end = {k.least('i_end', f'i + {height}')};")
    with k.block(f"if (line_end - i < {height})"), k.loop("t", height * stretch, simd=True):
        k.add("strip[t] = 0;")
    place = f"strip[(line - i) * {stretch} + p - p_first]"
    if rows.places is not None:
        with k.loop("line", "line_end", "i"), k.loop("p", "p_end", "p_first", simd=True):
            k.add(f"{place} = {rows.places.value('line', 'steps[p - p_first]')};")
        return
    _copy(k, rows, "line", ("i", "line_end"), place)


@dataclass(frozen=True)
class Sums:
    """Where the sums of a tile go.

    Attributes
    ----------
    place
        Given a row and a column, where its sum goes. Neighbouring columns are neighbours in memory.
    dtype
        Of what is there.
    factor
        What sums are multiplied with before they take the place of what is there; None where they are added to it.
    """

    place: Callable[[int, str], str]
    dtype: str
    factor: str | None = None

    def write(self, k: KernelBuilder, n: int, column: str, value: str) -> None:
        """Write the statement that takes one sum."""
        place = self.place(n, column)
        k.add(f"{place} += {value};" if self.factor is None else f"{place} = {value} * {self.factor};")

    def write_vector(self, k: KernelBuilder, vectors: Vectors, n: int, column: str, value: str, kind: str) -> None:
        """Write the statement that takes the sums of neighbouring columns, from one on."""
        address = f"&{self.place(n, column)}"
        if self.factor is not None:
            k.add(vectors.store(self.dtype, address, f"{value} * {self.factor}"))
            return
        sums = vectors.convert(value, kind, k.language.value_type(self.dtype))
        k.add(vectors.store(self.dtype, address, f"{vectors.load(self.dtype, address)} + {sums}"))


def multiply_tile(
    k: KernelBuilder,
    dtype: str,
    tile: tuple[int, int],
    depth: str,
    row: Callable[[int, str], str],
    column: Callable[[str, str], str],
    sums: Sums,
) -> None:
    """Write the sums of a tile, which stay in registers while the loop over the depth runs.

    Parameters
    ----------
    dtype
        Of the operands.
    tile
        Rows and columns.
    depth
        How many products are summed up.
    row
        Value of a row at a depth.
    column
        Value at a depth of a column, in the type that is computed in; neighbouring columns lie next to each other.
    sums
        What takes the sums.
    """
    kind, (height, width) = k.language.value_type(compute_dtype(dtype)), tile
    k.claim(kind, height * width)
    vectors = k.vectors
    with k.block(""):
        if vectors is not None and dtype in FLOATS and width % vectors.width == 0:
            _multiply_vectors(k, vectors, compute_dtype(dtype), tile, depth, row, column, sums)
            return
        names, values = [k.name("sum") for _ in range(height)], [k.name("a") for _ in range(height)]
        for name in names:
            k.add(f"{kind} {name}[{width}] = {{0}};")
        with k.loop("d", depth):
            for n, name in enumerate(values):
                k.add(f"const {kind} {name} = {row(n, 'd')};")
            with k.loop("e", width, simd=True):
                k.add(f"const {kind} b = {column('d', 'e')};")
                for total, name in zip(names, values, strict=True):
                    k.add(f"{total}[e] = {k.language.multiply_add(name, 'b', f'{total}[e]', dtype)};")
        with k.loop("e", width, simd=True):
            for n, total in enumerate(names):
                sums.write(k, n, "e", f"{total}[e]")


def _multiply_vectors(
    k: KernelBuilder,
    vectors: Vectors,
    dtype: str,
    tile: tuple[int, int],
    depth: str,
    row: Callable[[int, str], str],
    column: Callable[[str, str], str],
    sums: Sums,
) -> None:
    """Write the sums of a tile, some neighbouring columns to a vector."""
    (height, width), kind, short = tile, vectors.kind(dtype), k.language.value_type(dtype)
    firsts = [str(first) for first in range(0, width, vectors.width)]
    totals = [[k.name("sum") for _ in firsts] for _ in range(height)]
    for names in totals:
        k.add(*(f"{kind} {name} = ({kind})(0);" for name in names))
    with k.loop("d", depth):
        columns = [k.name("b") for _ in firsts]
        for name, first in zip(columns, firsts, strict=True):
            k.add(f"const {kind} {name} = {vectors.load(dtype, '&' + column('d', first))};")
        for n, names in enumerate(totals):
            value = k.name("a")
            k.add(f"const {kind} {value} = ({kind})({row(n, 'd')});")
            for total, name in zip(names, columns, strict=True):
                k.add(f"{total} = {vectors.multiply_add(value, name, total, dtype)};")
    for n, names in enumerate(totals):
        for total, first in zip(names, firsts, strict=True):
            sums.write_vector(k, vectors, n, first, total, short)
