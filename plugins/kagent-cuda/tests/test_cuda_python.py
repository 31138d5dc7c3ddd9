"""cuda-python itself, as far as it can be asked without a driver: the stand-ins of other tests must be like it."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from cuda import core
from cuda.bindings import driver
from cuda.core import graph

POINTERS = (ctypes.c_void_p * 2)(1, 2)
ADDRESS = ctypes.addressof(POINTERS)


def node() -> Any:
    made = driver.CUDA_KERNEL_NODE_PARAMS()
    made.func = driver.CUfunction(5)
    made.gridDimX, made.gridDimY, made.gridDimZ = 2**31 - 1, 2, 3
    made.blockDimX, made.blockDimY, made.blockDimZ = 32, 2, 1
    made.sharedMemBytes = 65536
    made.kernelParams = ADDRESS
    return made


CALLS: dict[str, tuple[Any, ...]] = {
    "cuCtxSetCurrent": (driver.CUcontext(1),),
    "cuFuncSetAttribute": (
        driver.CUfunction(1),
        driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
        65536,
    ),
    "cuGraphAddKernelNode": (driver.CUgraph(3), [driver.CUgraphNode(1)], 1, node()),
    "cuGraphExecKernelNodeSetParams": (driver.CUgraphExec(3), driver.CUgraphNode(1), node()),
    "cuKernelGetFunction": (driver.CUkernel(3),),
    "cuLaunchKernel": (driver.CUfunction(3), 1, 1, 1, 32, 1, 1, 0, driver.CUstream(7), ADDRESS, 0),
    "cuMemAllocHost": (4096,),
    "cuMemFreeHost": (ADDRESS,),
    "cuMemcpyDtoHAsync": (ADDRESS, 2**40, 8, driver.CUstream(7)),
    "cuMemcpyHtoDAsync": (2**40, ADDRESS, 8, driver.CUstream(7)),
}
"""With arguments of the kinds that the runtime gives."""


def has_driver() -> bool:
    try:
        driver.cuInit(0)
    except RuntimeError:
        return False
    return True


@pytest.mark.skipif(has_driver(), reason="the driver that is here would be given handles of nothing")
@pytest.mark.parametrize("name", sorted(CALLS))
def test_its_functions_take_what_the_runtime_gives(name: str) -> None:
    """Arguments are converted first, and only then is the driver looked for."""
    function, args = getattr(driver, name), CALLS[name]
    with pytest.raises(RuntimeError, match="driver"):
        function(*args)
    with pytest.raises((TypeError, ValueError)):
        function(*args[:-1], object())


def test_node_parameters_keep_what_they_are_given() -> None:
    made = node()
    assert int(made.kernelParams) == ADDRESS
    assert int(made.func) == 5
    assert (made.gridDimX, made.gridDimY, made.gridDimZ) == (2**31 - 1, 2, 3)
    assert (made.blockDimX, made.blockDimY, made.blockDimZ, made.sharedMemBytes) == (32, 2, 1, 65536)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (core.Buffer, ("close", "handle")),
        (core.Device, ("allocate", "compute_capability", "create_stream", "properties", "set_current")),
        (core.Kernel, ("arguments_info", "handle")),
        (core.ObjectCode, ("from_cubin", "get_kernel")),
        (core.Stream, ("from_handle", "handle", "record", "sync", "wait")),
        (graph.Graph, ("close", "handle", "launch", "upload")),
        (graph.GraphDefinition, ("handle", "instantiate")),
    ],
)
def test_what_the_runtime_uses_of_cuda_core_is_there(kind: type, names: tuple[str, ...]) -> None:
    assert [name for name in names if not hasattr(kind, name)] == []
