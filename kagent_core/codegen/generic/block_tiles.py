"""How large the pieces are that blocks of threads compute of a matrix product: chosen by the problem."""

from __future__ import annotations

from dataclasses import dataclass

from kagent_core.codegen.generic.builder import KernelBuilder
from kagent_core.codegen.groups import power_above
from kagent_core.errors import LaunchConfigError

LARGEST = 128
"""Most rows and columns of a block's piece."""

BUSY = 128
"""Blocks that keep a device busy: pieces are made smaller as long as there are fewer of them."""

SMALLEST = 32
"""Rows and columns below which pieces are not made smaller just to have more of them."""

WARP = 32
"""Threads that a device runs together anyway."""

COPIES = 8
"""Values that each thread copies to shared memory at a time: enough to be under way while others are computed with."""

DEPTHS = (64, 32, 16, 8)
"""Greatest depth of what is copied at a time: the first for which shared memory is large enough."""

CHUNK = 4
"""Neighbours that one thread computes: as many as are read from shared memory at once."""

LONGEST = 8
"""Most rows and columns of a thread, where no launch config says otherwise."""

REGISTER_NBYTES = 512
"""Most bytes of sums that one thread keeps in registers."""


def pitch(lines: int) -> int:
    """Return how far apart neighbours along the depth lie: not a multiple of the memory's banks."""
    return lines + CHUNK if lines >= CHUNK else lines


@dataclass(frozen=True)
class BlockTile:
    """The piece of a product that a block computes, and how its threads share it. All sizes are powers of two.

    Attributes
    ----------
    rows, columns, depth
        Of what the block copies to shared memory at a time.
    thread_rows, thread_columns
        How much of it one thread computes.
    slices
        How many threads share each sum, along the depth.
    threads
        Of a block, some of which may only copy.
    """

    rows: int
    columns: int
    depth: int
    thread_rows: int
    thread_columns: int
    slices: int
    threads: int

    @property
    def down(self) -> int:
        """Threads below each other."""
        return self.rows // self.thread_rows

    @property
    def across(self) -> int:
        """Threads beside each other."""
        return self.columns // self.thread_columns

    @property
    def computing(self) -> int:
        """Threads that compute."""
        return self.down * self.across * self.slices

    @property
    def copies_length(self) -> int:
        """Values of two copies of both operands."""
        return 2 * self.depth * (pitch(self.rows) + pitch(self.columns))

    @property
    def shared_length(self) -> int:
        """Values in shared memory: copies, and later in their place sums that are shared."""
        return max(self.copies_length, self.rows * self.columns * self.slices if self.slices > 1 else 0)


@dataclass(frozen=True)
class Problem:
    """A product that is to be cut into pieces.

    Attributes
    ----------
    rows, columns, depth
        Of the product.
    batch
        How many of them there are.
    nbytes
        Of a value, in the type that is computed in.
    alone
        Whether the kernel has nothing else to do: then a block may have fewer threads than the device prefers.
    """

    rows: int
    columns: int
    depth: int
    batch: int
    nbytes: int
    alone: bool


def block_tile(k: KernelBuilder, problem: Problem) -> BlockTile:
    """Return the piece of a product that a block computes: what a launch config says of it, and else what suits.

    Raises
    ------
    LaunchConfigError
        When a launch config asks for more threads or registers than a block has.
    """
    groups = k.work_groups
    assert groups is not None
    rows, columns = _extents(k, problem, groups.threads)
    while True:
        for deepest in DEPTHS:
            tile = _dealt_out(k, problem, rows, columns, groups.threads, deepest)
            if tile.shared_length * problem.nbytes <= groups.local_nbytes:
                return tile
        smaller = _halved(k, rows, columns)
        if smaller == (rows, columns):
            return tile  # what does not fit is told where the memory is declared
        rows, columns = smaller


