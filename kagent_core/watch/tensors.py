"""Whether tensors are the objects that they were, and lie where they lay: asked about hundreds of them in one call.

Compiled code asks PyTorch through the C interface that it has for what its own compiler makes (``aoti_torch_get_...``
in ``torch/csrc/inductor/aoti_torch/c/shim.h``). Nothing is made for that, and no reference counted, which would write
next to the memory of small parameters. About 260 tensors it takes 2 µs; asked from Python, 40 of the 3,300 that a
MobileNetV2 takes, and twice that where the caches have been used otherwise.
"""

from __future__ import annotations

import array
import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from kagent_core.native import Library

SOURCE = r"""
typedef struct {
    void *(*item)(void *, intptr_t);
    int32_t (*data)(void *, void **);
    int32_t (*strides)(void *, int64_t **);
    int64_t tensors;
    int64_t *known; /* of each tensor: its object, itself, its address, number of dimensions, strides */
} tensor_table;

/* Whether a tuple holds the tensors that are known. For as long as an object lives, its tensor is the same one. */
int64_t same_tensors(void *tuple, tensor_table *table) {
    int64_t *known = table->known;
    for (int64_t n = 0; n < table->tensors; n++) {
        if ((intptr_t)table->item(tuple, (intptr_t)n) != known[0]) return 0;
        void *tensor = known + 1, *data; /* what PyTorch's C interface takes is the address of a pointer to it */
        int64_t *strides, dimensions = known[3];
        if (table->data(tensor, &data) != 0 || (intptr_t)data != known[2]) return 0;
        if (table->strides(tensor, &strides) != 0) return 0;
        known += 4;
        while (dimensions-- > 0)
            if (*strides++ != *known++) return 0;
    }
    return 1;
}
"""

CompareTensors = Callable[[tuple[torch.Tensor, ...], int], int]
"""Of some tensors and the address of a table."""


@dataclass(frozen=True)
class TensorComparer:
    """Makes what compares tensors with those that there were.

    Attributes
    ----------
    compare
        The compiled function.
    interface
        Addresses of the functions that it calls.
    """

    compare: CompareTensors
    interface: tuple[int, ...]

    def of(self, tensors: tuple[torch.Tensor, ...]) -> SameTensors | None:
        """Return what tells whether others are the same tensors; None where that does not work for them."""
        same = SameTensors(self, tensors)
        return same if same.are(tensors) else None


class SameTensors:
    """Some tensors as they were; made by `TensorComparer.of`. Keeps none of them alive.

    Parameters
    ----------
    comparer
        Has the compiled function.
    tensors
        The tensors.
    """

    def __init__(self, comparer: TensorComparer, tensors: tuple[torch.Tensor, ...]) -> None:
        self._compare = comparer.compare
        self._count = len(tensors)
        self._known = array.array("q")
        for tensor in tensors:
            self._known.extend((id(tensor), tensor._cdata, tensor.data_ptr(), tensor.dim(), *tensor.stride()))
        self._table = array.array("Q", [*comparer.interface, self._count, self._known.buffer_info()[0]])
        self._at, _ = self._table.buffer_info()

    def are(self, tensors: tuple[torch.Tensor, ...]) -> bool:
        """Whether these are the same objects, and their elements lie where they lay.

        None of the objects that there were may be gone: another one could have come to its address.
        """
        return len(tensors) == self._count and self._compare(tensors, self._at) == 1


def make_tensor_comparer(library: Library) -> TensorComparer | None:
    """Return what compares tensors, by a library that has `SOURCE`; None for a PyTorch that does not let it."""
    interface = _interface()
    return None if interface is None else TensorComparer(library.python_function("same_tensors"), interface)


@functools.cache
def _interface() -> tuple[int, ...] | None:
    """Return the addresses of functions of Python and PyTorch."""
    try:
        shim = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        functions = (ctypes.pythonapi.PyTuple_GetItem, shim.aoti_torch_get_data_ptr, shim.aoti_torch_get_strides)
    except (OSError, AttributeError):
        return None
    return tuple(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)
