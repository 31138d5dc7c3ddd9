"""Launch configs for the common kinds of kernels, as data: what a device's deriver is put together from.

``grid`` counts blocks and ``block`` counts threads, on every device. Nothing here asks a driver: a device's limits are
in its `DeviceInfo`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kagent_core.errors import LaunchConfigError
from kagent_core.extract.fusion.operator_class import OperatorClass, class_of, loops_of
from kagent_core.specs import DeviceInfo, LaunchConfig, OpCall

THREADS = 256
"""Threads of a block, where nothing speaks for another number."""

TILE = (16, 16)
"""Columns and rows of a matrix product that one block computes."""

ROW_THREADS = 1024
"""Most threads that share the work of one row."""

PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"})
"""Matrix products: their result's last two dimensions are cut into tiles."""


def elementwise(
    elements: int,
    info: DeviceInfo,
    *,
    threads: int = THREADS,
    elements_per_thread: int = 1,
    max_blocks: int | None = None,
) -> LaunchConfig | None:
    """Return a launch config for a kernel that does its elements in a grid-stride loop.

    Such a kernel begins at its thread's number in the grid and goes on by the number of all threads, so that it does
    every element however few blocks there are.

    Parameters
    ----------
    elements
        To do.
    info
        The device.
    threads
        Of a block, at most.
    elements_per_thread
        That a thread should do before another block is worth it.
    max_blocks
        Of the grid; the device's limit holds in any case.

    Returns
    -------
    LaunchConfig or None
        None when there is nothing to do.

    Examples
    --------
    >>> from kagent_core.specs import Device
    >>> toy = DeviceInfo(Device("toy", 0), "Toy 3000", max_threads_per_block=1024)
    >>> print(elementwise(1000, toy), "or", elementwise(1_000_000, toy, max_blocks=64))
    grid (4, 1, 1) x block (256, 1, 1) or grid (64, 1, 1) x block (256, 1, 1)
    """
    if elements <= 0:
        return None
    block = min(threads, info.max_threads_per_block, info.max_block[0], elements)
    blocks = min(_ceil_div(elements, block * elements_per_thread), info.max_grid[0])
    if max_blocks is not None:
        blocks = min(blocks, max_blocks)
    return LaunchConfig((blocks, 1, 1), (block, 1, 1))


def blocks_of(threads: int, pieces: int, info: DeviceInfo) -> LaunchConfig | None:
    """Return a launch config for a kernel whose blocks have a fixed number of threads, which share each piece of work.

    A block goes on by the number of all blocks, so that any number of them does every piece.

    Parameters
    ----------
    threads
        Of a block, exactly.
    pieces
        Of work.
    info
        The device.

    Returns
    -------
    LaunchConfig or None
        None when there is nothing to do.
    """
    return LaunchConfig((min(pieces, info.max_grid[0]), 1, 1), (threads, 1, 1)) if pieces > 0 else None


def tiles(
    rows: int,
    columns: int,
    info: DeviceInfo,
    *,
    tile: tuple[int, int] = TILE,
    batch: int = 1,
    shared_nbytes: int = 0,
) -> LaunchConfig | None:
    """Return a launch config for a kernel of which each block computes one tile of a matrix.

    Columns go along x, rows along y. Blocks at the edges stick out, so the kernel must look where it is.

    Parameters
    ----------
    rows, columns
        Of the result.
    info
        The device.
    tile
        Columns and rows of a tile, one thread for each element. A tile that has more threads than a block can have is
        halved until it fits.
    batch
        Number of matrices, which is the grid's z.
    shared_nbytes
        Shared memory of a block, in bytes.

    Returns
    -------
    LaunchConfig or None
        None when the result has no elements.

    Raises
    ------
    LaunchConfigError
        When there are more tiles than the device's grid takes.

    Examples
    --------
    >>> from kagent_core.specs import Device
    >>> toy = DeviceInfo(Device("toy", 0), "Toy 3000", max_threads_per_block=1024)
    >>> print(tiles(5, 100, toy), "or", tiles(5, 100, toy, tile=(64, 64)))
    grid (7, 1, 1) x block (16, 16, 1) or grid (4, 1, 1) x block (32, 32, 1)
    """
    if min(rows, columns, batch) <= 0:
        return None
    across, down = tile
    most_across, most_down, _ = info.max_block
    while across * down > info.max_threads_per_block or across > most_across or down > most_down:
        if across > most_across or (across >= down and down <= most_down):
            across = _ceil_div(across, 2)
        else:
            down = _ceil_div(down, 2)
    grid = (_ceil_div(columns, across), _ceil_div(rows, down), batch)
    config = LaunchConfig(grid, (across, down, 1), shared_nbytes)
    beyond = _grid_beyond(config, info)
    if beyond is not None:
        raise LaunchConfigError(
            f"{batch} matrices of {rows} x {columns} in tiles of {down} x {across} {beyond}",
            hint="let each block loop over several tiles, or take larger ones",
        )
    return config


