"""One launch of an emulated kernel: what is checked before it, what the machine is told, what is checked after it."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from kagent_core.specs import Access, DeviceInfo, LaunchConfig
from kagent_cuda.emulated.kernels import EmulatedKernel, Machine
from kagent_cuda.emulated.memory import EmulationError, Memory

SEED = 0x9E3779B97F4A7C15
"""Of the order in which blocks and threads run: always the same, and never the one in which they are numbered."""

PARAMETER_NBYTES = 4096
"""Bytes of parameters that a launch can pass."""

_WRITABLE = 1
_TEXT_NBYTES = 480
_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class Region:
    """Memory that a launch may use.

    Attributes
    ----------
    begin, end
        Addresses.
    access
        What the kernel may do there.
    runs
        Of memory that it must write, all of it: address and bytes.
    name
        For messages.
    """

    begin: int
    end: int
    access: Access = Access.INOUT
    runs: tuple[tuple[int, int], ...] = ()
    name: str = "a result"


class _Range(ctypes.Structure):
    _fields_ = (
        ("begin", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("marks", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("entry", ctypes.c_uint64),
        ("parameters", ctypes.c_uint64),
        ("dynamic_nbytes", ctypes.c_uint64),
        ("static_shared", ctypes.c_uint64),
        ("static_nbytes", ctypes.c_uint64),
        ("ranges", ctypes.c_uint64),
        ("range_count", ctypes.c_uint64),
        ("image_begin", ctypes.c_uint64),
        ("image_end", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
    )


class _Fault(ctypes.Structure):
    _fields_ = (
        ("happened", ctypes.c_uint32),
        ("has_thread", ctypes.c_uint32),
        ("block", ctypes.c_uint32 * 3),
        ("thread", ctypes.c_uint32 * 3),
        ("pc", ctypes.c_uint64),
        ("line", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("text", ctypes.c_char * _TEXT_NBYTES),
    )


def run_kernel(
    machine: Machine,
    memory: Memory,
    info: DeviceInfo,
    kernel: EmulatedKernel,
    config: LaunchConfig,
    parameters: bytes,
    regions: Sequence[Region] | None = None,
) -> None:
    """Run a kernel to its end.

    Parameters
    ----------
    machine, memory, info
        Of the device.
    kernel
        What to run.
    config
        How.
    parameters
        The parameter block, as the driver gets it.
    regions
        Memory that the kernel may use; by default everything that is allocated.

    Raises
    ------
    EmulationError
        What went wrong: in which block and thread, where that is known.
    """
    check_config(kernel, config, info)
    check_parameters(kernel, parameters, memory)
    if regions is None:
        regions = [Region(one.address, one.end) for one in memory.all()]
    parts = _parts(regions)
    block = ctypes.create_string_buffer(parameters, max(len(parameters), 1))
    ranges = (_Range * max(len(parts), 1))(*(_Range(p.begin, p.end, p.address, p.flags) for p in parts))
    fault = _Fault()
    with _one_at_a_time:
        kernel.touch(0)
        begin, end, shared, _ = machine.image(kernel)
        launch = _Launch(
            *(kernel.entry, ctypes.addressof(block), config.shared_nbytes, shared, kernel.static_nbytes),
            *(ctypes.addressof(ranges), len(parts), begin, end, SEED),
            *((ctypes.c_uint32 * 3)(*config.grid), (ctypes.c_uint32 * 3)(*config.block)),
        )
        table = (ctypes.c_uint64 * 2)(ctypes.addressof(launch), ctypes.addressof(fault))
        machine.launch(ctypes.addressof(table))
    if fault.happened:
        raise EmulationError(_told(kernel, fault, begin))
    touched = {found for region in regions if (found := memory.holding(region.begin)) is not None}
    memory.check_guards(touched, f"kernel '{kernel.name}'")
    _check_written(kernel, config, regions, parts)


def check_config(kernel: EmulatedKernel, config: LaunchConfig, info: DeviceInfo) -> None:
    """Raise where a device would refuse a launch config."""
    threads = config.threads_per_block
    most = min(info.max_threads_per_block, kernel.most_threads or info.max_threads_per_block)
    if not 0 < threads <= most or min(config.block) < 1:
        raise EmulationError(
            f"kernel '{kernel.name}': a block of {threads} threads {config.block}, expected 1 to {most}"
        )
    if any(size > limit for size, limit in zip(config.block, info.max_block, strict=True)):
        raise EmulationError(f"kernel '{kernel.name}': a block of {config.block}, expected at most {info.max_block}")
    if min(config.grid) < 1 or any(size > limit for size, limit in zip(config.grid, info.max_grid, strict=True)):
        raise EmulationError(f"kernel '{kernel.name}': a grid of {config.grid}, expected 1 to {info.max_grid}")
    shared = kernel.static_nbytes + config.shared_nbytes
    if shared > info.shared_nbytes:
        raise EmulationError(
            f"kernel '{kernel.name}' wants {shared} bytes of shared memory ({config.shared_nbytes} of them dynamic), "
            f"expected at most {info.shared_nbytes}"
        )


def check_parameters(kernel: EmulatedKernel, parameters: bytes, memory: Memory) -> None:
    """Raise where a parameter block is not that of the kernel's own signature."""
    if len(parameters) != kernel.parameter_nbytes:
        raise EmulationError(
            f"kernel '{kernel.name}' takes a parameter block of {kernel.parameter_nbytes} bytes, {len(parameters)} came"
        )
    if len(parameters) > PARAMETER_NBYTES:
        raise EmulationError(
            f"kernel '{kernel.name}' takes {len(parameters)} bytes of parameters, expected at most {PARAMETER_NBYTES}"
        )
    for number, ((offset, nbytes), is_pointer) in enumerate(zip(kernel.places, kernel.pointers, strict=True)):
        if not is_pointer:
            continue
        address = int.from_bytes(parameters[offset : offset + nbytes], "little")
        if address == 0 or memory.holding(address) is not None:
            continue
        state = "memory that was freed" if memory.was_freed(address) else "no memory of the device"
        raise EmulationError(
            f"parameter {number} of kernel '{kernel.name}' is the pointer {address:#x}, which is {state}; expected one "
            "into an allocation, or a null pointer"
        )


