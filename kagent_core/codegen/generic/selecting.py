"""Order statistics and binary search.

The element of a rank is found bit by bit, from the highest, in keys that are ordered as the values are: linear in the
row's length, and without memory of its own.
"""

from __future__ import annotations

from kagent_core.codegen.c_family import INDEX_OUT_OF_RANGE
from kagent_core.codegen.dtypes import FLOATS, INTEGERS, NBITS, UNSIGNED
from kagent_core.codegen.generic.builder import KernelBuilder
from kagent_core.codegen.generic.core import GENERIC
from kagent_core.codegen.generic.loops import Rows, names, nest
from kagent_core.specs import OpCall, TensorSpec


def _unselectable(call: OpCall) -> str | None:
    (self,) = call.inputs
    if self.dtype.name == "bool":
        return f"{call.signature} is not defined for bool"
    return f"{call.name} selects from a tensor without elements" if self.numel == 0 else None


@GENERIC.kernel("aten::kthvalue", accepts=_unselectable)
def kthvalue(kernel: KernelBuilder, self: TensorSpec, k: int, dim: int, keepdim: bool) -> None:
    """Write the k-th smallest element of each row, and where it is."""
    _select_rows(kernel, self, dim, kernel.size(k - 1), None)


@GENERIC.kernel("aten::median.dim", accepts=_unselectable)
def median_dim(k: KernelBuilder, self: TensorSpec, dim: int, keepdim: bool) -> None:
    """Write the lower median of each row, and where it is; NaN where there is one."""
    _select_rows(k, self, dim, "", False)


@GENERIC.kernel("aten::nanmedian.dim", accepts=_unselectable)
def nanmedian_dim(k: KernelBuilder, self: TensorSpec, dim: int, keepdim: bool) -> None:
    """Write the lower median of the elements of each row that are not NaN, and where it is."""
    _select_rows(k, self, dim, "", True)


@GENERIC.kernel("aten::median", accepts=_unselectable)
def median(k: KernelBuilder, self: TensorSpec) -> None:
    """Write the lower median of all elements; NaN where there is one."""
    _select_all(k, self, False)


@GENERIC.kernel("aten::nanmedian", accepts=_unselectable)
def nanmedian(k: KernelBuilder, self: TensorSpec) -> None:
    """Write the lower median of all elements that are not NaN."""
    _select_all(k, self, True)


def _select_rows(k: KernelBuilder, self: TensorSpec, dim: int, rank: str, ignore_nan: bool | None) -> None:
    """Write an element of each row: that of a rank, or the median where `ignore_nan` is not None."""
    rows, made = Rows(self, dim), k.call.outputs[0]
    with k.items(*rows.axes, steps=rows.length * NBITS[self.dtype.name]):
        _select(k, self, [("j", k.size(rows.length))], rows.place("j"), rank, ignore_nan)
        k.store(rows.reduced(len(made.shape)), "found")
        k.store(rows.reduced(len(made.shape)), "found_at", 1)


def _select_all(k: KernelBuilder, self: TensorSpec, ignore_nan: bool) -> None:
    places = names("d", len(self.shape))
    with k.items(("row", 1), steps=self.numel * NBITS[self.dtype.name]):
        loops = [(place, k.size(size)) for place, size in zip(places, self.shape, strict=True)]
        _select(k, self, loops, places, "", ignore_nan)
        k.store([], "found")


def _select(
    k: KernelBuilder,
    self: TensorSpec,
    loops: list[tuple[str, str]],
    place: list[str],
    rank: str,
    ignore_nan: bool | None,
) -> None:
    """Write ``found`` and ``found_at``: of the elements that loops go over, the first of a rank in ascending order."""
    x = k.read(self)
    kind, is_float = k.compute_type(x.dtype), x.dtype in FLOATS
    count = " * ".join(size for _, size in loops) or "1"
    k.fits(self.numel)
    k.add(f"{k.index_type} rank = {rank or f'({count} - 1) / 2'};")
    if is_float and ignore_nan is not None:
        k.add(f"{k.index_type} nans = 0;")
        with nest(k, *loops):
            k.add(f"const {kind} value = {x.at(*place)};", "nans += value != value;")
        # NaN has the greatest keys: all that are not come first
        rest = f"nans < {count} ? ({count} - nans - 1) / 2 : 0" if ignore_nan else f"nans ? {count} - nans : rank"
        k.add(f"rank = {rest};")
    bits = 64 if x.dtype == "float64" else 32 if is_float else NBITS[x.dtype]
    k.add("u64 prefix = 0;")
    with k.block(f"for (i32 bit = {bits - 1}; bit >= 0; bit--)"):
        k.add(f"{k.index_type} below = 0;")
        with nest(k, *loops):
            _key(k, x.dtype, x.at(*place))
            k.add("below += key >> bit == prefix >> bit;")
        k.add("if (rank >= below) { rank -= below; prefix |= (u64)1 << bit; }")
    k.add(f"{kind} found = {k.number(0, x.dtype)};", "i64 found_at = 0;")
    with nest(k, *loops):
        _key(k, x.dtype, x.at(*place))
        position = loops[-1][0] if loops else "0"
        k.add(f"if (key == prefix && rank-- == 0) {{ found = value; found_at = {position}; }}")


