"""Matrix products."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kagent_core.codegen.dtypes import FLOATS, HALVES
from kagent_core.codegen.generic.builder import KernelBuilder, Tensor
from kagent_core.codegen.generic.core import GENERIC
from kagent_core.codegen.generic.spaces import Space
from kagent_core.codegen.generic.tiled import Operand, Places, Product, write_product
from kagent_core.specs import OpCall, TensorSpec

Number = bool | int | float


def _refusal(call: OpCall) -> str | None:
    """PyTorch has no products of booleans, nor fractions of integers."""
    dtype = call.outputs[0].dtype.name
    if any(spec.dtype.name != dtype for spec in call.inputs):
        return f"{call.name} has operands of several types"
    if dtype == "bool":
        return f"{call.name} is a product of booleans, which PyTorch does not have"
    return None


@GENERIC.kernel("aten::mm", epilogue=True, accepts=_refusal)
def mm(k: KernelBuilder, self: TensorSpec, mat2: TensorSpec) -> None:
    """Write the product of two matrices."""
    a, b = k.read(self), k.read(mat2)
    _product(k, [], a, b, k.store)


@GENERIC.kernel("aten::bmm", epilogue=True, accepts=_refusal)
def bmm(k: KernelBuilder, self: TensorSpec, mat2: TensorSpec) -> None:
    """Write a product for each of many pairs of matrices."""
    a, b = k.read(self), k.read(mat2)
    _product(k, ["b"], a, b, k.store)


@GENERIC.kernel("aten::addmm", epilogue=True, accepts=_refusal)
def addmm(k: KernelBuilder, self: TensorSpec, mat1: TensorSpec, mat2: TensorSpec, beta: Number, alpha: Number) -> None:
    """Write ``beta * self + alpha * mat1 @ mat2``."""
    a, b = k.read(mat1), k.read(mat2)
    _product(k, [], a, b, _added(k, self, beta, alpha))


@GENERIC.kernel("aten::baddbmm", epilogue=True, accepts=_refusal)
def baddbmm(
    k: KernelBuilder, self: TensorSpec, batch1: TensorSpec, batch2: TensorSpec, beta: Number, alpha: Number
) -> None:
    """Write ``beta * self + alpha * batch1 @ batch2`` for each of many pairs of matrices."""
    a, b = k.read(batch1), k.read(batch2)
    _product(k, ["b"], a, b, _added(k, self, beta, alpha, by_blas=False))


@GENERIC.kernel("aten::addbmm", epilogue=True, accepts=_refusal)
def addbmm(
    k: KernelBuilder, self: TensorSpec, batch1: TensorSpec, batch2: TensorSpec, beta: Number, alpha: Number
) -> None:
    """Write ``beta * self`` and `alpha` times the sum of many products of matrices: one product, of the whole depth."""
    a, b = k.read(batch1), k.read(batch2)
    depth, store = Space((batch1.shape[0], batch1.shape[2])), _added(k, self, beta, alpha)
    rows = Operand(
        Space((batch1.shape[1],)),
        depth,
        lambda line, at: a.at(at[0], line[0], at[1]),
        along_depth=batch1.strides[2] <= batch1.strides[1],
    )
    columns = Operand(
        Space((batch2.shape[2],)),
        depth,
        lambda line, at: b.at(*at, *line),
        along_depth=batch2.strides[1] < batch2.strides[2],
    )
    write_product(k, Product(a.dtype, [], rows, columns, lambda row, column, value: store([*row, *column], value)))


@GENERIC.kernel("aten::mv", epilogue=True, accepts=_refusal)
def mv(k: KernelBuilder, self: TensorSpec, vec: TensorSpec) -> None:
    """Write the product of a matrix and a vector."""
    _matrix_vector(k, k.read(self), k.read(vec), k.store)


@GENERIC.kernel("aten::addmv", epilogue=True, accepts=_refusal)
def addmv(k: KernelBuilder, self: TensorSpec, mat: TensorSpec, vec: TensorSpec, beta: Number, alpha: Number) -> None:
    """Write ``beta * self + alpha * mat @ vec``."""
    _matrix_vector(k, k.read(mat), k.read(vec), _added(k, self, beta, alpha))


@GENERIC.kernel("aten::dot", "aten::vdot", epilogue=True, accepts=_refusal)
def dot(k: KernelBuilder, self: TensorSpec, **other: TensorSpec) -> None:
    """Write the sum of the products of two vectors' elements; real ones, whose conjugates are themselves."""
    a, b = k.read(self), k.read(next(iter(other.values())))
    if k.work_groups is not None:  # whose threads share the one sum
        one, along = Space((1,)), Space((self.shape[0],))
        rows = Operand(one, along, lambda line, depth: a.at(*depth), along_depth=True)
        columns = Operand(one, along, lambda line, depth: b.at(*depth), along_depth=True)
        write_product(k, Product(a.dtype, [], rows, columns, lambda row, column, value: k.store([], value)))
        return
    with k.items(steps=self.shape[0]):
        k.store([], _sum_of_products(k, a.dtype, self.shape[0], a.at, b.at))


