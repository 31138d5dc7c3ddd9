"""Matrix products by CLBlast, where its library is installed and ``kagent tune`` measured that it is faster."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kagent_core.config import Config
from kagent_core.device import PointerArg
from kagent_core.inspect.logs import get_logger
from kagent_core.profile.measured import MeasuredFaster
from kagent_core.specs import DeviceInfo, KernelDescriptor, OpCall, TensorSpec

log = get_logger("plugins")

LIBRARY = "libclblast.so.1"
"""What it is called on Linux; elsewhere, whatever `ctypes.util.find_library` finds for ``clblast``."""

_ROW_MAJOR, _AS_IT_LIES, _TRANSPOSED = 101, 111, 112
_DTYPE = "float32"
"""All that it computes here. Its products of float64 end the process on PoCL, where a matrix begins within a buffer."""

_number = ctypes.c_float


@dataclass(frozen=True)
class QueueFunction:
    """A kernel that is a Python function which enqueues the work itself; its first argument is the queue."""

    function: Callable[..., None]

    def __call__(self, queue: Any, *args: Any, **kwargs: Any) -> None:
        """Enqueue the work."""
        self.function(queue, *args, **kwargs)

    def on(self, queue: Any) -> Callable[..., None]:
        """Return the function for one queue."""
        return functools.partial(self.function, queue)


def clblast_kernels(info: DeviceInfo, config: Config) -> Iterator[KernelDescriptor]:
    """Yield CLBlast's kernels for a device; none where the library is not installed."""
    library = _library()
    if library is None:
        log.info("%s: CLBlast is not installed, so that no product uses it (Debian: libclblast1)", info.device)
        return
    functions: dict[str, Callable[..., None]] = {"mm": mm, "bmm": mm, "addmm": addmm, "baddbmm": addmm}
    for name, function in functions.items():
        kernel = f"clblast_{name}"
        yield KernelDescriptor(
            f"aten::{name}",
            kernel,
            QueueFunction(functools.partial(function, library)),
            dtypes=frozenset({_DTYPE}),
            origin="CLBlast",
            accepts=MeasuredFaster(info, config, kernel, refusal),
        )


@functools.cache
def _library() -> ctypes.CDLL | None:
    for name in (LIBRARY, ctypes.util.find_library("clblast")):
        if name is not None:
            try:
                return ctypes.CDLL(name)
            except OSError as error:
                log.debug("'%s' cannot be loaded: %s", name, error)
    return None


# -- what it takes


@dataclass(frozen=True, slots=True)
class Matrix:
    """How CLBlast is told of one matrix.

    Attributes
    ----------
    transposed
        Whether its columns, rather than its rows, are next to each other.
    leading
        Elements from one row (column) to the next.
    """

    transposed: bool
    leading: int

    @classmethod
    def of(cls, spec: TensorSpec) -> Matrix | None:
        """Return what there is to tell of the last two dimensions; None where neither's elements are neighbours.

        Examples
        --------
        >>> from kagent_core.specs import DType
        >>> Matrix.of(TensorSpec(DType("float32", 4), (3, 5), (1, 8), 0, 0))
        Matrix(transposed=True, leading=8)
        """
        (rows, columns), (down, along) = spec.shape[-2:], spec.strides[-2:]
        if (along == 1 or columns == 1) and (down >= columns or rows == 1):
            return cls(False, max(down if rows > 1 else columns, columns))
        if (down == 1 or rows == 1) and (along >= rows or columns == 1):
            return cls(True, max(along if columns > 1 else rows, rows))
        return None

    @property
    def operation(self) -> int:
        """As the routines take it."""
        return _TRANSPOSED if self.transposed else _AS_IT_LIES


def refusal(call: OpCall) -> str | None:
    """Return why CLBlast cannot compute a product, or None."""
    out = call.outputs[0]
    if out.numel == 0 or any(0 in spec.shape for spec in call.inputs):
        return "takes no matrices without elements"
    result = Matrix.of(out)
    if result is None or result.transposed:
        return f"writes matrices row by row, not {out} with strides {out.strides}"
    for spec in call.inputs[-2:]:
        if Matrix.of(spec) is None:
            return f"takes matrices whose rows or columns have neighbouring elements, not {spec} of {spec.strides}"
    if len(call.inputs) == 3:
        return _added_refusal(call.inputs[0], out)
    return None


def _added_refusal(added: TensorSpec, out: TensorSpec) -> str | None:
    if added.shape == out.shape and added.is_contiguous and out.is_contiguous:
        return None
    if len(out.shape) == 2 and _vector(added, out) is not None:
        return None
    return f"adds contiguous tensors of the result's shape, or a vector to every row, not {added}"


