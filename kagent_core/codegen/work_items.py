"""C-like kernel languages whose kernels run as many work-items at once: OpenCL C, CUDA C++ and their like.

A kernel is written for any number of work-items: each begins at its own number and goes on by the number of all of
them (a grid-stride loop), so that every launch config gives the same result.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Self

from kagent_core.codegen.c_family import PREAMBLE_HELPERS, REPORT, SHORT, CFamily
from kagent_core.codegen.groups import THREAD, WorkGroups
from kagent_core.codegen.kernel import KernelArg
from kagent_core.codegen.text import Text
from kagent_core.codegen.vectors import Vectors
from kagent_core.specs import Access, DeviceInfo, DType, TensorSpec

C_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "i8": "signed char",
        "i16": "short",
        "i32": "int",
        "i64": "long",
        "u8": "unsigned char",
        "u16": "unsigned short",
        "u32": "unsigned int",
        "u64": "unsigned long",
        "b8": "unsigned char",
        "f16": "unsigned short",
        "bf16": "unsigned short",
        "f32": "float",
        "f64": "double",
    }
)
"""What the short names of generated kernels stand for, where int has 32 bits and long has 64."""

_TWO_SUM = """
/* sums in no wider type than the numbers' own: what an addition loses is kept beside the sum (Knuth's two-sum) */
INLINE T two_sum_T(T a, T b, T *rest) {
    T sum = a + b, added = sum - a;
    *rest += (a - (sum - added)) + (b - added);
    return sum;
}
"""
_TWO_SUMMED = "INLINE f32 two_summed_f32(f32 sum, f32 rest) { return rest == rest ? sum + rest : sum; }"
_TWO_SUMMED_LANES = "INLINE T two_summed_T(T sum, T rest) { return select(sum, sum + rest, rest == rest); }"

_REPORT_SPEC = TensorSpec(DType("int64", 8), (1,), (1,), 0, -1)
_BIT_CASTS = (("f32", "i32"), ("i32", "f32"), ("f64", "i64"), ("i64", "f64"), ("f32", "u32"), ("u32", "f32"))


class WorkItemLanguage(CFamily):
    """The printer of a language with work-items. A device sets what its language spells otherwise.

    The defaults are OpenCL C's way to say things, with C's names of types and functions.

    Examples
    --------
    >>> class Toy(WorkItemLanguage):
    ...     kernel_qualifiers = "KERNEL void"
    ...     global_space = ""
    ...     item = "my_number()"
    ...     item_count = "how_many()"
    """

    kernel_qualifiers = "__kernel void"
    global_space = "__global "

    item = "get_global_id(0)"
    """A work-item's number, from 0."""

    item_count = "get_global_size(0)"
    """How many work-items the launch has."""

    inline = "static inline"
    """What stands before the helper functions that generated kernels call."""

    types: Mapping[str, str] = C_TYPES
    """The language's names of the element types. The half types are 16 bits in memory, converted with integers."""

    element_offsets = False
    """Whether a tensor comes as a buffer and the number of its first element in it: in OpenCL, no pointer into a buffer
    can be passed. The runtime then gives the kernel two arguments for each `PointerArg`, the second an int64."""

    vector_width = 0
    """How many neighbouring elements are computed as a vector: a power of two; 0 where the language has no vectors, or
    its devices do better without."""

    vectors_per_item = 1
    """How many vectors, one behind the other, a work-item computes in a kernel that reduces nothing. Where neighbouring
    work-items run together, one; where each is a loop of a processor's, as many as make starting it worth while.
    With more than one, elements that can be no vectors are steps of a loop inside a work-item, too."""

    groups: WorkGroups | None = None
    """How threads of a block work together; None where they had better not, as on a device that runs a block's
    work-items one after the other. Then no kernel is written that needs it."""

    vector_spelling: type[Vectors] = Vectors
    """How vectors are spelled."""

    prelude = ""
    """What a source begins with, before anything of kagent's: includes, extensions, macros."""

    def preamble(self) -> str:
        """Return what every kernel's source begins with: `prelude`, types, and the helpers that kernels call."""
        lines = [self.prelude.strip()] if self.prelude.strip() else []
        lines += [f"typedef {name} {short};" for short, name in self.types.items()]
        lines.append(f"#define INLINE {self.inline}")
        for source, target in (pair for pair in _BIT_CASTS if set(pair) <= set(self.types)):
            head = f"INLINE {target} bits_{source}_{target}({source} x)"
            lines.append(f"{head} {{ union {{ {source} from; {target} to; }} both; both.from = x; return both.to; }}")
        lines.append("INLINE f32 bits_f32(u32 x) { return bits_u32_f32(x); }")
        lines.append("INLINE u32 f32_bits(f32 x) { return bits_f32_u32(x); }")
        vectors = [self.vectors.preamble()] if self.vectors is not None else []
        helpers = PREAMBLE_HELPERS.strip()
        for written, dtype in (("fmaf(", "float32"), ("fma(", "float64")):
            helpers = re.sub(rf"\b{re.escape(written)}", f"{self.function('fma', dtype)}(", helpers)
        if "f64" not in self.types:
            helpers = "\n".join(line for line in helpers.splitlines() if "f64" not in line)
        return "\n".join([*lines, helpers, *vectors, *self._two_sums(), ""])

    def _two_sums(self) -> list[str]:
        """Return the helpers of sums that go on in float32, where no wider type is there."""
        if self.wide != "float32":
            return []
        made = [_TWO_SUM.strip().replace("T", "f32"), _TWO_SUMMED]
        if self.vectors is not None:
            vector = self.vectors.named("f32")
            made += [text.strip().replace("T", vector) for text in (_TWO_SUM, _TWO_SUMMED_LANES)]
        return made

    def without(self, lacks: Mapping[str, str]) -> Self:
        """Return the same language for a device that lacks some dtypes.

        Parameters
        ----------
        lacks
            By dtype, the reason, as `DeviceInfo.lacks` has them.
        """
        other = copy.copy(self)
        other.lacks = dict(lacks)
        other.types = {short: name for short, name in self.types.items() if short not in map(SHORT.get, lacks)}
        if "float64" in lacks:
            other.wide = "float32"
        return other

    @property
    def vectors(self) -> Vectors | None:
        """What spells vectors; None where there are none."""
        return self.vector_spelling(self) if self.vector_width else None

    @classmethod
    def of(cls, info: DeviceInfo) -> Self:
        """Return the language of one device. By default they all speak the same, but for dtypes that one lacks."""
        return cls().without(dict(info.lacks)) if info.lacks else cls()

    def head(self, name: str, args: Sequence[KernelArg], reports: bool) -> str:
        """Return the head of a kernel."""
        if not self.element_offsets:
            return super().head(name, args, reports)
        parts: list[KernelArg] = []
        for arg in self._all(args, reports):
            if isinstance(arg.value, TensorSpec):
                parts += [replace(arg, name=f"{arg.name}_buffer"), KernelArg(f"{arg.name}_first", "i64", 0)]
            else:
                parts.append(arg)
        return super().head(name, parts, reports=False)

    def entry(self, args: Sequence[KernelArg], reports: bool) -> list[str]:
        """Return the pointers to tensors' first elements, where they come in two parts."""
        if not self.element_offsets:
            return []
        pointers = [arg for arg in self._all(args, reports) if isinstance(arg.value, TensorSpec)]
        return [f"{arg.type} {arg.name} = {arg.name}_buffer + {arg.name}_first;" for arg in pointers]

    def _all(self, args: Sequence[KernelArg], reports: bool) -> list[KernelArg]:
        report = KernelArg(REPORT, f"{self.global_space}i64 *", _REPORT_SPEC, Access.INOUT)
        return [*args, *([report] if reports else [])]

    def simd(self, reduction: str = "") -> str:
        """Return nothing: work-items are the lanes."""
        return ""

    def open_items(self, text: Text, axes: Sequence[tuple[str, str, int]], steps: int) -> int:
        """Open one loop of a work-item over its share of the steps, the last axis' steps being neighbours."""
        return self._open_steps(text, axes, self.item, self.item_count)

    def open_groups(self, text: Text, axes: Sequence[tuple[str, str, int]]) -> int:
        """Open one loop of a block over its share of the steps, each of which all threads of the block do together.

        It is the same loop for all of them, so that barriers may stand in it. One step alone is a loop, too: in a
        condition with barriers, PoCL 3.1 computes something wrong where threads branch otherwise before and after them.
        """
        assert self.groups is not None
        return self._open_steps(text, axes, self.groups.group, self.groups.group_count, always_loop=True)

    def fixed_head(self, head: str, threads: int) -> str:
        """Return the head of a kernel whose blocks have a fixed number of threads."""
        assert self.groups is not None
        fixed = self.groups.fixed.format(threads=threads)
        return head.replace(self.kernel_qualifiers, f"{self.kernel_qualifiers} {fixed}".rstrip(), 1)

    def thread(self) -> str:
        """Return the declaration of a thread's number in its block."""
        assert self.groups is not None
        return f"const i32 {THREAD} = {self.groups.item};"

    def _open_steps(
        self, text: Text, axes: Sequence[tuple[str, str, int]], first: str, count: str, always_loop: bool = False
    ) -> int:
        kind = self.index_type
        looped = [(name, size) for name, size, extent in axes if extent != 1]
        if looped:
            # unsigned, a step beyond the end cannot become a negative number
            counter = "u32" if self.is_narrow else "i64"
            total = " * ".join(f"({counter}){size}" for _, size in looped)
            begin, step = f"({counter}){first}", f"({counter}){count}"
            text.open(f"for ({counter} item = {begin}; item < {total}; item += {step}) {{")
            rest = "item"
            for name, size in reversed(looped[1:]):
                text.add(
                    f"const {kind} {name} = ({kind})({rest} % {size});",
                    f"const {counter} above_{name} = {rest} / {size};",
                )
                rest = f"above_{name}"
            text.add(f"const {kind} {looped[0][0]} = ({kind}){rest};")
        elif always_loop:
            text.open(f"for (i32 item = {first}; item < 1; item += {count}) {{")
        else:
            text.open(f"if ({first} == 0) {{")
        text.add(*(f"const {kind} {name} = 0;" for name, _, extent in axes if extent == 1))
        return 1
