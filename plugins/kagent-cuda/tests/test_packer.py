"""Parameters lie where the compiled kernel reads them: all types, structs, and what a launch can pass."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch

import kagent_core
from kagent_core.device import PointerArg, ScalarArg
from kagent_core.errors import KagentError, PackingError
from kagent_core.kernels import override
from kagent_core.layout import ANY_STRIDES, CONTIGUOUS
from kagent_core.prototype.abi import Abi
from kagent_core.specs import DType, TensorSpec
from kagent_cuda.compiler import NvrtcCompiler
from kagent_cuda.cubin import parameter_places
from kagent_cuda.parameters import check_places, pack_parameters

TYPES = {
    "int8_t": "signed char",
    "uint8_t": "unsigned char",
    "bool": "bool",
    "int16_t": "short",
    "int32_t": "int",
    "uint64_t": "unsigned long long",
    "int64_t": "long long",
    "float": "float",
    "double": "double",
    "float2": "float2",
    "int64_t[8]": "sizes8",
    "int32_t[3]": "three",
    "int8_t[5]": "five",
    "const float*": "const float *",
}
STRUCTS = """
struct sizes8 { long long data[8]; };
struct three { int data[3]; };
struct five { signed char data[5]; };
"""


def arg_of(kind: str) -> PointerArg | ScalarArg:
    if kind.endswith("*"):
        return PointerArg(64, 0, TensorSpec(DType("float32", 4), (4,), (1,), 0, 0))
    return ScalarArg(kind, memoryview(bytes(Abi().type(kind).nbytes)), 0, bytes)


@pytest.fixture(scope="module")
def kernels() -> dict[str, list[str]]:
    """Prototypes of all sorts, by kernel."""
    chosen = random.Random(7)
    singles = {f"single{number}": ["int8_t", kind, "int8_t"] for number, kind in enumerate(TYPES)}
    mixed = {f"mixed{number}": chosen.choices(list(TYPES), k=chosen.randint(2, 12)) for number in range(60)}
    return singles | mixed


@pytest.mark.parametrize("architecture", ["sm_75", "sm_100"])
def test_every_parameter_lies_where_the_compiled_kernel_reads_it(
    architecture: str, kernels: dict[str, list[str]], tmp_path: Path
) -> None:
    source = STRUCTS
    for name, kinds in kernels.items():
        declared = ", ".join(f"{TYPES[kind]} p{number}" for number, kind in enumerate(kinds))
        source += f'extern "C" __global__ void {name}({declared}) {{}}\n'
    binary = NvrtcCompiler(architecture, tmp_path).compile(source, "mixed0").binary
    for name, kinds in kernels.items():
        places = parameter_places(binary, name)
        assert places is not None
        block = pack_parameters([arg_of(kind) for kind in kinds], lambda buffer: buffer, Abi())
        check_places(name, block.places, places)
        assert len(block.data) == sum(places[-1])
    assert parameter_places(binary, "nobody") is None
    assert parameter_places(binary[:1000], "mixed0") is None
    assert parameter_places(b"text", "mixed0") is None


STRIDED = """
struct dims8 { long long data[8]; };
extern "C" __global__ void halved(
    signed char ndim, const float *self, dims8 sizes, short unused, dims8 self_strides, long long numel, float *out
) {
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < numel; i += gridDim.x * blockDim.x) {
        long long rest = i, at = 0;
        for (int d = ndim - 1; d >= 0; d--) {
            at += rest % sizes.data[d] * self_strides.data[d];
            rest /= sizes.data[d];
        }
        out[i] = self[at] > 0 ? self[at] / unused : 0;
    }
}
"""
PROTOTYPE = (
    "void halved(int8_t ndim, const float *self, {dims} sizes, int16_t unused, sizes8 self_strides, int64_t numel,"
    " float *out)"
)


def halved(x: torch.Tensor, device: str, prototype: str = PROTOTYPE.format(dims="sizes8")) -> torch.Tensor:
    layouts = {"layout": ANY_STRIDES, "layouts": {"out": CONTIGUOUS}}
    options = {"source": STRIDED, "prototype": prototype, "derived": {"unused": "2"}}
    with override("aten::relu", device=device, **options, **layouts):
        return kagent_core.run_op("aten::relu", x, device=device)


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 5)])
def test_structs_by_value(shape: tuple[int, ...], device: str) -> None:
    x = torch.randn(*shape)
    torch.testing.assert_close(halved(x, device), x.relu() / 2)
    base = torch.randn(*(2 * size for size in shape))
    strided = base[tuple(slice(None, None, 2) for _ in shape)]
    torch.testing.assert_close(halved(strided, device), strided.relu() / 2)


def test_a_struct_of_another_size(device: str) -> None:
    prototype = PROTOTYPE.format(dims="int64_t[6]").replace("int64_t[6] sizes", "six sizes")
    prototype = f"typedef struct {{ int64_t data[6]; }} six; {prototype}"
    with pytest.raises(KagentError, match=re.escape("'sizes'") + r".* 48 bytes, but parameter 2 was compiled with 64"):
        halved(torch.randn(3), device, prototype)


def test_more_than_a_launch_can_pass(device: str) -> None:
    source = """struct many { double data[600]; };
    extern "C" __global__ void k(const float *self, many numbers, float *out) { out[0] = self[0]; }"""
    prototype = "typedef struct { double data[600]; } many; void k(const float *self, many numbers, float *out)"
    options = {"source": source, "prototype": prototype, "derived": {"numbers": "self.shape"}, "layout": CONTIGUOUS}
    with (
        override("aten::relu", device=device, **options),
        pytest.raises(PackingError, match=r"takes 4816 bytes of parameters, expected at most 4096"),
    ):
        kagent_core.run_op("aten::relu", torch.ones(1), device=device)
