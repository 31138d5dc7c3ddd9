"""Host memory as a device's memory, kernels as calls."""

from __future__ import annotations

import pytest
import torch

from kagent_core.device import PointerArg
from kagent_core.specs import DType, KernelDescriptor, LaunchConfig, TensorSpec
from kagent_cpu.runtime import CpuRuntime

from .builders import segment_of

F32, F64, C64 = DType("float32", 4), DType("float64", 8), DType("complex64", 8)
ONCE = LaunchConfig()


@pytest.fixture
def runtime() -> CpuRuntime:
    return CpuRuntime()


def pointer(buffer: torch.Tensor, byte_offset: int, dtype: DType, shape, strides, **bits: bool) -> PointerArg:
    return PointerArg(buffer, byte_offset, TensorSpec(dtype, shape, strides, 0, 0, **bits))


@pytest.mark.parametrize("nbytes", [0, 1, 63, 4096, 1 << 20])
def test_memory_is_aligned_and_large_enough(runtime: CpuRuntime, nbytes: int) -> None:
    buffer = runtime.allocate(nbytes)
    assert buffer.nbytes >= nbytes
    assert buffer.data_ptr() % 64 == 0
    runtime.free(buffer)


def test_bytes_come_out_as_they_went_in(runtime: CpuRuntime) -> None:
    buffer = runtime.allocate(64)
    buffer.fill_(7)
    data = torch.arange(3, dtype=torch.float64)
    runtime.copy_in(buffer, 16, memoryview(data.numpy()))
    data.zero_()  # the caller may use its memory again at once
    out = bytearray(24)
    runtime.copy_out(buffer, 16, memoryview(out))
    assert torch.frombuffer(out, dtype=torch.float64).tolist() == [0.0, 1.0, 2.0]
    assert buffer[:16].tolist() == [7] * 16
    assert buffer[40:].tolist() == [7] * 24
    runtime.copy_in(buffer, 64, memoryview(b""))
    runtime.copy_out(buffer, 64, memoryview(bytearray()))


def test_a_launch_calls_the_kernel_with_tensors_on_its_buffers(runtime: CpuRuntime) -> None:
    source, target = runtime.allocate(64), runtime.allocate(64)
    numbers = torch.arange(8, dtype=torch.float32)
    runtime.copy_in(source, 32, memoryview(numbers.numpy()))

    def kernel(out, x, scale, more):
        assert [type(item) for item in more] == [torch.Tensor, int]
        out.copy_(x * scale + more[0])

    loaded = runtime.load(KernelDescriptor("mine::scale", "scale", function=kernel))
    x = pointer(source, 32, F32, (2, 4), (1, 2))
    out = pointer(target, 16, F32, (2, 4), (4, 1))
    runtime.launch(loaded, ONCE, [out, x, 3.0, (pointer(source, 36, F32, (), ()), 5)])
    runtime.synchronize()
    expected = numbers.view(4, 2).t() * 3 + 1
    assert target[16:48].view(torch.float32).view(2, 4).equal(expected)


def test_lazy_bits_are_applied(runtime: CpuRuntime) -> None:
    buffer = runtime.allocate(16)
    value = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    runtime.copy_in(buffer, 0, memoryview(torch.view_as_real(value).contiguous().numpy()))
    seen: list[torch.Tensor] = []
    runtime.launch(seen.append, ONCE, [pointer(buffer, 0, C64, (2,), (1,), conj=True)])
    assert seen[0].is_conj()
    assert seen[0].resolve_conj().equal(value.conj().resolve_conj())
    runtime.launch(seen.append, ONCE, [pointer(buffer, 0, C64, (2,), (1,), neg=True)])
    assert seen[1].resolve_neg().equal(-value)


def test_a_kernel_without_a_function_is_refused(runtime: CpuRuntime) -> None:
    with pytest.raises(TypeError, match="'text' has no function to call"):
        runtime.load(KernelDescriptor("mine::text", "text", source="void text() {}"))


def test_every_instance_of_a_sealed_segment_has_memory_of_its_own(runtime: CpuRuntime) -> None:
    compiled = segment_of(lambda x: torch.ops.aten.exp(torch.ops.aten.sin(x)), torch.randn(4))
    make = runtime.seal(compiled.segment)
    one, other = make(), make()
    planned = compiled.source.planned.values()
    addresses = [{instance._globals[name].data_ptr() for name in planned} for instance in (one, other)]  # type: ignore[attr-defined]
    assert addresses[0]
    assert addresses[0].isdisjoint(addresses[1])