@dataclass
class _Part:
    """Memory of which one thing is known; results have a mark per byte."""

    begin: int
    end: int
    flags: int
    marks: ctypes.Array[ctypes.c_char] | None

    @property
    def address(self) -> int:
        return 0 if self.marks is None else ctypes.addressof(self.marks)


def _parts(regions: Sequence[Region]) -> list[_Part]:
    """Return the regions cut where any of them begins or ends, by address."""
    cuts = sorted({place for region in regions for place in (region.begin, region.end)})
    parts = []
    for begin, end in itertools.pairwise(cuts):
        over = [region for region in regions if region.begin <= begin and end <= region.end]
        if over:
            flags = _WRITABLE if any(region.access is not Access.IN for region in over) else 0
            marks = ctypes.create_string_buffer(end - begin) if any(region.runs for region in over) else None
            parts.append(_Part(begin, end, flags, marks))
    return parts


def _check_written(
    kernel: EmulatedKernel, config: LaunchConfig, regions: Sequence[Region], parts: Sequence[_Part]
) -> None:
    for region in regions:
        missing, total, first = 0, 0, None
        for address, nbytes in region.runs:
            total += nbytes
            for part in parts:
                begin, end = max(part.begin, address), min(part.end, address + nbytes)
                if begin < end and part.marks is not None:
                    marks = ctypes.string_at(part.address + begin - part.begin, end - begin)
                    if first is None and 0 in marks:
                        first = begin + marks.index(0) - region.begin
                    missing += marks.count(0)
        if missing:
            raise EmulationError(
                f"kernel '{kernel.name}' did not write {missing} of the {total} bytes of {region.name}, from byte "
                f"{first} on; it was launched with {config}"
            )


def _told(kernel: EmulatedKernel, fault: _Fault, base: int) -> str:
    where = f"kernel '{kernel.name}'"
    if fault.has_thread:
        where += f", block {tuple(fault.block)}, thread {tuple(fault.thread)}"
    line = fault.line or (_line(kernel, fault.pc - base - 1) if fault.pc else 0)
    text = fault.text.decode(errors="replace")
    return f"{where}{f', line {line}' if line else ''}: {text}"


def _line(kernel: EmulatedKernel, offset: int) -> int:
    """Return the line of the source that an instruction was made from, as binutils say it; 0 where they do not."""
    command = ["addr2line", "-i", "-e", str(kernel.library.path), hex(offset)]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    for place in found.splitlines():  # inlined functions first: the first that is of the kernel's source
        file, _, number = place.split(" ")[0].rpartition(":")
        if file.endswith(f"{kernel.name}.cu") and number.isdecimal():
            return int(number)
    return 0
