"""CUDA C++ as kagent-cuda writes it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kagent_core.codegen.groups import SubGroups, WorkGroups
from kagent_core.codegen.work_items import C_TYPES, WorkItemLanguage
from kagent_cuda.devices import SHARED_NBYTES, WARP

# long has 32 bits with Windows' compilers
_TYPES: Mapping[str, str] = MappingProxyType({**C_TYPES, "i64": "long long", "u64": "unsigned long long"})

# NVRTC knows no math.h. Every GPU multiplies and adds in one step. Not every kernel needs all that its form computes,
# such as the place of its loops in every dimension (diagnostics 177 and 550).
_PRELUDE = """
#pragma nv_diag_suppress 177
#pragma nv_diag_suppress 550
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

_ITEM_NBYTES = 128 * 1024
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
