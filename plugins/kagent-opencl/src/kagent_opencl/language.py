"""OpenCL C as kagent-opencl writes it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Self

from kagent_core.codegen.vectors import Vectors
from kagent_core.codegen.work_items import C_TYPES, WorkItemLanguage
from kagent_core.specs import DeviceInfo
from kagent_opencl.groups import enabled, work_groups_of

_TYPES: Mapping[str, str] = MappingProxyType(
    {**C_TYPES, "i8": "char", "u8": "uchar", "u16": "ushort", "u32": "uint", "u64": "ulong", "b8": "uchar"}
    | {"f16": "ushort", "bf16": "ushort"}
)

_EXACT = "#pragma OPENCL FP_CONTRACT OFF\n"
_FLOAT64 = "#pragma OPENCL EXTENSION cl_khr_fp64 : enable\n"

_ERF = """
/* erf as a quotient of polynomials in x * x, good to 3 units in the last place */
INLINE f32xW erf_f32xW(f32xW x) {
    f32xW t = x * x;
    f32xW p = (f32xW)(2.0459649e-06f);
    p = mad_f32xW(t, p, (f32xW)(0.00028483616f)); p = mad_f32xW(t, p, (f32xW)(0.0037724718f));
    p = mad_f32xW(t, p, (f32xW)(0.052769057f)); p = mad_f32xW(t, p, (f32xW)(0.19059269f));
    p = mad_f32xW(t, p, (f32xW)(1.1283791f));
    f32xW q = (f32xW)(3.8046739e-05f);
    q = mad_f32xW(t, q, (f32xW)(0.0011638279f)); q = mad_f32xW(t, q, (f32xW)(0.014983052f));
    q = mad_f32xW(t, q, (f32xW)(0.11418219f)); q = mad_f32xW(t, q, (f32xW)(0.50224113f));
    q = mad_f32xW(t, q, (f32xW)(1.0f));
    return select(x * p / q, copysign((f32xW)(1.0f), x), fabs(x) > 3.92f); /* exactly 1, as gelu needs it */
}
"""

_CPU_VECTORS_PER_ITEM = 64
"""Vectors that one work-item computes where it is a loop of a processor's."""


class PoclVectors(Vectors):
    """Vectors on PoCL, where lanes of some functions are wrong beside a lane with a large or special operand."""

    by_lane = ("sin", "cos", "tan", "fmod")

    def preamble(self) -> str:
        """Return what the core needs, and an error function that takes a fraction of PoCL's time."""
        return super().preamble() + _ERF.replace("xW", f"x{self.width}")

    def function(self, name: str, dtype: str) -> str:
        """Return the name of a function of vectors."""
        own = (name, dtype) == ("erf", "float32")
        return f"erf_{self.kind(dtype)}" if own else super().function(name, dtype)


class OpenClLanguage(WorkItemLanguage):
    """OpenCL C 1.2. The half types are kept in memory only, and computed with in float32, as ATen does."""

    inline = "inline static"
    types = _TYPES
    prelude = _FLOAT64 + _EXACT
    element_offsets = True

    def function(self, name: str, dtype: str) -> str:
        """Return a function's name, which is the same for all types."""
        return name

    @classmethod
    def of(cls, info: DeviceInfo) -> Self:
        """Return the language of one device: with vectors as wide as it prefers them."""
        import pyopencl

        from kagent_opencl.platforms import device_of

        device = device_of(info)
        language = cls()
        preferred = device.preferred_vector_width_float
        if "PoCL 3.0" in device.platform.version:
            preferred = min(preferred, 8)  # vectors of 16 end the process there
        language.vector_width = preferred if preferred in (2, 4, 8, 16) else 0
        if device.type & pyopencl.device_type.CPU:
            language.vectors_per_item = _CPU_VECTORS_PER_ITEM
        else:
            language.narrow_indices = True  # 64-bit products are several instructions there
        if "PoCL" in device.version:
            language.vector_spelling = PoclVectors
        if info.lacks:
            language = language.without(dict(info.lacks))
            language.prelude = _EXACT
        language.groups = work_groups_of(device)
        language.prelude += enabled(language.groups)
        return language
