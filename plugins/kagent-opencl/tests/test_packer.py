"""What a prototype stands for is compared with what the kernel takes, and work-groups with what the kernel allows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyopencl as cl
import pytest
import torch

import kagent_core
from kagent_core.config import load_config
from kagent_core.errors import KagentError, LaunchConfigError, PackingError
from kagent_core.kernels import override
from kagent_core.layout import CONTIGUOUS
from kagent_core.prototype import parse_prototype
from kagent_core.specs import KernelDescriptor, LaunchConfig
from kagent_opencl import programs
from kagent_opencl.packer import OpenClPacker, arguments_in, arguments_of, check_arguments, expected_arguments
from kagent_opencl.platforms import list_devices
from kagent_opencl.runtime import LoadedKernel, OpenClRuntime
from kagent_opencl.work_groups import WorkGroupLimits, fitting, work_group_limits

PROTOTYPE = "void scale(const float *self, float *out, long numel, float factor)"
TAKES = "__global const float *self_buffer, long self_first, __global float *out_buffer, long out_first"


def kernel_of(arguments: str, prototype: str = PROTOTYPE, before: str = "", **derived: str) -> KernelDescriptor:
    """Return a kernel of which a source takes some arguments, and the prototype declares others."""
    derived.setdefault("factor", "2.0")
    parameters = parse_prototype(prototype, derived={k: v for k, v in derived.items() if k in prototype})
    source = f"{before}\n__kernel void scale({arguments}) {{}}"
    return KernelDescriptor("aten::relu", "scale", source=source, parameters=parameters)


def refusal(kernel: KernelDescriptor) -> PackingError:
    with pytest.raises(PackingError) as caught:
        check_arguments(kernel, arguments_in(kernel.source or "", kernel.name))
    return caught.value


def test_what_a_prototype_stands_for() -> None:
    prototype = "void k(const float *self, half *out, sizes4 sizes, unsigned int n, local float *scratch)"
    parameters = parse_prototype(prototype, derived={"scratch": "64"}, ignore=["alpha"])
    assert [str(argument) for argument in expected_arguments(parameters)] == [
        "__global const float *self_buffer",
        "long self_first",
        "__global half *out_buffer",
        "long out_first",
        "sizes4 sizes",
        "unsigned int n",
        "__local float *scratch",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (f"{TAKES}, int numel, float factor", "argument 4 .*'int numel'.*expected 'long numel': int is not long"),
        (f"{TAKES}, ulong numel, float factor", "argument 4 .*'ulong numel'.*ulong is not long"),
        (f"{TAKES}, double numel, float factor", "'double numel'.*double is not long"),
        (f"{TAKES}, long numel, int factor", "argument 5 .*'int factor' in its source, expected 'float factor'"),
        (f"{TAKES}, long numel, uint factor", "uint is not float"),
        (f"{TAKES}, long numel, float2 factor", "float2 is not float"),
        (f"{TAKES}, int2 numel, float factor", "int2 is not long"),
        (f"{TAKES}, long numel", r"has 5 arguments.*expected 6 \(self_buffer, self_first, .*factor\)"),
        (f"{TAKES}, long numel, float factor, int more", "has 7 arguments in its source .*more.*expected 6"),
        ("", r"has 0 arguments in its source \(none\), expected 6"),
        (
            "__global const float *self, __global float *out, long numel, float factor",
            "argument 1 .*'__global float \\*out'.*expected 'long self_first', since a tensor is two arguments",
        ),
        (
            TAKES.replace("long", "int") + ", long n, float f",
            "argument 1 .*int is not long",
        ),
        (TAKES.replace("const float", "const double") + ", long n, float f", "argument 0 .*double\\* is not float\\*"),
        (TAKES.replace("const float", "const int") + ", long n, float f", r"int\* is not float\*"),
        (TAKES.replace("const float", "const float4") + ", long n, float f", r"float4\* is not float\*"),
        (TAKES.replace("const float", "const uint8") + ", long n, float f", r"uint8\* is not float\*"),
        (TAKES.replace("__global const", "__local") + ", long n, float f", "in local memory, not in global memory"),
        (TAKES.replace("__global float", "__constant float") + ", long n, float f", "cannot write what is const"),
        (TAKES.replace("__global float", "global const float") + ", long n, float f", "cannot write what is const"),
        (
            TAKES.replace("__global const float *self_buffer", "read_only image2d_t self_buffer"),
            "argument 0 .*no argument of an operator is a image2d_t",
        ),
        (TAKES.replace("long self_first", "sampler_t self_first"), "no argument of an operator is a sampler_t"),
        (f"{TAKES}, __global long *numel, float factor", "it is in global memory, not in private memory"),
    ],
)
def test_a_kernel_that_takes_something_else(arguments: str, message: str) -> None:
    kernel = kernel_of(arguments)
    with pytest.raises(PackingError, match=message):
        check_arguments(kernel, arguments_in(kernel.source or "", kernel.name))
    assert "__kernel void scale(__global const float *self_buffer, long self_first" in (refusal(kernel).hint or "")


@pytest.mark.parametrize(
    ("arguments", "prototype", "before"),
    [
        (f"{TAKES}, long numel, float factor", PROTOTYPE, ""),
        (f"{TAKES}, const long numel, const float factor", PROTOTYPE, ""),
        (TAKES.replace("__global const", "__constant") + ", long n, float f", PROTOTYPE, ""),
        (TAKES.replace("float *out", "float *restrict out") + ", signed long n, float f", PROTOTYPE, ""),
        (TAKES.replace("const float", "float") + ", i64 n, f32 f", PROTOTYPE, "typedef float f32; typedef long i64;"),
        (
            f"{TAKES}, long n, struct sizes f",
            "void scale(const float *self, float *out, long numel, int64_t[2] sizes)",
            "",
        ),
        (
            "__global const ushort *x, long f, __global uchar *y, long g, uchar n",
            "void scale(const half *self, bool *out, bool flag)",
            "",
        ),
        (
            "__global const char *x, long f, __global float4 *y, long g",
            "void scale(const void *self, float4 *out)",
            "",
        ),
    ],
)
def test_a_kernel_that_takes_the_same(arguments: str, prototype: str, before: str) -> None:
    prototype = prototype.replace("int64_t[2] sizes", "sizes2 sizes")
    kernel = kernel_of(arguments, prototype, before, flag="True")
    check_arguments(kernel, arguments_in(kernel.source or "", kernel.name))


# -- what the driver tells

SOURCES = (
    f"__kernel void scale({TAKES}, int n, unsigned int m, __local double *s, uchar b, float4 v) {{}}",
    "typedef float f32; kernel void scale(constant float4 *restrict a, global const f32 *b, volatile global int *c) {}",
    "__kernel void scale(read_only image2d_t x, sampler_t s, __global float *restrict o) {}",
)


@pytest.fixture
def opened(device: str, tmp_path: Path) -> OpenClRuntime:
    [info] = [info for info in list_devices() if str(info.device) == device]
    return OpenClRuntime(info, load_config({"cache_dir": str(tmp_path)}))


@pytest.mark.parametrize("source", SOURCES)
def test_the_driver_tells_what_the_source_says(opened: OpenClRuntime, source: str) -> None:
    program = cl.Program(opened.context, source).build(options=["-cl-kernel-arg-info"], cache_dir=False)  # type: ignore[arg-type]
    told, read = arguments_of(cl.Kernel(program, "scale")), arguments_in(source, "scale")
    assert told is not None
    types = {"f32*": "float*", "unsigned int": "uint"}
    shown = [[types.get(argument.type, argument.type) for argument in each] for each in (told, read)]
    assert shown[0] == shown[1]
    assert [argument.space for argument in told] == [argument.space for argument in read]
    assert [argument.name for argument in told] == [argument.name for argument in read]
    for ours, its in zip(told, read, strict=True):
        assert ours.const == its.const


def test_what_only_the_driver_can_tell(opened: OpenClRuntime) -> None:
    kernel = kernel_of(f"{TAKES}, COUNT numel, float factor", before="#define COUNT int")
    check_arguments(kernel, arguments_in(kernel.source or "", kernel.name))  # a macro could be anything
    with pytest.raises(PackingError, match="'int numel' in its source, expected 'long numel'"):
        opened.load(kernel)


def test_arguments_are_kept_beside_the_binary(
    device: str, tmp_path: Path, opened: OpenClRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = kernel_of(f"{TAKES}, int numel, float factor")
    with pytest.raises(PackingError):
        opened.load(kernel)

    def refuse(*args: Any) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(programs.Programs, "_compiled", refuse)
    again = OpenClRuntime(list_devices()[int(device.partition(":")[2])], load_config({"cache_dir": str(tmp_path)}))
    with pytest.raises(PackingError, match="argument 4"):
        again.load(kernel)


def test_a_driver_that_tells_nothing(opened: OpenClRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "arguments_of", lambda kernel: None)
    for _ in range(2):
        with pytest.raises(PackingError, match="argument 4"):
            opened.load(kernel_of(f"{TAKES}, int numel, float factor"))
        opened.load(kernel_of(f"{TAKES}, long numel, float factor"))


def test_a_float_that_the_source_takes_as_an_int(device: str) -> None:
    source = f"__kernel void scale({TAKES}, long numel, int factor) {{ out_buffer[out_first] = factor; }}"
    with (
        override("aten::relu", device=device, source=source, prototype=PROTOTYPE, derived={"factor": "2.0"}),
        pytest.raises(KagentError, match=r"argument 5 .*'int factor' in its source, expected 'float factor'"),
    ):
        kagent_core.run_op("aten::relu", torch.ones(3), device=device)


def test_a_tensor_that_is_not_given(device: str) -> None:
    source = """
    __kernel void fill(__global const float *self_buffer, long self_first, __global const float *min_buffer,
                       long min_first, __global float *out_buffer, long out_first, long numel) {
        for (long i = get_global_id(0); i < numel; i += get_global_size(0))
            out_buffer[out_first + i] = self_buffer[self_first + i] + (min_buffer ? min_buffer[min_first] : 100);
    }"""
    prototype = "void fill(const float *self, const float *min, float *out, long numel)"
    with override(
        "aten::clamp.Tensor",
        device=device,
        source=source,
        prototype=prototype,
        optional=["min"],
        ignore=["max"],
        layout=CONTIGUOUS,
    ):
        given = kagent_core.run_op("aten::clamp.Tensor", torch.ones(3), None, torch.ones(3), device=device)
    assert given.tolist() == [101, 101, 101]


# -- local memory

SUM = """
__kernel void row_sum(__global const float *self_buffer, long self_first, __global float *out_buffer, long out_first,
                      long rows, long length, __local float *scratch) {
    const int thread = get_local_id(0), threads = get_local_size(0);
    for (long row = get_group_id(0); row < rows; row += get_num_groups(0)) {
        float total = 0;
        for (long i = thread; i < length; i += threads) total += self_buffer[self_first + row * length + i];
        scratch[thread] = total;
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int half_of = threads / 2; half_of > 0; half_of /= 2) {
            if (thread < half_of) scratch[thread] += scratch[thread + half_of];
            barrier(CLK_LOCAL_MEM_FENCE);
        }
        if (thread == 0) out_buffer[out_first + row] = scratch[0];
        barrier(CLK_LOCAL_MEM_FENCE);
    }
}
"""
SUM_PROTOTYPE = "void row_sum(const float *self, float *out, long rows, long length, local float *scratch)"
SUM_DERIVED = {"rows": "self.shape[0]", "length": "self.shape[1]"}


def row_sum(device: str, scratch: str, x: torch.Tensor) -> torch.Tensor:
    """Sum up rows in local memory, of as many elements as an expression says."""
    with override(
        "aten::sum.dim_IntList",
        device=device,
        source=SUM,
        prototype=SUM_PROTOTYPE,
        derived={**SUM_DERIVED, "scratch": scratch},
        only={"dim": (1,)},
        layout=CONTIGUOUS,
    ):
        made: torch.Tensor = kagent_core.run_op("aten::sum.dim_IntList", x, [1], device=device)
        return made


def test_local_memory_that_a_prototype_asks_for(device: str) -> None:
    for shape in ((7, 1000), (1, 1), (300, 33)):
        x = torch.randn(shape)
        torch.testing.assert_close(row_sum(device, "max(1024, self.shape[1])", x), x.sum(1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("scratch", "message"),
    [
        ("2**40", "bytes of shared memory per block"),
        ("0", "'scratch' .* is a local float\\* of the int 0 elements, expected a whole number of at least 1"),
        ("2.5", "of the float 2.5 elements"),
    ],
)
def test_local_memory_of_a_length_that_cannot_be(device: str, scratch: str, message: str) -> None:
    with pytest.raises(KagentError, match=message):
        row_sum(device, scratch, torch.randn(2, 3))


def test_local_memory_of_one_launch_does_not_count_in_the_next(device: str) -> None:
    [info] = [info for info in list_devices() if str(info.device) == device]
    most = info.shared_nbytes // 4
    for rows in (2, 3):  # other launch configs of one kernel, which would not fit together
        torch.testing.assert_close(row_sum(device, str(most), torch.ones(rows, 5)), torch.full((rows,), 5.0))


def test_local_memory_counts_in_the_launch_config(device: str) -> None:
    seen: list[LaunchConfig] = []
    real = OpenClRuntime.prepare

    def watched(self: OpenClRuntime, kernel: LoadedKernel, config: LaunchConfig, args: Any) -> Any:
        seen.append(config)
        return real(self, kernel, config, args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OpenClRuntime, "prepare", watched)
        row_sum(device, "2048", torch.randn(3, 8))
    assert [config.shared_nbytes for config in seen] == [8192]


# -- work-groups


def limits(most: int = 64, required: tuple[int, int, int] = (0, 0, 0), local: int = 0) -> WorkGroupLimits:
    return WorkGroupLimits(most, required, local, 1024)


def test_work_groups_that_a_kernel_takes() -> None:
    config = LaunchConfig((3, 1, 1), (8, 8, 1))
    assert fitting(limits(), "k", False, config) == config
    assert fitting(limits(required=(8, 8, 1)), "k", False, config) == config
    assert fitting(limits(local=1000), "k", False, LaunchConfig(shared_nbytes=24)).shared_nbytes == 24


@pytest.mark.parametrize(
    ("limit", "config", "message", "hint"),
    [
        (limits(63), LaunchConfig(block=(8, 8, 1)), r"\(8, 8, 1\), 64 work-items; as .* it takes 63", "smaller block"),
        (
            limits(required=(4, 16, 1)),
            LaunchConfig(block=(64, 1, 1)),
            r"of \(64, 1, 1\), its source requires \(4, 16, 1\)",
            r"block=\(4, 16, 1\)",
        ),
        (
            limits(local=1000),
            LaunchConfig(shared_nbytes=28),
            "1028 bytes of local memory, 1000 of its own and 28 by its arguments; a work-group can have 1024",
            "fewer elements",
        ),
    ],
)
def test_work_groups_that_a_kernel_does_not_take(
    limit: WorkGroupLimits, config: LaunchConfig, message: str, hint: str
) -> None:
    with pytest.raises(LaunchConfigError, match=message) as caught:
        fitting(limit, "k", False, config)
    assert re.search(hint, caught.value.hint or "")


@pytest.mark.parametrize(("most", "block", "grid"), [(63, 32, 16), (64, 64, 8), (1, 1, 512)])
def test_a_generated_kernel_gets_smaller_groups(most: int, block: int, grid: int) -> None:
    config = LaunchConfig((2, 1, 1), (256, 1, 1), tiles={"rows": 2})
    made = fitting(limits(most), "k", True, config)
    assert (made.grid, made.block) == ((grid, 1, 1), (block, 1, 1))


def test_what_a_driver_says_of_a_kernel(opened: OpenClRuntime) -> None:
    source = """__kernel __attribute__((reqd_work_group_size(4, 2, 1))) void scale(__global float *x) {
        __local float own[64]; own[get_local_id(0)] = x[0]; barrier(CLK_LOCAL_MEM_FENCE); x[1] = own[3];
    }"""
    program = cl.Program(opened.context, source).build(cache_dir=False)  # type: ignore[arg-type]
    found = work_group_limits(cl.Kernel(program, "scale"), opened.device)
    assert found.required == (4, 2, 1)
    assert found.local_nbytes >= 256
    assert found.most >= 8
    assert found.device_local_nbytes == opened.device.local_mem_size


def test_a_required_size_that_is_not_launched(device: str) -> None:
    head = "__kernel __attribute__((reqd_work_group_size(3, 1, 1)))"
    body = "if (get_global_id(0) < numel) out_buffer[out_first + get_global_id(0)] = numel;"
    source = f"{head} void scale({TAKES}, long numel) {{ {body} }}"
    prototype = "void scale(const float *self, float *out, long numel)"
    with override("aten::relu", device=device, source=source, prototype=prototype):
        with pytest.raises(KagentError, match=r"its source requires \(3, 1, 1\)"):
            kagent_core.run_op("aten::relu", torch.ones(4), device=device)
        with kagent_core.force_launch_config("aten::relu", LaunchConfig((2, 1, 1), (3, 1, 1))):
            assert kagent_core.run_op("aten::relu", torch.ones(4), device=device).tolist() == [4, 4, 4, 4]


# -- types that a device lacks


def test_a_prototype_of_a_type_that_the_device_lacks() -> None:
    told = OpenClPacker({"float64": "opencl:1 has no float64 (cl_khr_fp64)"})
    for prototype in ("void scale(const double *self)", "void scale(double x)", "void scale(const double2 *self)"):
        kernel = KernelDescriptor("aten::relu", "scale", source="", parameters=parse_prototype(prototype))
        with pytest.raises(PackingError, match=r"is a (const )?double.*, but opencl:1 has no float64 \(cl_khr_fp64\)"):
            told.pack(None, kernel)  # type: ignore[arg-type]
