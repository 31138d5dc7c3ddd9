"""Faults of kagent's own, planted in the whole way from an operator to a launch, and found on the emulated device."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import kagent_core
from kagent_core.config import load_config
from kagent_core.device import LaunchError, PointerArg, ScalarArg
from kagent_core.errors import KagentError
from kagent_core.kernels import override
from kagent_core.layout import CONTIGUOUS
from kagent_core.specs import Access, DType, KernelDescriptor, LaunchConfig, TensorSpec
from kagent_cuda.deriver import CudaDeriver
from kagent_cuda.devices import emulated_device
from kagent_cuda.emulated import runtime as emulated_runtime
from kagent_cuda.emulated.memory import EmulationError
from kagent_cuda.emulated.runtime import EmulatedRuntime
from kagent_cuda.language import GROUPS, CudaLanguage
from kagent_cuda.parameters import ParameterBlock


def test_a_generated_kernel_without_its_barriers(device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    x = torch.randn(4, 2000)
    monkeypatch.setattr(CudaLanguage, "groups", dataclasses.replace(GROUPS, barrier=";", sub_groups=None))
    with pytest.raises(KagentError, match="with no barrier between them"):
        kagent_core.compile(lambda x: x.softmax(-1), device=device, cache_dir=str(tmp_path))(x)


def test_parameters_packed_without_padding(device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = 'extern "C" __global__ void k(int n, const float *self, float *out) { if (!threadIdx.x) out[0] = n; }'

    def unpadded(args: list[PointerArg | ScalarArg], address_of: object, abi: object) -> ParameterBlock:
        parts = [
            (arg.buffer.address + arg.byte_offset).to_bytes(8, "little") if isinstance(arg, PointerArg) else arg.data
            for arg in args
        ]
        places = [(sum(map(len, parts[:n])), len(part)) for n, part in enumerate(parts)]
        return ParameterBlock(b"".join(parts), tuple(places))

    monkeypatch.setattr(emulated_runtime, "pack_parameters", unpadded)
    prototype = "void k(int32_t numel, const float *self, float *out)"
    with (
        override("aten::relu", device=device, source=source, prototype=prototype, layout=CONTIGUOUS),
        pytest.raises(KagentError, match=r"parameter 1 .* at offset 4, expected 8 bytes at offset 8"),
    ):
        kagent_core.run_op("aten::relu", torch.ones(1), device=device)
    monkeypatch.setattr(emulated_runtime, "check_places", lambda *args: None)  # and what the driver would not be told
    with (
        override("aten::relu", device=device, source=source, prototype=prototype, layout=CONTIGUOUS),
        pytest.raises(KagentError, match="parameter block of 24 bytes, 20 came"),
    ):
        kagent_core.run_op("aten::relu", torch.ones(1), device=device)


def test_a_grid_that_is_too_small(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """extern "C" __global__ void k(const float *self, float *out) {
        long i = (long)blockIdx.x * blockDim.x + threadIdx.x;
        out[i] = self[i];
    }"""
    prototype, derive = "void k(const float *self, float *out)", CudaDeriver.derive
    x = torch.randn(512)
    with override("aten::relu", device=device, source=source, prototype=prototype, layout=CONTIGUOUS):
        torch.testing.assert_close(kagent_core.run_op("aten::relu", x, device=device), x)
        monkeypatch.setattr(
            CudaDeriver,
            "derive",
            lambda *args: dataclasses.replace(config, grid=(1, 1, 1)) if (config := derive(*args)) else None,
        )
        with pytest.raises(KagentError, match="kernel 'k' did not write 1024 of the 2048 bytes of result"):
            kagent_core.compile(torch.relu, device=device)(x)


COUNT = """
extern "C" __global__ void k(int *out, int *next) { out[atomicAdd(next, 1)] = threadIdx.x + 100 * blockIdx.x; }
"""


def spec(count: int) -> TensorSpec:
    return TensorSpec(DType("int32", 4), (count,), (1,), 0, 0)


@pytest.fixture
def runtime(cache_dir: Path) -> EmulatedRuntime:
    return EmulatedRuntime(emulated_device(0), load_config({"cache_dir": str(cache_dir)}))


def counted(runtime: EmulatedRuntime) -> list[int]:
    kernel = runtime.load(KernelDescriptor("aten::relu", "k", source=COUNT))
    out, following = runtime.allocate(4 * 192), runtime.allocate(4)
    runtime.copy_in(following, 0, memoryview(bytes(4)))
    args = [PointerArg(out, 0, spec(192), Access.OUT), PointerArg(following, 0, spec(1), Access.INOUT)]
    runtime.launch(kernel, LaunchConfig((3, 1, 1), (64, 1, 1)), args)
    found = bytearray(4 * 192)
    runtime.copy_out(out, 0, memoryview(found))
    return list(memoryview(found).cast("i"))


def test_threads_and_blocks_run_in_an_order_of_their_own(runtime: EmulatedRuntime) -> None:
    order = counted(runtime)
    everyone = [thread + 100 * block for block in range(3) for thread in range(64)]
    assert sorted(order) == everyone
    assert order != everyone
    assert order[:64] != sorted(order[:64])
    assert counted(runtime) == order  # the same each time


def test_a_launch_runs_when_somebody_waits(runtime: EmulatedRuntime) -> None:
    source = 'extern "C" __global__ void k(int *out, int at) { out[at] = 5; }'
    kernel = runtime.load(KernelDescriptor("aten::relu", "k", source=source))
    out = runtime.allocate(16)

    def launch(at: int) -> None:
        place = ScalarArg("int32_t", memoryview(at.to_bytes(4, "little")), 0, bytes)
        runtime.launch(kernel, LaunchConfig(), [PointerArg(out, 0, spec(4), Access.INOUT), place])

    launch(1)
    with pytest.raises(EmulationError, match="free of memory that kernel 'k' is yet to use"):
        runtime.free(out)
    launch(4)
    launch(2)
    with pytest.raises(LaunchError) as raised:
        runtime.synchronize()
    assert raised.value.launch == 1
    assert "invalid write of 4 bytes, 0 bytes behind" in str(raised.value.cause)
    found = bytearray(16)
    runtime.copy_out(out, 0, memoryview(found))
    assert list(memoryview(found).cast("i")) == [-1, 5, -1, -1]
    runtime.free(out)