def row_blocks(
    rows: int,
    row_length: int,
    info: DeviceInfo,
    *,
    max_threads: int = ROW_THREADS,
    nbytes_per_thread: int = 0,
) -> LaunchConfig | None:
    """Return a launch config for a kernel of which each block reduces one row.

    The number of threads is a power of two, as halving them step by step wants it. Threads go along the row in strides
    of their number. Where the grid takes fewer blocks than there are rows, a block goes on with other rows.

    Parameters
    ----------
    rows
        Results to compute.
    row_length
        Elements that each is made of. It may be 0: the result, the sum of nothing, is to be written all the same.
    info
        The device.
    max_threads
        Of a block.
    nbytes_per_thread
        Shared memory that each thread needs, in bytes.

    Returns
    -------
    LaunchConfig or None
        None when there are no rows.

    Examples
    --------
    >>> from kagent_core.specs import Device
    >>> toy = DeviceInfo(Device("toy", 0), "Toy 3000", max_threads_per_block=512, shared_nbytes=1024)
    >>> print(row_blocks(10, 100, toy))
    grid (10, 1, 1) x block (64, 1, 1)
    >>> print(row_blocks(10, 100_000, toy, nbytes_per_thread=8))
    grid (10, 1, 1) x block (128, 1, 1) + 1024 B shared
    """
    if rows <= 0:
        return None
    most = min(max_threads, info.max_threads_per_block, info.max_block[0], max(row_length, 1))
    if nbytes_per_thread and info.shared_nbytes:
        most = min(most, max(info.shared_nbytes // nbytes_per_thread, 1))
    threads = 1 << most.bit_length() - 1
    return LaunchConfig((min(rows, info.max_grid[0]), 1, 1), (threads, 1, 1), threads * nbytes_per_thread)


def standard_launch_config(calls: Sequence[OpCall], info: DeviceInfo) -> LaunchConfig | None:
    """Return the launch config that a kernel's operators suggest.

    Matrix products get `tiles`, whatever reduces gets `row_blocks`, and the rest is `elementwise`.

    Parameters
    ----------
    calls
        What the kernel computes.
    info
        The device.

    Returns
    -------
    LaunchConfig or None
        None when there is nothing to compute.
    """
    last = calls[-1]
    if last.signature in PRODUCTS:
        *batch, rows, columns = last.outputs[0].shape
        return tiles(rows, columns, info, batch=math.prod(batch))
    for call in calls:
        if class_of(call) is OperatorClass.REDUCTION:
            loops = loops_of(call)
            return row_blocks(math.prod(loops.kept), math.prod(loops.full[dim] for dim in loops.reduced), info)
    sizes = [spec.numel for call in calls for spec in call.outputs]
    return elementwise(max(sizes, default=1), info)


def beyond_limits(config: LaunchConfig, info: DeviceInfo) -> str | None:
    """Return which of a device's limits a launch config exceeds, with numbers, or None. A limit of 0 is not known.

    Examples
    --------
    >>> from kagent_core.specs import Device
    >>> toy = DeviceInfo(Device("toy", 0), "Toy 3000", max_threads_per_block=256)
    >>> beyond_limits(LaunchConfig(block=(32, 32, 1)), toy)
    '1024 threads per block, toy:0 takes 256'
    """
    if min(*config.grid, *config.block) < 1 or config.shared_nbytes < 0:
        return "every extent must be at least 1"
    if config.threads_per_block > info.max_threads_per_block:
        return f"{config.threads_per_block} threads per block, {info.device} takes {info.max_threads_per_block}"
    for axis, threads, limit in zip("xyz", config.block, info.max_block, strict=True):
        if threads > limit:
            return f"{threads} threads per block in {axis}, {info.device} takes {limit}"
    if info.shared_nbytes and config.shared_nbytes > info.shared_nbytes:
        return (
            f"{config.shared_nbytes} bytes of shared memory, "
            f"{info.device} has {info.shared_nbytes} bytes of shared memory per block"
        )
    return _grid_beyond(config, info)


def _grid_beyond(config: LaunchConfig, info: DeviceInfo) -> str | None:
    for axis, blocks, limit in zip("xyz", config.grid, info.max_grid, strict=True):
        if blocks > limit:
            return f"need {blocks} blocks in {axis}, {info.device} takes {limit}"
    return None


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)
