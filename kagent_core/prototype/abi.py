"""C types by name, as a device's ABI lays them out."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from kagent_core.errors import PackingError, nearest
from kagent_core.prototype.c_types import CType, Kind


def _integer(name: str, nbytes: int, signed: bool, *extra: str) -> CType:
    code = {1: "b", 2: "h", 4: "i", 8: "q"}[nbytes]
    dtypes = frozenset([f"{'' if signed else 'u'}int{8 * nbytes}", *extra])
    return CType(name, Kind.INTEGER, nbytes, nbytes, code if signed else code.upper(), signed, dtypes)


def _float(name: str, nbytes: int, code: str, dtype: str) -> CType:
    return CType(name, Kind.FLOAT, nbytes, nbytes, code, dtypes=frozenset([dtype]))


def _complex(name: str, part: CType, *dtypes: str) -> CType:
    # C's own complex types need the alignment of a part only, vector types of two need all of it: more does no harm
    nbytes = 2 * part.nbytes
    return CType(name, Kind.COMPLEX, nbytes, nbytes, 2 * part.code, dtypes=frozenset(dtypes))


_HALF = _float("half", 2, "e", "float16")
_BFLOAT16 = _float("bfloat16", 2, "H", "bfloat16")
_FLOAT = _float("float", 4, "f", "float32")
_DOUBLE = _float("double", 8, "d", "float64")
_INTEGERS = {
    (1, True): _integer("int8_t", 1, True),
    # OpenCL C has no pointers to bool: its kernels see a bool tensor as bytes that are 0 or 1
    (1, False): _integer("uint8_t", 1, False, "bool"),
    (2, True): _integer("int16_t", 2, True),
    (2, False): _integer("uint16_t", 2, False),
    (4, True): _integer("int32_t", 4, True),
    (4, False): _integer("uint32_t", 4, False),
    (8, True): _integer("int64_t", 8, True),
    (8, False): _integer("uint64_t", 8, False),
}
_BOOL = CType("bool", Kind.BOOL, 1, 1, "?", dtypes=frozenset(["bool"]))
_VOID = CType("void", Kind.VOID, 0, 1, "", dtypes=None)

_NAMED: dict[str, CType] = {
    "void": _VOID,
    **dict.fromkeys(("bool", "_Bool"), _BOOL),
    **dict.fromkeys(("half", "__half", "_Float16", "__fp16", "c10::Half", "at::Half"), _HALF),
    **dict.fromkeys(("bfloat16", "__nv_bfloat16", "nv_bfloat16", "__bf16", "c10::BFloat16", "at::BFloat16"), _BFLOAT16),
    "float": _FLOAT,
    "double": _DOUBLE,
    **{ctype.name: ctype for ctype in _INTEGERS.values()},
    "uchar": _INTEGERS[1, False],
    "ushort": _INTEGERS[2, False],
    "uint": _INTEGERS[4, False],
}

_COMPLEX_NAMES = {
    **dict.fromkeys(("float2", "cuFloatComplex", "cuComplex", "float _Complex", "float complex"), _FLOAT),
    **dict.fromkeys(("double2", "cuDoubleComplex", "double _Complex", "double complex"), _DOUBLE),
    "half2": _HALF,
}
_COMPLEX_TEMPLATE = re.compile(r"(?:std|thrust|cuda::std|c10)::complex<(float|double)>")
_VECTOR = re.compile(r"(char|uchar|short|ushort|int|uint|long|ulong|half|float|double)(2|4|8|16)")
_ARRAY_ALIAS = re.compile(r"(?:sizes|strides)([1-9]\d*)")
_ARRAY = re.compile(r"(.+)\[([1-9]\d*)\]")
_MEANT = {"float32": "float", "float64": "double"}
_AMBIGUOUS = {"int8", "int16", "uint8", "uint16", "float16"}


@dataclass(frozen=True)
class Abi:
    """How a device lays out the parameters of its kernels.

    Attributes
    ----------
    pointer_nbytes
        Size of a pointer, and of ``size_t``.
    long_nbytes
        Size of ``long``: 8 in OpenCL C and on Linux, 4 for C and CUDA on Windows.
    alignments
        By the name of a type, an alignment in bytes that differs from its natural one.

    Examples
    --------
    >>> Abi().type("const float*").dtypes, Abi().type("unsigned long").nbytes, Abi().type("sizes8").nbytes
    (frozenset({'float32'}), 8, 64)
    """

    pointer_nbytes: int = 8
    long_nbytes: int = 8
    alignments: Mapping[str, int] = field(default_factory=dict)

    def type(self, spelling: str) -> CType:
        """Return the type that C, CUDA C++ or OpenCL C spells so; ``int64_t[8]`` is a struct of one such array.

        Raises
        ------
        PackingError
            When there is no such type among those that a kernel parameter can have.
        """
        known = self._cache.get(spelling)
        if known is None:
            known = self._cache[spelling] = self._aligned(self._parse(spelling))
        return known

    @functools.cached_property
    def _cache(self) -> dict[str, CType]:
        return {}

    def _aligned(self, ctype: CType) -> CType:
        alignment = self.alignments.get(ctype.name)
        return ctype if alignment is None else dataclasses.replace(ctype, alignment=alignment)

    def _parse(self, spelling: str) -> CType:
        if spelling.startswith("local ") and spelling.endswith("*"):
            return self._local(spelling.removeprefix("local ").removesuffix("*"))
        before, star, after = spelling.rpartition("*")
        if star and not after.replace("const", " ").split():
            return self._pointer(before)
        words = " ".join(word for word in spelling.split() if word != "const")
        name = re.sub(r"^(?:::)?std::(?=\w+_t$)", "", words)
        alias = _ARRAY_ALIAS.fullmatch(name)
        array = _ARRAY.fullmatch(f"int64_t[{alias[1]}]" if alias else name)
        if array:
            return self._array(array[1].strip(), int(array[2]), spelling)
        return self._scalar(name)

    def _pointer(self, target: str) -> CType:
        if "*" in target:
            raise PackingError(
                f"'{target.strip()}*' is a pointer to pointers, which no tensor is",
                hint="declare a parameter per tensor: 'tensors0', 'tensors1', ... for the list 'tensors'",
            )
        words = target.split()
        pointee = self.type(" ".join(word for word in words if word != "const"))
        const = "const" in words
        name = f"{'const ' if const else ''}{pointee.name}*"
        code = {4: "I", 8: "Q"}[self.pointer_nbytes]
        size = self.pointer_nbytes
        return CType(name, Kind.POINTER, size, size, code, False, pointee.dtypes, pointee, const=const)

    def _local(self, target: str) -> CType:
        element = self.type(target.strip())
        if element.kind in (Kind.POINTER, Kind.ARRAY, Kind.VOID, Kind.LOCAL):
            raise PackingError(
                f"'local {target.strip()}*' is local memory of no element type",
                hint="declare it a pointer to numbers, such as 'local float*'",
            )
        return CType(f"local {element.name}*", Kind.LOCAL, 0, 1, "", element=element)

    def _array(self, element_name: str, count: int, spelling: str) -> CType:
        element = self.type(element_name)
        if element.kind in (Kind.POINTER, Kind.ARRAY, Kind.VECTOR, Kind.VOID):
            raise PackingError(f"'{spelling}' is no array of numbers")
        code, name = element.code * count, f"{element.name}[{count}]"
        return CType(name, Kind.ARRAY, element.nbytes * count, element.alignment, code, element=element, count=count)

    def _scalar(self, name: str) -> CType:
        if name in _NAMED:
            return _NAMED[name]
        if name in _AMBIGUOUS:
            meant = "half" if name == "float16" else f"{name}_t"
            raise PackingError(
                f"'{name}' is one number in some languages and a vector in OpenCL C",
                hint=f"for one number write '{meant}'",
            )
        integer = self._integer(name)
        if integer is not None:
            return integer
        template = _COMPLEX_TEMPLATE.fullmatch(name)
        part = {"float": _FLOAT, "double": _DOUBLE}[template[1]] if template else _COMPLEX_NAMES.get(name)
        if part is not None:
            whole = {"half": "complex32", "float": "complex64", "double": "complex128"}[part.name]
            # a kernel may also read a real tensor two elements at a time
            return _complex(name, part, whole, *(() if template else part.dtypes or ()))
        vector = _VECTOR.fullmatch(name)
        if vector:
            base = self.type(vector[1])
            nbytes = base.nbytes * int(vector[2])
            return CType(name, Kind.VECTOR, nbytes, nbytes, "", dtypes=base.dtypes)
        close = _MEANT.get(name) or nearest(name, _NAMED)
        raise PackingError(
            f"'{name}' is no type that a kernel parameter can have",
            hint=f"did you mean '{close}'?" if close else "give its meaning with types={...}",
        )

    def _integer(self, name: str) -> CType | None:
        """Read what C has no single word for, such as ``unsigned long``, in any order of its words."""
        aliases = {"ulong": "unsigned long", "size_t": "uintptr_t", "ptrdiff_t": "intptr_t"}
        name = aliases.get(name, name)
        if name in ("uintptr_t", "intptr_t"):
            return _INTEGERS[self.pointer_nbytes, name == "intptr_t"]
        words = name.split()
        if not words or not set(words) <= {"signed", "unsigned", "char", "short", "int", "long"}:
            return None
        nbytes = 4
        if "char" in words:
            nbytes = 1
        elif "short" in words:
            nbytes = 2
        elif "long" in words:
            nbytes = self.long_nbytes if words.count("long") == 1 else 8
        return _INTEGERS[nbytes, "unsigned" not in words]