def _extents(k: KernelBuilder, problem: Problem, threads: int) -> tuple[int, int]:
    """Return rows and columns of a piece: few of them only if there are many pieces."""
    rows = k.tiles.block_rows or min(power_above(problem.rows), LARGEST)
    columns = k.tiles.block_columns or min(power_above(problem.columns), LARGEST)
    most = threads * min(REGISTER_NBYTES // 2 // problem.nbytes, LONGEST**2)

    def is_small_enough() -> bool:
        pieces = problem.batch * -(-problem.rows // rows) * -(-problem.columns // columns)
        computing = -(-rows // LONGEST) * -(-columns // LONGEST)
        return rows * columns <= most and computing <= threads and (pieces >= BUSY or max(rows, columns) <= SMALLEST)

    while not is_small_enough():
        smaller = _halved(k, rows, columns)
        if smaller == (rows, columns):
            break
        rows, columns = smaller
    return rows, columns


def _halved(k: KernelBuilder, rows: int, columns: int) -> tuple[int, int]:
    """Return a piece of half the size, as far as no launch config forbids it."""
    if k.tiles.block_rows is None and rows > 1 and (rows >= columns or k.tiles.block_columns is not None):
        return rows // 2, columns
    if k.tiles.block_columns is None and columns > 1:
        return rows, columns // 2
    return rows, columns


def _dealt_out(k: KernelBuilder, problem: Problem, rows: int, columns: int, threads: int, deepest: int) -> BlockTile:
    """Return a piece with its threads."""
    tall, wide = _of_thread(k, rows, columns, threads)
    computing = (rows // tall) * (columns // wide)
    no_more_than(k, threads, computing, tall * wide * problem.nbytes)
    depth = k.tiles.block_depth
    if depth is None:
        deepest = deepest * 16 if rows + columns <= CHUNK else deepest
        copied = power_above(COPIES * threads // (rows + columns))
        depth = min(max(copied, 8), deepest, power_above(problem.depth))
    slices = min(threads // computing, depth)
    launched = min(max(computing * slices, WARP), threads) if problem.alone else threads
    return BlockTile(rows, columns, depth, tall, wide, slices, launched)


def _of_thread(k: KernelBuilder, rows: int, columns: int, threads: int) -> tuple[int, int]:
    """Return rows and columns that one thread computes: about as many, so that it reads little for what it computes."""
    least = min(rows, CHUNK) * min(columns, CHUNK)
    wanted = max(rows * columns // threads, least)
    tall = min(k.tiles.thread_rows or 1, rows)
    wide = min(k.tiles.thread_columns or 1, columns)
    most_tall = tall if k.tiles.thread_rows is not None else min(rows, LONGEST)
    most_wide = wide if k.tiles.thread_columns is not None else min(columns, LONGEST)
    while tall * wide < wanted and (tall < most_tall or wide < most_wide):
        if wide < most_wide and (wide <= tall or tall == most_tall):
            wide *= 2
        else:
            tall *= 2
    return tall, wide


def no_more_than(k: KernelBuilder, threads: int, computing: int, nbytes: int) -> None:
    """Refuse tiles for which a block has too few threads, or a thread too few registers.

    Raises
    ------
    LaunchConfigError
        When it is so.
    """
    hint = "take other tile sizes: what they are is in docs/launch-configs.md"
    if computing > threads:
        raise LaunchConfigError(
            f"the tiles of {k.call.signature} take {computing} threads of a block, expected at most {threads}",
            hint=hint,
        )
    if nbytes > REGISTER_NBYTES:
        raise LaunchConfigError(
            f"the tiles of {k.call.signature} take {nbytes} bytes of a thread's registers for sums, "
            f"expected at most {REGISTER_NBYTES}",
            hint=hint,
        )


def line_of(count: int, own: str, step: str, others: int) -> str:
    """Return which line of a block's piece is one of a thread's.

    A thread has `CHUNK` neighbours at a time, and the other threads' are between them: so that what the threads read
    together is spread over all banks of the memory.

    Parameters
    ----------
    count
        How many lines a thread has.
    own
        The thread's number among those that have others.
    step
        Which of them.
    others
        How many threads have others.
    """
    if others == 1:
        return step
    if count <= CHUNK:
        return f"{own} * {count} + {step}" if count > 1 else own
    return f"{step} / {CHUNK} * {others * CHUNK} + {own} * {CHUNK} + {step} % {CHUNK}"
