"""Kernels of C text: how they are loaded, packed, launched, and called from a sealed segment."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kagent_core.capture.schemas import resolve_overload
from kagent_core.config import load_config
from kagent_core.device import PointerArg, ScalarArg
from kagent_core.extract.parameter_buffer import ParameterBuffer
from kagent_core.native import find_compiler
from kagent_core.prototype import parse_prototype
from kagent_core.specs import DType, KernelDescriptor, LaunchConfig, OpCall, TensorSpec
from kagent_cpu.launch import ChunkDeriver
from kagent_cpu.packing import CpuPacker
from kagent_cpu.plugin import kagent_devices
from kagent_cpu.runtime import CpuRuntime
from kagent_cpu.source import SourceKernel, SourceLoader, is_source

from .builders import call_of

SCALE = """
void scale(const float *self, float *out, int64_t numel, float other) {
    for (int64_t i = 0; i < numel; i++) out[i] = self[i] * other;
}
"""
F32 = DType("float32", 4)


def kernel(source: str = SCALE, signature: str = "aten::mul.Scalar", name: str = "scale", **fields) -> KernelDescriptor:
    fields = {"parameters": parse_prototype(source), **fields}
    return KernelDescriptor(signature, name, source=source, origin="here:1", **fields)


@pytest.fixture
def runtime(tmp_path: Path) -> CpuRuntime:
    return CpuRuntime(load_source=SourceLoader(tmp_path))


def test_what_counts_as_source() -> None:
    assert is_source(kernel())
    assert not is_source(KernelDescriptor("aten::relu", "r", function=torch.relu, source="text"))
    assert not is_source(KernelDescriptor("aten::relu", "r", source="static void r() {}", packed=()))
    assert not is_source(KernelDescriptor("aten::relu", "r", function=torch.relu))


def test_a_launch_calls_the_function_with_addresses_and_values(runtime: CpuRuntime) -> None:
    loaded = runtime.load(kernel())
    assert isinstance(loaded, SourceKernel)
    source, target = runtime.allocate(64), runtime.allocate(64)
    source.view(torch.float32)[2:5] = torch.tensor([1.0, -2.0, 3.0])
    target.zero_()
    parameters = ParameterBuffer()
    slots = [parameters.append("int64_t", 3, "numel"), parameters.append("float", 2.5, "other")]
    parameters.freeze()
    values = [ScalarArg(s.type.name, parameters.view(s), parameters.address(s), s.type.unpack) for s in slots]
    spec = TensorSpec(F32, (3,), (1,), 0, 0)
    runtime.launch(loaded, LaunchConfig(), [PointerArg(source, 8, spec), PointerArg(target, 16, spec), *values])
    runtime.synchronize()
    assert target.view(torch.float32)[3:8].tolist() == [0.0, 2.5, -5.0, 7.5, 0.0]


def test_a_text_is_loaded_once(runtime: CpuRuntime) -> None:
    assert runtime.load(kernel()) is runtime.load(kernel())
    other = kernel(SCALE.replace("* other", "/ other"))
    assert runtime.load(other) is not runtime.load(kernel())


def test_the_packer_follows_the_prototype() -> None:
    call = call_of(torch.ops.aten.mul.Scalar, torch.randn(2, 3), 0.1)
    packed = CpuPacker().pack(call, kernel())
    assert [(arg.name, arg.type) for arg in packed] == [
        ("self", "const float*"),
        ("out", "float*"),
        ("numel", "int64_t"),
        ("other", "float"),
    ]
    assert [arg.value for arg in packed[2:]] == [6, torch.tensor(0.1).item()]
    function = KernelDescriptor("aten::mul.Scalar", "f", function=lambda x, y, out: None)
    assert [arg.name for arg in CpuPacker().pack(call, function)] == ["self", "other", "out"]


@pytest.mark.parametrize("numel", [0, 1, 10**7])
def test_it_is_called_once_whatever_the_size(numel: int) -> None:
    [info] = kagent_devices(load_config())
    spec = TensorSpec(F32, (numel,), (1,), 0, 0)
    overload = resolve_overload("aten::relu")
    call = OpCall(0, "relu", "aten::relu", {"self": spec}, (spec,), (spec,), (spec,), overload=overload)
    assert ChunkDeriver(8).derive([call], kernel(), info) == LaunchConfig()


def test_an_omp_loop_uses_as_many_threads_as_torch() -> None:
    import kagent_core
    from kagent_core.kernels import override

    compiler = find_compiler()
    assert compiler is not None
    assert compiler.single_thread is None
    source = """
    #include <omp.h>
    void threads(const float *self, float *out) {
        #pragma omp parallel
        #pragma omp single
        out[0] = omp_get_num_threads();
    }
    """
    before = torch.get_num_threads()
    try:
        with override("aten::relu", device="cpu", source=source):
            for count in (1, 2):
                torch.set_num_threads(count)
                assert kagent_core.run_op("aten::relu", torch.zeros(1), device="cpu").item() == count
            compiled = torch.compile(torch.relu, backend="kagent", options={"device": "cpu", "threads": 1})
            assert compiled(torch.zeros(1)).item() == 1
    finally:
        torch.set_num_threads(before)


def test_half_types_behind_pointers() -> None:
    import kagent_core
    from kagent_core.kernels import override

    source = """
    typedef uint16_t bfloat16;
    void flip(const bfloat16 *self, bfloat16 *out, int64_t numel) {
        for (int64_t i = 0; i < numel; i++) out[i] = self[i] ^ 0x8000;
    }
    """
    prototype = "void flip(const bfloat16 *self, bfloat16 *out, int64_t numel)"
    x = torch.tensor([1.5, -2.0, 0.0], dtype=torch.bfloat16)
    with override("aten::neg", device="cpu", source=source, prototype=prototype) as made:
        assert made.descriptor.dtypes == {"bfloat16"}
        assert kagent_core.run_op("aten::neg", x, device="cpu").equal(-x)


def test_a_null_pointer_for_a_tensor_that_was_not_given() -> None:
    import kagent_core
    from kagent_core.kernels import override

    source = """
    void clamp(const float *self, const float *min, const float *max, float *out, int64_t numel) {
        for (int64_t i = 0; i < numel; i++) {
            float x = min && self[i] < *min ? *min : self[i];
            out[i] = max && x > *max ? *max : x;
        }
    }
    """
    x = torch.tensor([-1.0, 2.0])
    with override("aten::clamp.Tensor", device="cpu", source=source, optional=["min", "max"]):
        run = kagent_core.run_op
        assert run("aten::clamp.Tensor", x, torch.tensor(0.5), device="cpu").tolist() == [0.5, 2.0]
        assert run("aten::clamp.Tensor", x, None, torch.tensor(1.0), device="cpu").tolist() == [-1.0, 1.0]


def test_a_segment_has_one_call_of_the_function() -> None:
    from kagent_core.kernels import override

    from .builders import segment_of

    with override("aten::mul.Scalar", device="cpu", source=SCALE):
        compiled = segment_of(lambda x: torch.ops.aten.mul.Scalar(torch.ops.aten.sin(x), 3.0).cos(), torch.randn(4))
    calls = [line for line in compiled.source.lines if "k_aten__mul" in line]
    assert len(calls) == 1
    assert ".data_ptr(), 4, 3.0)" in calls[0]


def test_without_a_loader_it_is_refused() -> None:
    with pytest.raises(TypeError, match="'scale' has no function to call"):
        CpuRuntime().load(kernel())
