"""CUDA C++ as kagent-cuda writes it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from kagent_core.codegen.groups import SubGroups, WorkGroups
from kagent_core.codegen.work_items import C_TYPES, WorkItemLanguage
from kagent_cuda.devices import SHARED_NBYTES, WARP
from kagent_cuda.vectors import CudaVectors

# long has 32 bits with Windows' compilers
_TYPES: Mapping[str, str] = MappingProxyType({**C_TYPES, "i64": "long long", "u64": "unsigned long long"})

# NVRTC knows no math.h. Every GPU multiplies and adds in one step.
_PRELUDE = """
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#ifndef NAN
#define NAN __int_as_float(0x7fc00000)
#endif
#ifndef __FP_FAST_FMAF
#define __FP_FAST_FMAF 1
#endif
"""

_ITEM_NBYTES = 4 * 1024
"""Local memory of a thread, which a device sets aside for all threads that it can run at once."""

WARPS = SubGroups(
    lanes=WARP,
    size=str(WARP),
    lane=f"(i32)(threadIdx.x % {WARP}u)",
    shuffle="__shfl_sync(0xffffffffu, {value}, {lane})",
)

GROUPS = WorkGroups(
    threads=256,
    local_space="__shared__ ",
    local_nbytes=SHARED_NBYTES,
    barrier="__syncthreads();",
    memory_barrier="__syncthreads();",
    item="(i32)threadIdx.x",
    group="blockIdx.x",
    group_count="gridDim.x",
    fixed="__launch_bounds__({threads})",
    sub_groups=WARPS,
)


class CudaLanguage(WorkItemLanguage):
    """CUDA C++17, as NVRTC compiles it."""

    kernel_qualifiers = 'extern "C" __global__ void'
    global_space = ""
    restrict = "__restrict__"
    inline = "inline __device__"
    item = "((u64)blockIdx.x * blockDim.x + threadIdx.x)"
    item_count = "((u64)gridDim.x * blockDim.x)"
    types = _TYPES
    prelude = _PRELUDE
    groups = GROUPS
    narrow_indices = True
    item_nbytes = _ITEM_NBYTES
    vector_width = 4
    vector_spelling = CudaVectors

    def finished(self, text: str) -> str:
        """Return a kernel's text without the constants that nothing refers to, of which NVRTC warns.

        Not every kernel needs all that its form computes, such as the place of its loops in every dimension.
        """
        lines = text.splitlines(keepends=True)
        while (kept := [_used(line, lines[n + 1 :]) for n, line in enumerate(lines)]) != lines:
            lines = [line for line in kept if line]
        return "".join(lines)


_CONSTANTS = re.compile(r"( *)const ([iuf](?:8|16|32|64)) (\w+ = .*);\n")
"""The declaration of some numbers in a line of its own."""

_WAITS = "_sync("
"""In what all threads of a warp must compute together, whether they need it or not."""


def _used(line: str, below: Sequence[str]) -> str:
    """Return a line without the constants that nothing else in their block refers to; empty where it has no others."""
    declared = _CONSTANTS.fullmatch(line)
    if declared is None or _WAITS in line:
        return line
    indent, kind, constants = declared[1], declared[2], re.split(r", (?=\w+ = )", declared[3])
    kept = [each for n, each in enumerate(constants) if _refers(_scope(indent, constants[n + 1 :], below), each)]
    return f"{indent}const {kind} {', '.join(kept)};\n" if kept else ""


def _scope(indent: str, constants: Sequence[str], below: Sequence[str]) -> Iterator[str]:
    """Yield where a constant can be referred to: what is declared behind it, and its block, which is indented."""
    yield from constants
    for line in below:
        yield line
        if not line.startswith(indent) and not line.startswith("#"):
            return


def _refers(lines: Iterable[str], constant: str) -> bool:
    name = re.compile(rf"\b{constant.partition(' ')[0]}\b")
    return any(map(name.search, lines))