def _product(
    k: KernelBuilder, batch: Sequence[str], a: Tensor, b: Tensor, store: Callable[[Sequence[str], str], None]
) -> None:
    """Write a product of matrices for each step of the loops `batch`, which are the first dimensions of the tensors."""
    m, depth = a.spec.shape[-2:]
    n = b.spec.shape[-1]
    rows = Operand(
        Space((m,)),
        Space((depth,)),
        lambda line, depth: a.at(*batch, *line, *depth),
        along_depth=a.spec.strides[-1] <= a.spec.strides[-2],
        places=None if a.dtype in HALVES else Places(lambda line, depth: a.at(*batch, line, depth)),
    )
    columns = Operand(
        Space((n,)),
        Space((depth,)),
        lambda line, depth: b.at(*batch, *depth, *line),
        along_depth=b.spec.strides[-2] < b.spec.strides[-1],
    )
    sizes = list(zip(batch, a.spec.shape, strict=False))
    write_product(
        k, Product(a.dtype, sizes, rows, columns, lambda row, column, value: store([*batch, *row, *column], value))
    )


def _added(
    k: KernelBuilder, self: TensorSpec, beta: Number, alpha: Number, by_blas: bool = True
) -> Callable[[Sequence[str], str], None]:
    """Return what stores ``beta * self + alpha * value``.

    With a `beta` of 0, `self` is not read: it may be NaN. With an `alpha` of 0, BLAS leaves the product out; PyTorch
    calls it for single products of the types that BLAS has.
    """
    added = k.read(self)
    dtype = added.dtype
    left_out = by_blas and alpha == 0 and dtype in ("float32", "float64")

    def scaled(factor: Number, value: str) -> str:
        factor = factor if dtype in FLOATS else int(factor)
        return value if factor == 1 else f"{k.number(factor, dtype)} * {value}"

    def store(index: Sequence[str], value: str) -> None:
        result = k.number(0.0, dtype) if left_out else scaled(alpha, value)
        if beta != 0:
            own = scaled(beta, added.at(*index[len(index) - len(self.shape) :]))
            result = own if left_out else f"{result} + {own}"
        k.store(index, k.converted(dtype, result))

    return store


def _matrix_vector(k: KernelBuilder, a: Tensor, x: Tensor, store: Callable[[Sequence[str], str], None]) -> None:
    m, depth = a.spec.shape
    along_rows = a.spec.strides[1] <= a.spec.strides[0]
    if along_rows and k.work_groups is None:
        with k.items(("i", m), steps=depth):
            store(["i"], _sum_of_products(k, a.dtype, depth, lambda p: a.at("i", p), x.at))
        return
    one, along, across = Space((1,)), Space((depth,)), Space((m,))
    places = None if a.dtype in HALVES else Places(lambda line, depth: x.at(depth))
    rows = Operand(one, along, lambda line, depth: x.at(*depth), along_depth=True, places=places)
    columns = Operand(across, along, lambda line, depth: a.at(*line, *depth), along_depth=along_rows)
    write_product(k, Product(a.dtype, [], rows, columns, lambda row, column, value: store(column, value)))


def _sum_of_products(
    k: KernelBuilder, dtype: str, length: int, one: Callable[[str], str], other: Callable[[str], str]
) -> str:
    """Write a sum of products and return its name. Many sums side by side, and stretches of them in a wider type."""
    lanes, stretch, end = k.tiles.lanes, k.tiles.lanes * k.tiles.depth, k.size(length)
    kind, total = k.compute_type(dtype), k.language.value_type(k.tiles.total_dtype(dtype))
    k.add(f"{total} total = 0;")
    with k.loop("p_first", end, step=stretch):
        k.add(f"const {k.index_type} p_end = {k.least(end, f'p_first + {stretch}')};")
        k.add(f"{kind} sums[{lanes}] = {{0}};", f"{k.index_type} p_next = p_first;")
        with k.block(f"for (; p_next + {lanes} <= p_end; p_next += {lanes})"), k.loop("e", lanes, simd=True):
            k.add(f"sums[e] = {k.language.multiply_add(one('p_next + e'), other('p_next + e'), 'sums[e]', dtype)};")
        with k.loop("e", "p_end - p_next", simd=True):
            k.add(f"sums[e] = {k.language.multiply_add(one('p_next + e'), other('p_next + e'), 'sums[e]', dtype)};")
        with k.loop("e", lanes, reduction="+:total"):
            k.add("total += sums[e];")
    k.add(f"const {kind} result = ({kind})total;")
    return "result"