def _key(k: KernelBuilder, dtype: str, value: str) -> None:
    """Write ``key``, a u64 that is ordered as values of the type are, NaN greatest and the two zeros equal."""
    kind = k.compute_type(dtype)
    k.add(f"const {kind} value = {value};")
    if dtype in UNSIGNED:
        k.add("const u64 key = value;")
    elif dtype in INTEGERS:
        k.add(f"const u64 key = (u64)(i64)value + ((u64)1 << {NBITS[dtype] - 1});")
    else:
        wide = dtype == "float64"
        word, bits = ("u64", "(u64)bits_f64_i64") if wide else ("u32", "f32_bits")
        top = f"(({word})1 << {63 if wide else 31})"
        k.add(f"const {word} word = {bits}(value == 0 ? 0 : value);")
        k.add(f"const u64 key = value != value ? ({word})-1 : word & {top} ? ({word})~word : word | {top};")


# -- binary search


def _unlike(call: OpCall) -> str | None:
    """Return why a number cannot be searched among boundaries: it would be converted as promotion says."""
    numbers = [value for value in call.arguments.values() if isinstance(value, int | float)]
    number = next((v for v in numbers if not isinstance(v, bool)), None)
    is_float = call.inputs[0].dtype.name in FLOATS
    if number is None or isinstance(number, float) != is_float:
        return f"{call.name} compares {number} with {call.inputs[0].dtype}"
    return None


@GENERIC.kernel("aten::searchsorted.Tensor")
@GENERIC.kernel("aten::searchsorted.Scalar", accepts=_unlike)
def searchsorted(
    k: KernelBuilder,
    sorted_sequence: TensorSpec,
    self: TensorSpec | float,
    out_int32: bool,
    right: bool,
    side: str | None,
    sorter: TensorSpec | None,
) -> None:
    """Write where each element belongs in its row of a sorted tensor, or where a number does."""
    _search(k, sorted_sequence, self, right or side == "right", sorter)


@GENERIC.kernel("aten::bucketize.Tensor")
@GENERIC.kernel("aten::bucketize.Scalar", accepts=_unlike)
def bucketize(k: KernelBuilder, self: TensorSpec | float, boundaries: TensorSpec, out_int32: bool, right: bool) -> None:
    """Write between which boundaries each element lies, or a number does."""
    _search(k, boundaries, self, right, None)


def _search(
    k: KernelBuilder, sequence: TensorSpec, wanted: TensorSpec | float, right: bool, sorter: TensorSpec | None
) -> None:
    row, made = k.read(sequence), k.call.outputs[0]
    places = names("d", len(made.shape))
    lead = places[: len(sequence.shape) - 1] if len(sequence.shape) > 1 else []
    kind, length = k.compute_type(row.dtype), sequence.shape[-1] if sequence.shape else 1
    target = k.read(wanted).at(*places) if isinstance(wanted, TensorSpec) else k.number(wanted, row.dtype)
    with k.items(*(zip(places, made.shape, strict=True) if places else [("row", 1)]), steps=length.bit_length() * 4):
        k.add(f"const {kind} target = {target};", f"{k.index_type} begin = 0, end = {k.size(length)};")
        with k.block("while (begin < end)"):
            k.add(f"const {k.index_type} middle = begin + (end - begin) / 2;")
            k.add(f"i64 place = {'middle' if sorter is None else k.read(sorter).at(*lead, 'middle')};")
            if sorter is not None:
                outside = f"place < 0 || place >= {k.size(length)}"
                k.report(outside, INDEX_OUT_OF_RANGE)
                k.add(f"if ({outside}) place = 0;")
            at = [*lead, "place"] if sequence.shape else []
            k.add(f"const {kind} value = {row.at(*at)};")
            # written so that NaN comes after everything, as in ATen
            k.add(f"if (!(value {'>' if right else '>='} target)) begin = middle + 1; else end = middle;")
        k.store(places, "begin")
