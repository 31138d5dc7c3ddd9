"""How many blocks of a kernel run on one multiprocessor at once, as data: no driver is asked.

The limits are those of the table "Technical Specifications per Compute Capability" in NVIDIA's CUDA C++ Programming
Guide; what is set aside for a warp and a block follows NVIDIA's occupancy calculator.
"""

from __future__ import annotations

from dataclasses import dataclass

WARP = 32

REGISTER_UNIT = 256
"""Registers are set aside for a warp in multiples of this."""

PARTITIONS = 4
"""Parts of a multiprocessor, each of which has a quarter of its registers. A warp stays in one of them."""

_KIB = 1024


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """What one multiprocessor has.

    Attributes
    ----------
    threads
        Most threads at once.
    blocks
        Most blocks at once.
    shared_nbytes
        Shared memory of all its blocks, in bytes.
    reserved_nbytes
        Shared memory that the system takes of each block, in bytes.
    shared_unit
        Bytes in multiples of which a block gets its shared memory.
    registers
        32-bit registers of all its threads.
    """

    threads: int
    blocks: int
    shared_nbytes: int
    reserved_nbytes: int = _KIB
    shared_unit: int = 128
    registers: int = 64 * 1024


MULTIPROCESSORS: dict[tuple[int, int], Multiprocessor] = {
    (7, 5): Multiprocessor(1024, 16, 64 * _KIB, reserved_nbytes=0, shared_unit=256),
    (8, 0): Multiprocessor(2048, 32, 164 * _KIB),
    (8, 6): Multiprocessor(1536, 16, 100 * _KIB),
    (8, 7): Multiprocessor(1536, 16, 164 * _KIB),
    (8, 9): Multiprocessor(1536, 24, 100 * _KIB),
    (9, 0): Multiprocessor(2048, 32, 228 * _KIB),
    (10, 0): Multiprocessor(2048, 32, 228 * _KIB),
    (10, 3): Multiprocessor(2048, 32, 228 * _KIB),
    (11, 0): Multiprocessor(1536, 24, 228 * _KIB),
    (12, 0): Multiprocessor(1536, 24, 100 * _KIB),
    (12, 1): Multiprocessor(1536, 24, 100 * _KIB),
}
"""By compute capability."""


def multiprocessor(capability: tuple[int, int] | None) -> Multiprocessor:
    """Return what a multiprocessor of a compute capability has.

    Parameters
    ----------
    capability
        Major and minor number. One that is not in the table is taken for the nearest older one; None for the oldest.

    Examples
    --------
    >>> multiprocessor((9, 0)).threads, multiprocessor((9, 9)).threads, multiprocessor(None).threads
    (2048, 2048, 1024)
    """
    older = [known for known in MULTIPROCESSORS if capability is not None and known <= capability]
    return MULTIPROCESSORS[max(older, default=min(MULTIPROCESSORS))]


def resident_blocks(unit: Multiprocessor, threads: int, registers: int, shared_nbytes: int = 0) -> int:
    """Return how many blocks of a kernel one multiprocessor runs at once; 0 when it has no room for a single one.

    Parameters
    ----------
    unit
        The multiprocessor.
    threads
        Of a block.
    registers
        Of a thread; 0 when that is not known, and then they are no limit.
    shared_nbytes
        Of a block: what the kernel declares and what its launch adds.

    Examples
    --------
    >>> resident_blocks(multiprocessor((8, 0)), 256, 40)
    6
    """
    warps = -(-threads // WARP)
    limits = [unit.blocks, unit.threads // (warps * WARP)]
    if registers:
        of_warp = _up(registers * WARP, REGISTER_UNIT)
        limits.append(unit.registers // PARTITIONS // of_warp * PARTITIONS // warps)
    of_block = _up(shared_nbytes, unit.shared_unit) + unit.reserved_nbytes
    if of_block:
        limits.append(unit.shared_nbytes // of_block)
    return min(limits)


def best_block(
    unit: Multiprocessor, registers: int, shared_nbytes: int = 0, limit: int = 1024, preferred: int = 256
) -> int:
    """Return how many threads a block should have, for as many threads at once as the multiprocessor can run.

    What ``cuOccupancyMaxPotentialBlockSize`` finds, with one difference: of several sizes that are as good, the driver
    takes the largest one, this the one nearest to `preferred`.

    Parameters
    ----------
    unit, registers, shared_nbytes
        As for `resident_blocks`.
    limit
        Most threads of a block.
    preferred
        The size that is taken where it is as good as any.

    Returns
    -------
    int
        A multiple of a warp. One warp, when not even that fits: its launch then says what is missing.

    Examples
    --------
    >>> best_block(multiprocessor((9, 0)), 32), best_block(multiprocessor((8, 6)), 80)
    (256, 256)
    """
    best, most = WARP, -1
    for threads in range(WARP, max(limit - limit % WARP, WARP) + 1, WARP):
        resident = resident_blocks(unit, threads, registers, shared_nbytes) * threads
        nearer = abs(threads - preferred) < abs(best - preferred)
        if resident > most or (resident == most and nearer):
            best, most = threads, resident
    return best


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
