"""Small programs for Oclgrind, which interprets kernels and reports accesses beside buffers and races.

A script: ``oclgrind [OPTIONS] python oclgrind_programs.py WHAT``, where WHAT is ``vectors`` (kernels as for a CPU with
vectors), ``groups`` (kernels as for a GPU, whose threads share memory), ``long rows`` (such that go on in the device's
memory) or the name of a planted fault. Prints the kernels that ran, and those written by hand that did not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from gpu_like import GpuLikePlugin

import kagent_core
from kagent_core.codegen.groups import WorkGroups
from kagent_core.config import Config, load_config
from kagent_core.kernels import override
from kagent_core.session import session_for
from kagent_core.specs import Device, DeviceInfo, KernelDescriptor
from kagent_opencl.language import OpenClLanguage, PoclVectors
from kagent_opencl.platforms import list_devices
from kagent_opencl.plugin import OpenClPlugin
from kagent_opencl.runtime import LoadedKernel, OpenClRuntime

aten = torch.ops.aten
WIDTH = 4
THREADS = 8
TOLERANCE = 1e-4
"""Oclgrind computes functions with the C library's, in double precision."""


class NotingRuntime(OpenClRuntime):
    """The plugin's runtime, with a note of the kernels that were loaded, which all run."""

    loaded: ClassVar[set[str]] = set()

    def load(self, kernel: KernelDescriptor) -> LoadedKernel:
        """Compile a kernel."""
        self.loaded.add(kernel.name)
        return super().load(kernel)


class VectorLanguage(OpenClLanguage):
    """OpenCL C as for a processor with vectors, whatever the device says that it prefers."""

    @classmethod
    def of(cls, info: DeviceInfo) -> Self:
        """Return the language."""
        language = super().of(info)
        language.vector_width, language.vector_spelling, language.groups = WIDTH, PoclVectors, None
        language.vectors_per_item = 2
        return language


class Vectors(OpenClPlugin):
    """Oclgrind's device, taken for a CPU with vectors."""

    device_type = "vectors"
    language = VectorLanguage
    runtime = NotingRuntime

    def devices(self, config: Config) -> Sequence[DeviceInfo]:
        """List it under another type."""
        return [replace(info, device=Device("vectors", info.device.index)) for info in list_devices()]


class Groups(GpuLikePlugin):
    """Oclgrind's device, taken for a GPU."""

    runtime = NotingRuntime


def numbers(*shape: int) -> torch.Tensor:
    """Return numbers that lie behind others, at an offset that is no multiple of a vector."""
    return torch.randn(torch.Size(shape).numel() + 3)[3:].view(shape)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
    """Return attention, and its logarithms of sums."""
    return tuple(aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True))