def _vector(added: TensorSpec, out: TensorSpec) -> int | None:
    """Return the elements from one to the next of a vector that is added to every row; None where it is none."""
    columns = out.shape[-1]
    shape = (1,) * (2 - len(added.shape)) + added.shape
    if shape != (1, columns) or (columns > 1 and added.strides[-1] < 1):
        return None
    return added.strides[-1] if columns > 1 else 1


# -- the kernels


def mm(library: ctypes.CDLL, queue: Any, self: PointerArg, mat2: PointerArg, out: PointerArg) -> None:
    """Enqueue ``out = self @ mat2``, for one pair of matrices or for many."""
    _multiply(library, queue, self, mat2, out, 1.0, 0.0)


def addmm(
    library: ctypes.CDLL,
    queue: Any,
    self: PointerArg,
    mat1: PointerArg,
    mat2: PointerArg,
    out: PointerArg,
    *,
    beta: float = 1.0,
    alpha: float = 1.0,
) -> None:
    """Enqueue ``out = beta * self + alpha * mat1 @ mat2``, for one pair of matrices or for many.

    With a `beta` of 0, `self` is not read: it may be NaN.
    """
    if beta == 0 or self.spec.shape == out.spec.shape:
        if beta != 0:
            _copy(queue, self, out)
        _multiply(library, queue, mat1, mat2, out, alpha, beta)
    else:
        _multiply(library, queue, mat1, mat2, out, alpha, 0.0)
        _add_to_rows(library, queue, self, out, beta)


def _copy(queue: Any, source: PointerArg, out: PointerArg) -> None:
    import pyopencl as cl

    begins, to = source.byte_offset, out.byte_offset
    cl.enqueue_copy(queue, out.buffer, source.buffer, byte_count=out.nbytes, src_offset=begins, dst_offset=to)


def _add_to_rows(library: ctypes.CDLL, queue: Any, vector: PointerArg, out: PointerArg, factor: float) -> None:
    """Enqueue what adds a vector, times a factor, to every row of a matrix."""
    (rows, columns), step = out.spec.shape, _vector(vector.spec, out.spec)
    result = Matrix.of(out.spec)
    assert step is not None
    assert result is not None
    ones = _ones(queue.context, rows)
    _call(
        library,
        "CLBlastSger",
        queue,
        *(ctypes.c_int(_ROW_MAJOR), _size(rows), _size(columns), _number(factor)),
        *(*_place(ones, 0), _size(1), *_at(vector), _size(step), *_at(out), _size(result.leading)),
    )


def _multiply(
    library: ctypes.CDLL, queue: Any, a: PointerArg, b: PointerArg, out: PointerArg, alpha: float, beta: float
) -> None:
    """Enqueue ``out = alpha * a @ b + beta * out``, for one pair of matrices or for many."""
    m, k, n = *a.spec.shape[-2:], b.spec.shape[-1]
    matrices = [Matrix.of(arg.spec) for arg in (a, b, out)]
    one, other, result = (matrix for matrix in matrices if matrix is not None)
    batched = len(out.spec.shape) == 3
    places = [
        (*_at(arg), _size(matrix.leading), *([_size(arg.spec.strides[0])] if batched else []))
        for arg, matrix in ((a, one), (b, other), (out, result))
    ]
    _call(
        library,
        "CLBlastSgemmStridedBatched" if batched else "CLBlastSgemm",
        queue,
        *(ctypes.c_int(_ROW_MAJOR), ctypes.c_int(one.operation), ctypes.c_int(other.operation)),
        *(_size(m), _size(n), _size(k), _number(alpha), *places[0], *places[1], _number(beta), *places[2]),
        *([_size(out.spec.shape[0])] if batched else []),
    )


def _call(library: ctypes.CDLL, routine: str, queue: Any, *args: Any) -> None:
    handle = ctypes.c_void_p(queue.int_ptr)
    status = getattr(library, routine)(*args, ctypes.byref(handle), None)
    if status != 0:
        raise RuntimeError(f"{routine} returned status {status}; clblast_c.h tells what it means")


def _at(arg: PointerArg) -> tuple[Any, Any]:
    return _place(arg.buffer, arg.byte_offset // arg.spec.dtype.itemsize)


def _place(buffer: Any, first: int) -> tuple[Any, Any]:
    return ctypes.c_void_p(buffer.int_ptr), _size(first)


def _size(value: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(value)


@functools.cache
def _ones(context: Any, count: int) -> Any:
    """Return a buffer of ones, with which an outer product adds a vector to every row."""
    import numpy as np
    import pyopencl as cl

    flags = cl.mem_flags.READ_ONLY | cl.mem_flags.COPY_HOST_PTR
    return cl.Buffer(context, flags, hostbuf=np.ones(count, _DTYPE))
