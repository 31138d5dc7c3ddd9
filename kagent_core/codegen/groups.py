"""Work-items of one block that work together: memory that they share, barriers, and sub-groups.

A kernel that is written for this says how many threads its blocks have (`KernelSource.threads`); its pieces of work are
dealt out to blocks, and the threads of a block share each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

THREAD = "thread"
"""Name of the variable with a thread's number in its block, in kernels whose blocks work together."""

ENOUGH_ITEMS = 1 << 16
"""Work-items that keep even a large device busy: where there are as many rows, each may have one to itself."""


def power_above(value: int) -> int:
    """Return the least power of two that is not below a number.

    Examples
    --------
    >>> power_above(1), power_above(5), power_above(32)
    (1, 8, 32)
    """
    return 1 << max(value - 1, 0).bit_length()


@dataclass(frozen=True)
class SubGroups:
    """How threads of a block give each other values without memory: OpenCL's sub-groups, CUDA's warps.

    The threads of a sub-group are neighbours in the block, and blocks are made of whole sub-groups. Each has as many
    threads, a power of two.

    Attributes
    ----------
    lanes
        How many threads each has; None where that is known only when the kernel runs.
    size
        The same, as a language says it. A number where `lanes` is given.
    lane
        A thread's number in its sub-group.
    shuffle
        The ``{value}`` that the thread with number ``{lane}`` of the sub-group has: all of them ask at once. Empty
        where there is no such function.
    reduces
        What ``{value}`` comes to over the sub-group, by ``add``, ``min``, ``max``, where there are such functions. They
        need not keep NaN.
    reduced_types
        Types that those take.
    """

    lanes: int | None = None
    size: str = "(i32)get_sub_group_size()"
    lane: str = "(i32)get_sub_group_local_id()"
    shuffle: str = ""
    reduces: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    reduced_types: frozenset[str] = frozenset({"i32", "u32", "i64", "u64", "f32", "f64"})


@dataclass(frozen=True)
class WorkGroups:
    """How a language spells what the threads of a block do together. The defaults are OpenCL C's.

    Attributes
    ----------
    threads
        Of a block, where a kernel has no reason for another number: a power of two.
    local_space
        Qualifier of memory that a block shares, declared at the top of a kernel.
    local_nbytes
        How much of it a block has, in bytes.
    barrier
        Statement that waits for the other threads of the block, after which each sees what they wrote.
    memory_barrier
        The same for what they wrote to the device's memory, too.
    item
        A thread's number in its block.
    group, group_count
        A block's number, and how many there are.
    unroll
        The line before a loop with a known number of steps, which are to be written out: values that it indexes then
        stay in registers.
    fixed
        What stands before a kernel's name when its blocks have ``{threads}`` threads.
    sub_groups
        How neighbouring threads give each other values without memory; None where they cannot.
    """

    threads: int = 256
    local_space: str = "__local "
    local_nbytes: int = 32 << 10
    barrier: str = "barrier(CLK_LOCAL_MEM_FENCE);"
    memory_barrier: str = "barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);"
    item: str = "get_local_id(0)"
    group: str = "get_group_id(0)"
    group_count: str = "get_num_groups(0)"
    unroll: str = "#pragma unroll"
    fixed: str = "__attribute__((reqd_work_group_size({threads}, 1, 1)))"
    sub_groups: SubGroups | None = None

    def declared(self, kind: str, name: str, length: int) -> str:
        """Return the declaration of shared memory, which can be read 16 bytes at a time."""
        return f"{self.local_space}{kind} {name}[{length}] __attribute__((aligned(16)));"