def convolve(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    """Return a convolution with a stride and padding, and the gradients of another."""
    made = aten.relu(aten.convolution(x, weight, bias, [2, 1], [1, 1], [1, 1], False, [0, 0], 1))
    return made, *aten.convolution_backward(made, x, weight, [4], [2, 1], [1, 1], [1, 1], False, [0, 0], 1, [True] * 3)


def normalize(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return a layer norm."""
    return torch.nn.functional.layer_norm(x, [x.shape[-1]], weight, bias)


INDICES = torch.tensor([3, 0, 6, 3, -7])

PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "elements": (
        lambda x, y: (torch.where(x > 0, x * y, y), (x.half() + y.half()).float()),
        (numbers(37), numbers(37)),
    ),
    "broadcast": (lambda x, y: x + y, (numbers(5, 7), numbers(7))),
    "strided views": (lambda x: (x[:, ::2] + 1, x.t().contiguous(), x.flip(1) * 2), (numbers(5, 11),)),
    "integers": (lambda x: (x * 3, x // 2, x.bool()), (torch.arange(-9, 10),)),
    "rows": (lambda x: (x.sum(1), x.amax(1), x.mean(1)), (numbers(5, 19),)),
    "columns": (lambda x: (x.sum(0), x.amax(0)), (numbers(19, 5),)),
    "all": (lambda x: x.sum(), (numbers(9, 21),)),
    "arg of the greatest": (lambda x: x.argmax(1), (numbers(5, 19),)),
    "softmax": (lambda x: x.softmax(-1), (numbers(5, 19),)),
    "softmax across memory": (lambda x: x.softmax(0), (numbers(19, 5),)),
    "layer norm": (normalize, (numbers(5, 19), numbers(19), numbers(19))),
    "rows that are looked up": (lambda w, i: w[i] * 2, (numbers(7, 9), INDICES)),
    "joined": (lambda x: torch.cat([x[:, 2:], -x[:, :2]], 1), (numbers(3, 9),)),
    "padded": (lambda x: aten.constant_pad_nd(x, [3, 2, 1, 1], 0.5), (numbers(3, 5),)),
    "product": (lambda b, x, y: aten.addmm(b, x, y).relu(), (numbers(11), numbers(13, 7), numbers(7, 11))),
    "transposed product": (lambda x, y: x.t() @ y.t(), (numbers(7, 13), numbers(11, 7))),
    "products": (lambda x, y: x @ y, (numbers(2, 5, 7), numbers(2, 7, 6))),
    "convolution": (convolve, (numbers(1, 3, 6, 9), numbers(4, 3, 3, 3), numbers(4))),
    "depthwise": (lambda x, w: torch.conv2d(x, w, padding=1, groups=3), (numbers(1, 3, 5, 9), numbers(3, 1, 3, 3))),
    "transposed": (lambda x, w: torch.conv_transpose2d(x, w, stride=2), (numbers(1, 3, 3, 5), numbers(3, 2, 2, 2))),
    "attention": (attend, (numbers(1, 2, 5, 4), numbers(1, 2, 5, 4), numbers(1, 2, 5, 4))),
    "pooling": (lambda x: torch.max_pool2d(x, 3, 2, 1), (numbers(1, 2, 7, 9),)),
    "sort": (lambda x: x.sort(-1), (numbers(3, 13),)),
    "topk": (lambda x: x.topk(4), (numbers(3, 13),)),
    "cumsum": (lambda x: x.cumsum(1), (numbers(3, 13),)),
    "scatter": (lambda x, i, y: x.scatter_add(0, i, y), (numbers(7), INDICES % 7, numbers(5))),
    "index_put": (lambda x, i, y: aten.index_put(x, [i], y, True), (numbers(7, 3), INDICES, numbers(5, 3))),
    "gradient of an embedding": (
        lambda y, i: aten.embedding_dense_backward(y, i, 7, -1, False),
        (numbers(5, 3), INDICES % 7),
    ),
}

PLACES = torch.randint(-70, 70, (150,))
LONG_ROWS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "sort": (lambda x: x.sort(-1), (numbers(2, 300),)),
    "sort across memory": (lambda x: x.sort(0, descending=True), (numbers(257, 2),)),
    "topk": (lambda x: x.topk(9), (numbers(2, 300),)),
    "cumsum": (lambda x: (x.cumsum(1), x.cumsum(0), x.long().cumsum(1)), (numbers(2, 300),)),
    "cumprod": (lambda x: (x.cumprod(1), (x * 0).cumprod(1)), (numbers(2, 300),)),
    "cummax": (lambda x: x.cummax(1), (numbers(2, 300),)),
    "logcumsumexp": (lambda x: x.logcumsumexp(1), (numbers(2, 300),)),
    "index_put": (lambda x, i, y: aten.index_put(x, [i], y, True), (numbers(70, 3), PLACES, numbers(150, 3))),
    "index_add": (lambda x, i, y: x.index_add(1, i, y), (numbers(3, 300), PLACES % 70, numbers(3, 150))),
    "scatter": (lambda x, i, y: x.scatter(0, i, y), (numbers(300), torch.randperm(300)[:200], numbers(200))),
    "mean": (
        lambda x, i, y: x.scatter_reduce(0, i, y, "mean", include_self=False),
        (numbers(90), PLACES % 90, numbers(150)),
    ),
}
"""For blocks with little shared memory, which has no room for whole rows."""

HEAD = """
__kernel void planted(__global const float *self_buffer, long self_first, __global float *out_buffer, long out_first,
                      long numel) {
    long i = get_global_id(0);
"""
PLANTED = {
    "write behind": f"{HEAD} if (i < numel) out_buffer[out_first + i + 1] = 1; }}",
    "read before": f"{HEAD} if (i < numel) out_buffer[out_first + i] = self_buffer[self_first + i - 1]; }}",
    "race": f"{HEAD} if (i < numel) out_buffer[out_first + i / 2] = i; }}",
    "race in a group": f"""{HEAD}
    __local float shared[1];
    shared[0] = i;
    barrier(CLK_LOCAL_MEM_FENCE);
    if (i < numel) out_buffer[out_first + i] = shared[0]; }}""",
}
"""Kernels with a fault, which must be found."""


def run_all(device: str, programs: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]]) -> None:
    """Run programs, and compare with eager PyTorch."""
    session = session_for(load_config({"device": device}))
    session.reports.clear()
    for name, (function, args) in programs.items():
        torch._dynamo.reset()
        made = torch.compile(function, backend="kagent", options={"device": device}, dynamic=False)(*args)
        told = lambda message, name=name: f"{name}: {message}"
        torch.testing.assert_close(made, function(*args), rtol=TOLERANCE, atol=TOLERANCE, msg=told)
    fallbacks = {fall.signature for report in session.reports for fall in report.fallbacks}
    assert not fallbacks, f"these were not run at all: {fallbacks}"
    registry = session.open(session.target.device).registry
    by_hand = {kernel.name for kernel in registry.kernels() if kernel.source is not None}
    ran = sorted(NotingRuntime.loaded)
    print(json.dumps({"ran": ran, "left": sorted(by_hand - NotingRuntime.loaded)}))


def plant(fault: str, device: str) -> None:
    """Run a kernel with a fault."""
    prototype = "void planted(const float *self, float *out, long numel)"
    with override("aten::relu", device=device, source=PLANTED[fault], prototype=prototype):
        kagent_core.run_op("aten::relu", torch.randn(16), device=device)
    print(json.dumps({"ran": ["planted"], "left": []}))


def main(what: str) -> None:
    """Run what is asked for."""
    torch.manual_seed(0)
    groups = WorkGroups(threads=THREADS)
    if what == "long rows":
        groups = replace(groups, local_nbytes=2048)
    plugin = Vectors() if what == "vectors" else Groups(groups)
    with torch.no_grad(), kagent_core.use_plugin(plugin):
        device = f"{plugin.device_type}:0"
        if what in PLANTED:
            plant(what, device)
        else:
            run_all(device, LONG_ROWS if what == "long rows" else PROGRAMS)


if __name__ == "__main__":
    main(sys.argv[1])
